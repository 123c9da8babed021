"""``Normalizer``: how a scorer is fitted, changed without re-indexing, fingerprinted and saved."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from sscd_vec.normalize import persistence, record
from sscd_vec.normalize.background import RowSample, collect, measure, without_references
from sscd_vec.normalize.calibration import Per, calibrate
from sscd_vec.normalize.descriptors import Descriptors, as_descriptors, batches, is_array
from sscd_vec.normalize.errors import NormalizerFileError
from sscd_vec.normalize.fingerprint import HasFingerprint, digest, fingerprint_of
from sscd_vec.normalize.neighbours import Search
from sscd_vec.normalize.score_norm import ScoreNorm
from sscd_vec.normalize.scorer import Precision, Scorer
from sscd_vec.normalize.threshold import Kind, Threshold
from sscd_vec.normalize.whitening import Mode, Whitening

PAPER = ScoreNorm()


@dataclass(frozen=True, eq=False)
class Normalizer(Scorer):
    """From descriptors to vectors any index can search, and back to scores. Immutable.

    Made by ``fit`` or ``load``. What it does with descriptors, and its attributes, are those of
    ``Scorer``; here is how it is made, changed on the query side, calibrated and kept.
    """

    @classmethod
    def fit(
        cls,
        background: Descriptors,
        *,
        whitening: Mode | Whitening | None = "whiten",
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
            whitening: ``"whiten"``, ``"centre"``, None, or an already fitted ``Whitening``.
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
        sample = RowSample(background_size, seed)
        rows: Descriptors = background
        if references is not None:
            bank = as_descriptors(references, what="references")
            rows = without_references(batches(rows, bank.shape[1]), bank)
        if score_norm is not None and not is_array(background):
            # A generator passes by once: whiten on all of it, keep what the bias needs.
            rows = sample.watch(batches(rows))
        transform: Whitening | None
        if isinstance(whitening, str):
            transform = Whitening.fit(rows, whitening, dim, eps, l2_before)
        elif dim is not None or l2_before or eps:
            raise ValueError(
                "dim, eps and l2_before: expected only with whitening='whiten' or 'centre', "
                f"got whitening={'None' if whitening is None else 'a fitted one'}"
            )
        else:
            transform = whitening
        if transform is None:
            dim_in, radius = measure(rows, unit, max_length)
        elif unit and max_length is None:
            dim_in, radius = transform.dim_in, 1.0
        else:
            raise ValueError(
                "unit=False and max_length: expected only with whitening=None; whitened vectors "
                "have unit length"
            )
        fitted = cls(dim_in, transform, None, None, fingerprint_of(encoder), unit, radius)
        if isinstance(rows, Iterator):
            for _ in rows:  # whatever a fitted whitening left unread
                pass
        if score_norm is None:
            return fitted
        return fitted.with_background(
            background if is_array(background) else sample.rows(),
            score_norm=score_norm,
            keep=keep_background,
            size=background_size,
            seed=seed,
        )

    @classmethod
    def identity(cls, dim_in: int) -> "Normalizer":
        """No whitening and no score normalization: unit descriptors as they are, cosine scores."""
        return cls(dim_in=dim_in)

    def with_background(
        self,
        background: Descriptors,
        *,
        score_norm: ScoreNorm | None = None,
        keep: Precision | None = None,
        size: int | None = None,
        seed: int = 0,
    ) -> "Normalizer":
        """The same reference side with another background for the bias. Thresholds are dropped."""
        keep = self.background_precision if keep is None else keep
        if keep not in ("float32", "float16"):
            raise ValueError(f"keep_background: expected 'float32' or 'float16', got {keep!r}")
        score_norm = score_norm or self.score_norm or ScoreNorm()
        if size is not None:
            background = collect(batches(background, self.dim_in), size, seed)
        rows = collect(self.whiten(batch) for batch in batches(background, self.dim_in))
        if len(rows) < score_norm.n_end:
            raise ValueError(
                f"background: expected at least n_end = {score_norm.n_end} rows, got {len(rows)}"
            )
        return replace(
            self,
            score_norm=score_norm,
            background=rows.astype(keep).astype(np.float32),
            background_precision=keep,
            thresholds={},
            search=None,
        )

    def with_score_norm(self, score_norm: ScoreNorm | None) -> "Normalizer":
        """The same with other score normalization settings. Thresholds are dropped."""
        if score_norm is not None:
            if self.background is None:
                raise ValueError("this normalizer has no background; use with_background")
            if score_norm.n_end > len(self.background):
                raise ValueError(
                    f"n_end: expected at most {len(self.background)} (the background's size), "
                    f"got {score_norm.n_end}"
                )
        return replace(self, score_norm=score_norm, thresholds={})

    def with_threshold(self, threshold: float | Threshold, kind: Kind = "search") -> "Normalizer":
        """The same with a threshold added or replaced; fits the same indexes."""
        if not isinstance(threshold, Threshold):
            threshold = Threshold(float(threshold), kind)
        return replace(self, thresholds={**self.thresholds, threshold.kind: threshold})

    def calibrate(
        self,
        queries: ArrayLike | None = None,
        references: ArrayLike | None = None,
        is_match: ArrayLike | None = None,
        *,
        false_match_rate: float | None = None,
        precision: float | None = None,
        per: Per = "query",
        bank_size: int | None = None,
        kind: Kind = "search",
        query_groups: ArrayLike | None = None,
        reference_groups: ArrayLike | None = None,
        confidence: float = 0.95,
        seed: int = 0,
    ) -> "Normalizer":
        """The same with a calibrated threshold; fits the same indexes.

        Takes what ``sscd_vec.normalize.calibration.calibrate`` takes, where it is explained::

            normalizer.calibrate(held_out, false_match_rate=1e-3, bank_size=1_000_000)
            normalizer.calibrate(queries, references, is_match, precision=0.9)
        """
        calibration = calibrate(
            self,
            queries,
            references,
            is_match,
            false_match_rate=false_match_rate,
            precision=precision,
            per=per,
            bank_size=bank_size,
            kind=kind,
            query_groups=query_groups,
            reference_groups=reference_groups,
            confidence=confidence,
            seed=seed,
        )
        return self.with_threshold(calibration.threshold)

    def with_search(self, search: Search | None) -> "Normalizer":
        """The same, finding background neighbours with ``search(queries, k) -> (n, k)``.

        For example ``lambda q, k: index.search(q, k)[0]`` with a FAISS index over
        ``background``. It is not saved with the normalizer and is in no fingerprint.
        """
        return replace(self, search=search)

    @cached_property
    def reference_fingerprint(self) -> str:
        """What an index depends on: encoder, whitening, layout. Other indexes must be rebuilt."""
        return digest(*record.reference_side(self))

    @cached_property
    def query_fingerprint(self) -> str:
        """What may change without re-indexing: beta, n, n_end, background, M, thresholds."""
        settings, arrays = record.query_side(self)
        return digest({"reference": self.reference_fingerprint, **settings}, arrays)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        settings, arrays = record.reference_side(self)
        query_settings, query_arrays = record.query_side(self)
        fingerprints = {
            "background_count": 0 if self.background is None else len(self.background),
            "reference_fingerprint": self.reference_fingerprint,
            "query_fingerprint": self.query_fingerprint,
        }
        persistence.write(path, settings | query_settings | fingerprints, arrays | query_arrays)

    @classmethod
    def load(cls, path: str | Path) -> "Normalizer":
        """Read what ``save`` wrote, bit for bit.

        Raises:
            NormalizerFileError: If the file is truncated, altered, foreign, or of a newer format.
        """
        settings, arrays = persistence.read(path)
        try:
            loaded = cls(**record.fields(settings, arrays))
            expected = settings["reference_fingerprint"], settings["query_fingerprint"]
        except (KeyError, TypeError, ValueError) as error:
            raise NormalizerFileError(
                f"{path}: incomplete normalizer ({error!r}); fit and save it again"
            ) from error
        if (loaded.reference_fingerprint, loaded.query_fingerprint) != expected:
            raise NormalizerFileError(
                f"{path}: the content does not have the fingerprint written with it; the file was "
                "altered or damaged. Copy it again from where it came"
            )
        return loaded
