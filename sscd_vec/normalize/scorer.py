"""A fitted normalizer at work: descriptors to searchable vectors, and index results to scores."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike

from sscd_vec.normalize.background import overlapping_pairs, refuse_pairs
from sscd_vec.normalize.descriptors import Float32, Float64, as_descriptors, require_unit, unit
from sscd_vec.normalize.errors import FingerprintMismatch, UncalibratedError
from sscd_vec.normalize.fingerprint import HasFingerprint, fingerprint_of
from sscd_vec.normalize.lift import Lift, Metric, Numbers
from sscd_vec.normalize.neighbours import MEMORY, Search
from sscd_vec.normalize.score_norm import ScoreNorm
from sscd_vec.normalize.threshold import KINDS, Kind, Threshold
from sscd_vec.normalize.whitening import Whitening

Precision = Literal["float32", "float16"]


@dataclass(frozen=True, eq=False)
class Scorer:
    """Whitening, score normalization and lift, fitted: what ``Normalizer`` does with descriptors.

    For whitened unit descriptors ``z``, ``scores(q, r) = z_q.z_r - bias(q)`` (the paper's
    normalized similarity), and the inner product of a row of ``queries`` with a row of
    ``references`` is exactly that score; see ``lift`` for squared L2 and cosine.

    Attributes:
        dim_in: Dimensions of the descriptors taken.
        whitening: The transform, or None.
        score_norm: Settings of the bias, or None for no score normalization.
        background: ``(m, dim)`` float32 background, transformed like queries; None without score
            normalization.
        encoder: Fingerprint of the encoder the background came from, or None if unknown.
        unit: Whether stored vectors have unit length (always so after whitening).
        max_length: ``R``, the longest vector allowed; 1 for unit vectors.
        background_precision: How the background is kept on file and rounded in memory.
        thresholds: Calibrated thresholds by kind.
        search: Finds background neighbours instead of the exhaustive search; never saved.
    """

    dim_in: int
    whitening: Whitening | None = None
    score_norm: ScoreNorm | None = None
    background: Float32 | None = field(default=None, repr=False)
    encoder: str | None = None
    unit: bool = True
    max_length: float = 1.0
    background_precision: Precision = "float32"
    thresholds: Mapping[Kind, Threshold] = field(default_factory=dict)
    search: Search | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Freeze what could still be changed."""
        object.__setattr__(self, "thresholds", MappingProxyType(dict(self.thresholds)))
        if self.background is not None:
            self.background.setflags(write=False)

    @property
    def dim(self) -> int:
        """Dimensions after whitening."""
        return self.dim_in if self.whitening is None else self.whitening.dim

    @cached_property
    def lift(self) -> Lift:
        """How vectors are laid out, and how scores, IP, L2 and cosine convert."""
        beta = 0.0 if self.score_norm is None else self.score_norm.beta
        return Lift(beta, self.max_length, self.unit)

    @property
    def lifted_dim(self) -> int:
        """Dimensions of what an index stores: ``dim + 2`` (``dim + 3`` with ``unit=False``)."""
        return self.dim + self.lift.extra

    def whiten(self, z: ArrayLike) -> Float32:
        """Descriptors ``(n, dim_in)`` as they are compared: ``(n, dim)``, unit length."""
        if self.whitening is not None:
            return self.whitening.apply(z)
        z = as_descriptors(z, self.dim_in)
        if self.unit:
            require_unit(z)
            return unit(z)
        return z

    def check(self, z: ArrayLike) -> None:
        """Refuse the descriptors that ``references`` would refuse, without whitening them.

        Raises:
            TypeError: If they are no floating point numbers.
            ValueError: If they have another size, are not finite, or not of a length allowed.
        """
        if self.whitening is not None:
            self.whitening.prepared(z)
            return
        rows = self.whiten(z)
        if not self.unit:
            self.lift.references(rows)

    def biases(self, z: ArrayLike, memory: int = MEMORY) -> Float32:
        """``bias(q)`` of descriptors ``(n, dim_in)``; zeros without score normalization."""
        return self.whitened_biases(self.whiten(z), memory)

    def queries(
        self,
        z: ArrayLike,
        *,
        encoder: str | HasFingerprint | None = None,
        memory: int = MEMORY,
    ) -> Float32:
        """Descriptors as queries, ``(n, lifted_dim)``.

        Args:
            z: ``(n, dim_in)`` descriptors.
            encoder: If given, refused unless it is the one fitted with.
            memory: Bytes the search of the background may use for similarities.
        """
        if encoder is not None:
            self.check_encoder(encoder)
        whitened = self.whiten(z)
        return self.lift.queries(whitened, self.whitened_biases(whitened, memory))

    def references(self, z: ArrayLike, *, encoder: str | HasFingerprint | None = None) -> Float32:
        """Descriptors as references, ``(n, lifted_dim)``; what an index stores."""
        if encoder is not None:
            self.check_encoder(encoder)
        return self.lift.references(self.whiten(z))

    def scores(self, queries: ArrayLike, references: ArrayLike) -> Float32:
        """``s(q, r) - bias(q)`` for all pairs of descriptors: ``(n_queries, n_references)``."""
        q, r = self.whiten(queries), self.whiten(references)
        scores: Float32 = q @ r.T - self.whitened_biases(q)[:, None]
        return scores

    def symmetric_scores(self, a: ArrayLike, b: ArrayLike) -> Float32:
        """``min(score(a, b), score(b, a)) = s(a, b) - max(bias(a), bias(b))`` for all pairs.

        For comparing and grouping images where neither is the query. Its threshold is of kind
        ``"symmetric"``.
        """
        first, second = self.whiten(a), self.whiten(b)
        bias = np.maximum(self.whitened_biases(first)[:, None], self.whitened_biases(second)[None])
        scores: Float32 = first @ second.T - bias
        return scores

    @overload
    def to_metric(self, score: float, metric: Metric) -> float: ...
    @overload
    def to_metric(self, score: Numbers, metric: Metric) -> Float64: ...
    def to_metric(self, score: float | Numbers, metric: Metric) -> float | Float64:
        """A score as the ``"ip"``, squared ``"l2"`` or ``"cosine"`` of lifted vectors."""
        return self.lift.to_metric(score, metric)

    @overload
    def from_metric(self, value: float, metric: Metric) -> float: ...
    @overload
    def from_metric(self, value: Numbers, metric: Metric) -> Float64: ...
    def from_metric(self, value: float | Numbers, metric: Metric) -> float | Float64:
        """What an index returned, as a score."""
        return self.lift.from_metric(value, metric)

    def threshold(self, kind: Kind = "search") -> float:
        """The calibrated threshold of a kind of score.

        Raises:
            UncalibratedError: If there is none.
        """
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
        if kind not in self.thresholds:
            raise UncalibratedError(
                f"no calibrated threshold for {kind!r} scores (stored: "
                f"{sorted(self.thresholds) or 'none'}); use Normalizer.calibrate or "
                f"`sscd-vec calibrate`, or pass a number"
            )
        return self.thresholds[kind].value

    def whitened_biases(self, whitened: Float32, memory: int = MEMORY) -> Float32:
        """``bias(q)`` of vectors that ``whiten`` returned, for those who need both."""
        if self.score_norm is None or self.background is None:
            return np.zeros(len(whitened), dtype=np.float32)
        return self.score_norm.bias(whitened, self.background, self.search, memory)

    def check_encoder(self, encoder: str | HasFingerprint) -> None:
        """Refuse another encoder than the one fitted with (if that one is known).

        Raises:
            FingerprintMismatch: Naming both.
        """
        given = fingerprint_of(encoder)
        if self.encoder is not None and given != self.encoder:
            raise FingerprintMismatch(
                f"this normalizer was fitted on descriptors of encoder {self.encoder}, got encoder "
                f"{given}; use that encoder, or fit a normalizer on this one's descriptors"
            )

    def check_overlap(self, references: ArrayLike) -> None:
        """Refuse references that are also in the background: their copies would score too low.

        Raises:
            OverlapError: With the duplicated rows in ``pairs``.
        """
        if self.background is None:
            return
        slack = 1e-4 if self.background_precision == "float16" else 1e-5
        refuse_pairs(overlapping_pairs(self.background, self.whiten(references), slack))
