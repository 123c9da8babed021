"""What a bank answers: matches, what an ``add`` did, and groups of copies."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.matches import Metadata
from sscd_vec.bank.records import BankImage
from sscd_vec.files import Unreadable
from sscd_vec.normalize import Grade, Verdict

if TYPE_CHECKING:
    from sscd_vec.bank.quality import InspectedImage
    from sscd_vec.verify import Evidence, Region

Heatmap = NDArray[np.floating]  # (h, w), larger is more alike


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


@dataclass(frozen=True)
class Copy:
    """A member of a group of copies.

    Attributes:
        image: What the bank knows about it.
        score: Symmetric score with the one to keep; 1 for that one itself.
        inspected: Its size, detail and thumbnail; None without a file.
        heatmap: Which part of it matches the one to keep.
        keep_heatmap: Which part of the one to keep it matches.
        evidence: What geometry says, with the copy as the query and the one to keep as the
            reference; None if the copies were not verified.
        reason: What speaks against it, in words; '' if nothing does.
        is_protected: Whether it stays where it is, whatever it is.
        judged: What its score means in a bank of this size; None for the one to keep.
    """

    image: BankImage
    score: float = 1.0
    inspected: "InspectedImage | None" = None
    heatmap: Heatmap | None = None
    keep_heatmap: Heatmap | None = None
    evidence: "Evidence | None" = None
    reason: str = ""
    is_protected: bool = False
    judged: Verdict | None = None


@dataclass(frozen=True)
class CopyGroup:
    """Images that are copies of each other, or that only a person can tell apart.

    Attributes:
        keep: The one to keep.
        copies: The others, most alike first.
        related: Ids with a score: copies of one member that are not copies of the group.
        reason: Why this is the one to keep.
        leave_alone: Why no file of the group is moved or linked, such as that it is unsure which
            one to keep; '' if they may be.
        verdict: ``"copy"``, or ``"unsure"``: they look alike to the model and may all be different.
    """

    keep: Copy
    copies: tuple[Copy, ...]
    related: tuple[tuple[str, float], ...] = ()
    reason: str = ""
    leave_alone: str = ""
    verdict: Grade = "copy"

    @property
    def is_sure(self) -> bool:
        """Whether copies may be moved away."""
        return not self.leave_alone

    @property
    def members(self) -> tuple[Copy, ...]:
        """All of them, the one to keep first."""
        return (self.keep, *self.copies)


@dataclass(frozen=True)
class Copies:
    """What a search for copies found.

    Attributes:
        groups: The groups of copies, largest first.
        threshold: Least symmetric score of a copy.
        scanned: Images compared.
        pairs: Pairs of copies, in groups or not.
        unreadable: Files that could be encoded earlier and cannot be read now.
        recall: Share of the copies found, measured on a sample of images; 1 if every pair of
            images was compared, None if the sample has no copies.
        unsure: Groups of documents, screens or graphics that score like copies and cannot be told
            from strangers of their kind. Nothing ever moves or links them.
    """

    groups: list[CopyGroup]
    threshold: float
    scanned: int
    pairs: int
    unreadable: list[Unreadable]
    recall: float | None = 1.0
    unsure: list[CopyGroup] = field(default_factory=list)
