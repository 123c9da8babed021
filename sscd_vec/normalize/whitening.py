"""PCA whitening or centring of descriptors, followed by L2 normalization."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from sscd_vec.normalize.descriptors import (
    Descriptors,
    Float32,
    Float64,
    as_descriptors,
    batches,
    is_unit,
    unit,
)

Mode = Literal["whiten", "centre"]

Matmul = Callable[[Float32, Float32], Float32]
"""``matmul(rows (n, d_in), matrix (d_in, d)) -> (n, d)``, as ``numpy.matmul``."""

# A direction whose variance is below this share of the largest is rounding noise of a float32
# encoder (a standard deviation of 3e-5 of the strongest); whitening would blow it up to full size.
RANK_TOLERANCE = 1e-9
ROWS_PER_DIMENSION = 10  # with fewer background rows the smallest variances are poorly known

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Whitening:
    """The fitted transform ``z -> y / |y|`` with ``y = W (z - mean)``.

    With ``V`` the eigenvectors and ``l`` the eigenvalues of the background's covariance, largest
    first, row ``i`` of ``W`` is ``V_i / sqrt((1 - eps) l_i + eps mean(l))`` in mode ``"whiten"``
    and ``V_i`` in mode ``"centre"``. After the division by ``|y|`` this is FAISS's
    ``PCAW{dim},L2norm`` and ``PCA{dim},L2norm``, up to the sign of each coordinate.

    Attributes:
        mode: ``"whiten"`` or ``"centre"``.
        mean: ``(dim_in,)`` background mean.
        matrix: ``(dim, dim_in)``, the ``W`` above.
        variances: All ``dim_in`` eigenvalues, largest first (the principal-value spectrum).
        eps: Shrinkage used: 0 is none; 1 makes whitening the same as centring.
        count: Background rows seen.
        l2_before: Whether descriptors are brought to unit length first.
        unit_input: Whether the background was of unit length; then other input is refused.
    """

    mode: Mode
    mean: Float32 = field(repr=False)
    matrix: Float32 = field(repr=False)
    variances: Float64 = field(repr=False)
    eps: float
    count: int
    l2_before: bool
    unit_input: bool

    def __post_init__(self) -> None:
        """Make the arrays read-only: a fitted transform never changes."""
        for array in (self.mean, self.matrix, self.variances):
            array.setflags(write=False)

    @property
    def dim_in(self) -> int:
        """Dimensions of the descriptors taken."""
        return int(self.matrix.shape[1])

    @property
    def dim(self) -> int:
        """Dimensions of the vectors returned."""
        return int(self.matrix.shape[0])

    @classmethod
    def fit(
        cls,
        background: Descriptors,
        mode: Mode = "whiten",
        dim: int | None = None,
        eps: float | Literal["oas"] = 0.0,
        l2_before: bool = False,
    ) -> "Whitening":
        """Fit on background descriptors, in one pass, holding one batch at a time.

        Args:
            background: An ``(n, d)`` array (memory-mapped is fine) or an iterable of batches.
            mode: ``"whiten"`` (the paper's) or ``"centre"``.
            dim: Keep this many directions, those of largest variance. All by default.
            eps: Shrinkage of the variances towards their mean, between 0 and 1, for small
                backgrounds; ``"oas"`` estimates it (Chen et al. 2010, "oracle approximating").
            l2_before: Bring descriptors to unit length first: for trunk features, as the paper
                does for its baselines.

        Raises:
            ValueError: If the background has too few rows, or too few directions that vary, for
                the dimensions asked for.
        """
        return cls.from_moments(Moments.of(background, l2_before), mode, dim, eps)

    @classmethod
    def from_moments(
        cls,
        moments: "Moments",
        mode: Mode = "whiten",
        dim: int | None = None,
        eps: float | Literal["oas"] = 0.0,
    ) -> "Whitening":
        """``fit``, for a background whose moments are known."""
        if mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {get_args(Mode)}, got {mode!r}")
        if eps != "oas" and not 0 <= eps <= 1:
            raise ValueError(f"eps: expected a number from 0 to 1 or 'oas', got {eps!r}")
        dim = moments.dim if dim is None else dim
        if not 1 <= dim <= moments.dim:
            raise ValueError(f"dim: expected 1 to {moments.dim} (the descriptors' size), got {dim}")
        variances, vectors = np.linalg.eigh(moments.scatter / moments.count)
        variances = np.maximum(variances[::-1], 0)
        matrix = _fix_signs(vectors[:, ::-1].T[:dim])
        shrinkage = _oas(variances, moments.count) if eps == "oas" else float(eps)
        if mode == "whiten":
            shrunk = (1 - shrinkage) * variances + shrinkage * variances.mean()
            _require_rank(shrunk, dim, moments.count)
            if shrinkage == 0:
                _warn_if_few(dim, moments.count)
            matrix = matrix / np.sqrt(shrunk[:dim])[:, None]
        return cls(
            mode=mode,
            mean=moments.mean.astype(np.float32),
            matrix=np.ascontiguousarray(matrix, dtype=np.float32),
            variances=variances,
            eps=shrinkage,
            count=moments.count,
            l2_before=moments.l2_before,
            unit_input=moments.unit,
        )

    def prepared(self, z: ArrayLike) -> Float32:
        """Check descriptors, and bring them to unit length if ``l2_before`` says so.

        Raises:
            TypeError: If they are not floating point numbers.
            ValueError: If they have another size, are not finite, or are not of unit length
                although the background was.
        """
        rows = as_descriptors(z, self.dim_in, unit=self.unit_input and not self.l2_before)
        return unit(rows) if self.l2_before else rows

    def project(self, z: ArrayLike, matmul: Matmul = np.matmul) -> Float32:
        """``W (z - mean)``, without the final L2 normalization."""
        return matmul(self.prepared(z) - self.mean, self.matrix.T)

    def apply(self, z: ArrayLike, matmul: Matmul = np.matmul) -> Float32:
        """Whitened descriptors of unit length: ``(n, dim_in)`` to ``(n, dim)`` float32."""
        projected = self.project(z, matmul)
        return unit(projected, "whitened descriptors", out=projected)


class Moments:
    """Running mean and scatter in float64, merged batch by batch (Chan, Golub & LeVeque 1979).

    Attributes:
        count: Rows seen.
        mean: ``(d,)``.
        scatter: ``(d, d)``, the sum of ``(z - mean) (z - mean)^T``.
        unit: Whether all rows had unit length.
        l2_before: Whether rows are brought to unit length first.
    """

    def __init__(self, l2_before: bool = False) -> None:
        """Begin with no rows."""
        self.count = 0
        self.unit = True
        self.l2_before = l2_before
        self.mean: Float64 = np.zeros(0)
        self.scatter: Float64 = np.zeros((0, 0))

    @classmethod
    def of(cls, background: Descriptors, l2_before: bool = False) -> "Moments":
        """Read a whole background, one batch at a time.

        Raises:
            ValueError: If it has fewer than two rows.
        """
        moments = cls(l2_before)
        for batch in batches(background):
            moments.add(unit(batch, "background") if l2_before else batch)
        if moments.count < 2:
            raise ValueError(f"background: expected at least 2 rows, got {moments.count}")
        return moments

    @property
    def dim(self) -> int:
        """Dimensions of the rows."""
        return len(self.mean)

    def add(self, batch: Float32) -> None:
        """Take in some more rows."""
        rows = len(batch)
        if rows == 0:
            return
        self.unit = self.unit and is_unit(batch)
        values = batch.astype(np.float64)
        mean = values.mean(axis=0)
        values -= mean
        scatter = values.T @ values
        if self.count == 0:
            self.mean, self.scatter, self.count = mean, scatter, rows
            return
        total = self.count + rows
        shift = mean - self.mean
        self.scatter += scatter + np.outer(shift, shift) * (self.count * rows / total)
        self.mean = self.mean + shift * (rows / total)
        self.count = total


def _fix_signs(vectors: Float64) -> Float64:
    """Turn each row so that its largest coordinate is positive: eigenvectors have no sign."""
    largest = np.abs(vectors).argmax(axis=1)
    signs = np.sign(vectors[np.arange(len(vectors)), largest])
    turned: Float64 = vectors * signs[:, None]
    return turned


def _require_rank(variances: Float64, dim: int, count: int) -> None:
    if variances[0] <= 0:
        raise ValueError("background: all rows are the same; there is nothing to whiten")
    rank = int((variances > RANK_TOLERANCE * variances[0]).sum())
    if rank < dim:
        raise ValueError(
            f"background: {count} rows vary in {rank} directions, but whitening to {dim} "
            f"dimensions needs {dim}. Give {ROWS_PER_DIMENSION * dim} different images or more, "
            f"or reduce with dim={max(rank // 2, 1)}, or shrink with eps='oas'"
        )


def _warn_if_few(dim: int, count: int) -> None:
    if count < ROWS_PER_DIMENSION * dim:
        _log.warning(
            "whitening to %d dimensions from %d rows: the smallest variances are poorly known; "
            "give %d rows or more, or shrink with eps='oas'",
            dim,
            count,
            ROWS_PER_DIMENSION * dim,
        )


def _oas(variances: Float64, count: int) -> float:
    """Shrinkage of Chen, Wiesel, Eldar & Hero (2010), eq. 23, from the eigenvalues alone."""
    size = len(variances)
    trace_of_square = float((variances**2).sum())
    square_of_trace = float(variances.sum() ** 2)
    numerator = (1 - 2 / size) * trace_of_square + square_of_trace
    denominator = (count + 1 - 2 / size) * (trace_of_square - square_of_trace / size)
    return 1.0 if denominator <= 0 else min(1.0, numerator / denominator)
