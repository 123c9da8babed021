"""A bar with the time left and the last figures, on standard error where somebody watches."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Display:
    """Shows a run; does nothing where nobody watches."""

    def __init__(self, show: bool | None = None) -> None:
        """``show`` None means: on a terminal only."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            disable=not (sys.stderr.isatty() if show is None else show),
        )
        self._started = False
        self._decoding = self._progress.add_task("decoding", total=None, figures="", visible=False)
        self._training = self._progress.add_task(
            "training", start=False, total=None, figures="", visible=False
        )

    def __enter__(self) -> "Display":
        """Begin to show."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the last state on the screen."""
        self._progress.stop()

    def decoded(self, done: int, total: int) -> None:
        """Show how many photos are decoded."""
        self._progress.update(self._decoding, completed=done, total=total, visible=done < total)

    def show(self, step: int, steps: int, figures: Mapping[str, Any]) -> None:
        """Show the figures after ``step`` of ``steps``."""
        text = (
            f"loss {figures['total']:.3f}  copies {figures['positive_similarity']:.2f}  "
            f"nearest other {figures['negative_similarity']:.2f}"
        )
        if not self._started:
            self._progress.start_task(self._training)
            self._started = True
        self._progress.update(
            self._training, completed=step, total=steps, figures=text, visible=True
        )
        if "micro_ap" in figures:
            self.say(
                f"step {step}: µAP {100 * figures['micro_ap']:.1f}, raw cosine "
                f"{100 * figures['micro_ap_raw']:.1f}"
            )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._progress.disable:
            self._progress.console.print(text)
