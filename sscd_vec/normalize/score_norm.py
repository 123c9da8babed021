"""Score normalization: a query's bias from its nearest background similarities.

The exhaustive search behind it is plain numpy: blocked, exact, memory bounded.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.normalize.descriptors import MEMORY, Float32, block_shape

Search = Callable[[Float32, int], Float32]
"""``search(queries (n, d), k) -> (n, k)`` similarities to the background, from any index."""

_AUTHORS_NOTATION = re.compile(
    r"\s*(?P<beta>[0-9.eE+-]+)\s*\[\s*(?P<first>\d+)\s*,\s*(?P<last>\d+)\s*\]\s*"
)


@dataclass(frozen=True)
class ScoreNorm:
    """``bias(q) = beta / (1 + n_end - n) * sum_{i=n..n_end} s(q, b_i)``; score = ``s - bias``.

    ``b_i`` is the i-th nearest background descriptor, counted from 1 as in the paper.

    Attributes:
        beta: Weight of the bias, at least 0.
        n: First neighbour counted.
        n_end: Last neighbour counted.
    """

    beta: float = 1.0
    n: int = 1
    n_end: int = 3

    def __post_init__(self) -> None:
        """Check the settings and keep them as plain numbers.

        Raises:
            TypeError: If beta is not a number, or a neighbour is not a whole number.
            ValueError: If beta is negative or not finite, or the neighbours are out of order.
        """
        if not isinstance(self.beta, Real):
            raise TypeError(
                f"beta: expected a number, got {self.beta!r}; ScoreNorm.parse reads '1.0[0,2]'"
            )
        if not (isinstance(self.n, Integral) and isinstance(self.n_end, Integral)):
            raise TypeError(
                f"n and n_end: expected whole numbers, got {self.n!r} and {self.n_end!r}"
            )
        if not (np.isfinite(self.beta) and self.beta >= 0):
            raise ValueError(f"beta: expected a number of at least 0, got {self.beta}")
        if not 1 <= self.n <= self.n_end:
            raise ValueError(
                f"expected 1 <= n <= n_end (neighbours are counted from 1), got n={self.n}, "
                f"n_end={self.n_end}"
            )
        # Plain numbers: 1 and 1.0 have one fingerprint, and JSON cannot hold numpy scalars.
        object.__setattr__(self, "beta", float(self.beta))
        object.__setattr__(self, "n", int(self.n))
        object.__setattr__(self, "n_end", int(self.n_end))

    def require_rows(self, background: Float32 | None) -> None:
        """Refuse a background that has fewer rows than neighbours are counted.

        Raises:
            ValueError: If it is missing or too small.
        """
        if background is None:
            raise ValueError("this normalizer has no background; use with_background")
        if self.n_end > len(background):
            raise ValueError(
                f"background: expected at least n_end = {self.n_end} rows, got {len(background)}"
            )

    @classmethod
    def parse(cls, text: str) -> "ScoreNorm":
        """Read the authors' notation, which counts from 0: ``"1.0[0,2]"`` is n=1, n_end=3.

        Raises:
            ValueError: If ``text`` is not ``beta[first,last]``.
        """
        match = _AUTHORS_NOTATION.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            return cls(float(match["beta"]), int(match["first"]) + 1, int(match["last"]) + 1)
        except ValueError:
            raise ValueError(
                f"score normalization: expected beta[first,last] counted from 0 with "
                f"first <= last, such as '1.0[0,2]', got {text!r}"
            ) from None

    def __str__(self) -> str:
        """The authors' notation."""
        return f"{self.beta}[{self.n - 1},{self.n_end - 1}]"

    def bias(
        self,
        queries: Float32,
        background: Float32,
        search: Search | None = None,
        memory: int = MEMORY,
    ) -> Float32:
        """Biases ``(n,)`` of whitened unit queries.

        Args:
            queries: ``(n, dim)`` float32, transformed like the background.
            background: ``(m, dim)`` float32.
            search: Finds the neighbours instead of the exhaustive search:
                ``search(queries, k)`` returns ``(n, k)`` similarities.
            memory: Bytes the exhaustive search may use for similarities.
        """
        if self.beta == 0:
            return np.zeros(len(queries), dtype=np.float32)
        if search is None:
            nearest = nearest_similarities(queries, background, self.n_end, memory)
        else:
            nearest = np.asarray(search(queries, self.n_end))
            if nearest.shape != (len(queries), self.n_end):
                raise ValueError(
                    f"search: expected similarities of shape {(len(queries), self.n_end)}, "
                    f"got {nearest.shape}"
                )
        return self.bias_from_neighbours(nearest)

    def bias_from_neighbours(self, similarities: ArrayLike) -> Float32:
        """Biases ``(n,)`` from ``(n, k)`` similarities, ``k >= n_end``, in any order per row.

        Raises:
            ValueError: If there are too few columns or a value is not finite.
        """
        nearest = np.asarray(similarities, dtype=np.float64)
        if nearest.ndim != 2 or nearest.shape[1] < self.n_end:
            raise ValueError(
                f"neighbours: expected shape (n, k) with k >= n_end = {self.n_end}, "
                f"got {nearest.shape}"
            )
        if not np.isfinite(nearest).all():
            raise ValueError(
                "neighbours: NaN or infinity among the similarities; the index returned fewer "
                "neighbours than asked for (search more cells) or vectors that are not finite"
            )
        nearest = -np.sort(-nearest, axis=1)
        bias = self.beta * nearest[:, self.n - 1 : self.n_end].mean(axis=1)
        rounded: Float32 = bias.astype(np.float32)
        return rounded


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

    Like ``nearest_similarities``, with the row of each; ``-inf`` and -1 fill the rest
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


def _merge(best: Float32, similarities: Float32, k: int) -> Float32:
    """The ``k`` largest of two sets of columns, ascending."""
    if similarities.shape[1] > k:
        similarities = np.partition(similarities, similarities.shape[1] - k, axis=1)[:, -k:]
    merged = np.concatenate([best, similarities], axis=1)
    merged.sort(axis=1)
    return merged[:, -k:]
