"""Scores between images that are no copies: the highest of them, block by block."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize.descriptors import Float32, Float64
from sscd_vec.normalize.neighbours import MEMORY

SAMPLE = 20_000  # scores kept for a plot
HIGHEST = 20  # pairs kept for a second look


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
