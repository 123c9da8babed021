import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as vision

from sscd_vec.trainer.augment.choices import Choices, draw, generator
from sscd_vec.trainer.augment.geometry import (
    crop_boxes,
    cut_box,
    largest_upright,
    resample,
    resample_own,
    views_of,
)
from sscd_vec.trainer.augment.recipe import ADVANCED
from sscd_vec.trainer.pixels import as_squares
from tests.trainer.images import photo

NO_CROP = {"crop_area": (1.0, 1.0), "crop_ratio": (1.0, 1.0)}


def still(count: int = 1, **changes: float) -> Choices:
    """Choices that leave a square image as it is, but for ``changes``."""
    quiet = {"flip": 0.0, "quarter_turn": 0.0, "rotation": 0.0} | NO_CROP
    return draw(ADVANCED.with_changes(quiet | changes), count, generator(0, 0))


def looked_at(image: torch.Tensor, choices: Choices, aspect: float = 1.0) -> torch.Tensor:
    views = views_of(choices, np.array([aspect], dtype=np.float32))
    return resample(image[None], views.to_image, image.shape[-1])[0]


def test_nothing_chosen_is_the_identity() -> None:
    image = torch.rand(3, 17, 17)
    torch.testing.assert_close(looked_at(image, still()), image)


def test_flip_and_quarter_turns_move_pixels_exactly() -> None:
    image = torch.rand(3, 16, 16)
    torch.testing.assert_close(looked_at(image, still(flip=1.0)), image.flip(2))
    seen = set()
    for step in range(24):
        quiet = ADVANCED.with_changes({"flip": 0.0, "quarter_turn": 1.0, "rotation": 0.0} | NO_CROP)
        choices = draw(quiet, 1, generator(0, step))
        turned = looked_at(image, choices)
        (fitting,) = (
            k for k in range(4) if torch.allclose(turned, image.rot90(k, (1, 2)), atol=1e-5)
        )
        seen.add(fitting)
    assert seen == {1, 2, 3}


def test_rotation_looks_only_inside_the_photo() -> None:
    recipe = ADVANCED.with_changes({"rotation": 1.0, "quarter_turn": 0.5})
    choices = draw(recipe, 500, generator(1, 0))
    aspects = np.random.default_rng(0).uniform(0.3, 3, 500).astype(np.float32)
    views = views_of(choices, aspects)
    corners = np.array([[-1, -1, 1], [-1, 1, 1], [1, -1, 1], [1, 1, 1]]).T
    assert np.abs(views.to_image @ corners).max() <= 1 + 1e-6


@given(st.floats(0.2, 5), st.floats(0, 2 * np.pi))
def test_largest_upright_rectangle_fits_and_cannot_grow(aspect: float, angle: float) -> None:
    frame = np.array([[aspect, 1.0]])
    (width, height) = largest_upright(frame, np.array([angle]))[0]

    def fits(w: float, h: float) -> bool:
        cos, sin = abs(np.cos(angle)), abs(np.sin(angle))
        return bool(w * cos + h * sin <= aspect + 1e-6 and w * sin + h * cos <= 1 + 1e-6)

    assert fits(width, height)
    # No rectangle of 2 % more area, of any shape near it, fits too.
    for stretch in np.linspace(-0.5, 0.5, 41):
        assert not fits(width * 1.01 * np.exp(stretch), height * 1.01 * np.exp(-stretch))


def test_crops_lie_inside_and_have_the_drawn_area() -> None:
    random = np.random.default_rng(3)
    count = 400
    frame = random.uniform(0.4, 2.5, (count, 2))
    areas = random.uniform(0.08, 1, (count, 10)).astype(np.float32)
    ratios = random.uniform(0.75, 1.33, (count, 10)).astype(np.float32)
    centre, half = crop_boxes(frame, areas, ratios, random.uniform(0, 1, (count, 2)))
    assert (np.abs(centre) + half <= frame / 2 + 1e-9).all()
    area = 4 * half.prod(axis=1) / frame.prod(axis=1)
    assert np.isclose(area[:, None], areas, rtol=1e-5).any(axis=1).mean() > 0.95


def test_a_frame_too_long_for_any_candidate_gets_a_central_crop() -> None:
    one = np.ones((1, 10), dtype=np.float32)
    centre, half = crop_boxes(np.array([[9.0, 1.0]]), one, one, np.array([[0.9, 0.9]]))
    assert centre.tolist() == [[0.0, 0.0]]
    assert half.tolist() == [[0.5, 0.5]]


def test_cut_lies_inside_and_has_its_area() -> None:
    random = np.random.default_rng(0)
    for gamma in (*random.uniform(0, 1, 200), 1.0):
        place = random.uniform(0, 1, 2).astype(np.float32)
        channels, *sides = cut_box(float(gamma), place, 64)
        assert channels == slice(None)
        assert all(0 <= side.start < side.stop <= 64 for side in sides)
        height, width = (side.stop - side.start for side in sides)
        assert height == width and abs(width**2 / 64**2 - (1 - gamma)) < 0.02


def crop_of(image: torch.Tensor, box: tuple[int, int, int, int], size: int) -> torch.Tensor:
    """The view of a box (left, top, right, bottom) in pixels, from the image's own pixels."""
    high, wide = image.shape[:2]
    left, top, right, bottom = box
    to_image = np.array(
        [
            [(right - left) / wide, 0, (left + right) / wide - 1],
            [0, (bottom - top) / high, (top + bottom) / high - 1],
        ]
    )
    return resample_own([image], to_image[None], size)[0]


def test_a_small_crop_keeps_the_pixels_that_a_stored_square_has_lost() -> None:
    stripes = torch.zeros(200, 300, 3, dtype=torch.uint8)
    stripes[:, ::2] = 255
    view = crop_of(stripes, (100, 50, 132, 82), 32)
    torch.testing.assert_close(view, stripes[50:82, 100:132].permute(2, 0, 1) / 255)
    square = as_squares(stripes[None], 48, torch.float32)
    assert square.std() < 0.01, "gray: no resample of this brings the stripes back"


def test_a_large_crop_is_shrunk_as_torchvision_shrinks_it() -> None:
    image = torch.from_numpy(np.array(photo(3, 640, 480)))
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 60, (480, 640, 3)))
    image = (image.int() + noise).clamp(0, 255).to(torch.uint8)
    for left, top, right, bottom in ((0, 0, 640, 480), (40, 100, 400, 380), (300, 20, 380, 120)):
        ours = crop_of(image, (left, top, right, bottom), 64)
        place = (top, left, bottom - top, right - left)
        plain = image.permute(2, 0, 1).float() / 255
        theirs = vision.resized_crop(plain, *place, [64, 64], antialias=True)
        assert (ours - theirs).abs().mean() < 0.012


def test_own_pixels_and_stored_squares_look_at_the_same_place() -> None:
    """A smooth image stored both ways gives the same views, turned, rotated, flipped or not."""
    y, x = np.mgrid[0:90, 0:150] / 100
    smooth = np.stack([np.sin(3 * x + y), np.cos(4 * y), np.sin(2 * x * y)], axis=2)
    image = torch.from_numpy(((smooth + 1) * 127).astype(np.uint8))
    square = as_squares(image[None], 120, torch.float32)
    turning = {"rotation": 0.5, "quarter_turn": 0.5, "canvas": 0.5, "crop_area": (0.2, 1.0)}
    choices = draw(ADVANCED.with_changes(turning), 40, generator(2, 0))
    to_image = views_of(choices, np.full(40, 150 / 90, dtype=np.float32)).to_image
    own = resample_own([image] * 40, to_image, 48)
    stored = resample(square.expand(40, -1, -1, -1), to_image, 48)
    assert (own - stored).abs().mean() < 0.005
    assert (own - stored).abs().amax(dim=(1, 2, 3)).median() < 0.05
