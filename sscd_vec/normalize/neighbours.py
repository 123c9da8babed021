"""Exhaustive nearest-neighbour similarities in plain numpy: blocked, exact, memory bounded."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize.descriptors import Float32

Search = Callable[[Float32, int], Float32]
"""``search(queries (n, d), k) -> (n, k)`` similarities to the background, from any index."""

MEMORY = 64 << 20  # bytes a search may use beside its arguments and its result
QUERY_ROWS = 4096
BACKGROUND_ROWS = 1024


def nearest_similarities(
    queries: Float32, background: Float32, k: int, memory: int = MEMORY
) -> Float32:
    """The ``k`` largest inner products of each query with the background, largest first.

    One matrix product per block; a block is searched further only for the queries whose largest
    similarity in it beats what they already have, which soon is nearly none of them. Time is
    that of the matrix product plus one maximum over it.

    Args:
        queries: ``(n, d)`` float32.
        background: ``(m, d)`` float32, ``m >= k``.
        k: Neighbours wanted.
        memory: Bytes used beside arguments and result; blocks shrink to fit.

    Returns:
        ``(n, k)`` float32, each row descending.
    """
    if not 1 <= k <= len(background):
        raise ValueError(f"k: expected 1 to {len(background)} (the background's size), got {k}")
    # Three blocks may live at once: the product, its improved rows, and their partition.
    query_rows, background_rows = block_shape(len(queries), len(background), memory // 3)
    best = np.full((len(queries), k), -np.inf, dtype=np.float32)
    product = np.empty(query_rows * background_rows, dtype=np.float32)
    for start in range(0, len(queries), query_rows):
        block = queries[start : start + query_rows]
        block_best = best[start : start + query_rows]
        for first in range(0, len(background), background_rows):
            part = background[first : first + background_rows]
            similarities = product[: len(block) * len(part)].reshape(len(block), len(part))
            np.matmul(block, part.T, out=similarities)
            improved = np.flatnonzero(similarities.max(axis=1) > block_best[:, 0])
            if len(improved):
                block_best[improved] = _merge(block_best[improved], similarities[improved], k)
    return best[:, ::-1]


def nearest_neighbours(
    queries: Float32, references: Float32, k: int, memory: int = MEMORY
) -> tuple[Float32, NDArray[np.int64]]:
    """The ``k`` largest inner products of each query and the rows they belong to, largest first.

    Like ``nearest_similarities``, for those who need to know which; ``-inf`` and -1 fill the rest
    where there are fewer than ``k`` references.
    """
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    best = np.full((len(queries), k), -np.inf, dtype=np.float32)
    rows = np.full((len(queries), k), -1, dtype=np.int64)
    # The product, its improved rows, their 8-byte places, and what the last turn left of these.
    query_rows, reference_rows = block_shape(len(queries), len(references), memory // 7)
    for start in range(0, len(queries), query_rows):
        stop = min(start + query_rows, len(queries))
        for first in range(0, len(references), reference_rows):
            similarities = queries[start:stop] @ references[first : first + reference_rows].T
            better = start + np.flatnonzero(similarities.max(axis=1) > best[start:stop, -1])
            if len(better) == 0:
                continue
            part = similarities[better - start]
            take = min(k, part.shape[1])
            places = np.argpartition(part, part.shape[1] - take, axis=1)[:, -take:]
            values = np.concatenate([best[better], np.take_along_axis(part, places, 1)], axis=1)
            names = np.concatenate([rows[better], places + first], axis=1)
            order = np.argsort(-values, axis=1, kind="stable")[:, :k]
            best[better] = np.take_along_axis(values, order, 1)
            rows[better] = np.take_along_axis(names, order, 1)
    return best, rows


def block_shape(queries: int, background: int, memory: int = MEMORY) -> tuple[int, int]:
    """Rows of queries and of background whose similarities fit in ``memory`` bytes."""
    cells = max(memory // 4, 1)
    background_rows = max(min(BACKGROUND_ROWS, background, cells), 1)
    query_rows = max(min(QUERY_ROWS, queries, cells // background_rows), 1)
    return query_rows, background_rows


def _merge(best: Float32, similarities: Float32, k: int) -> Float32:
    """The ``k`` largest of two sets of columns, ascending."""
    if similarities.shape[1] > k:
        similarities = np.partition(similarities, similarities.shape[1] - k, axis=1)[:, -k:]
    merged = np.concatenate([best, similarities], axis=1)
    merged.sort(axis=1)
    return merged[:, -k:]
