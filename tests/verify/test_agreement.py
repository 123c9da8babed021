"""Whether aligned thumbnails agree, and where an alignment lies, in numbers worked out by hand."""

import numpy as np
import pytest

from sscd_vec.verify.agreement import compare_thumbnails
from sscd_vec.verify.features import Features, extract
from sscd_vec.verify.geometry import to_frame
from sscd_vec.verify.regions import area, overlap, to_unit
from tests.verify.scenes import crop, paste, scene

LEFT_HALF = np.array([[0.5, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


def features(pixels: np.ndarray) -> Features:
    return extract(pixels, side=256, keypoints=10)


def test_an_image_agrees_with_itself_everywhere() -> None:
    image = features(scene(1))
    found = compare_thumbnails(image, image, np.eye(3))
    assert found.correlation == pytest.approx(1)
    assert found.agreeing == 1
    assert found.query_coverage == pytest.approx(1)
    assert found.reference_coverage == pytest.approx(1)
    assert found.textured > 50


def test_other_images_do_not_agree() -> None:
    found = compare_thumbnails(features(scene(1)), features(scene(2)), np.eye(3))
    assert abs(found.correlation) < 0.2
    assert found.agreeing < 0.2


def test_a_negative_agrees_like_its_original() -> None:
    image = scene(1)
    found = compare_thumbnails(features(image), features(255 - image), np.eye(3))
    assert found.correlation == pytest.approx(1, abs=0.01)
    assert found.agreeing == 1


def test_brightness_and_contrast_do_not_matter() -> None:
    image = scene(1)
    dull = (image * 0.4 + 90).astype(np.uint8)
    assert compare_thumbnails(features(image), features(dull), np.eye(3)).correlation > 0.98


def test_coverage_of_a_crop_and_of_its_original() -> None:
    whole = scene(1)
    query, reference = features(crop(whole, 0, 0, 0.5, 1)), features(whole)
    unit = LEFT_HALF
    start, end = _pixels(query), _pixels(reference)
    found = compare_thumbnails(query, reference, end @ unit @ np.linalg.inv(start))
    assert found.correlation > 0.9
    assert found.query_coverage == pytest.approx(1, abs=0.02)
    assert found.reference_coverage == pytest.approx(0.5, abs=0.03)


def test_half_of_an_image_replaced() -> None:
    image = scene(1)
    other = paste(scene(2), image, (160, 0, 320, 240))
    found = compare_thumbnails(features(other), features(image), np.eye(3))
    assert 0.3 < found.agreeing < 0.65


@pytest.mark.parametrize("shape", [(1, 400, 3), (400, 1, 3), (1, 1, 3)])
def test_thin_images_say_nothing(shape: tuple[int, int, int]) -> None:
    thin = features(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    found = compare_thumbnails(thin, features(scene(1)), to_frame(thin, features(scene(1))))
    assert found.agreeing < 0.5


def test_no_overlap_is_no_agreement() -> None:
    image = features(scene(1))
    away = np.array([[1, 0, 5000.0], [0, 1, 0], [0, 0, 1]])
    found = compare_thumbnails(image, image, away)
    assert (found.correlation, found.agreeing, found.query_coverage) == (0, 0, 0)


def test_regions_of_a_crop() -> None:
    query, reference = overlap(LEFT_HALF)
    assert area(query) == pytest.approx(1)
    assert area(reference) == pytest.approx(0.5)
    assert np.array(sorted(reference)) == pytest.approx(
        np.array([(0, 0), (0, 1), (0.5, 0), (0.5, 1)])
    )


def test_regions_of_an_image_pasted_into_another() -> None:
    pasted = np.linalg.inv(np.array([[0.25, 0, 0.5], [0, 0.5, 0.25], [0, 0, 1.0]]))
    query, reference = overlap(pasted)
    assert area(query) == pytest.approx(0.125)
    assert area(reference) == pytest.approx(1)
    assert min(x for x, _ in query) == pytest.approx(0.5)
    assert max(y for _, y in query) == pytest.approx(0.75)


def test_regions_that_do_not_meet_are_empty() -> None:
    away = np.array([[1, 0, 3.0], [0, 1, 0], [0, 0, 1]])
    assert overlap(away) == ((), ())
    assert area(()) == 0


def test_to_unit_turns_a_mirrored_map_round() -> None:
    unit = to_unit(np.eye(3), (200, 100), (200, 100), mirrored=True)
    corner = unit @ (0, 0, 1)
    assert corner[:2] / corner[2] == pytest.approx((1, 0))
    assert to_unit(np.eye(3), (200, 100), (200, 100), False) == pytest.approx(np.eye(3))


def _pixels(image: Features) -> np.ndarray:
    """From unit coordinates to working pixels."""
    return np.array([[image.size[0], 0, -0.5], [0, image.size[1], -0.5], [0, 0, 1.0]])
