"""Images that are not copies of each other: which ones are scored, and their highest scores.

A background image must never be scored against itself, nor an image against its own duplicate.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.normalize.calibration.threshold import Kind
from sscd_vec.normalize.descriptors import (
    HALF_ROUNDING,
    MEMORY,
    ROUNDING,
    Float32,
    Float64,
    OverlapError,
    overlapping_pairs,
)
from sscd_vec.normalize.whitening import ROWS_PER_DIMENSION

if TYPE_CHECKING:
    from sscd_vec.normalize.normalizer import Normalizer

SAMPLE = 20_000  # scores kept for a plot
HIGHEST = 20  # pairs kept for a second look


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
        note: What a reader of the threshold should know.
    """

    q: Float32
    r: Float32
    q_bias: Float32
    r_bias: Float32 | None
    q_rows: NDArray[np.int64]
    r_rows: NDArray[np.int64]
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
    """Two sides from what ``calibrate`` was given: two arrays, one to split, or the background.

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
        rows = normalizer.whiten(queries)
        order = np.random.default_rng(seed).permutation(len(rows))
        q_rows, r_rows = order[: len(rows) // 2], order[len(rows) // 2 :]
        q, r = rows[q_rows], rows[r_rows]
    else:
        q, r = normalizer.whiten(queries), normalizer.whiten(references)
        q_rows, r_rows = np.arange(len(q)), np.arange(len(r))
    slack = HALF_ROUNDING if normalizer.background_precision == "float16" else ROUNDING
    if normalizer.background is not None:
        every = np.arange(len(normalizer.background))
        for rows, given, name in ((q, q_rows, "queries"), (r, r_rows, "references")):
            _refuse_overlap(
                normalizer.background, rows, every, given, slack, "background rows", name
            )
    _refuse_overlap(q, r, q_rows, r_rows, ROUNDING, "queries", "references")
    q_bias = normalizer.whitened_biases(q)
    r_bias = normalizer.whitened_biases(r) if kind == "symmetric" else None
    return Sides(q, r, q_bias, r_bias, q_rows, r_rows)


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
            "images that are no copies of each other"
        )
    _refuse_overfitted(normalizer)
    order = np.random.default_rng(seed).permutation(len(background))
    quarter = len(background) // 4
    q_rows, r_rows = order[:quarter], order[quarter : 2 * quarter]
    q, r = background[q_rows], background[r_rows]
    rest = background[order[2 * quarter :]]
    _refuse_overlap(q, r, q_rows, r_rows, ROUNDING, "background rows", "other background rows")
    nothing = np.zeros(len(q), dtype=np.float32)
    q_bias = nothing if norm is None else norm.bias(q, rest)
    r_bias = None
    if kind == "symmetric":
        r_bias = np.zeros(len(r), dtype=np.float32) if norm is None else norm.bias(r, rest)
    note = (
        f"calibrated on the background itself: {len(q)} queries, {len(r)} references, bias from "
        f"the other {len(rest)} rows"
    )
    return Sides(q, r, q_bias, r_bias, q_rows, r_rows, note)


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


def _refuse_overlap(
    a: Float32,
    b: Float32,
    a_rows: NDArray[np.int64],
    b_rows: NDArray[np.int64],
    slack: float,
    what: str,
    other: str,
) -> None:
    pairs = overlapping_pairs(a, b, slack)
    if len(pairs):
        given = np.stack([a_rows[pairs[:, 0]], b_rows[pairs[:, 1]]], axis=1)
        raise OverlapError(
            f"{len(pairs)} {what} are also among the {other} (first: rows {given[0, 0]} and "
            f"{given[0, 1]}); calibration needs images that are no copies of each other. Remove "
            "duplicates first",
            given,
        )


# ---------------------------------------------------------------------- their scores


@dataclass(frozen=True, eq=False)
class NonMatches:
    """The upper end of ``count`` maxima, one per query and bank.

    Attributes:
        count: Queries times banks.
        queries: Query images.
        top: The highest maxima, descending.
        top_query: Query image of each.
        sample: A random sample of all pairs' scores.
        highest_pairs: ``(k, 2)`` images (query, reference) of the highest scores.
    """

    count: int
    queries: int
    top: Float64
    top_query: NDArray[np.int64]
    sample: Float64
    highest_pairs: NDArray[np.int64]


def score_nonmatches(
    queries: Float32,
    references: Float32,
    query_bias: Float32,
    reference_bias: Float32 | None,
    query_groups: NDArray[np.int64],
    reference_groups: NDArray[np.int64],
    bank: int,
    keep: int,
    seed: int = 0,
    memory: int = MEMORY,
) -> NonMatches:
    """Score all pairs of images; keep the highest maxima over banks of ``bank`` references.

    A pair's score is ``max over tiles (s - bias(q))``, with ``max(bias(q), bias(r))`` in place of
    ``bias(q)`` where reference biases are given. References beyond a whole number of banks are
    left out, after a shuffle.

    Args:
        queries: ``(n, d)`` whitened rows.
        references: ``(m, d)`` whitened rows.
        query_bias: ``(n,)``.
        reference_bias: ``(m,)`` for symmetric scores.
        query_groups: Image of each query row: 0, 0, 1, ...
        reference_groups: Image of each reference row.
        bank: References per bank.
        keep: Maxima to keep.
        seed: Of the shuffle and the sample.
        memory: Bytes of scores held at once.
    """
    random = np.random.default_rng(seed)
    q_starts, r_starts = _starts(query_groups), _starts(reference_groups)
    images, banks = len(q_starts), len(r_starts) // bank
    chosen = random.permutation(len(r_starts))[: banks * bank]
    q_ends = np.append(q_starts[1:], len(queries))
    per_image = max(int((q_ends - q_starts).max()), 1)
    # Up to three arrays of this size live at once: product, bias or tile maximum, shuffled copy.
    step = max(memory // (12 * len(references) * per_image), 1)
    share = min(1.0, SAMPLE / (images * len(r_starts)))

    top, top_query = np.zeros(0, np.float32), np.zeros(0, np.int64)
    best, best_pair = np.zeros(0, np.float32), np.zeros((0, 2), np.int64)
    sampled: list[Float32] = []
    for first in range(0, images, step):
        last = min(first + step, images)
        rows = slice(q_starts[first], q_ends[last - 1])
        scores = queries[rows] @ references.T
        if reference_bias is None:
            scores -= query_bias[rows, None]
        else:
            scores -= np.maximum(query_bias[rows, None], reference_bias[None])
        scores = _tile_maxima(scores, q_starts[first:last] - q_starts[first], r_starts)
        flat = scores.ravel()
        sampled.append(flat[random.random(len(flat)) < share])
        highest = _largest(flat, HIGHEST)
        pairs = np.stack([first + highest // len(r_starts), highest % len(r_starts)], axis=1)
        best, best_pair = np.append(best, flat[highest]), np.concatenate([best_pair, pairs])
        stay = _largest(best, HIGHEST)
        best, best_pair = best[stay], best_pair[stay]

        maxima = scores[:, chosen].reshape(last - first, banks, bank).max(axis=2).ravel()
        top = np.append(top, maxima)
        top_query = np.append(top_query, np.repeat(np.arange(first, last), banks))
        stay = _largest(top, keep)
        top, top_query = top[stay], top_query[stay]
    return NonMatches(
        images * banks,
        images,
        top.astype(np.float64),
        top_query,
        np.concatenate(sampled).astype(np.float64),
        best_pair,
    )


def _starts(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))


def _tile_maxima(
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
