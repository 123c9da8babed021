"""What a run writes about itself: ``metrics.jsonl``, TensorBoard, and a list of skipped photos."""

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from sscd_vec.trainer.checkpoint import write_atomically

METRICS = "metrics.jsonl"
SKIPPED = "skipped.txt"


class Journal:
    """Appends a run's figures, one JSON object per line; a resumed run forgets the future."""

    def __init__(self, out: Path, from_step: int, writes: bool = True) -> None:
        """Open ``out/metrics.jsonl``, dropping what was written for steps not yet taken.

        Args:
            out: The run's folder.
            from_step: The first step to come.
            writes: False on ranks that leave the writing to the first.
        """
        self._file: TextIO | None = None
        self._board: Any = None
        if not writes:
            return
        path = out / METRICS
        kept = [line for line in read_metrics(path) if line["step"] < from_step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(path, lambda partial: partial.write_text(text))
        self._file = open(path, "a")
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=from_step)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Record the figures of one step."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in figures.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def __enter__(self) -> "Journal":
        """Write until the end of ``with``."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``; a last line cut short by a crash is left out."""
    file = Path(path)
    if not file.exists():
        return []
    lines = []
    for line in file.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def write_skipped(out: Path, skipped: Mapping[str, str]) -> None:
    """List unreadable photos with the reason, one per line."""
    if skipped:
        text = "".join(f"{name}\t{reason}\n" for name, reason in sorted(skipped.items()))
        write_atomically(out / SKIPPED, lambda partial: partial.write_text(text))
