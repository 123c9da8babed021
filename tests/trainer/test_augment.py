import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as vision

from sscd_vec.trainer.augment import (
    augment,
    blur,
    compress,
    noisy,
    paste,
    pixelize,
    recolour,
)
from sscd_vec.trainer.filters import FILTERS, invert
from sscd_vec.trainer.overlay import Overlays, scribble
from sscd_vec.trainer.recipe import ADVANCED_MIXUP, NOTHING, SIMCLR, Choices, draw, generator
from tests.trainer.photos import photo

OVERLAYS = Overlays()


def pixels(count: int, side: int = 40) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(photo(i, side, side)) for i in range(count)]))


def choose(count: int, **changes: object) -> Choices:
    return draw(SIMCLR.with_changes(changes), count, generator(0, 0))


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
    together = recolour(images.clone(), choices)
    for row in range(24):
        slow = slow_jitter(images[row], choices, row)
        torch.testing.assert_close(together[row].double(), slow, atol=2e-5, rtol=0)


def test_no_jitter_leaves_the_image() -> None:
    images = pixels(3).permute(0, 3, 1, 2).float() / 255
    torch.testing.assert_close(
        recolour(images.clone(), choose(3, jitter=0.0, grayscale=0.0)), images
    )


def test_blur_equals_a_convolution_with_mirrored_edges() -> None:
    images = torch.rand(3, 3, 41, 41)
    sigmas = torch.tensor([0.3, 1.4, 3.0])
    blurred = blur(images, sigmas)
    for image, sigma, result in zip(images, sigmas.tolist(), blurred, strict=True):
        expected = vision.gaussian_blur(image, [39, 39], [sigma, sigma])
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)


def test_blur_scales_with_the_training_size() -> None:
    flat = {"jitter": 0.0, "grayscale": 0.0, "flip": 0.0, "crop_area": (1.0, 1.0)}
    flat |= {"crop_ratio": (1.0, 1.0), "blur": 1.0, "blur_sigma": (4.0, 4.0)}
    choices = choose(1, **flat)
    source = pixels(1, 56)
    view = augment(source, np.ones(1, dtype=np.float32), choices, 56, OVERLAYS)
    expected = blur(source.permute(0, 3, 1, 2).float() / 255, torch.tensor([4.0 * 56 / 224]))
    torch.testing.assert_close(view, expected, atol=1e-5, rtol=0)


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
    noise = noisy(gray, 0.1, seed=2) - gray
    assert noise.std().item() == pytest.approx(0.1, rel=0.03)
    assert abs(noise.mean().item()) < 0.005
    for seed in (1, 2):
        assert torch.equal(noisy(gray, 0.1, seed), noisy(gray, 0.1, seed))
        assert not torch.equal(noisy(gray, 0.1, seed), noisy(gray, 0.1, seed + 2))
    strong = noisy(gray, 1.0, seed=2)
    assert strong.min() == 0 and strong.max() == 1


def test_salt_and_pepper_hit_half_their_share_of_the_pixels() -> None:
    gray = torch.full((3, 200, 200), 0.5)
    hit = noisy(gray, 0.2, seed=1)
    for level in (0, 1):
        assert (hit == level).all(dim=0).float().mean().item() == pytest.approx(0.05, rel=0.1)
    assert (hit == 0.5).all(dim=0).float().mean().item() == pytest.approx(0.9, rel=0.01)


def test_pixelize_makes_squares_of_their_mean_colour() -> None:
    image = torch.rand(3, 12, 12)
    squares = pixelize(image, 3).view(3, 3, 4, 3, 4)
    means = image.view(3, 3, 4, 3, 4).mean(dim=(2, 4), keepdim=True)
    torch.testing.assert_close(squares, means.expand_as(squares))
    assert torch.equal(pixelize(image, 100), image), "finer than the pixels"


def test_noise_pixels_and_whole_views_reach_the_views() -> None:
    source, aspects = pixels(1), np.array([1.5], dtype=np.float32)
    quiet = {"flip": 0.0, "jitter": 0.0, "grayscale": 0.0, "blur": 0.0, "crop": 0.0}

    def view(**changes: object) -> torch.Tensor:
        return augment(source, aspects, choose(1, **(quiet | changes)), 40, OVERLAYS)[0]

    whole = source[0].permute(2, 0, 1).float() / 255
    torch.testing.assert_close(view(), whole, atol=1e-5, rtol=0)
    noise = choose(1, noise=1.0)
    expected = noisy(whole, float(noise.noise_sigma[0]), int(noise.noise[0]))
    torch.testing.assert_close(view(noise=1.0), expected, atol=1e-5, rtol=0)
    squares = view(pixelize=1.0, pixelize_cells=(8, 8))
    torch.testing.assert_close(squares, pixelize(whole, 8), atol=1e-5, rtol=0)


def test_a_canvas_surrounds_the_whole_view() -> None:
    source, aspects = pixels(1), np.ones(1, dtype=np.float32)
    drawn = draw(NOTHING.with_changes({"canvas": 1.0}), 1, generator(0, 0))
    wide = np.array([[2.0, 1.0]], dtype=np.float32)
    right = np.array([[1.0, 0.5]], dtype=np.float32)
    ground = np.array([[0.2, 0.4, 0.6]], dtype=np.float32)
    choices = replace(drawn, zoom=wide, canvas_place=right, ground=ground)
    view = augment(source, aspects, choices, 40, OVERLAYS)[0]
    band = torch.from_numpy(ground[0])[:, None, None].expand(3, 40, 20)
    torch.testing.assert_close(view[:, :, :20], band)
    shrunk = source[0].permute(2, 0, 1).float().view(3, 40, 20, 2)[..., 0:2].mean(dim=3) / 255
    torch.testing.assert_close(view[:, :, 20:], shrunk, atol=1e-5, rtol=0)


def test_a_canvas_shows_the_corners_of_a_rotation_and_leaves_other_views_alone() -> None:
    white = torch.full((2, 40, 40, 3), 255, dtype=torch.uint8)
    drawn = draw(NOTHING.with_changes({"canvas": 1.0, "rotation": 1.0}), 2, generator(0, 0))
    choices = replace(
        drawn,
        angle=np.full(2, np.pi / 4, dtype=np.float32),
        zoom=np.array([[1, 1], [0, 0]], dtype=np.float32),
        ground=np.zeros((2, 3), dtype=np.float32),
    )
    turned, plain = augment(white, np.ones(2, dtype=np.float32), choices, 160, OVERLAYS)[:, 0]
    assert turned[0, 0] == turned[159, 159] == 0 and turned[80, 1] == turned[1, 80] == 1
    assert float(turned.mean()) == pytest.approx(0.5, abs=0.02), "a square on its corner"
    assert (plain == 1).all()


def test_an_inset_is_shrunk_into_its_square_and_edited_with_the_view() -> None:
    striped = torch.zeros(1, 3, 40, 40)
    striped[:, :, :, 20:] = 1.0
    gray = torch.full((1, 40, 40, 3), 51, dtype=torch.uint8)
    choices = replace(
        draw(NOTHING, 1, generator(0, 0)),
        gamma=np.array([0.75], dtype=np.float32),  # a quarter of the area: half the side
        cut_place=np.array([[1.0, 0.0]], dtype=np.float32),  # bottom left
        filter=np.array([FILTERS.index(invert)]),
    )
    view = augment(gray, np.ones(1, dtype=np.float32), choices, 40, OVERLAYS, insets=striped)[0, 0]
    inset = view[20:, :20]
    assert set(inset[:, :9].flatten().tolist()) == {1.0}
    assert set(inset[:, 11:].flatten().tolist()) == {0.0}
    torch.testing.assert_close(view[:20], torch.full((20, 40), 0.8))
    torch.testing.assert_close(view[20:, 20:], torch.full((20, 20), 0.8))


def test_scribbles_cover_some_of_the_view_that_drew_them() -> None:
    source, aspects = pixels(2), np.ones(2, dtype=np.float32)
    drawn = draw(NOTHING, 2, generator(0, 0))
    scribbled = replace(drawn, scribble=np.array([-1, 5]))
    plain, covered = (augment(source, aspects, c, 40, OVERLAYS) for c in (drawn, scribbled))
    torch.testing.assert_close(covered[0], plain[0])
    lines = torch.from_numpy(scribble(5, 40)).permute(2, 0, 1)
    torch.testing.assert_close(covered[1], torch.where(lines[3] == 1, lines[:3], plain[1]))
    assert 0.01 < float(lines[3].mean()) < 0.9


def test_a_filter_reaches_the_view_that_drew_it() -> None:
    source, aspects = pixels(2), np.ones(2, dtype=np.float32)
    drawn = draw(NOTHING, 2, generator(0, 0))
    inverted = replace(drawn, filter=np.array([-1, FILTERS.index(invert)]))
    plain, filtered = (augment(source, aspects, c, 40, OVERLAYS) for c in (drawn, inverted))
    torch.testing.assert_close(filtered[0], plain[0])
    torch.testing.assert_close(filtered[1], 1 - plain[1])


def test_paste_covers_where_the_sprite_is_and_nothing_else() -> None:
    image = torch.zeros(3, 8, 8)
    red = np.tile(np.array([1, 0, 0, 1], dtype=np.float32), (4, 4, 1))
    right_half = np.array([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])  # x from 0 to 1 is the sprite
    paste(image, red, right_half, opacity=0.5)
    assert set(image[0, 1:7, 5:7].flatten().tolist()) == {0.5}  # the rim is blended
    assert image[0, :, :3].abs().max() == 0
    assert image[1:].abs().max() == 0


def test_views_are_the_same_in_any_grouping_and_order() -> None:
    changes = {"canvas": 0.3, "filter": 0.3, "noise": 0.1, "pixelize": 0.1}
    choices = draw(ADVANCED_MIXUP.with_changes(changes), 70, generator(5, 1))
    source, aspects = pixels(35), np.linspace(0.5, 2, 35).astype(np.float32)
    rows = np.arange(70) % 35
    together = augment(source, aspects, choices, 32, OVERLAYS, rows)
    some = np.array([66, 3, 40])
    alone = augment(source, aspects, choices.take(some), 32, OVERLAYS, rows[some])
    torch.testing.assert_close(alone, together[some], atol=1e-5, rtol=0)
    assert together.shape == (70, 3, 32, 32)
    assert 0 <= together.min() and together.max() <= 1 + 1e-6
