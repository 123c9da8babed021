"""Exhaustive search for candidate pairs over references that are streamed in blocks.

torch's matrix product and top-k in tiles: exact, and the memory is that of one tile and of the
candidates kept, whatever the number of references.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

QUERY_ROWS = 1024


@dataclass(frozen=True)
class Candidates:
    """Candidate pairs by row: ``scores[i]`` is that of ``queries[i]`` with ``references[i]``."""

    queries: NDArray[np.int64]
    references: NDArray[np.int64]
    scores: NDArray[np.float32]

    def plus(self, offsets: NDArray[np.float32]) -> "Candidates":
        """The same pairs with a number per query added to their scores."""
        return Candidates(self.queries, self.references, self.scores + offsets[self.queries])


def nearest(
    queries: NDArray[np.float32], blocks: Iterable[NDArray[np.float32]], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The ``k`` largest inner products of each query, largest first, and the rows they are with.

    Args:
        queries: ``(n, d)``.
        blocks: References ``(m_i, d)`` in order; rows are counted across blocks.
        k: Neighbours wanted; fewer come back if there are fewer references.

    Returns:
        Scores and rows, both ``(n, min(k, m))``.
    """
    q = torch.from_numpy(queries)
    scores = torch.empty(len(q), 0)
    rows = torch.empty(len(q), 0, dtype=torch.int64)
    seen = 0
    for block in blocks:
        r = torch.from_numpy(np.ascontiguousarray(block))
        width = min(k, scores.shape[1] + len(r))
        new_scores = torch.empty(len(q), width)
        new_rows = torch.empty(len(q), width, dtype=torch.int64)
        for start in range(0, len(q), QUERY_ROWS):
            tile = slice(start, start + QUERY_ROWS)
            found, place = (q[tile] @ r.T).topk(min(k, len(r)))
            merged = torch.cat([scores[tile], found], 1)
            labels = torch.cat([rows[tile], place + seen], 1)
            new_scores[tile], order = merged.topk(width)
            new_rows[tile] = labels.gather(1, order)
        scores, rows = new_scores, new_rows
        seen += len(r)
    return scores.numpy(), rows.numpy()


def best_per_query(
    queries: NDArray[np.float32], blocks: Iterable[NDArray[np.float32]], k: int
) -> Candidates:
    """The ``k`` best references of every query as a list of pairs."""
    scores, rows = nearest(queries, blocks, k)
    labels = np.repeat(np.arange(len(queries)), scores.shape[1])
    return Candidates(labels, rows.reshape(-1), scores.reshape(-1))


def best_overall(
    queries: NDArray[np.float32],
    blocks: Iterable[NDArray[np.float32]],
    count: int,
    offsets: NDArray[np.float32] | None = None,
) -> Candidates:
    """The ``count`` pairs of largest score over all queries: the challenge's way.

    Args:
        queries: ``(n, d)``.
        blocks: References ``(m_i, d)`` in order.
        count: Pairs wanted (500 000 in the Image Similarity Challenge).
        offsets: Added to every score of a query (minus its bias).
    """
    q = torch.from_numpy(queries)
    shift = torch.zeros(len(q)) if offsets is None else torch.from_numpy(offsets)
    kept = [(torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))]
    held, bar, seen = 0, float("-inf"), 0
    for block in blocks:
        r = torch.from_numpy(np.ascontiguousarray(block))
        for start in range(0, len(q), QUERY_ROWS):
            tile = q[start : start + QUERY_ROWS] @ r.T
            tile += shift[start : start + QUERY_ROWS, None]
            flat = tile.reshape(-1)
            place = torch.nonzero(flat > bar).squeeze(1)
            if len(place) > count:
                place = place[flat[place].topk(count).indices]
            kept.append((flat[place], place // len(r) + start, place % len(r) + seen))
            held += len(place)
            if held >= 2 * count:
                kept = [_largest(kept, count)]
                held, bar = len(kept[0][0]), float(kept[0][0].min())
        seen += len(r)
    scores, query_rows, reference_rows = _largest(kept, count)
    return Candidates(query_rows.numpy(), reference_rows.numpy(), scores.numpy())


Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _largest(parts: list[Triple], count: int) -> Triple:
    scores, queries, references = (torch.cat(column) for column in zip(*parts, strict=True))
    top, order = scores.topk(min(count, len(scores)))
    return top, queries[order], references[order]
