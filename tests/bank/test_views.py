"""Crops and larger looks, and how their hits are merged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sscd_vec.bank.views import (
    best_hits,
    best_over_scales,
    crop_count,
    crops,
    image_of,
    needs_larger_look,
    tile_id,
)


def test_crops_of_half_the_side() -> None:
    pixels = np.arange(120 * 200 * 3, dtype=np.uint32).reshape(120, 200, 3).astype(np.uint8)
    views = crops(pixels, 2)
    assert len(views) == crop_count(2) == 10
    assert views[0] is pixels
    assert all(view.shape == (60, 100, 3) for view in views[1:])
    assert (views[1] == pixels[:60, :100]).all()
    assert (views[5] == pixels[30:90, 50:150]).all()  # the centre
    assert (views[9] == pixels[60:, 100:]).all()


def test_every_pixel_is_in_a_crop() -> None:
    for n in (2, 3, 4):
        numbers = np.arange(131 * 133).reshape(131, 133)
        pixels = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], 2).astype(np.uint8)
        seen = {tuple(p) for view in crops(pixels, n)[1:] for p in view.reshape(-1, 3).tolist()}
        assert len(seen) == 131 * 133
        assert len(crops(pixels, n)) == crop_count(n)


def test_small_images_and_one_tile_stay_whole() -> None:
    assert len(crops(np.zeros((40, 400, 3), np.uint8), 2)) == 1
    assert len(crops(np.zeros((400, 400, 3), np.uint8), 1)) == crop_count(1) == 1
    with pytest.raises(ValueError, match="at least 1"):
        crops(np.zeros((40, 40, 3), np.uint8), 0)


@given(st.text(min_size=1), st.integers(0, 100))
def test_ids_come_back(name: str, crop: int) -> None:
    if crop or image_of(name) == name:  # a name that ends like a crop's is one only as itself
        assert image_of(tile_id(name, crop)) == name


def test_best_hit_of_each_image_and_the_view_that_found_it() -> None:
    whole = [("a#tile=3", 0.4), ("b", 0.5), ("a", 0.1)]
    crop = [("a#tile=1", 0.6), ("b", 0.5), ("c#tile=x", 0.2)]
    assert best_hits([whole, crop]) == [("a", 0.6, 1), ("b", 0.5, 0), ("c#tile=x", 0.2, 1)]


def test_the_best_scale_wins_after_its_penalty() -> None:
    own = np.array([[0.1, 0.5, -0.2]], np.float32)
    larger = np.array([[0.3, 0.52, -0.1]], np.float32)
    best = best_over_scales([own, larger], penalty=0.05)
    np.testing.assert_allclose(best, [[0.25, 0.5, -0.15]], atol=1e-6)
    assert own[0, 0] == np.float32(0.1), "the scores given are left alone"
    np.testing.assert_array_equal(best_over_scales([own]), own)


def test_no_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one scale"):
        best_over_scales([])


def test_a_decided_copy_needs_no_second_look() -> None:
    assert needs_larger_look(0.05, 0.07) and not needs_larger_look(0.07, 0.07)
