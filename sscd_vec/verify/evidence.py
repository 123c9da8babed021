"""What geometry says about a pair of images: the best alignment, and how much speaks for it.

Keypoints match twice: by themselves, which proposes an alignment, and then where it puts them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.verify.agreement import Agreement, compare_thumbnails
from sscd_vec.verify.features import Features, Float32
from sscd_vec.verify.geometry import (
    Matrix,
    Pairs,
    align,
    count_cells,
    count_inside,
    fit_perspective,
    linear_part,
    to_frame,
    transform,
)

PERSPECTIVE_FROM = 12  # cells
HOPELESS = 0.15  # correlation
RATIO = 0.87  # the best match is this much nearer than the second best
MOST_PAIRS = 256
NEAR = 0.02  # of the reference's longer side: how far a keypoint may lie from its prediction
ALIKE = 0.8  # cosine of descriptors that lie where they should
CROWD = 5000  # alike pairs of an ordinary image are fewer; a tiled texture has a hundred times more
TURNED, SCALED = 0.5, 0.8  # radians and octaves between a keypoint and its prediction
NO_PAIRS: Pairs = np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class Support(Agreement):
    """What speaks for an alignment: how the thumbnails agree, and matched keypoints.

    Attributes:
        sure_cells: Distinct cells of the keypoints that matched by themselves.
        cells: Distinct cells of the keypoints that match where the transform puts them.
        inliers: Number of those keypoints.
        visible: Keypoints that lie in the overlap, in the image where they are fewer.
    """

    sure_cells: int
    cells: int
    inliers: int
    visible: int


@dataclass(frozen=True)
class Aligned:
    """An alignment of a query with a reference.

    Attributes:
        matrix: From working pixels of the (mirrored) query to those of the reference.
        mirrored: Whether the query was flipped left to right first.
        pairs: Matched keypoints.
        support: What speaks for it.
    """

    matrix: Matrix
    mirrored: bool
    pairs: Pairs
    support: Support

    @property
    def strength(self) -> float:
        """Which of several alignments to believe."""
        cells = 1 + self.support.cells + self.support.sure_cells
        return cells * (0.5 + self.support.correlation)


def best_alignment(query: Features, reference: Features) -> Aligned:
    """The strongest alignment: by keypoints or frame on frame, plain or mirrored, tilted or not."""
    sides = [_best_of_side(query, reference, mirrored) for mirrored in (False, True)]
    return max(sides, key=lambda one: one.strength)


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


def _best_of_side(query: Features, reference: Features, mirrored: bool) -> Aligned:
    seen = (query.mirrored if mirrored else query).with_negatives
    similarity = seen.descriptors @ reference.descriptors.T
    found = [_support(seen, reference, to_frame(seen, reference), mirrored, 0, similarity)]
    aligned = align(seen, reference, match(similarity))
    if aligned is not None:
        found.append(_support(seen, reference, aligned.matrix, mirrored, aligned.cells, similarity))
    best = max(found, key=lambda one: one.strength)
    if best.support.cells >= PERSPECTIVE_FROM:
        tilted = fit_perspective(seen, reference, best.pairs)
        if tilted is not None:
            sure = best.support.sure_cells
            other = _support(seen, reference, tilted, mirrored, sure, similarity)
            best = max(best, other, key=lambda one: one.strength)
    return best


def _support(
    query: Features,
    reference: Features,
    matrix: Matrix,
    mirrored: bool,
    sure_cells: int,
    similarity: Float32,
) -> Aligned:
    agreement = compare_thumbnails(query, reference, matrix)
    # Nothing speaks for this transform, and looking for matches is what takes time.
    hopeless = sure_cells == 0 and agreement.correlation < HOPELESS
    pairs = NO_PAIRS if hopeless else match_again(query, reference, matrix, similarity)
    cells = count_cells(query, reference, pairs)
    visible = min(
        count_inside(transform(matrix, query.points), reference.size),
        count_inside(transform(np.linalg.inv(matrix), reference.points), query.size),
    )
    support = Support(
        **vars(agreement),
        sure_cells=sure_cells,
        cells=cells,
        inliers=len(pairs),
        visible=visible,
    )
    return Aligned(matrix, mirrored, pairs, support)


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
