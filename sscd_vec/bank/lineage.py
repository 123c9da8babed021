"""Which image of a group is the original, and what the others are.

Every finding about a pair (``comparison``) says that one of the two was made from the other or from
something better. The original is the one that nothing speaks against while something speaks against
every other one. If there is not exactly one such image, and not exactly one of those left has its
camera's notes (EXIF), the choice is *unsure*. Size alone never decides, and neither does the time
of a file: both change by copying.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePath

from sscd_vec.bank.comparison import Finding, compare
from sscd_vec.bank.quality import InspectedImage, Pixels, load_grey
from sscd_vec.files import ImageFile

MOST = 48  # images of a group that are compared with each other
DECODED = 4  # images kept in memory at full size
PREFERENCES = "largest, oldest, format:heic, path:GLOB"


@dataclass(frozen=True)
class Choice:
    """The one to keep.

    Attributes:
        keep: Its position.
        is_sure: Whether the evidence (or a preference) decides.
        reason: Why it is the one, or why that cannot be told.
        reasons: For each image, what speaks against it; '' for the one to keep and for those that
            nothing speaks against.
    """

    keep: int
    is_sure: bool
    reason: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Rules:
    """What a person wants, besides the evidence.

    Attributes:
        prefer: What to keep where the evidence does not decide; None leaves it undecided.
        protected: Folders whose images stay where they are.
        kept: SHA-256 of images that a person chose to keep.
    """

    prefer: str | None = None
    protected: tuple[Path, ...] = ()
    kept: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check the preference.

        Raises:
            ValueError: It is none of those known.
        """
        if self.prefer is not None:
            preference_key(self.prefer)

    def protects(self, file: ImageFile | None) -> bool:
        """Whether an image stays where it is."""
        return file is not None and any(file.path.is_relative_to(p) for p in self.protected)


def choose(
    images: Sequence[InspectedImage], digests: Sequence[str], rules: Rules | None = None
) -> Choice:
    """Choose the one to keep: what a person chose, else the original, else what is preferred.

    Args:
        images: The group.
        digests: The SHA-256 of each.
        rules: What a person wants.
    """
    rules = rules or Rules()
    chosen = {digest for digest in digests if digest in rules.kept}
    if len(chosen) == 1:
        keep = digests.index(chosen.pop())
        why = tuple("" if row == keep else "another one was chosen" for row in range(len(images)))
        return Choice(keep, True, "chosen by a person", why)
    choice = choose_original(images, digests)
    safe = [row for row, image in enumerate(images) if rules.protects(image.file)]
    same = [row for row in safe if digests[row] == digests[choice.keep]]
    if same and choice.keep not in safe:  # an equal file that stays anyway
        reasons = list(choice.reasons)
        reasons[choice.keep], reasons[same[0]] = reasons[same[0]], reasons[choice.keep]
        choice = replace(choice, keep=same[0], reasons=tuple(reasons))
    left = [row for row in safe if not choice.reasons[row]]
    if not choice.is_sure and left:
        return replace(choice, keep=left[0], is_sure=True, reason="nothing better than it is found")
    return choice if rules.prefer is None else prefer(choice, images, rules.prefer)


def choose_original(
    images: Sequence[InspectedImage], equal: Sequence[object] | None = None
) -> Choice:
    """Choose the original of a group of copies.

    Args:
        images: The group.
        equal: A key for each image: those of one key are the same file (content hashes).
    """
    keys = list(range(len(images))) if equal is None else list(equal)
    first: dict[object, int] = {}
    for row in sorted(range(len(images)), key=lambda row: _plainness(images[row])):
        first.setdefault(keys[row], row)
    rows = sorted(first.values())
    choice = _Family([images[row] for row in rows]).choose()
    reasons = [""] * len(images)
    for row, key in enumerate(keys):
        own = choice.reasons[rows.index(first[key])]
        reasons[row] = own if row == first[key] else own or "the same file"
    reason = "all are the same file" if len(rows) == 1 else choice.reason
    return Choice(rows[choice.keep], choice.is_sure, reason, tuple(reasons))


def prefer(choice: Choice, images: Sequence[InspectedImage], preference: str) -> Choice:
    """Decide an unsure choice by a preference, among those that nothing speaks against.

    Args:
        choice: Of ``choose_original``; returned as it is if it is sure.
        images: The group.
        preference: ``largest``, ``oldest``, ``format:NAME`` or ``path:GLOB``.

    Raises:
        ValueError: The preference is none of these.
    """
    better = preference_key(preference)
    if choice.is_sure:
        return choice
    left = [row for row, text in enumerate(choice.reasons) if not text] or range(len(images))
    ranks = {row: better(images[row]) for row in left}
    best = max(ranks.values())
    chosen = [row for row in left if ranks[row] == best]
    if len(chosen) != 1 and len(chosen) == len(ranks):
        return replace(choice, reason=f"{choice.reason}; {preference} does not decide either")
    keep = min(chosen, key=lambda row: _plainness(images[row]))
    return Choice(keep, True, f"preferred: {preference}", choice.reasons)


def preference_key(preference: str) -> Callable[[InspectedImage], float]:
    """What a preference calls better: larger numbers."""
    name, _, value = preference.partition(":")
    if preference == "largest":
        return lambda image: image.width * image.height
    if preference == "oldest":
        return lambda image: -image.file.modified
    if name == "format" and value:
        wanted = value.lower().replace("jpg", "jpeg").replace("heic", "heif")
        return lambda image: image.format.lower() == wanted
    if name == "path" and value:
        return lambda image: fnmatch(image.file.id, value) or PurePath(image.file.id).match(value)
    raise ValueError(f"expected {PREFERENCES} as a preference, got {preference!r}")


def _plainness(image: InspectedImage) -> tuple[int, str]:
    """Of equal files the one with the shortest path."""
    return len(image.file.id), image.file.id


class _Family:
    """The images of a group, and what speaks against each."""

    def __init__(self, images: Sequence[InspectedImage]) -> None:
        self._images = images
        self._greys: dict[int, Pixels] = {}
        self._against: list[list[str]] = [[] for _ in images]
        self._compared: set[tuple[int, int]] = set()

    def choose(self) -> Choice:
        rows = sorted(range(len(self._images)), key=self._rank)
        best = rows[0]
        for row in rows[1:MOST]:
            self._compare(best, row)
            if self._against[best] and not self._against[row]:
                best = row
        for row in rows[:MOST]:  # whatever nothing speaks against meets every other such one
            for other in rows[:MOST]:
                if row < other and not self._against[row] and not self._against[other]:
                    self._compare(row, other)
        return self._decide(rows)

    def _decide(self, rows: list[int]) -> Choice:
        left = [row for row in rows if not self._against[row]]
        noted = [row for row in left if self._images[row].has_camera_notes]
        reasons = tuple("; ".join(dict.fromkeys(texts)) for texts in self._against)
        if len(rows) > MOST:
            text = f"more than {MOST} different files in one group"
            return Choice((left or rows)[0], False, text, reasons)
        if len(left) == 1:
            return Choice(left[0], True, "every other one was changed", reasons)
        if len(noted) == 1:
            others = ["without a camera's notes (EXIF)" if row in left and row != noted[0] else text
                      for row, text in enumerate(reasons)]  # fmt: skip
            return Choice(noted[0], True, "only it has its camera's notes (EXIF)", tuple(others))
        if not left:
            return Choice(rows[0], False, "each has lost something another one has", reasons)
        return Choice(left[0], False, f"nothing tells {len(left)} of them apart", reasons)

    def _rank(self, row: int) -> tuple[object, ...]:
        """Likely originals first, so that few pairs need to be compared."""
        image = self._images[row]
        side = image.resolution * (image.width * image.height) ** 0.5
        return not image.has_camera_notes, not image.has_colour, -side, image.file.id

    def _compare(self, a: int, b: int) -> None:
        if (a, b) in self._compared:
            return
        self._compared |= {(a, b), (b, a)}
        found = compare(self._images[a], self._images[b], self._grey(a), self._grey(b))
        decisive: Sequence[Finding] = [one for one in found if one.proves] or found
        if len({one.against for one in decisive}) == 1:  # else each has lost something
            self._against[(a, b)[decisive[0].against]] += [one.text for one in found]

    def _grey(self, row: int) -> Pixels:
        if row not in self._greys:
            while len(self._greys) >= DECODED:
                del self._greys[next(iter(self._greys))]
            self._greys[row] = load_grey(self._images[row].file)
        return self._greys[row]
