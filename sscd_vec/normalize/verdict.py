"""Verdicts: what a score means in a bank of a stated size, in a word and in a sentence.

Everything that calls a pair of images copies asks ``Normalizer.judge``. There are four grades:

- ``copy``: fewer than one stranger in 1 000 finds a score this high in such a bank;
- ``look``: fewer than one in 20; a person should look at it;
- ``unsure``: the score cannot say, because both images lie outside what the normalizer knows
  (``domain``) and look alike to it, or because nothing is calibrated; the reason says which;
- ``no``: anything else.

Proof outweighs scores: what a comparison of pixels, or a person, found (``Proof``) decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from sscd_vec.normalize.calibration.thresholds import (
    KINDS,
    FalseMatchCurve,
    Kind,
    Threshold,
    UncalibratedError,
)

Grade = Literal["copy", "look", "unsure", "no"]
Basis = Literal["score", "pixels", "geometry", "person"]

GRADES: tuple[Grade, ...] = ("copy", "look", "unsure", "no")
COPY_RATE = 1e-3  # false matches per query at which a match is called a copy
LOOK_RATE = 0.05  # and at which a person should look at it
STANDARD_BANK = 1000  # references, if there are fewer or nobody says how many there are
OFTEN, RAREST = 0.3, 1e-9  # rates beyond these are not given as a number
ALIKE = "both are documents, screens or graphics, which look alike to the model"


class Proof(NamedTuple):
    """What is known about two images besides their score.

    Attributes:
        is_copy: Whether they are copies; None if this cannot say.
        reason: One line for people, without a full stop.
        basis: Where it comes from.
    """

    is_copy: bool | None
    reason: str
    basis: Basis = "pixels"


@dataclass(frozen=True)
class Verdict:
    """What a score means in a bank of a stated size.

    Attributes:
        score: The score.
        grade: One of ``GRADES``.
        reason: Why, in one line for people, without a full stop.
        threshold: The score of a copy; None if there is none.
        false_match_rate: Share of strangers that find a score this high in such a bank; None if
            the normalizer has no curve.
        interval: Interval of that rate at the curve's confidence.
        bank_size: References in the bank; at least as many as the threshold was calibrated for.
        in_doubt: Whether both images lie outside what the normalizer knows.
        basis: What decided.
    """

    score: float
    grade: Grade
    reason: str
    threshold: float | None
    false_match_rate: float | None
    interval: tuple[float, float] | None
    bank_size: int
    in_doubt: bool = False
    basis: Basis = "score"

    @property
    def is_copy(self) -> bool | None:
        """Whether the grade is ``"copy"``; None if nothing is calibrated."""
        return None if self.threshold is None else self.grade == "copy"

    def to_dict(self) -> dict[str, object]:
        """What every JSON answer says about a pair."""
        return {
            "score": round(self.score, 5),
            "verdict": self.grade,
            "copy": self.is_copy,
            "reason": self.reason,
            "false_match_rate": self.false_match_rate,
        }

    def __str__(self) -> str:
        """One line for people: "0.41: about 1 stranger in 50 000 scores this high in …"."""
        return f"{self.score:.2f}: {self.reason}"


class Facts(TypedDict, total=False):
    """What ``Verdicts.judge`` may be told about a pair besides its score."""

    views: int | None
    threshold: float | None
    in_doubt: bool
    shift: float
    proof: Proof | None


@dataclass(frozen=True, eq=False)
class Verdicts:
    """What a normalizer's thresholds and curves say about scores.

    Attributes:
        thresholds: What counts as a copy, by kind of score.
        curves: How often strangers score how high, by kind of score.
    """

    thresholds: Mapping[Kind, Threshold]
    curves: Mapping[Kind, FalseMatchCurve]

    def curve(self, kind: Kind) -> FalseMatchCurve:
        """The curve of a kind of score.

        Raises:
            UncalibratedError: If there is none.
        """
        if kind not in self.curves:
            raise self._uncalibrated("false-match rate", kind, list(self.curves))
        return self.curves[kind]

    def bank_size(self, kind: Kind, bank_size: int | None = None) -> int:
        """The bank a score is judged in: never smaller than the threshold was calibrated for.

        So two images get one verdict whether they are compared alone or in a small bank.
        """
        stored = self.thresholds.get(kind)
        least = STANDARD_BANK if stored is None or stored.bank_size is None else stored.bank_size
        return max(least, bank_size or 0)

    def threshold(
        self, kind: Kind, bank_size: int | None = None, views: int | None = None
    ) -> float:
        """The score of a copy: the one that was set, or the one for the rate that was set.

        The latter grows with the bank.

        Args:
            kind: The kind of score.
            bank_size: References in the bank, if more than the threshold was calibrated for.
            views: Comparisons of views per reference, if not those of the calibration.

        Raises:
            UncalibratedError: If there is neither a threshold nor a curve.
        """
        stored, curve = self.thresholds.get(kind), self.curves.get(kind)
        if curve is None or (stored is not None and stored.rate is None):
            if stored is None:
                raise self._uncalibrated("threshold", kind, list(self.thresholds))
            return stored.value
        rate = COPY_RATE if stored is None or stored.rate is None else stored.rate
        if stored is not None and stored.target == "false_match_rate_per_comparison":
            return curve.score(rate, 1, views)
        return curve.score(rate, self.bank_size(kind, bank_size), views)

    def judge(
        self,
        score: float,
        bank_size: int | None = None,
        kind: Kind = "search",
        *,
        views: int | None = None,
        threshold: float | None = None,
        in_doubt: bool = False,
        shift: float = 0.0,
        proof: Proof | None = None,
    ) -> Verdict:
        """The verdict on a pair of images.

        Args:
            score: Of the pair; larger is better.
            bank_size: References in the bank.
            kind: The kind of score.
            views: Comparisons of views per reference, if not those of the calibration.
            threshold: The score of a copy, instead of the calibrated one.
            in_doubt: Whether both images lie outside what the normalizer knows: then the score
                alone makes no copy.
            shift: What images outside have in common with the query (``Normalizer.outside``).
            proof: What is known beside the score.
        """
        found = self._by_score(score, bank_size, kind, views, threshold)
        found = replace(found, in_doubt=in_doubt)
        if proof is not None and proof.is_copy is not None:
            grade: Grade = "copy" if proof.is_copy else "no"
            return replace(found, grade=grade, reason=proof.reason, basis=proof.basis)
        if not in_doubt or found.grade == "no":
            return found
        if self._by_score(score - shift, bank_size, kind, views, threshold).grade == "no":
            return replace(found, grade="no", reason="no more alike than others of their kind")
        said = "compare their pixels" if proof is None else proof.reason
        return replace(found, grade="unsure", reason=f"{ALIKE}; {said}")

    def _by_score(
        self,
        score: float,
        bank_size: int | None,
        kind: Kind,
        views: int | None,
        threshold: float | None,
    ) -> Verdict:
        """What the score says by itself."""
        size, curve = self.bank_size(kind, bank_size), self.curves.get(kind)
        if threshold is None:
            try:
                threshold = self.threshold(kind, size, views)
            except UncalibratedError:
                reason = f"no threshold is calibrated for {kind} scores"
                return Verdict(score, "unsure", reason, None, None, None, size)
        if curve is None:
            reason = f"a copy scores {threshold:.2f} or more; no false-match rate is known"
            grade: Grade = "copy" if score >= threshold else "no"
            return Verdict(score, grade, reason, threshold, None, None, size)
        look_at = min(threshold, curve.score(LOOK_RATE, size, views))
        grade = "copy" if score >= threshold else "look" if score >= look_at else "no"
        rate, interval = curve.rate(score, size, views), curve.interval(score, size, views)
        return Verdict(score, grade, _how_rare(rate, size), threshold, rate, interval, size)

    def _uncalibrated(self, what: str, kind: Kind, stored: list[Kind]) -> ValueError:
        if kind not in KINDS:
            return ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
        return UncalibratedError(
            f"no calibrated {what} for {kind!r} scores (stored: {sorted(stored) or 'none'}); use "
            "Normalizer.calibrate or `sscd-vec calibrate`, or pass a number as threshold"
        )


def _how_rare(rate: float, size: int) -> str:
    bank = f"in a bank of {_spaced(size)}"
    if rate > OFTEN:
        return f"strangers often score this high {bank}"
    about = "about" if rate > RAREST else "fewer than"
    return (
        f"{about} 1 stranger in {_spaced(_rounded(1 / max(rate, RAREST)))} scores this high {bank}"
    )


def _rounded(value: float) -> int:
    """To one significant figure, two below 2: "about" promises no more."""
    digits = int(np.floor(np.log10(value)))
    step = 10 ** max(digits if value >= 2 * 10**digits else digits - 1, 0)
    return int(round(value / step) * step)


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")
