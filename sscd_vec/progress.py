"""One progress bar on standard error, shown on a terminal or in a notebook."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

Unit = Literal["items", "bytes"]
T = TypeVar("T")


class ProgressBar:
    """A running bar; every call does nothing where no bar is shown."""

    def __init__(self, bar: "Progress | None" = None, task: "TaskID | None" = None) -> None:
        """Drive ``task`` of ``bar``, or nothing."""
        self._bar, self._task = bar, task

    def advance(self, count: int = 1) -> None:
        """Count items as done."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)

    def update(
        self,
        completed: int | None = None,
        total: int | None = None,
        *,
        title: str | None = None,
        figures: str | None = None,
    ) -> None:
        """Set what is done, out of how many, under which title, with which figures behind it."""
        if self._bar is None or self._task is None:
            return
        self._bar.update(self._task, completed=completed, total=total, description=title)
        if figures is not None:
            self._bar.update(self._task, figures=figures)

    def track(self, items: Sequence[T], title: str) -> Iterator[T]:
        """Begin again under a title, and count each of the items as done once it is used."""
        self.update(0, len(items), title=title)
        for item in items:
            yield item
            self.advance()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)


@contextmanager
def progress_bar(
    title: str, total: int | None = None, show: bool | None = None, *, unit: Unit = "items"
) -> Iterator[ProgressBar]:
    """Show a bar while the block runs.

    Args:
        title: What is being done.
        total: How many items (or bytes) there are; None while that is unknown.
        show: True or False; None shows the bar on a terminal and in a notebook only.
        unit: What is counted.
    """
    if not is_watched() if show is None else not show:
        yield ProgressBar()
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (
        (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    )
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        console=_console(),
    ) as bar:
        yield ProgressBar(bar, bar.add_task(title, total=total, figures=""))


def is_watched() -> bool:
    """Whether a person sees standard error: a terminal or a notebook."""
    return sys.stderr.isatty() or _in_notebook()


def _console() -> "Console":
    from rich.console import Console

    # Rich draws in a notebook with ipywidgets; without them one line that rewrites itself does.
    notebook = _in_notebook()
    widgets = notebook and find_spec("ipywidgets") is not None
    return Console(
        stderr=True,
        force_jupyter=widgets,
        force_terminal=True if notebook and not widgets else None,
    )


def _in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel (which loads IPython itself)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
