"""Say which recorded figures are stale, and which fall short of what we aim for.

    python benchmarks/check.py

A record is stale if it was made with another encoder than the one in the box, or does not say with
which. A bar is the least that a figure should be; larger is better for all of them.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import RESULTS

# Records whose figures depend on the model in the box.
OF_THE_MODEL = (
    "dedup_photos",
    "disc_like",
    "domains",
    "heatmap",
    "model_speed",
    "overview",
    "serve_load",
    "threshold",
    "thresholds",
    "throughput",
    "tiles",
    "verification",
    "verification_time",
    "verification_unseen",
)


@dataclass(frozen=True)
class Bar:
    """The least a figure should be: ``path`` leads to it, names and row conditions in turn."""

    record: str
    path: tuple[str, ...]
    least: float

    def __str__(self) -> str:
        """Which figure."""
        return f"{self.record}: {', '.join(self.path)}"


BARS = (
    Bar("model_speed", ("over_resnet50_by_our_encoder",), 5.0),
    Bar("encoder", ("forward 288x288, batch 32", "torch, times the reference"), 1.8),
    Bar("encoder", ("forward 288x288, batch 32", "openvino, times the reference"), 2.6),
    Bar("encoder", ("folder to descriptors, 1000 photos", "torch, times the reference"), 2.5),
    Bar("kernels", ("cpu", "speedup"), 4.1),
    Bar("overview", ("model=**sscd_lite0** (in the box)", "µAP"), 80.0),
    Bar("trainer", ("speedup: loss",), 1.0),  # of a small batch, over the plain N x N form
)


def main() -> None:
    """Print what is stale and what falls short; exit with 1 if there is any."""
    from sscd_vec.encoder import Encoder

    lines = [*stale(Encoder.from_pretrained().fingerprint), *short()]
    print("\n".join(lines) or "every record is of the model in the box, every bar is met")
    sys.exit(bool(lines))


def stale(fingerprint: str, folder: Path = RESULTS) -> Iterator[str]:
    """A line for each record of the model that was made with another one."""
    for name in OF_THE_MODEL:
        record = _read(folder, name)
        if record is None:
            yield f"{name}: there is no such record; run its benchmark"
        elif record.get("encoder") is None:
            yield f"{name}: does not say which encoder it was made with; run it again"
        elif record["encoder"] != fingerprint:
            yield f"{name}: made with another encoder ({record['encoder'][:12]}); run it again"


def short(bars: Sequence[Bar] = BARS, folder: Path = RESULTS) -> Iterator[str]:
    """A line for each figure below its bar."""
    for bar in bars:
        record = _read(folder, bar.record)
        figure = None if record is None else _at(record["figures"], bar.path)
        if figure is None:
            yield f"{bar}: expected at least {bar.least:g}, found no figure"
        elif figure < bar.least:
            yield f"{bar}: expected at least {bar.least:g}, got {figure:g}"


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _at(figures: object, path: Sequence[str]) -> float | None:
    """The figure a path leads to: a key of a record, or ``key=value`` for one row of several."""
    for step in path:
        if isinstance(figures, list):
            key, _, value = step.partition("=")
            figures = next((row for row in figures if str(row.get(key)) == value), None)
        elif isinstance(figures, dict):
            figures = figures.get(step)
    return float(figures) if isinstance(figures, int | float) else None


if __name__ == "__main__":
    main()
