"""How far a reader walks through the package to follow one call: files and switches between them.

    python benchmarks release/walks                  # all five walks, and the size of the house
    python benchmarks release/walks encode --list    # and each switch by name
    python benchmarks release/walks --before 45d6416.json --record    # beside an earlier commit's

The earlier figures are what ``--json`` prints when this file runs there.

A walk runs one call under ``sys.setprofile``. A switch is a function of one file that calls a
function of another; the same pair counts once, however often it happens, as it is read once.
Everything a walk needs is prepared, and the call made once, before counting: imports do not count.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import results
import sscd_vec

PACKAGE = Path(sscd_vec.__file__).parent
DIM = 64
NAME = "walks"

Call = Callable[[], object]


@dataclass
class Walk:
    """The files a call passed, and the pairs of functions where it went from one to another."""

    files: set[str] = field(default_factory=set)
    switches: set[tuple[str, str]] = field(default_factory=set)

    def watch(self, frame: FrameType, event: str, _: object) -> None:
        """Take note of a call; the profile function."""
        file = _file(frame.f_code)
        if event != "call" or file is None:
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and _file(caller.f_code) is None:
            caller = caller.f_back
        if caller is not None and (other := _file(caller.f_code)) != file:
            origin = f"{other}:{caller.f_code.co_qualname}"
            self.switches.add((origin, f"{file}:{frame.f_code.co_qualname}"))


def follow(call: Call) -> Walk:
    """Make a call twice, and watch the second time: in this thread and in those it starts."""
    call()
    walk = Walk()
    threading.setprofile(walk.watch)
    sys.setprofile(walk.watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return walk


def house() -> dict[str, int]:
    """Modules, lines, and modules that only one other module imports."""
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    importers: dict[str, set[Path]] = {_module(path): set() for path in sources}
    for path, text in sources.items():
        for name in _imported(text) & importers.keys():
            importers[name].add(path)
    return {
        "modules": len(sources),
        "lines": sum(len(text.splitlines()) for text in sources.values()),
        "modules under 100 lines": sum(len(t.splitlines()) < 100 for t in sources.values()),
        "modules with one importer": sum(len(users) == 1 for users in importers.values()),
    }


@contextlib.contextmanager
def encode(folder: Path) -> Iterator[Call]:
    """From a name and an image file to a descriptor."""
    from sscd_vec import Encoder

    path = _images(folder, 1)[0]
    yield lambda: Encoder.from_pretrained(device="cpu").encode(path)


@contextlib.contextmanager
def faiss_search(folder: Path) -> Iterator[Call]:
    """From descriptors to matches, in a FAISS index."""
    from sscd_vec import FaissIndex

    descriptors = _descriptors(200)
    index = FaissIndex(_normalizer(descriptors))
    index.add([f"image {number}" for number in range(100)], descriptors[:100])
    yield lambda: index.search(descriptors[:3], k=5)


@contextlib.contextmanager
def milvus_search(folder: Path) -> Iterator[Call]:
    """From descriptors to matches, in a Milvus Lite collection."""
    from sscd_vec import MilvusCollection

    descriptors = _descriptors(200)
    with MilvusCollection(folder / "walk.db", "walk", _normalizer(descriptors)) as collection:
        collection.add([f"image {number}" for number in range(100)], descriptors[:100])
        yield lambda: collection.search(descriptors[:3], k=5)


@contextlib.contextmanager
def dedup(folder: Path) -> Iterator[Call]:
    """From a folder to groups of copies, by the command."""
    from sscd_vec.cli import main

    paths = _images(folder, 6)
    Image.open(paths[0]).save(folder / "copy.png")

    def run() -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"dedup ended with exit code {end.code}") from end

    words, sys.argv = sys.argv, ["sscd-vec", "dedup", str(folder), "--no-cache"]
    try:
        yield run
    finally:
        sys.argv = words


@contextlib.contextmanager
def fit(folder: Path) -> Iterator[Call]:
    """From a folder of images to a trained encoder: two steps."""
    from sscd_vec.trainer import TrainConfig, Trainer

    _images(folder, 24)
    config = TrainConfig(
        trunk="efficientnet_lite0", dim=16, size=32, inference_size=32, size_mode="square",
        batch=8, steps=2, optimizer="adamw", learning_rate=1e-3, holdout=0.0,
    )  # fmt: skip
    runs = iter(range(9))
    yield lambda: Trainer(config, device="cpu").fit(folder, folder.parent / f"run{next(runs)}")


WALKS = {
    "encode": encode,
    "faiss": faiss_search,
    "milvus": milvus_search,
    "dedup": dedup,
    "fit": fit,
}


def compared(
    now: dict[str, dict[str, int]], before: dict[str, dict[str, int]]
) -> dict[str, list[dict[str, object]]]:
    """The figures as two tables beside those of an earlier commit: the walks and the house."""
    walks: list[dict[str, object]] = [
        {
            "call": (WALKS[name].__doc__ or "").rstrip("."),
            "files before": before[name]["files"],
            "switches before": before[name]["switches"],
            "files": now[name]["files"],
            "switches": now[name]["switches"],
        }
        for name in WALKS
    ]
    size: list[dict[str, object]] = [
        {"package": what, "before": before["house"][what], "now": count}
        for what, count in now["house"].items()
    ]
    return {"walks": walks, "house": size}


def main() -> None:
    """Print a table of walks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("walks", nargs="*", choices=[*WALKS, []], help="all by default")
    parser.add_argument("--list", action="store_true", help="print every file and switch too")
    parser.add_argument("--json", action="store_true", help="print figures for programs")
    parser.add_argument("--before", type=Path, help="what --json printed at an earlier commit")
    parser.add_argument("--record", action="store_true", help="write results/walks.json")
    options = parser.parse_args()
    if options.record and (options.before is None or options.walks):
        parser.error("--record: expected --before and all walks")
    figures: dict[str, dict[str, int]] = {"house": house()}
    for name in options.walks or WALKS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "images")
            folder.mkdir()
            with contextlib.redirect_stderr(io.StringIO()), WALKS[name](folder) as call:
                walk = follow(call)
        rooms = {(a, b) for a, b in walk.switches if _room(a) != _room(b)}
        figures[name] = {
            "files": len(walk.files), "switches": len(walk.switches), "between rooms": len(rooms)
        }  # fmt: skip
        if options.list:
            print(f"\n{name}", *sorted(walk.files), sep="\n  ")
            print("", *(f"{a} -> {b}" for a, b in sorted(walk.switches)), sep="\n  ")
    if options.json:
        print(json.dumps(figures))
        return
    if options.record:
        print(results.write(NAME, compared(figures, json.loads(options.before.read_text()))))
    for name, counts in figures.items():
        print(f"{name:8}", ", ".join(f"{count} {what}" for what, count in counts.items()))


def _file(code: CodeType) -> str | None:
    """The package's file that holds a function, relative to it; None for any other code."""
    if not code.co_filename.startswith(f"{PACKAGE}{os.sep}") or code.co_name == "<module>":
        return None
    return os.path.relpath(code.co_filename, PACKAGE)


def _room(place: str) -> str:
    return place.split(":")[0].split(os.sep)[0]


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _images(folder: Path, count: int) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = [folder / f"{number:03}.png" for number in range(count)]
    for path in paths:
        small = generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((96, 72), Image.Resampling.BICUBIC).save(path)
    return paths


def _descriptors(count: int) -> NDArray[np.float32]:
    rows = np.random.default_rng(0).normal(size=(count, DIM)).astype(np.float32)
    unit: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def _normalizer(descriptors: NDArray[np.float32]) -> "sscd_vec.Normalizer":
    from sscd_vec import Normalizer

    return Normalizer.fit(descriptors[100:])


if __name__ == "__main__":
    main()
