"""Transforms: recovered exactly from made-up keypoints, refused where they make no sense."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from sscd_vec.verify import evidence
from sscd_vec.verify.evidence import match, match_again
from sscd_vec.verify.features import KEYPOINT, OCTAVE, SUBPIXEL, TURN, Features
from sscd_vec.verify.geometry import (
    align,
    count_cells,
    fit_perspective,
    linear_part,
    to_frame,
    transform,
)

SIZE = (400, 300)
Points = NDArray[np.float64]


def features(
    points: Points, octaves: Points | None = None, angles: Points | None = None
) -> Features:
    """Keypoints at given places, with random descriptors of their own."""
    count = len(points)
    rng = np.random.default_rng(count)
    made = np.zeros(count, KEYPOINT)
    made["x"], made["y"] = np.rint(points * SUBPIXEL).astype(int).T
    made["scale"] = np.rint((np.full(count, 3.0) if octaves is None else octaves) * OCTAVE)
    turns = np.zeros(count) if angles is None else angles
    made["angle"] = np.rint(turns * TURN / (2 * np.pi)).astype(int) % TURN
    made["descriptor"] = rng.integers(0, 256, (count, 128))
    return Features(SIZE, made, np.zeros((48, 64), np.uint8))


def spread(count: int, seed: int = 0) -> Points:
    return np.random.default_rng(seed).uniform((20, 20), (380, 280), (count, 2))


def moved(matrix: Points, points: Points) -> tuple[Features, Features]:
    """Keypoints and what becomes of them under a map, scale and direction included."""
    (a, b), (c, d) = linear_part(matrix, SIZE)
    octaves = np.full(len(points), 3.0)
    angles = np.zeros(len(points))
    turn, octave = np.arctan2(c - b, a + d), 0.5 * np.log2(a * d - b * c)
    return features(points, octaves, angles), features(
        transform(matrix, points), octaves + octave, angles + turn
    )


def in_order(count: int) -> NDArray[np.int64]:
    return np.stack([np.arange(count)] * 2, axis=1)


SIMILARITY = np.array([[0.5, -0.3, 120.0], [0.3, 0.5, 20.0], [0, 0, 1.0]])
AFFINE = np.array([[0.6, 0.1, 40.0], [-0.05, 0.9, 15.0], [0, 0, 1.0]])


@pytest.mark.parametrize("matrix", [SIMILARITY, AFFINE])
def test_align_finds_the_transform_among_wrong_pairs(matrix: Points) -> None:
    points = spread(60)
    query, reference = moved(matrix, points)
    wrong = np.stack([np.arange(60), np.random.default_rng(1).permutation(60)], axis=1)
    found = align(query, reference, np.concatenate([in_order(60)[:20], wrong]))
    assert found is not None
    assert np.allclose(transform(found.matrix, points), transform(matrix, points), atol=0.5)
    assert found.cells >= 15
    right = found.pairs[:, 0] == found.pairs[:, 1]
    assert right[:20].all()


def test_align_says_the_same_every_time() -> None:
    query, reference = moved(AFFINE, spread(80))
    pairs = np.concatenate([in_order(80), in_order(80)[::-1]])
    first, second = align(query, reference, pairs), align(query, reference, pairs)
    assert first is not None and second is not None
    assert np.array_equal(first.matrix, second.matrix)


def test_pairs_without_a_common_transform_have_none() -> None:
    rng = np.random.default_rng(3)
    query = features(spread(40, 1), rng.uniform(1, 6, 40), rng.uniform(0, 6.28, 40))
    reference = features(spread(40, 2), rng.uniform(1, 6, 40), rng.uniform(0, 6.28, 40))
    found = align(query, reference, in_order(40))
    assert found is None or found.cells <= 4
    assert align(query, reference, in_order(2)) is None


def test_many_keypoints_in_one_place_count_once() -> None:
    crowd = np.array([200.0, 150.0]) + np.random.default_rng(0).uniform(0, 4, (100, 2))
    query = reference = features(crowd)
    assert count_cells(query, reference, in_order(100)) <= 2
    assert align(query, reference, in_order(100)) is None
    assert count_cells(query, reference, in_order(100)[:0]) == 0


@pytest.mark.parametrize(
    "matrix",
    [
        np.diag([0.01, 0.01, 1.0]),  # a hundredth of the size
        np.diag([20.0, 20.0, 1.0]),
        np.array([[1.0, 0, 0], [0, 0.1, 0], [0, 0, 1]]),  # squeezed to a tenth
    ],
)
def test_what_nobody_does_to_an_image_is_refused(matrix: Points) -> None:
    points = spread(40)
    query = features(points)
    reference = features(np.clip(transform(matrix, points), 0, 8000), np.full(40, 3.0))
    found = align(query, reference, in_order(40))
    assert found is None or not np.allclose(found.matrix, matrix, atol=0.05)


def test_fit_perspective_recovers_a_homography() -> None:
    matrix = np.array([[0.8, 0.05, 30.0], [0.02, 0.85, 10.0], [2e-4, 1e-4, 1.0]])
    query, reference = moved(matrix, spread(50))
    found = fit_perspective(query, reference, in_order(50))
    assert found is not None
    assert np.allclose(transform(found, spread(50)), transform(matrix, spread(50)), atol=0.5)


@pytest.mark.parametrize("tilt", [(-0.004, 0.0), (0.01, 0.01)])
def test_fit_perspective_refuses_a_horizon_in_the_image(tilt: tuple[float, float]) -> None:
    points = spread(50)
    points = points[points @ tilt > -0.9]
    matrix = np.array([[0.8, 0, 30.0], [0, 0.8, 10.0], [*tilt, 1.0]])
    end = np.clip(transform(matrix, points), 0, 8000)
    assert fit_perspective(features(points), features(end), in_order(len(points))) is None


def test_degenerate_points_have_no_perspective() -> None:
    same = features(np.full((20, 2), 100.0))
    assert fit_perspective(same, same, in_order(20)) is None


def test_to_frame_lays_corner_on_corner() -> None:
    small = Features((200, 100), np.zeros(0, KEYPOINT), np.zeros((32, 64), np.uint8))
    matrix = to_frame(features(spread(3)), small)
    corners = np.array([[-0.5, -0.5], [399.5, 299.5]])
    assert np.allclose(transform(matrix, corners), [[-0.5, -0.5], [199.5, 99.5]])


def test_match_takes_what_stands_out() -> None:
    similarity = np.array([[0.9, 0.1, 0.2], [0.8, 0.79, 0.1], [0.3, 0.3, 0.99]], np.float32)
    assert match(similarity).tolist() == [[2, 2], [0, 0]]
    assert match(similarity[:1]).shape == (0, 2)
    assert match(similarity[:, :0]).shape == (0, 2)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x[:, ::-1]])
def test_match_again_takes_only_what_lies_in_its_place(
    change: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> None:
    query, reference = moved(SIMILARITY, spread(30))
    similarity = np.full((30, 30), 0.85, np.float32)
    np.fill_diagonal(similarity, 0.95)
    pairs = match_again(query, reference, SIMILARITY, np.ascontiguousarray(change(similarity)))
    assert len(pairs) == len({*pairs[:, 0].tolist()}) == len({*pairs[:, 1].tolist()})
    gap = transform(SIMILARITY, query.points[pairs[:, 0]]) - reference.points[pairs[:, 1]]
    assert np.linalg.norm(gap, axis=1).max(initial=0) < 0.02 * 400
    if similarity[0, 0] == change(similarity)[0, 0]:
        assert sorted(map(tuple, pairs.tolist())) == [(i, i) for i in range(30)]


def test_match_again_refuses_other_scales_and_directions() -> None:
    query, reference = moved(SIMILARITY, spread(10))
    similarity = np.eye(10, dtype=np.float32)
    turned = reference.keypoints.copy()
    turned["angle"] += 64
    scaled = reference.keypoints.copy()
    scaled["scale"] += 2 * OCTAVE
    for changed in (turned, scaled):
        other = Features(SIZE, changed, reference.thumbnail)
        assert len(match_again(query, other, SIMILARITY, similarity)) == 0
    assert len(match_again(query, reference, SIMILARITY, similarity)) == 10


def test_a_crowd_of_alike_keypoints_gives_the_same_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, reference = moved(SIMILARITY, spread(300))
    similarity = np.random.default_rng(0).uniform(0.7, 1, (300, 300)).astype(np.float32)
    crowd = match_again(query, reference, SIMILARITY, similarity)
    assert np.count_nonzero(similarity > evidence.ALIKE) > evidence.CROWD
    monkeypatch.setattr(evidence, "CROWD", similarity.size)
    assert np.array_equal(crowd, match_again(query, reference, SIMILARITY, similarity))
    assert len(crowd) > 10
