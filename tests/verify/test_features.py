"""Local features: bounded, exact when kept, mirrored for free, and OpenCV only when it is used."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sscd_vec.verify.features import HEADER, KEYPOINT, Features, FeaturesError, extract
from tests.verify.scenes import scene

ODD = {
    "flat": np.full((30, 40, 3), 7, np.uint8),
    "one pixel": np.zeros((1, 1, 3), np.uint8),
    "one pixel wide": np.arange(1500, dtype=np.uint8).reshape(500, 1, 3),
    "one pixel high": np.arange(1500, dtype=np.uint8).reshape(1, 500, 3),
    "checks": np.repeat((np.indices((400, 400)).sum(0) // 8 % 2 * 255)[:, :, None], 3, 2).astype(
        np.uint8
    ),
}


@pytest.fixture(scope="module")
def found() -> Features:
    return extract(scene(1), side=256, keypoints=300)


def test_extract_keeps_the_most_useful_keypoints_up_to_a_limit(found: Features) -> None:
    assert len(found) == 300
    assert found.size == (256, 192)
    assert found.thumbnail.shape == (48, 64)
    fewer = extract(scene(1), side=256, keypoints=100)
    assert fewer.keypoints.tobytes() == found.best(100).keypoints.tobytes()
    assert found.best(1000) is found


def test_the_first_keypoints_are_spread_over_the_image(found: Features) -> None:
    cells = (found.best(150).points * 4 / found.size).astype(int)
    assert len(np.unique(cells @ (1, 4))) == 16


def test_small_images_are_enlarged_at_most_twice() -> None:
    assert extract(scene(2, (80, 60)), side=256, keypoints=10).size == (160, 120)
    assert extract(scene(2, (800, 300)), side=256, keypoints=10).size == (256, 96)


@pytest.mark.parametrize("kind", ODD)
def test_odd_images_have_features_that_can_be_kept(kind: str) -> None:
    features = extract(ODD[kind], side=256, keypoints=300)
    again = Features.from_bytes(features.to_bytes())
    assert again.to_bytes() == features.to_bytes()
    assert min(features.size) >= 1 and max(features.thumbnail.shape) == 64
    assert len(features.mirrored) == len(features) < 300


def test_twenty_thousand_keypoints_become_a_few() -> None:
    rng = np.random.default_rng(0)
    dots = rng.integers(0, 2, (500, 500, 1), np.uint8).repeat(3, 2) * 255
    big = dots.repeat(2, 0).repeat(2, 1)
    assert len(extract(big, side=1000, keypoints=300)) == 300


def test_bytes_give_the_same_features_without_a_copy(found: Features) -> None:
    data = found.to_bytes()
    assert len(data) == HEADER.size + 48 * 64 + 300 * 134
    again = Features.from_bytes(data)
    assert again.size == found.size
    for name in ("points", "octaves", "angles", "descriptors", "thumbnail"):
        assert np.array_equal(getattr(again, name), getattr(found, name)), name
    assert not again.keypoints.flags.owndata


def test_mirrored_features_are_those_of_the_mirrored_image(found: Features) -> None:
    flipped = extract(np.ascontiguousarray(scene(1)[:, ::-1]), side=256, keypoints=300)
    mirrored = found.mirrored
    gap = np.linalg.norm(flipped.points[:, None] - mirrored.points[None], axis=2)
    gap += 100 * np.abs(flipped.octaves[:, None] - mirrored.octaves[None])
    turned = np.cos(flipped.angles[:, None] - mirrored.angles[None])
    nearest = np.where(turned > 0.98, gap, np.inf).argmin(axis=1)
    same = (gap[np.arange(len(gap)), nearest] < 1.5) & (turned[np.arange(len(gap)), nearest] > 0.98)
    assert same.mean() > 0.7  # the weakest few differ: cells of the grid are mirrored too
    cosines = (flipped.descriptors * mirrored.descriptors[nearest]).sum(axis=1)[same]
    assert np.median(cosines) > 0.97
    assert np.array_equal(mirrored.thumbnail, found.thumbnail[:, ::-1])
    assert np.array_equal(mirrored.mirrored.descriptors, found.descriptors)


@pytest.mark.parametrize("cut", [0, 5, HEADER.size, HEADER.size + 10, -1])
def test_cut_off_bytes_are_refused(found: Features, cut: int) -> None:
    with pytest.raises(FeaturesError, match="expected"):
        Features.from_bytes(found.to_bytes()[:cut])


def test_foreign_bytes_are_refused(found: Features) -> None:
    with pytest.raises(FeaturesError, match="extract them again with this version"):
        Features.from_bytes(b"XXXX" + found.to_bytes()[4:])
    with pytest.raises(FeaturesError, match="300 keypoints"):
        Features.from_bytes(found.to_bytes() + bytes(KEYPOINT.itemsize))


@given(st.binary(max_size=400))
def test_any_bytes_are_features_or_refused(data: bytes) -> None:
    try:
        features = Features.from_bytes(data)
    except FeaturesError:
        return
    assert features.to_bytes() == data


def test_opencv_is_imported_when_it_is_used_and_missed_by_name() -> None:
    script = (
        "import sys, numpy as np, sscd_vec.verify as verify\n"
        "assert not {'cv2', 'torch', 'faiss', 'pymilvus'} & set(sys.modules)\n"
        "sys.modules['cv2'] = None\n"
        "try:\n"
        "    verify.Verifier.from_pretrained().extract(np.zeros((9, 9, 3), np.uint8))\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "pip install 'sscd-vec[verify]'" in done.stdout
