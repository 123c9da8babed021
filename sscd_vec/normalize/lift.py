"""The bias inside the vector, and vectors of equal length: one threshold for every metric.

Unit references (the usual case), ``dim + 2`` coordinates::

    q' = [z_q, -bias(q), sqrt(M^2 - 1 - bias(q)^2)]        |q'|^2 = M^2
    r' = [z_r,        1,                          0]       |r'|^2 = 2

References of any length up to ``R`` (Bachrach et al. 2014), ``dim + 3`` coordinates::

    q' = [q, -bias(q),                   0, sqrt(M^2 - |q|^2 - bias(q)^2)]     |q'|^2 = M^2
    r' = [r,        1, sqrt(R^2 - |r|^2),                               0]     |r'|^2 = R^2 + 1

In both, with ``R = 1`` for unit references::

    q'.r' = s(q, r) - bias(q) = score
    |q' - r'|^2 = M^2 + R^2 + 1 - 2 score
    cos(q', r') = score / (M sqrt(R^2 + 1))

``M^2 = R^2 (1 + beta^2 R^2)``, that is ``1 + beta^2`` for unit vectors, depends on nothing but beta
and R: it is the largest ``|q|^2 + bias^2`` there can be, as ``|s(q, b)| <= R^2``. So the same beta
gives the same M for every background.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize.descriptors import Float32, Float64, lengths

Metric = Literal["ip", "l2", "cosine"]
"""``"l2"`` is the SQUARED distance, as FAISS and Milvus return it."""

Numbers = NDArray[np.floating] | Sequence[float]  # what indexes return: arrays, or lists

LENGTH_SLACK = 1e-5  # of R: float32 rounding of a row exactly at the limit


@dataclass(frozen=True)
class Lift:
    """Appends the coordinates above, and converts between a score and the three metrics.

    Attributes:
        beta: Weight of the bias; 0 without score normalization.
        radius: ``R``: longest reference and query allowed. 1 for unit vectors.
        unit: Whether all vectors have unit length, which saves one coordinate.
    """

    beta: float
    radius: float = 1.0
    unit: bool = True

    @property
    def extra(self) -> int:
        """Coordinates appended: 2 for unit vectors, 3 otherwise."""
        return 2 if self.unit else 3

    @property
    def query_square(self) -> float:
        """``M^2``, the squared length of every lifted query."""
        return self.radius**2 * (1 + self.beta**2 * self.radius**2)

    @property
    def reference_square(self) -> float:
        """``R^2 + 1``, the squared length of every lifted reference."""
        return self.radius**2 + 1

    def queries(self, z: Float32, bias: Float32) -> Float32:
        """``q'`` from ``(n, dim)`` vectors and their ``(n,)`` biases."""
        dim = z.shape[1]
        square = 1.0 if self.unit else self._squares(z, "query")
        rest = self.query_square - square - bias.astype(np.float64) ** 2
        lifted = np.zeros((len(z), dim + self.extra), dtype=np.float32)
        lifted[:, :dim] = z
        lifted[:, dim] = -bias
        lifted[:, -1] = np.sqrt(np.maximum(rest, 0))  # below 0 by rounding only
        return lifted

    def references(self, z: Float32) -> Float32:
        """``r'`` from ``(n, dim)`` vectors."""
        dim = z.shape[1]
        lifted = np.zeros((len(z), dim + self.extra), dtype=np.float32)
        lifted[:, :dim] = z
        lifted[:, dim] = 1
        if not self.unit:
            rest = self.radius**2 - self._squares(z, "reference")
            lifted[:, dim + 1] = np.sqrt(np.maximum(rest, 0))
        return lifted

    @overload
    def to_metric(self, score: float, metric: Metric) -> float: ...
    @overload
    def to_metric(self, score: Numbers, metric: Metric) -> Float64: ...
    def to_metric(self, score: float | Numbers, metric: Metric) -> float | Float64:
        """The inner product, squared L2 distance or cosine at which the score is ``score``."""
        s = np.asarray(score, dtype=np.float64)
        if metric == "ip":
            value = s
        elif metric == "l2":
            value = self.query_square + self.reference_square - 2 * s
        elif metric == "cosine":
            value = s / self._length_product
        else:
            raise ValueError(f"metric: expected one of {get_args(Metric)}, got {metric!r}")
        return _like(value, score)

    @overload
    def from_metric(self, value: float, metric: Metric) -> float: ...
    @overload
    def from_metric(self, value: Numbers, metric: Metric) -> Float64: ...
    def from_metric(self, value: float | Numbers, metric: Metric) -> float | Float64:
        """The score at an inner product, squared L2 distance or cosine of lifted vectors."""
        v = np.asarray(value, dtype=np.float64)
        if metric == "ip":
            score = v
        elif metric == "l2":
            score = (self.query_square + self.reference_square - v) / 2
        elif metric == "cosine":
            score = v * self._length_product
        else:
            raise ValueError(f"metric: expected one of {get_args(Metric)}, got {metric!r}")
        return _like(score, value)

    @property
    def _length_product(self) -> float:
        return float(np.sqrt(self.query_square * self.reference_square))

    def _squares(self, z: Float32, what: str) -> Float64:
        length = lengths(z).astype(np.float64)
        if (length > self.radius * (1 + LENGTH_SLACK)).any():
            raise ValueError(
                f"{what}: a vector of length {length.max():.6g} is longer than R = "
                f"{self.radius:.6g}, fixed when the normalizer was fitted; fit again with a larger "
                "max_length and rebuild the index"
            )
        squares: Float64 = length**2
        return squares


def _like(value: Float64, given: float | Numbers) -> float | Float64:
    return value if isinstance(given, np.ndarray | Sequence) else float(value)
