"""The plot of ``--throughput``: each candidate's speed over the paper code's, stage by stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402 - the backend comes first


class Speed(Protocol):
    """What is plotted."""

    @property
    def stage(self) -> str:
        """Name of the stage."""
        ...

    @property
    def size(self) -> int:
        """Images or descriptors."""
        ...

    @property
    def candidate(self) -> str:
        """Who did it."""
        ...

    @property
    def ratio(self) -> float:
        """Speed over the paper code's."""
        ...


def plot(speeds: Sequence[Speed], path: Path) -> None:
    """Write horizontal bars, one row per stage and size."""
    rows = list(dict.fromkeys((speed.stage, speed.size) for speed in speeds))
    names = list(dict.fromkeys(speed.candidate for speed in speeds))
    palette = plt.get_cmap("tab10")
    colours = {name: palette(number) for number, name in enumerate(names)}
    figure, axis = plt.subplots(figsize=(8, 0.5 + 0.55 * len(rows)), layout="constrained")
    labelled: set[str] = set()
    for place, row in enumerate(rows):
        here = [speed for speed in speeds if (speed.stage, speed.size) == row]
        thick = 0.8 / len(here)
        for offset, speed in enumerate(here):
            y = place - 0.4 + thick * (offset + 0.5)
            label = None if speed.candidate in labelled else speed.candidate
            labelled.add(speed.candidate)
            axis.barh(y, speed.ratio, thick * 0.9, color=colours[speed.candidate], label=label)
    axis.axvline(1, color="0.4", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [f"{stage} {size:,}" for stage, size in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("speed over the paper code's (log scale)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path)
    plt.close(figure)
