"""A progress bar on standard error, where somebody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress_bar(
    title: str, total: int | None, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Give a function that takes the number of items newly done.

    Args:
        title: What is being done.
        total: How many items there are; None if nobody knows yet.
        show: True or False; None shows the bar on a terminal and in a notebook only.
    """
    notebook = _in_notebook()
    if not (sys.stderr.isatty() or notebook if show is None else show):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    # Rich draws in a notebook with ipywidgets; without them one line that rewrites itself does.
    widgets = notebook and find_spec("ipywidgets") is not None
    console = Console(
        stderr=True,
        force_jupyter=widgets,
        force_terminal=True if notebook and not widgets else None,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


def _in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel (which loads IPython itself)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
