"""Images that are not copies of each other: which ones are scored, and their highest scores.

A background image must never be scored against itself, nor an image against its own duplicate.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.normalize.calibration.thresholds import Kind
from sscd_vec.normalize.descriptors import (
    HALF_ROUNDING,
    MEMORY,
    ROUNDING,
    Float32,
    Float64,
    OverlapError,
    lengths,
    overlapping_pairs,
)
from sscd_vec.normalize.whitening import ROWS_PER_DIMENSION

if TYPE_CHECKING:
    from sscd_vec.normalize.normalizer import Normalizer

SAMPLE = 20_000  # scores kept for a plot
BINS = 4096  # of the histogram of all scores


@dataclass(frozen=True, eq=False)
class Sides:
    """Whitened queries and references, their biases, and the rows they were given as.

    Attributes:
        q: ``(n, dim)`` queries.
        r: ``(m, dim)`` references.
        q_bias: ``(n,)`` biases of the queries.
        r_bias: ``(m,)`` biases of the references, for symmetric scores only.
        q_rows: ``(n,)`` rows in what was given; the background's if nothing was.
        r_rows: ``(m,)`` the same for references.
        one_set: Whether both sides are the same images, each compared with all others.
        note: What a reader of the threshold should know.
    """

    q: Float32
    r: Float32
    q_bias: Float32
    r_bias: Float32 | None
    q_rows: NDArray[np.int64]
    r_rows: NDArray[np.int64]
    one_set: bool = False
    note: str = ""

    def given_rows(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pairs ``(k, 2)`` of places in ``q`` and ``r`` as rows of what was given."""
        return np.stack([self.q_rows[pairs[:, 0]], self.r_rows[pairs[:, 1]]], axis=1)


def both_sides(
    normalizer: "Normalizer",
    queries: ArrayLike | None,
    references: ArrayLike | None,
    kind: Kind,
    seed: int,
) -> Sides:
    """Two sides from what ``calibrate`` was given: two arrays, one for both, or the background.

    Raises:
        ValueError: If there is nothing fit to calibrate on.
        OverlapError: If an image is on two sides, or on one and in the background.
    """
    if queries is None:
        if references is not None:
            raise ValueError("calibration: expected queries where references are given")
        return _background_thirds(normalizer, kind, seed)
    if references is None:
        if kind == "tiled":
            raise ValueError("tiled calibration: expected queries and references, got one array")
        q = r = normalizer.whiten(queries)
    else:
        q, r = normalizer.whiten(queries), normalizer.whiten(references)
    one_set = references is None
    background, half = normalizer.background, normalizer.background_precision == "float16"
    if background is not None:
        slack = HALF_ROUNDING if half else ROUNDING
        _refuse_overlap(overlapping_pairs(background, q, slack), "background rows", "queries")
        if not one_set:
            pairs = overlapping_pairs(background, r, slack)
            _refuse_overlap(pairs, "background rows", "references")
    twice = overlapping_pairs(q, r, ROUNDING)
    if one_set:
        _refuse_overlap(twice[twice[:, 0] < twice[:, 1]], "queries", "other queries")
    else:
        _refuse_overlap(twice, "queries", "references")
    q_bias = normalizer.whitened_biases(q)
    r_bias = None
    if kind == "symmetric":
        r_bias = q_bias if one_set else normalizer.whitened_biases(r)
    return Sides(q, r, q_bias, r_bias, np.arange(len(q)), np.arange(len(r)), one_set)


def image_numbers(groups: ArrayLike | None, rows: int) -> NDArray[np.int64]:
    """Image number of each row, 0, 0, 1, 1, ...; each row its own image by default.

    Raises:
        ValueError: If there is not one group per row, or the rows of an image lie apart.
    """
    if groups is None:
        return np.arange(rows)
    named = np.asarray(groups)
    if named.shape != (rows,):
        raise ValueError(f"groups: expected one entry per row, {rows}, got shape {named.shape}")
    changes = np.append(True, named[1:] != named[:-1])
    numbers: NDArray[np.int64] = np.cumsum(changes) - 1
    if len(np.unique(named)) != numbers[-1] + 1:
        raise ValueError("groups: expected the tiles of an image in consecutive rows")
    return numbers


def _background_thirds(normalizer: "Normalizer", kind: Kind, seed: int) -> Sides:
    background, norm = normalizer.background, normalizer.score_norm
    if kind == "tiled":
        raise ValueError("tiled calibration: expected tiled queries; a background has no tiles")
    if background is None:
        raise ValueError(
            "calibration: this normalizer keeps no background to calibrate on; pass descriptors of "
            "images that are not copies of each other"
        )
    _refuse_overfitted(normalizer)
    order = np.random.default_rng(seed).permutation(len(background))
    quarter = len(background) // 4
    q_rows, r_rows = order[:quarter], order[quarter : 2 * quarter]
    q, r = background[q_rows], background[r_rows]
    rest = background[order[2 * quarter :]]
    twice = overlapping_pairs(q, r, ROUNDING)
    twice = np.stack([q_rows[twice[:, 0]], r_rows[twice[:, 1]]], axis=1)
    _refuse_overlap(twice, "background rows", "other background rows")
    nothing = np.zeros(len(q), dtype=np.float32)
    q_bias = nothing if norm is None else norm.bias(q, rest)
    r_bias = None
    if kind == "symmetric":
        r_bias = np.zeros(len(r), dtype=np.float32) if norm is None else norm.bias(r, rest)
    note = (
        f"calibrated on the background itself: {len(q)} queries, {len(r)} references, bias from "
        f"the other {len(rest)} rows"
    )
    return Sides(q, r, q_bias, r_bias, q_rows, r_rows, note=note)


def _refuse_overfitted(normalizer: "Normalizer") -> None:
    """Refuse to score rows with a whitening that knows them too well.

    At two rows per dimension, 512 dimensions and a wanted rate of 0.05, images never seen exceed
    the threshold found on the whitening's own rows at a rate of 0.74; at ten, of 0.06.
    """
    whitening = normalizer.whitening
    if whitening is None or whitening.mode == "centre":
        return
    needed = ROWS_PER_DIMENSION * whitening.dim
    if whitening.count < needed:
        raise ValueError(
            f"calibration on the background alone: expected a whitening to {whitening.dim} "
            f"dimensions fitted on at least {needed} rows, got {whitening.count}; images it never "
            "saw would score higher than these, and the threshold would be too low. Pass "
            "descriptors of other images as queries, or fit on a larger background or fewer "
            "dimensions"
        )


def _refuse_overlap(pairs: NDArray[np.int64], what: str, other: str) -> None:
    if len(pairs):
        raise OverlapError(
            f"{len(pairs)} {what} are also among the {other} (first: rows {pairs[0, 0]} and "
            f"{pairs[0, 1]}); calibration needs images that are not copies of each other. Remove "
            "duplicates first",
            pairs,
        )


# ---------------------------------------------------------------------- their scores


@dataclass(frozen=True, eq=False)
class NonMatches:
    """Scores of ``count`` pairs of images that are not copies.

    Attributes:
        count: Pairs.
        queries: Query images.
        references: Reference images.
        one_set: Whether these are the same images.
        histogram: ``(b,)`` how many scores fall between ``edges``.
        edges: ``(b + 1,)``.
        top: The highest scores, descending.
        top_pairs: ``(k, 2)`` images (query, reference) of these.
        sample: A random sample of all scores.
    """

    count: int
    queries: int
    references: int
    one_set: bool
    histogram: NDArray[np.int64]
    edges: Float64
    top: Float64
    top_pairs: NDArray[np.int64]
    sample: Float64


def score_nonmatches(
    sides: Sides,
    query_groups: NDArray[np.int64],
    reference_groups: NDArray[np.int64],
    keep: int,
    *,
    related: NDArray[np.int64] | None = None,
    seed: int = 0,
    memory: int = MEMORY,
) -> NonMatches:
    """Score all pairs of images, block by block.

    A pair's score is ``max over views (s - bias(q))``, with ``max(bias(q), bias(r))`` in place of
    ``bias(q)`` if the sides have reference biases.

    Args:
        sides: What is scored.
        query_groups: Image of each query row: 0, 0, 1, ...
        reference_groups: Image of each reference row.
        keep: Highest pairs to keep.
        related: ``(k, 2)`` pairs of images that are left out: copies, or shots of one scene.
        seed: Of the sample.
        memory: Bytes of scores held at once.
    """
    random = np.random.default_rng(seed)
    q_starts, r_starts = _starts(query_groups), _starts(reference_groups)
    images, references = len(q_starts), len(r_starts)
    q_ends = np.append(q_starts[1:], len(sides.q))
    # Up to three arrays of this size live at once: product, bias or view maximum, bin numbers.
    per_image = max(int((q_ends - q_starts).max()), 1)
    step = max(memory // (12 * len(sides.r) * per_image), 1)
    share = min(1.0, SAMPLE / (images * references))
    top, top_pairs = np.zeros(0, np.float32), np.zeros((0, 2), np.int64)
    span = _span(sides)
    histogram, sampled, left_out = np.zeros(BINS, np.int64), [], 0
    for first in range(0, images, step):
        last = min(first + step, images)
        rows = slice(q_starts[first], q_ends[last - 1])
        scores = sides.q[rows] @ sides.r.T
        if sides.r_bias is None:
            scores -= sides.q_bias[rows, None]
        else:
            scores -= np.maximum(sides.q_bias[rows, None], sides.r_bias[None])
        scores = _view_maxima(scores, q_starts[first:last] - q_starts[first], r_starts)
        left_out += _leave_out(scores, first, sides, related, -span)
        flat = scores.ravel()
        places = ((flat + span) * (BINS / (2 * span))).astype(np.int32)
        histogram += np.bincount(np.clip(places, 0, BINS - 1, out=places), minlength=BINS)
        chosen = flat[random.random(len(flat)) < share]
        sampled.append(chosen[chosen > -span])
        highest = _largest(flat, keep)
        pairs = np.stack([first + highest // references, highest % references], axis=1)
        top, top_pairs = np.append(top, flat[highest]), np.concatenate([top_pairs, pairs])
        stay = _largest(top, keep)
        top, top_pairs = top[stay], top_pairs[stay]
    histogram[0] -= left_out
    valid = top > -span
    return NonMatches(
        count=images * references - left_out,
        queries=images,
        references=references,
        one_set=sides.one_set,
        histogram=histogram,
        edges=np.linspace(-float(span), float(span), BINS + 1),
        top=top[valid].astype(np.float64),
        top_pairs=top_pairs[valid],
        sample=np.concatenate(sampled).astype(np.float64),
    )


def _span(sides: Sides) -> np.float32:
    """A bound of all scores' size, from the longest vectors and the largest bias."""
    length = np.float32(lengths(sides.q).max(initial=0) * lengths(sides.r).max(initial=0))
    biases = [
        np.abs(bias).max(initial=0) for bias in (sides.q_bias, sides.r_bias) if bias is not None
    ]
    return np.float32(1.01) * (length + np.float32(max(biases))) + np.float32(1e-6)


def _leave_out(
    scores: Float32,
    first: int,
    sides: Sides,
    related: NDArray[np.int64] | None,
    lowest: np.float32,
) -> int:
    """Set the scores of pairs that are not strangers to ``lowest``, and say how many there are."""
    rows = np.arange(len(scores))
    if sides.one_set and sides.r_bias is not None:  # symmetric: every pair once
        scores[np.arange(scores.shape[1]) <= first + rows[:, None]] = lowest
    elif sides.one_set:
        scores[rows, first + rows] = lowest
    if related is not None:
        both = np.concatenate([related, related[:, ::-1]]) if sides.one_set else related
        here = both[(both[:, 0] >= first) & (both[:, 0] < first + len(scores))]
        scores[here[:, 0] - first, here[:, 1]] = lowest
    return int((scores <= lowest).sum())


def _starts(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))


def _view_maxima(
    scores: Float32, query_starts: NDArray[np.int64], reference_starts: NDArray[np.int64]
) -> Float32:
    if len(query_starts) < scores.shape[0]:
        scores = np.maximum.reduceat(scores, query_starts, axis=0)
    if len(reference_starts) < scores.shape[1]:
        scores = np.maximum.reduceat(scores, reference_starts, axis=1)
    return scores


def _largest(values: Float32, count: int) -> NDArray[np.int64]:
    """Places of the ``count`` largest, descending."""
    if len(values) > count:
        places = np.argpartition(-values, count - 1)[:count]
    else:
        places = np.arange(len(values))
    return places[np.argsort(-values[places], kind="stable")]
