"""Checkpoints: whole, rotating, complete enough to continue to the bit; and when to stop.

A checkpoint holds weights, averaged weights, optimizer, scaler, step and the best validation so
far. Learning rate, order, augmentations and mixing are functions of the seed and the step, so there
is no other state to save.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from sscd_vec.files import staging

log = logging.getLogger(__name__)

FOLDER = "checkpoints"


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
            with staging(path) as staged:
                torch.save(state, staged)
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


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question the loop asks between two steps: stop now?

    A second signal interrupts at once. Only the main thread can listen.
    """
    requested = threading.Event()

    def remember(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = [(number, signal.signal(number, remember)) for number in signals]
    try:
        yield requested.is_set
    finally:
        for number, handler in before:
            signal.signal(number, handler)
