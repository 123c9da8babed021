"""What a bank answers: matches, answers for many images, and what an ``add`` did."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from sscd_vec.adapters.matches import Metadata
from sscd_vec.bank.records import BankImage
from sscd_vec.files import Unreadable
from sscd_vec.normalize.scales import PENALTY


@dataclass(frozen=True)
class BankMatch:
    """An image of the bank that a query may be a copy of.

    Attributes:
        id: Its id: what it was added with, or the path of its file.
        score: The paper's normalized similarity; larger is better.
        threshold: Least score of a copy; None if the normalizer is not calibrated.
        image: What the bank knows about it; None if only the index knows it.
        metadata: What was added with it, or None.
    """

    id: str
    score: float
    threshold: float | None
    image: BankImage | None = field(default=None, repr=False)
    metadata: Metadata | None = None

    @property
    def is_copy(self) -> bool | None:
        """Whether the score is that of a copy; None without a threshold."""
        return None if self.threshold is None else self.score >= self.threshold

    @property
    def path(self) -> Path | None:
        """Its file, if it was added from one."""
        return None if self.image is None or self.image.file is None else self.image.file.path


def merge_looks(first: list[BankMatch], larger: list[BankMatch], k: int) -> list[BankMatch]:
    """The ``k`` best of two looks at one image, each match once.

    Args:
        first: Found at the model's own size.
        larger: Found at another scale; their scores lose ``PENALTY``.
        k: At most so many.
    """
    best = {match.id: match for match in first}
    for match in larger:
        score = match.score - PENALTY
        if match.id not in best or best[match.id].score < score:
            best[match.id] = replace(match, score=score)
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
