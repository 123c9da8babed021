"""Which keypoints of two images look alike: by themselves, and where a transform puts them."""

import numpy as np
from numpy.typing import NDArray

from sscd_vec.verify.features import Features, Float32
from sscd_vec.verify.geometry import Pairs, linear_part, transform

RATIO = 0.87  # the best match is this much nearer than the second best
MOST_PAIRS = 256
NEAR = 0.02  # of the reference's longer side: how far a keypoint may lie from its prediction
ALIKE = 0.8  # cosine of descriptors that lie where they should
CROWD = 5000  # alike pairs of an ordinary image are fewer; a tiled texture has a hundred times more
TURNED, SCALED = 0.5, 0.8  # radians and octaves between a keypoint and its prediction


def match(similarity: Float32) -> Pairs:
    """Query keypoints whose best match stands out from the second best, surest first.

    Args:
        similarity: ``(query keypoints, reference keypoints)`` cosines.
    """
    if min(similarity.shape) < 2:
        return np.zeros((0, 2), np.int64)
    rows = np.arange(len(similarity))
    best = similarity.argmax(axis=1)
    first = similarity[rows, best]
    others = similarity.copy()
    others[rows, best] = -1
    second = others.max(axis=1)
    ratio = np.sqrt(np.maximum(1 - first, 0) / np.maximum(1 - second, 1e-6))
    order = np.argsort(ratio, kind="stable")[: min(MOST_PAIRS, int((ratio < RATIO).sum()))]
    return np.stack([order, best[order]], axis=1)


def match_again(
    query: Features, reference: Features, matrix: NDArray[np.float64], similarity: Float32
) -> Pairs:
    """Pairs that are alike and lie where a transform puts them; one to one.

    Args:
        query: Of the query.
        reference: Of the reference.
        matrix: ``(3, 3)`` from the query's to the reference's working pixels.
        similarity: ``(query keypoints, reference keypoints)`` cosines.
    """
    placed, near = transform(matrix, query.points), NEAR * max(reference.size)
    rows, columns = _alike(similarity, placed, reference.points, near)
    gap = np.linalg.norm(placed[rows] - reference.points[columns], axis=1) / max(reference.size)
    (a, b), (c, d) = linear_part(matrix, query.size)
    turn, octave = np.arctan2(c - b, a + d), 0.5 * np.log2(a * d - b * c)
    turned = reference.angles[columns] - query.angles[rows] - turn
    scaled = reference.octaves[columns] - query.octaves[rows] - octave
    fits = (gap < NEAR) & (np.cos(turned) > np.cos(TURNED)) & (np.abs(scaled) < SCALED)
    rows, columns = rows[fits], columns[fits]
    order = np.argsort(-similarity[rows, columns], kind="stable")
    pairs = np.stack([rows, columns], axis=1)[order]
    # The best pair of a query keypoint that is also the best of its reference keypoint.
    best_of_row = _first_rows(pairs[:, 0])
    best_of_column = _first_rows(pairs[:, 1])
    return pairs[best_of_row & best_of_column]


def _alike(
    similarity: Float32, placed: NDArray[np.float64], points: Float32, near: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of pairs that are alike, without most of those that lie too far apart."""
    alike = similarity > ALIKE
    if np.count_nonzero(alike) > CROWD:
        # Two comparisons of all pairs cost less than looking closely at so many of them.
        for axis in (0, 1):
            away = placed[:, axis, None].astype(np.float32) - points[None, :, axis]
            alike &= np.abs(away, out=away) < 1.01 * near  # rounding may not lose a pair
    rows, columns = np.divmod(np.flatnonzero(alike), similarity.shape[1])
    return rows, columns


def _first_rows(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which entries are the first of their key."""
    first = np.zeros(len(keys), bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first
