"""What a bank answers: matches, answers for many images, and what an ``add`` did."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sscd_vec.adapters.matches import Metadata
from sscd_vec.bank.records import BankImage
from sscd_vec.files import Unreadable
from sscd_vec.normalize import Grade, Verdict

if TYPE_CHECKING:
    from sscd_vec.verify import Evidence, Region


@dataclass(frozen=True)
class BankMatch:
    """An image of the bank that a query may be a copy of.

    Attributes:
        id: Its id: what it was added with, or the path of its file.
        score: The paper's normalized similarity; larger is better. Of a verified match the
            verifier's score, 0 to 1.
        judged: What that score means in this bank, and why.
        image: What the bank knows about it; None if only the index knows it.
        metadata: What was added with it, or None.
        evidence: What verification says; None if the match was not verified.
        decision: Whether a person called the query a copy of it; None if nobody decided.
    """

    id: str
    score: float
    judged: Verdict
    image: BankImage | None = field(default=None, repr=False)
    metadata: Metadata | None = None
    evidence: "Evidence | None" = None
    decision: bool | None = None

    @property
    def region(self) -> "Region | None":
        """What was copied, outlined in the query and in this image; None if not located."""
        return None if self.evidence is None else self.evidence.region

    @property
    def verdict(self) -> Grade:
        """``"copy"``, ``"look"`` (at it yourself), ``"unsure"`` or ``"no"``."""
        if self.decision is not None:
            return "copy" if self.decision else "no"
        return self.judged.grade

    @property
    def reason(self) -> str:
        """Why, in one line."""
        return self.judged.reason if self.decision is None else "a person decided so"

    @property
    def is_copy(self) -> bool | None:
        """Whether the verdict is ``"copy"``; None if nobody decided and nothing is calibrated."""
        return self.judged.is_copy if self.decision is None else self.decision

    @property
    def threshold(self) -> float | None:
        """Least score of a copy; None if the normalizer is not calibrated."""
        return self.judged.threshold

    @property
    def false_match_rate(self) -> float | None:
        """Share of strangers whose descriptors score this high in this bank, if that is known."""
        return self.judged.false_match_rate

    def to_dict(self) -> dict[str, object]:
        """What every JSON answer says about it."""
        return {
            "score": round(self.score, 5),
            "verdict": self.verdict,
            "copy": self.is_copy,
            "reason": self.reason,
            "false_match_rate": self.false_match_rate,
        }

    @property
    def path(self) -> Path | None:
        """Its file, if it was added from one."""
        return None if self.image is None or self.image.file is None else self.image.file.path


def merge_looks(first: list[BankMatch], larger: list[BankMatch], k: int) -> list[BankMatch]:
    """The ``k`` best of two looks at one image, each match once.

    Args:
        first: Found at the model's own size.
        larger: Found at another scale, with scores that have lost ``scales.PENALTY``.
        k: At most so many.
    """
    best = {match.id: match for match in first}
    for match in larger:
        if match.id not in best or best[match.id].score < match.score:
            best[match.id] = match
    return sorted(best.values(), key=lambda match: (-match.score, match.id))[:k]


@dataclass(frozen=True)
class Answer:
    """What a search for one of many images found.

    Attributes:
        image: The query: its path, or its position as text.
        matches: Best first; empty if it could not be read.
        error: Why it could not be read; '' if it could.
    """

    image: str
    matches: list[BankMatch]
    error: str = ""


@dataclass
class Added:
    """What ``Bank.add`` did.

    Attributes:
        added: Images encoded and stored, new or changed.
        unchanged: Images that were there already.
        unreadable: Files that are not usable images, and why.
    """

    added: int = 0
    unchanged: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)
