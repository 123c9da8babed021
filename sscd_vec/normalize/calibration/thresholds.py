"""What a calibration finds: a threshold, and how often strangers score how high.

Strangers are images that show nothing in common: neither copies nor shots of one scene. With
``p(t) = P(score >= t)`` for one comparison of two strangers, a query that is a stranger to all
``N`` references of a bank has a false match with probability::

    rate(t, N) = 1 - exp(-N v p(t) / v_0)

where a score is a maximum over ``v`` comparisons of views (crops or scales; 1 for whole images)
and the curve was fitted with ``v_0`` of them. Comparisons of one query are nearly independent: in
banks of 100 to 20 000 photos the counted rate was 0.8 to 1.0 times this one.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize.descriptors import Float64

Kind = Literal["search", "symmetric", "scaled", "tiled"]
"""Which score: the paper's directed one, the minimum of both directions, or the maximum over
several views of a query: the whole image at several sizes (``"scaled"``) or its crops."""

KINDS: tuple[Kind, ...] = ("search", "symmetric", "scaled", "tiled")
VIEWS: tuple[Kind, ...] = ("scaled", "tiled")
WIDEST = 0.3  # interval of a threshold to be trusted, as a share of the largest score there can be
LEAST_RECALL = 0.95  # share of known copies that a threshold should find

Target = Literal[
    "given", "false_match_rate_per_query", "false_match_rate_per_comparison", "precision"
]

RATES: Float64 = 10.0 ** (-np.arange(49) / 4)  # 1 to 1e-12: where a curve is kept


class UncalibratedError(ValueError):
    """A calibrated threshold was asked for and none is stored."""


@dataclass(frozen=True)
class Threshold:
    """Scores of at least ``value`` are matches.

    Attributes:
        value: The score.
        kind: The kind of score it applies to.
        target: What was asked for; ``"given"`` for a number set by hand.
        wanted: The rate or precision asked for.
        interval: Interval of the threshold at ``confidence``.
        confidence: Coverage the interval aims at.
        samples: Queries, comparisons or labelled pairs the estimate rests on.
        bank_size: References one query is compared with, for a rate per query.
        extrapolated: Whether the rate is below what the sample can show by counting.
        note: What a reader should know, in a sentence.
    """

    value: float
    kind: Kind = "search"
    target: Target = "given"
    wanted: float | None = None
    interval: tuple[float, float] | None = None
    confidence: float | None = None
    samples: int | None = None
    bank_size: int | None = None
    extrapolated: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        """Check the kind.

        Raises:
            ValueError: If the kind is unknown or the value is not a number.
        """
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {KINDS}, got {self.kind!r}")
        if self.value != self.value:
            raise ValueError("value: expected a number, got NaN")

    @property
    def rate(self) -> float | None:
        """The false-match rate asked for; None if it was a precision, or the score itself."""
        return self.wanted if self.target.startswith("false_match_rate") else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Threshold":
        """Read what ``to_dict`` wrote."""
        interval = fields.get("interval")
        return cls(**{**fields, "interval": None if interval is None else tuple(interval)})

    def __str__(self) -> str:
        """One line for people."""
        text = f"{self.kind}: score >= {self.value:.4f}"
        if self.target != "given" and self.wanted is not None:
            text += f" for {self.target.replace('_', ' ')} {self.wanted:g}"
        if self.bank_size is not None:
            text += f" in a bank of {self.bank_size}"
        if self.interval is not None and self.confidence is not None:
            low, high = self.interval
            text += f" ({self.confidence:.0%} interval {low:.4f} to {high:.4f})"
        if self.extrapolated:
            text += ", extrapolated"
        return text


@dataclass(frozen=True, eq=False)
class FalseMatchCurve:
    """``p(t)`` with its interval, at fixed rates from 1 to 1e-12.

    Attributes:
        kind: The kind of score.
        scores: ``(k,)`` the score that a share ``RATES`` of all comparisons reaches, ascending.
        low: ``(k,)`` lower end of the interval of ``scores``.
        high: ``(k,)`` upper end.
        views: Comparisons of views per pair of images it was fitted with; 1 for whole images.
        confidence: Coverage the interval aims at.
        comparisons: Pairs of images it was fitted on.
        images: Query and reference images these are made of.
        left_out: Pairs left out because they are not strangers.
    """

    kind: Kind
    scores: Float64 = field(repr=False)
    low: Float64 = field(repr=False)
    high: Float64 = field(repr=False)
    views: int = 1
    confidence: float = 0.95
    comparisons: int = 0
    images: tuple[int, int] = (0, 0)
    left_out: int = 0

    def __post_init__(self) -> None:
        """Check the curve and make it read-only.

        Raises:
            ValueError: If the kind is unknown or a column is not a rising curve over ``RATES``.
        """
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {KINDS}, got {self.kind!r}")
        for column in (self.scores, self.low, self.high):
            rising = column.shape == RATES.shape and (np.diff(column) >= 0).all()
            if not (rising and np.isfinite(column).all()):
                raise ValueError(
                    f"curve: expected {len(RATES)} finite scores that do not fall, got "
                    f"shape {column.shape}"
                )
            column.setflags(write=False)

    @property
    def counted(self) -> float:
        """The smallest rate per comparison with ten comparisons above it; below is extrapolated."""
        return 10 / max(self.comparisons, 10)

    @overload
    def rate(self, score: float, bank_size: float, views: int | None = None) -> float: ...
    @overload
    def rate(
        self, score: NDArray[np.floating], bank_size: float, views: int | None = None
    ) -> Float64: ...
    def rate(
        self, score: float | NDArray[np.floating], bank_size: float, views: int | None = None
    ) -> float | Float64:
        """Share of strangers with a false match of at least ``score`` in such a bank.

        Args:
            score: One score or an array of them.
            bank_size: References the query is compared with.
            views: Comparisons of views per reference; those of the fit by default.
        """
        found = self._rate(self.scores, score, bank_size, views)
        return found if isinstance(score, np.ndarray) else float(found)

    def interval(
        self, score: float, bank_size: float, views: int | None = None
    ) -> tuple[float, float]:
        """Interval of ``rate``."""
        ends = [self._rate(column, score, bank_size, views) for column in (self.low, self.high)]
        return float(ends[0]), float(ends[1])

    def score(self, rate: float, bank_size: float, views: int | None = None) -> float:
        """The score that a share ``rate`` of all strangers reaches in such a bank."""
        return self._score(self.scores, rate, bank_size, views)

    def score_interval(
        self, rate: float, bank_size: float, views: int | None = None
    ) -> tuple[float, float]:
        """Interval of ``score``."""
        low, high = (
            self._score(column, rate, bank_size, views) for column in (self.low, self.high)
        )
        return low, high

    def per_comparison(self, rate: float, bank_size: float, views: int | None = None) -> float:
        """The rate per comparison that gives ``rate`` per query in such a bank."""
        if not 0 < rate < 1:
            raise ValueError(f"false_match_rate: expected a number between 0 and 1, got {rate}")
        return float(-np.log1p(-rate) / self._comparisons(bank_size, views))

    def to_record(self) -> tuple[dict[str, Any], Float64]:
        """Settings for JSON, and the three columns as one ``(k, 3)`` array."""
        settings = {
            "kind": self.kind,
            "views": self.views,
            "confidence": self.confidence,
            "comparisons": self.comparisons,
            "images": list(self.images),
            "left_out": self.left_out,
        }
        return settings, np.stack([self.scores, self.low, self.high], axis=1)

    @classmethod
    def from_record(cls, settings: dict[str, Any], columns: Float64) -> "FalseMatchCurve":
        """Read what ``to_record`` returned."""
        queries, references = settings["images"]
        scores, low, high = np.ascontiguousarray(columns.T, dtype=np.float64)
        fields = {**settings, "images": (int(queries), int(references))}
        return cls(scores=scores, low=low, high=high, **fields)

    def _comparisons(self, bank_size: float, views: int | None) -> float:
        if not bank_size >= 1:
            raise ValueError(f"bank_size: expected at least 1, got {bank_size}")
        if views is not None and views < 1:
            raise ValueError(f"views: expected at least 1, got {views}")
        return bank_size * (self.views if views is None else views) / self.views

    def _rate(
        self,
        column: Float64,
        score: float | NDArray[np.floating],
        bank_size: float,
        views: int | None,
    ) -> Float64:
        p = np.exp(np.interp(score, column, np.log(RATES)))
        rate: Float64 = -np.expm1(-self._comparisons(bank_size, views) * p)
        return rate

    def _score(self, column: Float64, rate: float, bank_size: float, views: int | None) -> float:
        p = self.per_comparison(rate, bank_size, views)
        return float(np.interp(-np.log(p), -np.log(RATES), column))


@dataclass(frozen=True, eq=False)
class Calibration:
    """A threshold and what it was found from, for a plot or a second look.

    Attributes:
        threshold: The result; give the calibration to ``Normalizer.with_calibration``.
        curve: How often strangers score how high; None if calibrated for a precision.
        nonmatch_scores: Scores of non-matching pairs: a random sample, or all that were labelled.
        match_scores: Scores of labelled matches or known copies; empty without any.
        highest_pairs: ``(k, 2)`` rows (query, reference) of the highest-scoring non-matches, as
            they were given: rows of one array, or images if these have several views. Those that
            turn out to be copies, or shots of one scene, go into ``related``.
        highest_scores: ``(k,)`` their scores.
        warnings: What a person should know before using it.
    """

    threshold: Threshold
    curve: FalseMatchCurve | None
    nonmatch_scores: Float64
    match_scores: Float64
    highest_pairs: NDArray[np.int64]
    highest_scores: Float64
    warnings: tuple[str, ...] = field(default=())


class CalibrationError(ValueError):
    """A threshold that nobody should use: the sample cannot say it, or it would miss copies.

    Attributes:
        calibration: What was found, for a look at the highest-scoring non-matches.
    """

    def __init__(self, message: str, calibration: Calibration) -> None:
        """Keep what was found beside the message."""
        super().__init__(message)
        self.calibration = calibration
