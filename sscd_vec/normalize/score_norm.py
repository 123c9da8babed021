"""Score normalization: a query's bias from its nearest background similarities."""

import re
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
from numpy.typing import ArrayLike

from sscd_vec.normalize.descriptors import Float32
from sscd_vec.normalize.neighbours import MEMORY, Search, nearest_similarities

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
            TypeError: If beta is not a number, or a neighbour not a whole one.
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
        # Plain numbers: 1 and 1.0 are one setting with one fingerprint, and JSON knows no numpy.
        object.__setattr__(self, "beta", float(self.beta))
        object.__setattr__(self, "n", int(self.n))
        object.__setattr__(self, "n_end", int(self.n_end))

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
