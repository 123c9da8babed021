"""A calibrated threshold: the score, how it was found, and how far to trust it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

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
