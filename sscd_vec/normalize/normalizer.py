"""``Normalizer``: whitening, score normalization, lift and thresholds, fitted and kept together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from sscd_vec import models
from sscd_vec.normalize import descriptors, persistence
from sscd_vec.normalize.calibration import (
    Calibration,
    FalseMatchCurve,
    Kind,
    Options,
    Threshold,
    calibrate,
)
from sscd_vec.normalize.descriptors import MEMORY, Descriptors, Float32, Float64
from sscd_vec.normalize.domain import Domain, Outside
from sscd_vec.normalize.fitting import Precision, fit_normalizer, whitened_background
from sscd_vec.normalize.lift import Lift, Metric, Numbers
from sscd_vec.normalize.persistence import (
    HasFingerprint,
    NormalizerFileError,
    fingerprint_of,
    require_encoder,
)
from sscd_vec.normalize.score_norm import ScoreNorm, Search
from sscd_vec.normalize.verdict import Facts, Verdict, Verdicts
from sscd_vec.normalize.whitening import Matmul, Mode, Whitening

PAPER = ScoreNorm()
_PRODUCTS = ("matmul", "search")  # how, not what: neither saved nor pickled


@dataclass(frozen=True, eq=False)
class Normalizer:
    """From descriptors to vectors any index can search, and back to scores. Immutable.

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
        thresholds: What counts as a copy, by kind of score.
        curves: How often strangers score how high, by kind of score.
        domain: Tells images like the background from all others, or None.
        matmul: Whitens; see ``with_products``. Never saved.
        search: Finds background neighbours instead of the exhaustive search. Never saved.
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
    curves: Mapping[Kind, FalseMatchCurve] = field(default_factory=dict, repr=False)
    domain: Domain | None = None
    matmul: Matmul = field(default=np.matmul, repr=False)
    search: Search | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Freeze what could still be changed."""
        for name in ("thresholds", "curves"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if self.background is not None:
            self.background.setflags(write=False)

    # ------------------------------------------------------------------ made

    def __reduce__(self) -> tuple[Callable[..., "Normalizer"], tuple[()]]:
        """Pickle without the product functions: another process chooses its own."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        kept: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in values.items()
            if name not in _PRODUCTS
        }
        return partial(Normalizer, **kept), ()

    @classmethod
    def fit(
        cls,
        background: Descriptors,
        *,
        whitening: Mode | Whitening | Literal["auto"] | None = "auto",
        dim: int | None = None,
        eps: float | Literal["oas"] = 0.0,
        l2_before: bool = False,
        score_norm: ScoreNorm | None = PAPER,
        encoder: str | HasFingerprint | None = None,
        keep_background: Precision = "float32",
        background_size: int | None = None,
        unit: bool = True,
        max_length: float | None = None,
        references: ArrayLike | None = None,
        seed: int = 0,
    ) -> "Normalizer":
        """Fit on descriptors of background images: like those to be searched, but not among them.

        Args:
            background: ``(n, d)`` array or iterable of batches. Without score normalization it is
                streamed; with it, its rows (or ``background_size`` of them) are kept.
            whitening: ``"whiten"``, ``"centre"``, None, or a fitted ``Whitening``. ``"auto"``
                whitens; but with fewer than ten rows per dimension and a shipped model as
                ``encoder`` it keeps that model's whitening, which is better than one fitted on
                so few rows, and only the bias comes from the background.
            dim: Keep this many whitened dimensions; all by default.
            eps: Shrinkage for small backgrounds, see ``Whitening.fit``.
            l2_before: L2-normalize before whitening too (trunk features).
            score_norm: Settings of the bias; None for none.
            encoder: The encoder, or its fingerprint; kept and checked later.
            keep_background: ``"float16"`` halves the file; the rounding is applied at once, so
                saving changes nothing.
            background_size: Keep a random sample of this many rows for the bias.
            unit: Without whitening only: False allows vectors of any length up to ``max_length``.
            max_length: ``R`` for ``unit=False``; by default a quarter above the longest.
            references: If given, refuse a background that holds any of these descriptors.
            seed: Of the sample.
        """
        return fit_normalizer(
            cls, background, whitening=whitening, dim=dim, eps=eps, l2_before=l2_before,
            score_norm=score_norm, encoder=fingerprint_of(encoder),
            keep_background=keep_background, background_size=background_size, unit=unit,
            max_length=max_length, references=references, seed=seed,
        )  # fmt: skip

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path | None = None) -> "Normalizer":
        """Load the normalizer of a model, with its thresholds.

        Args:
            name_or_path: A model's name or folder, or a normalizer file; None for the shipped one.

        Raises:
            FileNotFoundError: If there is none; says what to do.
            NormalizerFileError: As ``load``.
        """
        return cls.load(models.normalizer_path(name_or_path))

    @classmethod
    def identity(cls, dim_in: int) -> "Normalizer":
        """No whitening and no score normalization: unit descriptors as they are, cosine scores."""
        return cls(dim_in=dim_in)

    @classmethod
    def load(cls, path: str | Path) -> "Normalizer":
        """Read what ``save`` wrote, bit for bit.

        Raises:
            FileNotFoundError: If there is no such file.
            NormalizerFileError: If the file is truncated, altered, foreign, or of a newer format.
        """
        fields, expected = persistence.read(path)
        loaded = cls(**fields)
        if (loaded.reference_fingerprint, loaded.query_fingerprint) != expected:
            raise NormalizerFileError(
                f"{path}: the content does not have the fingerprint written with it; the file was "
                "altered or damaged. Copy it again from where it came"
            )
        return loaded

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        persistence.write(path, self)

    @cached_property
    def reference_fingerprint(self) -> str:
        """What an index depends on: encoder, whitening, layout. Other indexes must be rebuilt."""
        return persistence.reference_fingerprint(self)

    @cached_property
    def query_fingerprint(self) -> str:
        """What may change without re-indexing: beta, n, n_end, background, M, thresholds."""
        return persistence.query_fingerprint(self)

    # ------------------------------------------------------------------ at work

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
            return self.whitening.apply(z, self.matmul)
        rows = descriptors.as_descriptors(z, self.dim_in, unit=self.unit)
        return descriptors.unit(rows) if self.unit else rows

    def biases(self, z: ArrayLike, memory: int = MEMORY) -> Float32:
        """``bias(q)`` of descriptors ``(n, dim_in)``; zeros without score normalization."""
        return self.whitened_biases(self.whiten(z), memory)

    def whitened_biases(self, whitened: Float32, memory: int = MEMORY) -> Float32:
        """``bias(q)`` of vectors that ``whiten`` returned, for callers that need both."""
        if self.score_norm is None or self.background is None:
            return np.zeros(len(whitened), dtype=np.float32)
        return self.score_norm.bias(whitened, self.background, self.search, memory)

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

    # ------------------------------------------------------------------ thresholds

    @property
    def largest_score(self) -> float:
        """What no score exceeds: that of an exact copy without a bias, ``R^2``."""
        return self.max_length**2

    @cached_property
    def verdicts(self) -> Verdicts:
        """What thresholds and curves say about scores; the methods below ask it."""
        return Verdicts(self.thresholds, self.curves)

    def false_match_rate(
        self, score: float, bank_size: int, kind: Kind = "search", views: int | None = None
    ) -> float:
        """Share of strangers that find a score this high in a bank of this size.

        ``views`` is the number of comparisons per reference, if not that of the calibration.
        """
        return self.verdicts.curve(kind).rate(score, bank_size, views)

    def threshold_for(
        self, rate: float, bank_size: int, kind: Kind = "search", views: int | None = None
    ) -> float:
        """The score that a share ``rate`` of strangers finds in a bank of this size."""
        return self.verdicts.curve(kind).score(rate, bank_size, views)

    def threshold(
        self, kind: Kind = "search", bank_size: int | None = None, views: int | None = None
    ) -> float:
        """The score of a copy in a bank of this size; see ``Verdicts.threshold``."""
        return self.verdicts.threshold(kind, bank_size, views)

    def judge(
        self,
        score: float,
        bank_size: int | None = None,
        kind: Kind = "search",
        **facts: Unpack[Facts],
    ) -> Verdict:
        """The verdict on a pair of images; see ``Verdicts.judge``."""
        return self.verdicts.judge(score, bank_size, kind, **facts)

    def outside(self, whitened: Float32) -> Outside:
        """Which vectors that ``whiten`` returned lie outside what is known; none without a domain.

        A score between two images outside says little: give both facts to ``judge``.
        """
        if self.domain is None:
            return Outside.none(len(whitened))
        return self.domain.examine(whitened, self.whitened_biases, self.score_norm)

    def calibrate(
        self,
        queries: ArrayLike | None = None,
        references: ArrayLike | None = None,
        is_match: ArrayLike | None = None,
        **options: Unpack[Options],
    ) -> "Normalizer":
        """The same with a calibrated threshold and curve; takes what ``calibrate`` takes.

        For example ``calibrate(held_out, false_match_rate=1e-3, bank_size=1_000_000)``, or
        ``calibrate(queries, references, is_match, precision=0.9)``.
        """
        return self.with_calibration(calibrate(self, queries, references, is_match, **options))

    # ------------------------------------------------------------------ changed

    def with_background(
        self,
        background: Descriptors,
        *,
        extend: bool = False,
        score_norm: ScoreNorm | None = None,
        keep: Precision | None = None,
        size: int | None = None,
        seed: int = 0,
    ) -> "Normalizer":
        """The same reference side with another background for the bias; fits the same indexes.

        Args:
            background: ``(n, dim_in)`` array or iterable of batches.
            extend: Add to the background there is. That can only raise biases and lower scores, so
                thresholds and curves stay: strangers pass less often than they say. Without it
                they are dropped.
            score_norm: Settings of the bias, if not the same.
            keep: ``"float32"`` or ``"float16"``, if not the same.
            size: Keep a random sample of this many rows.
            seed: Of the sample.
        """
        keep = self.background_precision if keep is None else keep
        rows = whitened_background(background, self.whiten, self.dim_in, keep, size, seed)
        if extend:
            if self.background is None or score_norm not in (None, self.score_norm):
                raise ValueError("extend: expected a background to add to, and the same score_norm")
            return replace(self, background=np.concatenate([self.background, rows]), search=None)
        norm = score_norm or self.score_norm or PAPER
        changed = replace(self, background=rows, background_precision=keep, search=None)
        return changed.with_score_norm(norm)

    def with_score_norm(self, score_norm: ScoreNorm | None) -> "Normalizer":
        """The same with other score normalization settings. Thresholds and curves are dropped."""
        if score_norm is not None:
            score_norm.require_rows(self.background)
        return replace(self, score_norm=score_norm, thresholds={}, curves={})

    def with_threshold(self, threshold: float | Threshold, kind: Kind = "search") -> "Normalizer":
        """The same with a threshold added or replaced; fits the same indexes.

        Raises:
            ValueError: If no score can reach it.
        """
        if not isinstance(threshold, Threshold):
            threshold = Threshold(float(threshold), kind)
        if threshold.value > self.largest_score:
            raise ValueError(
                f"threshold: expected at most {self.largest_score:g}, the score of an exact copy, "
                f"got {threshold.value:g}; nothing would be found"
            )
        return replace(self, thresholds={**self.thresholds, threshold.kind: threshold})

    def with_calibration(self, calibration: Calibration) -> "Normalizer":
        """The same with a calibration's threshold and curve; fits the same indexes."""
        made = self.with_threshold(calibration.threshold)
        curve = calibration.curve
        return made if curve is None else replace(made, curves={**made.curves, curve.kind: curve})

    def with_domain(self, domain: Domain | None) -> "Normalizer":
        """The same with another domain of known images; fits the same indexes."""
        if domain is not None:
            domain.require_dim(self.dim)
        return replace(self, domain=domain)

    def with_products(
        self, matmul: Matmul | None = None, search: Search | None = None
    ) -> "Normalizer":
        """The same, with its two large products computed elsewhere; numpy's where None.

        Neither is saved, nor part of a fingerprint: results may differ by rounding only.

        Args:
            matmul: Whitens: ``matmul(rows (n, dim_in), matrix (dim_in, dim)) -> (n, dim)``.
            search: Finds background neighbours: ``search(queries (n, dim), k) -> (n, k)`` largest
                inner products with ``background``, in any order. For example
                ``lambda q, k: index.search(q, k)[0]`` with a FAISS index over ``background``.
        """
        return replace(self, matmul=np.matmul if matmul is None else matmul, search=search)

    # ------------------------------------------------------------------ checked

    def check(self, z: ArrayLike) -> None:
        """Refuse the descriptors that ``references`` would refuse, without whitening them.

        Raises:
            TypeError: If they are not floating point numbers.
            ValueError: If they have another size, are not finite, or not of a length allowed.
        """
        if self.whitening is not None:
            self.whitening.prepared(z)
            return
        rows = self.whiten(z)
        if not self.unit:
            self.lift.references(rows)

    def check_encoder(self, encoder: str | HasFingerprint) -> None:
        """Refuse another encoder than the one fitted with (if that one is known).

        Raises:
            FingerprintMismatch: Naming both.
        """
        require_encoder(self.encoder, encoder)

    def check_overlap(self, references: ArrayLike) -> None:
        """Refuse references that are also in the background: their copies would score too low.

        Raises:
            OverlapError: With the duplicated rows in ``pairs``.
        """
        if self.background is not None:
            half = self.background_precision == "float16"
            slack = descriptors.HALF_ROUNDING if half else descriptors.ROUNDING
            descriptors.refuse_overlap(
                descriptors.overlapping_pairs(self.background, self.whiten(references), slack)
            )
