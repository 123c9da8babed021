"""Stale records and figures below their bar are named."""

import json
from pathlib import Path
from typing import Any

from check import OF_THE_MODEL, Bar, short, stale


def record(folder: Path, name: str, **fields: Any) -> None:  # noqa: ANN401
    (folder / f"{name}.json").write_text(json.dumps({"figures": {}, **fields}))


def test_records_of_another_encoder_are_stale(tmp_path: Path) -> None:
    for name in OF_THE_MODEL:
        record(tmp_path, name, encoder="this one")
    assert list(stale("this one", tmp_path)) == []
    record(tmp_path, "tiles", encoder="another")
    record(tmp_path, "heatmap")
    (tmp_path / "overview.json").unlink()
    lines = "\n".join(stale("this one", tmp_path))
    assert lines.count("\n") == 2
    assert "tiles: made with another encoder" in lines
    assert "heatmap: does not say" in lines
    assert "overview: there is no such record" in lines


def test_figures_below_their_bar_are_named(tmp_path: Path) -> None:
    record(tmp_path, "speed", figures={"step": 0.9, "rows": [{"name": "a b", "ratio": 3.0}]})
    bars = [
        Bar("speed", ("step",), 1.0),
        Bar("speed", ("rows", "name=a b", "ratio"), 2.5),
        Bar("speed", ("rows", "name=c", "ratio"), 2.5),
        Bar("none", ("step",), 1.0),
    ]
    assert list(short(bars, tmp_path)) == [
        "speed: step: expected at least 1, got 0.9",
        "speed: rows, name=c, ratio: expected at least 2.5, found no figure",
        "none: step: expected at least 1, found no figure",
    ]
