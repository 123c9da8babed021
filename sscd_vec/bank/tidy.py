"""Moving copies away, or replacing equal files by hard links. Nothing is ever deleted."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sscd_vec.bank.results import CopyGroup


@dataclass(frozen=True)
class Action:
    """What was done, or would be done, with one copy.

    Attributes:
        verb: What.
        path: The copy.
        to: Where it went, or the file it now is a link to.
    """

    verb: Literal["move", "link"]
    path: Path
    to: Path


@dataclass(frozen=True)
class Tidied:
    """Actions, and files that had to stay, each with the reason."""

    actions: list[Action]
    untouched: list[tuple[Path, str]]


def move_copies(groups: Sequence[CopyGroup], folder: Path, *, apply: bool) -> Tidied:
    """Move all but the one to keep of each group into a folder; skip groups to leave alone.

    Args:
        groups: What ``Bank.duplicates`` found.
        folder: Where to; names that are taken get a number.
        apply: False only says what would be done.
    """
    done = Tidied([], [])
    taken: set[Path] = set()  # by files that a dry run only says it would move
    for path, _ in _copies(groups):
        target = _free_name(folder, path, taken)
        try:
            if apply:
                _move(path, target)
        except OSError as error:  # a read-only folder, a full disk: the others go on
            done.untouched.append((path, error.strerror or str(error)))
        else:
            taken.add(target)
            done.actions.append(Action("move", path, target))
    return done


def link_copies(groups: Sequence[CopyGroup], *, apply: bool) -> Tidied:
    """Replace files that are byte for byte the one to keep by hard links to it."""
    done = Tidied([], [])
    for path, keep in _copies(groups):
        try:
            if not _same_bytes(path, keep):
                continue
            if apply:
                _link(keep, path)
        except OSError as error:
            done.untouched.append((path, error.strerror or str(error)))
        else:
            done.actions.append(Action("link", path, keep))
    return done


def _copies(groups: Sequence[CopyGroup]) -> list[tuple[Path, Path]]:
    """Copies that are separate files and may be moved, each with the file to keep."""
    return [
        (copy.image.file.path, group.keep.image.file.path)
        for group in groups
        if not group.leave_alone
        and group.keep.image.file is not None
        and not group.keep.image.file.member
        for copy in group.copies
        if copy.image.file is not None and not copy.image.file.member and not copy.is_protected
    ]


def _free_name(folder: Path, path: Path, taken: set[Path]) -> Path:
    """A name in ``folder`` that no file has; nothing is ever overwritten."""
    number = 0
    while True:
        suffix = f" ({number})" if number else ""
        target = folder / f"{path.stem}{suffix}{path.suffix}"
        if not target.exists() and target not in taken:
            return target
        number += 1


def _move(path: Path, target: Path) -> None:
    """Move without ever replacing a file, across disks too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target, follow_symlinks=False)  # fails if the name was taken meanwhile
    except FileExistsError:
        raise
    except OSError:  # another disk, or one without hard links
        with open(target, "xb") as new, open(path, "rb") as old:
            shutil.copyfileobj(old, new)
        shutil.copystat(path, target)
        if not _same_bytes(path, target):
            target.unlink()
            raise OSError(f"{target}: the copy differs from {path}; nothing was moved") from None
    try:
        path.unlink()
    except OSError:  # a read-only folder: then it stays there, and only there
        target.unlink()
        raise


def _link(keep: Path, path: Path) -> None:
    """Replace ``path`` by a hard link to ``keep``, in one step."""
    partial = path.with_name(f".link-{os.getpid()}-{path.name}")
    os.link(keep, partial)
    os.replace(partial, path)


def _same_bytes(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with open(a, "rb") as first, open(b, "rb") as second:
        while True:
            left, right = first.read(2**20), second.read(2**20)
            if left != right:
                return False
            if not left:
                return True
