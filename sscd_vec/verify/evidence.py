"""What geometry says about a pair of images: the best alignment, and how much speaks for it."""

from dataclasses import dataclass

import numpy as np

from sscd_vec.verify.agreement import Agreement, compare_thumbnails
from sscd_vec.verify.features import Features, Float32
from sscd_vec.verify.geometry import (
    Matrix,
    Pairs,
    align,
    count_cells,
    count_inside,
    fit_perspective,
    to_frame,
    transform,
)
from sscd_vec.verify.matching import match, match_again

PERSPECTIVE_FROM = 12  # cells
HOPELESS = 0.15  # correlation
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
