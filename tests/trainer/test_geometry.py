import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sscd_vec.trainer.augment import resample
from sscd_vec.trainer.geometry import crop_boxes, cut_box, largest_upright, views_of
from sscd_vec.trainer.recipe import ADVANCED, Choices, draw, generator

NO_CROP = {"crop_area": (1.0, 1.0), "crop_ratio": (1.0, 1.0)}


def still(count: int = 1, **changes: float) -> Choices:
    """Choices that leave a square image as it is, but for ``changes``."""
    quiet = {"flip": 0.0, "quarter_turn": 0.0, "rotation": 0.0} | NO_CROP
    return draw(ADVANCED.with_changes(quiet | changes), count, generator(0, 0))


def looked_at(image: torch.Tensor, choices: Choices, aspect: float = 1.0) -> torch.Tensor:
    views = views_of(choices, np.array([aspect], dtype=np.float32))
    return resample(image[None], views.to_photo, image.shape[-1])[0]


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
    assert np.abs(views.to_photo @ corners).max() <= 1 + 1e-6


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
