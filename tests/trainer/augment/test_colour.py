import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as vision

from sscd_vec.trainer.augment import colour
from sscd_vec.trainer.augment.choices import Choices, draw, generator
from sscd_vec.trainer.augment.colour import (
    FILTERS,
    Filter,
    add_noise,
    blur,
    compress,
    jitter_exactly,
    pixelize,
    recolour,
)
from sscd_vec.trainer.augment.recipe import SIMCLR
from tests.trainer.images import pixels


def choose(count: int, **changes: object) -> Choices:
    return draw(SIMCLR.with_changes(changes), count, generator(0, 0))


def recoloured(images: torch.Tensor, choices: Choices) -> torch.Tensor:
    return recolour(
        images.clone(),
        torch.from_numpy(choices.colour),
        torch.from_numpy(choices.colour_order),
        torch.from_numpy(choices.grayscale),
    )


@pytest.mark.parametrize("edit", FILTERS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_a_filter_changes_a_view_and_stays_in_range(edit: Filter, strength: float) -> None:
    image = torch.rand(3, 20, 20, generator=torch.Generator().manual_seed(0))
    before = image.clone()
    changed = edit(image, strength)
    assert torch.equal(image, before), "the view given is left alone"
    assert changed.shape == image.shape and changed.dtype == image.dtype
    assert changed.min() >= 0 and changed.max() <= 1
    if (edit, strength) != (colour.adjust_gamma, 0.5):  # a gamma of 1
        assert (changed - image).abs().mean() > 0.01


def test_filters_by_hand() -> None:
    image = torch.tensor([0.0, 0.25, 0.8]).view(3, 1, 1).expand(3, 2, 2)

    def values(edit: Filter, strength: float) -> list[float]:
        return [round(float(channel[0, 0]), 4) for channel in edit(image, strength)]

    assert values(colour.invert, 0) == [1, 0.75, 0.2]
    assert values(colour.solarize, 1) == [0, 0.25, 0.2]
    assert values(colour.solarize, 0) == [0, 0.25, 0.8]
    assert values(colour.posterize, 1) == [0, 0, 1]
    assert values(colour.adjust_gamma, 1) == [0, 0.0156, 0.512]
    assert values(colour.roll_channels, 0) == [0.8, 0, 0.25]
    assert values(colour.roll_channels, 1) == [0.25, 0.8, 0]
    assert values(colour.sharpen, 1) == [0, 0.25, 0.8], "no edges, nothing to sharpen"
    assert values(colour.relief, 1) == [0.45, 0.475, 0.53], "no slopes: grey"


def test_sharpening_widens_an_edge() -> None:
    image = torch.full((3, 8, 8), 0.4)
    image[:, :, 4:] = 0.6
    sharp = colour.sharpen(image, 0.0)
    assert float(sharp[0, 4, 3]) == pytest.approx(0.4 - 0.2 * 2 / 5)
    assert float(sharp[0, 4, 4]) == pytest.approx(0.6 + 0.2 * 2 / 5)
    assert float(sharp[0, 4, 0]) == pytest.approx(0.4)


def slow_jitter(image: torch.Tensor, choices: Choices, row: int) -> torch.Tensor:
    """Colour jitter of one image, operation after operation, in float64."""
    luma = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    yiq = torch.tensor(
        [
            [0.299, 0.587, 0.114],
            [0.595716, -0.274453, -0.321263],
            [0.211456, -0.522591, 0.311135],
        ],
        dtype=torch.float64,
    )
    x = image.double()
    brightness, contrast, saturation, hue = choices.colour[row].astype(np.float64)
    for kind in choices.colour_order[row]:
        gray = torch.einsum("c,chw->hw", luma, x)
        if kind == 0:
            x = x * brightness
        elif kind == 1:
            x = contrast * x + (1 - contrast) * gray.mean()
        elif kind == 2:
            x = saturation * x + (1 - saturation) * gray
        else:
            y, i, q = torch.einsum("kc,chw->khw", yiq, x)
            cos, sin = np.cos(2 * np.pi * hue), np.sin(2 * np.pi * hue)
            turned = torch.stack([y, cos * i - sin * q, sin * i + cos * q])
            x = torch.einsum("kc,chw->khw", torch.linalg.inv(yiq), turned)
    if choices.grayscale[row]:
        x = torch.einsum("c,chw->hw", luma, x).expand(3, -1, -1)
    return x.clamp(0, 1)


def test_colour_jitter_equals_its_operations_one_by_one() -> None:
    images = pixels(24).permute(0, 3, 1, 2).float() / 255
    choices = choose(24, jitter=1.0)
    together = recoloured(images, choices)
    for row in range(24):
        slow = slow_jitter(images[row], choices, row)
        torch.testing.assert_close(together[row].double(), slow, atol=2e-5, rtol=0)


def test_no_jitter_leaves_the_image() -> None:
    images = pixels(3).permute(0, 3, 1, 2).float() / 255
    plain = recoloured(images, choose(3, jitter=0.0, grayscale=0.0))
    torch.testing.assert_close(plain, images)


def torchvision_jitter(image: torch.Tensor, choices: Choices, row: int) -> torch.Tensor:
    """The same factors in the same order, by torchvision's ColorJitter operations."""
    brightness, contrast, saturation, hue = choices.colour[row].tolist()
    for kind in choices.colour_order[row]:
        if kind == 0:
            image = vision.adjust_brightness(image, brightness)
        elif kind == 1:
            image = vision.adjust_contrast(image, contrast)
        elif kind == 2:
            image = vision.adjust_saturation(image, saturation)
        else:
            image = vision.adjust_hue(image, hue)
    return image


def test_without_hue_and_clipping_the_jitter_is_torchvisions() -> None:
    # Mild factors on colours around gray: nothing reaches 0 or 1 in any order.
    images = 0.35 + 0.2 * pixels(48).permute(0, 3, 1, 2).float() / 255
    mild = {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.0}
    choices = choose(48, jitter=1.0, grayscale=0.0, **mild)
    ours = recoloured(images, choices)
    for row in range(48):
        theirs = torchvision_jitter(images[row], choices, row)
        # torchvision's luma weights have four digits.
        torch.testing.assert_close(ours[row], theirs, atol=2e-4, rtol=0)


def test_the_exact_jitter_is_torchvisions() -> None:
    images = pixels(24).permute(0, 3, 1, 2).float() / 255
    choices = choose(24, jitter=1.0)
    for row in range(24):
        ours = jitter_exactly(
            images[row], choices.colour[row].tolist(), choices.colour_order[row].tolist()
        )
        assert torch.equal(ours, torchvision_jitter(images[row], choices, row))


def test_the_matrix_comes_near_torchvisions_jitter() -> None:
    """Clipping once, and hue in YIQ (turned the other way), cost less than a third of the edit."""
    images = pixels(64).permute(0, 3, 1, 2).float() / 255
    choices = choose(64, jitter=1.0, grayscale=0.0)
    theirs = torch.stack([torchvision_jitter(images[row], choices, row) for row in range(64)])
    changed = (theirs - images).abs().mean()
    choices.colour[:, 3] *= -1
    apart = (recoloured(images, choices) - theirs).abs().mean()
    assert changed > 0.2, "the paper's jitter is strong"
    assert apart < changed / 3


def test_blur_equals_a_convolution_with_mirrored_edges() -> None:
    images = torch.rand(3, 3, 41, 41)
    sigmas = torch.tensor([0.3, 1.4, 3.0])
    blurred = blur(images, sigmas)
    for image, sigma, result in zip(images, sigmas.tolist(), blurred, strict=True):
        expected = vision.gaussian_blur(image, [39, 39], [sigma, sigma])
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("quality", [1, 30, 95])
def test_jpeg_loses_what_pillow_loses(quality: int) -> None:
    image = pixels(1)[0].permute(2, 0, 1).float() / 255
    file = io.BytesIO()
    Image.fromarray(pixels(1)[0].numpy()).save(file, "JPEG", quality=quality)
    expected = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1).float() / 255
    assert torch.equal(compress(image, quality), expected)
    assert (compress(image, 1) - image).abs().mean() > (compress(image, 95) - image).abs().mean()
    assert torch.equal(compress(image, 0), compress(image, 1))


def test_noise_has_its_sigma_and_follows_its_seed() -> None:
    gray = torch.full((3, 64, 64), 0.5)
    noise = add_noise(gray, 0.1, seed=2) - gray
    assert noise.std().item() == pytest.approx(0.1, rel=0.03)
    assert abs(noise.mean().item()) < 0.005
    for seed in (1, 2):
        assert torch.equal(add_noise(gray, 0.1, seed), add_noise(gray, 0.1, seed))
        assert not torch.equal(add_noise(gray, 0.1, seed), add_noise(gray, 0.1, seed + 2))
    strong = add_noise(gray, 1.0, seed=2)
    assert strong.min() == 0 and strong.max() == 1


def test_salt_and_pepper_hit_half_their_share_of_the_pixels() -> None:
    gray = torch.full((3, 200, 200), 0.5)
    hit = add_noise(gray, 0.2, seed=1)
    for level in (0, 1):
        assert (hit == level).all(dim=0).float().mean().item() == pytest.approx(0.05, rel=0.1)
    assert (hit == 0.5).all(dim=0).float().mean().item() == pytest.approx(0.9, rel=0.01)


def test_pixelize_makes_squares_of_their_mean_colour() -> None:
    image = torch.rand(3, 12, 12)
    squares = pixelize(image, 3).view(3, 3, 4, 3, 4)
    means = image.view(3, 3, 4, 3, 4).mean(dim=(2, 4), keepdim=True)
    torch.testing.assert_close(squares, means.expand_as(squares))
    assert torch.equal(pixelize(image, 100), image), "finer than the pixels"
