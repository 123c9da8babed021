"""One transform that many matched keypoints agree on, found without chance.

A SIFT keypoint has a place, a scale and a direction, so a single pair of them already says how one
image lies on the other. Every pair proposes that similarity, all pairs vote, and the proposals with
the most votes are refined by least squares: similarity, then affine, then homography, each only
where enough pairs support it and the result is a thing people do to images.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.verify.features import Features

Pairs = NDArray[np.int64]  # (m, 2): a keypoint of the query, a keypoint of the reference
Matrix = NDArray[np.float64]  # (3, 3), from working pixels of the query to those of the reference
Points = NDArray[np.floating]

LOOSE, TIGHT = 0.06, 0.02  # distance from the prediction, as part of the reference's longer side
OCTAVES, RADIANS = 1.0, 0.6  # how far scale and direction of a voter may differ
CELLS = 24  # per longer side: keypoints in one cell count once
FEWEST = 3  # cells: fewer say nothing
AFFINE_FROM = 5  # cells
STARTS = 4
TILT = 2.5  # how much nearer one corner of an image may be than another
SMALLEST, LARGEST, STRETCH = 0.08, 12.0, 3.5  # sane scales, and the most one side may be stretched


@dataclass(frozen=True)
class Alignment:
    """How a query lies on a reference.

    Attributes:
        matrix: ``(3, 3)`` map from the query's to the reference's working pixels.
        pairs: The matched keypoints that agree.
        cells: How many distinct cells of either image they lie in, the fewer of the two.
    """

    matrix: Matrix
    pairs: Pairs
    cells: int


def align(query: Features, reference: Features, pairs: Pairs) -> Alignment | None:
    """The transform with the most support, counted in distinct cells; None if there is none."""
    if len(pairs) < FEWEST:
        return None
    proposals = _votes(query, reference, pairs)
    cells = _cell_numbers(query.points[pairs[:, 0]], query.size)
    _, numbers = np.unique(cells, return_inverse=True)
    member = np.zeros((len(pairs), numbers.max() + 1), np.float32)
    member[np.arange(len(pairs)), numbers] = 1
    support = ((proposals.astype(np.float32) @ member) > 0).sum(axis=1)
    best: Alignment | None = None
    tried: list[NDArray[np.bool_]] = []
    for proposal in np.argsort(-support, kind="stable"):
        votes = proposals[proposal]
        if support[proposal] < FEWEST or len(tried) == STARTS:
            break
        if any((votes & other).sum() > 0.6 * votes.sum() for other in tried):
            continue
        tried.append(votes)
        found = _refine(query, reference, pairs, votes)
        if found is not None and (best is None or found.cells > best.cells):
            best = found
    return best


def count_cells(query: Features, reference: Features, pairs: Pairs) -> int:
    """Distinct cells the pairs lie in, in the image where they are fewer."""
    return min(
        len(np.unique(_cell_numbers(query.points[pairs[:, 0]], query.size))),
        len(np.unique(_cell_numbers(reference.points[pairs[:, 1]], reference.size))),
    )


def transform(matrix: NDArray[np.floating], points: Points) -> NDArray[np.float64]:
    """Points moved by a map."""
    moved = points @ matrix[:, :2].T + matrix[:, 2]
    return np.asarray(moved[:, :2] / moved[:, 2:], np.float64)


def linear_part(matrix: Matrix, size: tuple[int, int]) -> NDArray[np.float64]:
    """``(2, 2)`` what a map does to small things in the middle of an image."""
    middle = np.array([size[0] / 2, size[1] / 2, 1.0])
    moved = matrix @ middle
    place = moved[:2] / moved[2]
    return np.asarray((matrix[:2, :2] - np.outer(place, matrix[2, :2])) / moved[2])


def fit_perspective(query: Features, reference: Features, pairs: Pairs) -> Matrix | None:
    """The homography with the least algebraic error; None if it is not a sane one."""
    x, y = query.points[pairs[:, 0]], reference.points[pairs[:, 1]]
    start, end = _to_unit_spread(x), _to_unit_spread(y)
    (a, b), (u, v) = transform(start, x).T, transform(end, y).T
    one, zero = np.ones(len(a)), np.zeros(len(a))
    rows = np.concatenate(
        [
            np.stack([a, b, one, zero, zero, zero, -u * a, -u * b, -u], axis=1),
            np.stack([zero, zero, zero, a, b, one, -v * a, -v * b, -v], axis=1),
        ]
    )
    least = np.linalg.eigh(rows.T @ rows)[1][:, 0].reshape(3, 3)
    matrix = np.linalg.inv(end) @ least @ start
    if abs(matrix[2, 2]) < 1e-9:
        return None
    matrix = matrix / matrix[2, 2]
    return matrix if _is_sane_perspective(matrix, query.size) else None


def to_frame(query: Features, reference: Features) -> Matrix:
    """The map that lays the query's frame on the reference's."""
    wide, high = reference.size[0] / query.size[0], reference.size[1] / query.size[1]
    return np.array([[wide, 0, 0.5 * wide - 0.5], [0, high, 0.5 * high - 0.5], [0, 0, 1.0]])


def count_inside(points: Points, size: tuple[int, int]) -> int:
    """How many points lie in an image."""
    return int(((points >= 0) & (points < size)).all(axis=1).sum())


def _votes(query: Features, reference: Features, pairs: Pairs) -> NDArray[np.bool_]:
    """``(proposals, pairs)``: which pairs agree with the similarity that each pair proposes."""
    x, y = query.points[pairs[:, 0]], reference.points[pairs[:, 1]]
    octave = reference.octaves[pairs[:, 1]] - query.octaves[pairs[:, 0]]
    turn = reference.angles[pairs[:, 1]] - query.angles[pairs[:, 0]]
    # Points as complex numbers: a similarity is one multiplication and one addition.
    factor = np.exp2(octave) * np.exp(1j * turn)
    start, end = x[:, 0] + 1j * x[:, 1], y[:, 0] + 1j * y[:, 1]
    gap = np.abs(factor[:, None] * (start[None] - start[:, None]) - (end[None] - end[:, None]))
    agree = gap < LOOSE * max(reference.size)
    agree &= np.abs(octave[None] - octave[:, None]) < OCTAVES
    agree &= np.cos(turn[None] - turn[:, None]) > np.cos(RADIANS)
    agree[(np.exp2(octave) < SMALLEST) | (np.exp2(octave) > LARGEST)] = False
    return np.asarray(agree)


def _refine(
    query: Features, reference: Features, pairs: Pairs, votes: NDArray[np.bool_]
) -> Alignment | None:
    """Fit to the voters and vote again, ever more strictly."""
    x, y = query.points[pairs[:, 0]], reference.points[pairs[:, 1]]
    octave = reference.octaves[pairs[:, 1]] - query.octaves[pairs[:, 0]]
    matrix: Matrix | None = None
    for limit in (0.8 * LOOSE, 1.5 * TIGHT, TIGHT, TIGHT):
        cells = count_cells(query, reference, pairs[votes])
        if cells < FEWEST:
            return None
        matrix = _fit(x[votes], y[votes], affine=cells >= AFFINE_FROM)
        if matrix is None:
            return None
        gap = np.linalg.norm(transform(matrix, x) - y, axis=1)
        scale = 0.5 * np.log2(np.linalg.det(matrix[:2, :2]))
        votes = (gap < limit * max(reference.size)) & (np.abs(octave - scale) < OCTAVES)
    cells = count_cells(query, reference, pairs[votes])
    if matrix is None or cells < FEWEST:
        return None
    return Alignment(matrix, pairs[votes], cells)


def _fit(x: Points, y: Points, *, affine: bool) -> Matrix | None:
    """Least squares; a similarity if an affine map would not be sane, None if neither is."""
    for make in (_affine, _similarity) if affine else (_similarity,):
        matrix = make(x, y)
        if _is_sane(matrix):
            return matrix
    return None


def _affine(x: Points, y: Points) -> Matrix:
    columns = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    rows = np.linalg.lstsq(columns, y.astype(np.float64), rcond=None)[0].T
    return np.concatenate([rows, [[0.0, 0.0, 1.0]]])


def _similarity(x: Points, y: Points) -> Matrix:
    start = (x[:, 0] + 1j * x[:, 1]).astype(np.complex128)
    end = (y[:, 0] + 1j * y[:, 1]).astype(np.complex128)
    a, b = start - start.mean(), end - end.mean()
    factor = (b * a.conj()).sum() / max((a * a.conj()).real.sum(), 1e-9)
    shift = end.mean() - factor * start.mean()
    return np.array(
        [
            [factor.real, -factor.imag, shift.real],
            [factor.imag, factor.real, shift.imag],
            [0.0, 0.0, 1.0],
        ]
    )


def _is_sane(matrix: Matrix) -> bool:
    if not np.isfinite(matrix).all() or np.linalg.det(matrix[:2, :2]) <= 0:
        return False
    large, small = np.linalg.svd(matrix[:2, :2], compute_uv=False)
    return bool(small > SMALLEST and large < LARGEST and large < STRETCH * small)


def _is_sane_perspective(matrix: Matrix, size: tuple[int, int]) -> bool:
    """Sane in the middle, with a horizon far from the image and a scale that varies little."""
    weights = np.array([[0, 0], [size[0], 0], [0, size[1]], size]) @ matrix[2, :2] + 1
    if not np.isfinite(matrix).all() or weights.min() <= 0 or weights.max() > TILT * weights.min():
        return False
    local = np.eye(3)
    local[:2, :2] = linear_part(matrix, size)
    return _is_sane(local)


def _to_unit_spread(points: Points) -> Matrix:
    """Moves points to mean 0 and spread 1, for the sake of precision."""
    mean, spread = points.mean(axis=0), max(float(points.std()), 1e-6)
    return np.array([[1, 0, -mean[0]], [0, 1, -mean[1]], [0, 0, spread]]) / spread


def _cell_numbers(points: Points, size: tuple[int, int]) -> NDArray[np.int64]:
    cells = (points * (CELLS / max(size))).astype(np.int64)
    return np.asarray(cells @ (1, 4 * CELLS))
