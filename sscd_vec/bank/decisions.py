"""What a person decided about pairs of images: remembered by content, kept in a file or a bank.

A decision names images by the SHA-256 of their bytes, so it holds wherever they lie and under any
name. The report on copies saves a file of them, ``Bank.decide`` writes them into a bank, and
``sscd-vec calibrate --from-decisions`` turns them into a threshold.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sscd_vec.files import PathLike, printable_path, write_whole

FORMAT = "sscd-vec decisions 1"
_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Decision:
    """Whether two images are copies.

    Attributes:
        first: SHA-256 of one, in hex.
        second: SHA-256 of the other.
        is_copy: What the person said.
        score: Their symmetric score, if it is known.
    """

    first: str
    second: str
    is_copy: bool
    score: float | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """Both, in one order."""
        return (self.first, self.second) if self.first <= self.second else (self.second, self.first)


@dataclass
class Decisions:
    """Decisions about pairs, and images that a person chose to keep.

    Attributes:
        pairs: The last decision about each pair.
        kept: SHA-256 of the images to keep, in whatever group they are.
        normalizer: Query fingerprint of the normalizer the scores were made with; '' if unknown.
    """

    pairs: dict[tuple[str, str], Decision] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    normalizer: str = ""

    def __iter__(self) -> Iterator[Decision]:
        """All decisions about pairs."""
        return iter(self.pairs.values())

    def __len__(self) -> int:
        """How many pairs were decided about."""
        return len(self.pairs)

    def add(self, decisions: Iterable[Decision]) -> None:
        """Take over decisions; later ones replace earlier ones about the same pair."""
        self.pairs |= {one.pair: one for one in decisions}

    def about(self, first: str, second: str) -> bool | None:
        """Whether two images are copies; None if nobody decided."""
        found = self.pairs.get((min(first, second), max(first, second)))
        return None if found is None else found.is_copy

    @classmethod
    def load(cls, path: PathLike) -> "Decisions":
        """Read a file of decisions.

        Raises:
            ValueError: It is not one.
        """
        try:
            return cls._read(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{printable_path(path)}: expected decisions as the report or `sscd-vec decisions` "
                f"saves them ({error})"
            ) from error

    @classmethod
    def _read(cls, content: Any) -> "Decisions":  # noqa: ANN401 - any JSON
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT!r}")
        made = cls(kept={_digest(one) for one in content["keep"]})
        made.normalizer = str(content.get("normalizer", ""))
        for pair in content["pairs"]:
            score = pair.get("score")
            if not isinstance(pair["is_copy"], bool) or not isinstance(score, int | float | None):
                raise ValueError(f"not a decision: {pair}")
            first, second = _digest(pair["first"]), _digest(pair["second"])
            made.add([Decision(first, second, pair["is_copy"], score)])
        return made

    def save(self, path: PathLike) -> None:
        """Write a file that ``load`` reads, whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "format": FORMAT,
            "normalizer": self.normalizer,
            "pairs": [
                {"first": d.first, "second": d.second, "is_copy": d.is_copy, "score": d.score}
                for d in self
            ],
            "keep": sorted(self.kept),
        }


def is_digest(text: object) -> bool:
    """Whether this is a SHA-256 in hex."""
    return isinstance(text, str) and len(text) == 64 and _DIGITS.issuperset(text)


def _digest(text: object) -> str:
    if not is_digest(text):
        raise ValueError(f"not a SHA-256 in hex: {text!r}")
    return str(text)
