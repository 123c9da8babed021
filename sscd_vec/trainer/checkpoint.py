"""Checkpoints: atomic, rotating, and complete enough to continue to the bit.

A checkpoint holds weights, averaged weights, optimizer, scaler, step and the best validation so
far. Learning rate, order, augmentations and mixing are functions of the seed and the step, so
there is no other state to save.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

FOLDER = "checkpoints"


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Let one process at a time train into a folder; the system lets go when that one ends.

    Raises:
        BlockingIOError: Another process trains into it.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{out}: another process trains into this folder; wait for it, or choose another"
            ) from error
        yield
    finally:
        os.close(handle)


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, out: Path, keep: int) -> None:
        """Keep the newest ``keep`` below ``out``."""
        self.folder = out / FOLDER
        self.keep = keep

    def files(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int, state: dict[str, Any]) -> Path | None:
        """Write one and drop the oldest; on a full disk keep the last good one and say so.

        Returns:
            The file, or None if it could not be written.
        """
        path = self.folder / f"step-{step:08d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda partial: torch.save(state, partial))
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            log.error(
                "checkpoint at step %d not written (%s); the last good one stays", step, error
            )
            return None
        for old in self.files()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def load_newest(self) -> dict[str, Any] | None:
        """The newest readable checkpoint, or None if there is none."""
        for path in reversed(self.files()):
            try:
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, EOFError) as error:
                log.warning("%s cannot be read (%s); trying an older one", path, error)
                continue
            return state
        return None


def write_atomically(path: Path, write: Any) -> None:  # noqa: ANN401
    """Call ``write`` with a temporary path beside ``path``, flush it to disk, and rename it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically."""
    write_atomically(path, lambda partial: partial.write_text(json.dumps(content, indent=1) + "\n"))
