from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as vision

from sscd_vec.trainer.augment.choices import CUTMIX, MIXUP, NO_MIX, Choices, draw, generator
from sscd_vec.trainer.augment.colour import (
    FILTERS,
    add_noise,
    blur,
    invert,
    jitter_exactly,
    pixelize,
)
from sscd_vec.trainer.augment.overlay import Overlays, paste, scribble
from sscd_vec.trainer.augment.recipe import ADVANCED_MIXUP, NOTHING, SIMCLR
from sscd_vec.trainer.augment.views import augment, mix
from tests.trainer.images import pixels

OVERLAYS = Overlays()


def choose(count: int, **changes: object) -> Choices:
    return draw(SIMCLR.with_changes(changes), count, generator(0, 0))


def test_blur_scales_with_the_training_size() -> None:
    flat = {"jitter": 0.0, "grayscale": 0.0, "flip": 0.0, "crop_area": (1.0, 1.0)}
    flat |= {"crop_ratio": (1.0, 1.0), "blur": 1.0, "blur_sigma": (4.0, 4.0)}
    choices = choose(1, **flat)
    source = pixels(1, 56)
    view = augment(source, np.ones(1, dtype=np.float32), choices, 56, OVERLAYS)
    expected = blur(source.permute(0, 3, 1, 2).float() / 255, torch.tensor([4.0 * 56 / 224]))
    torch.testing.assert_close(view, expected, atol=1e-5, rtol=0)


def test_noise_pixels_and_whole_views_reach_the_views() -> None:
    source, aspects = pixels(1), np.array([1.5], dtype=np.float32)
    quiet = {"flip": 0.0, "jitter": 0.0, "grayscale": 0.0, "blur": 0.0, "crop": 0.0}

    def view(**changes: object) -> torch.Tensor:
        return augment(source, aspects, choose(1, **(quiet | changes)), 40, OVERLAYS)[0]

    whole = source[0].permute(2, 0, 1).float() / 255
    torch.testing.assert_close(view(), whole, atol=1e-5, rtol=0)
    noise = choose(1, noise=1.0)
    expected = add_noise(whole, float(noise.noise_sigma[0]), int(noise.noise[0]))
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


def test_the_exact_jitter_reaches_the_views_that_drew_it() -> None:
    source, aspects = pixels(3), np.ones(3, dtype=np.float32)
    drawn = draw(NOTHING.with_changes({"jitter": 1.0}), 3, generator(0, 0))
    mixed = replace(drawn, exact_jitter=np.array([0, 1, 1]), grayscale=np.array([0, 0, 1]))
    views = augment(source, aspects, mixed, 40, OVERLAYS)
    plain = source.permute(0, 3, 1, 2).float() / 255
    torch.testing.assert_close(views[0], augment(source, aspects, drawn, 40, OVERLAYS)[0])
    for row in (1, 2):
        factors, order = mixed.colour[row].tolist(), mixed.colour_order[row].tolist()
        expected = jitter_exactly(plain[row], factors, order)
        if row == 2:
            expected = vision.rgb_to_grayscale(expected, num_output_channels=3)
        torch.testing.assert_close(views[row], expected, atol=2e-4, rtol=0)


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


def test_mixup_and_cutmix_by_hand() -> None:
    views = torch.stack([torch.full((3, 10, 10), float(v)) for v in (0.0, 1.0, 0.5)])
    choices = draw(SIMCLR, 3, generator(0, 0))
    choices.mix[:] = (MIXUP, CUTMIX, NO_MIX)
    choices.gamma[:] = (0.25, 0.64, 0.9)
    choices.cut_place[1] = (0.0, 1.0)  # top right
    batch = mix(
        views, np.array([7, 8, 9]), choices, rows=np.arange(3), partners=np.array([1, 2, 0])
    )
    # 0.25 * 0 + 0.75 * 1
    assert set(batch.images[0].flatten().tolist()) == {0.75}
    # 1 - 0.64 of the area is a square of side 6, taken from the half-gray view
    assert set(batch.images[1, 0, :6, 4:].flatten().tolist()) == {0.5}
    assert (batch.images[1] == 0.5).float().mean() == 0.36
    assert torch.equal(batch.images[2], views[2])
    assert batch.sources.tolist() == [[7, 8], [8, 9], [9, 9]]
    assert batch.sources.dtype == torch.int64


def test_partners_are_taken_unmixed() -> None:
    views = torch.stack([torch.full((3, 4, 4), float(v)) for v in (0.0, 1.0)])
    choices = draw(SIMCLR, 2, generator(0, 0))
    choices.mix[:] = MIXUP
    choices.gamma[:] = 0.5
    batch = mix(views, np.array([0, 1]), choices, np.arange(2), np.array([1, 0]))
    assert set(batch.images.flatten().tolist()) == {0.5}
    assert set(views[0].flatten().tolist()) == {0.0}, "the unmixed views are left alone"
