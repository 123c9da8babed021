"""Descriptors of many images in shards on disk: resumable, shared by processes, streamed."""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from disc_layout import Images

Descriptors = NDArray[np.float32]
SHARD_ROWS = 4096
# Whole shards are not read at once by the search: one block of a million-row set is this many rows.
BLOCK_ROWS = 16384


class Describer(Protocol):
    """Turns image files into descriptors."""

    @property
    def fingerprint(self) -> str:
        """What distinguishes its descriptors from every other describer's."""
        ...

    def __call__(self, paths: Sequence[str]) -> Descriptors:
        """Descriptors ``(n, d)`` of image files."""
        ...


class Recipe(Protocol):
    """How to build a describer: small enough to send to another process."""

    def build(self) -> Describer:
        """Load the model."""
        ...


@dataclass(frozen=True)
class Shards:
    """The descriptors of a list of images, one ``.npy`` file per ``rows`` images."""

    files: tuple[Path, ...]
    count: int

    @property
    def dim(self) -> int:
        """Dimensions of the descriptors."""
        return int(np.load(self.files[0], mmap_mode="r").shape[1])

    def blocks(self, rows: int = BLOCK_ROWS) -> Iterator[Descriptors]:
        """The descriptors in order, about ``rows`` at a time."""
        waiting: list[Descriptors] = []
        held = 0
        for file in self.files:
            waiting.append(np.load(file))
            held += len(waiting[-1])
            if held >= rows:
                yield np.concatenate(waiting)
                waiting, held = [], 0
        if waiting:
            yield np.concatenate(waiting)

    def array(self) -> Descriptors:
        """All descriptors in memory."""
        return np.concatenate(list(self.blocks()))


def describe(
    images: Images,
    describer: Describer,
    folder: Path,
    *,
    recipe: Recipe | None = None,
    processes: int = 1,
    part: tuple[int, int] = (0, 1),
    shard_rows: int = SHARD_ROWS,
) -> Shards:
    """Compute what is missing of the descriptors of ``images`` and return all of them.

    Args:
        images: Image files.
        describer: The model.
        folder: Where this model's descriptors of this list are kept; see ``place``.
        recipe: Builds the model again in other processes; without it there are none.
        processes: How many processes share the work.
        part: ``(i, n)`` computes every n-th shard from i only, for several machines with a
            common disk. The result is complete when all parts have run.
        shard_rows: Images per shard.

    Raises:
        FileNotFoundError: If other parts have not computed their shards yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(images), shard_rows)
    files = [folder / f"{start:09d}.npy" for start in starts]
    jobs = []
    for number, (start, file) in enumerate(zip(starts, files, strict=True)):
        if number % part[1] == part[0] and not file.exists():
            jobs.append((images.paths[start : start + shard_rows], file))
    if recipe is None or processes == 1:
        for done, (paths, file) in enumerate(jobs, 1):
            _write(file, describer(paths))
            print(f"{folder.name}: shard {done} of {len(jobs)} written", flush=True)
    elif jobs:
        spawn = get_context("spawn")
        with ProcessPoolExecutor(processes, spawn, _load, (recipe, processes)) as pool:
            for done, _ in enumerate(pool.map(_describe_shard, jobs), 1):
                print(f"{folder.name}: shard {done} of {len(jobs)} written", flush=True)
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder}: {len(missing)} of {len(files)} shards are missing, first {missing[0]}: "
            "run the other parts, then this command again without --part"
        )
    return Shards(tuple(files), len(images))


def place(root: Path, fingerprint: str, split: str, images: Images) -> Path:
    """The cache folder of one model's descriptors of one list of images (names and sizes)."""
    listed = hashlib.sha256()
    for path in images.paths:
        listed.update(f"{path}\0{os.stat(path).st_size}\0".encode())
    model = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    return root / model / f"{split}-{len(images)}-{listed.hexdigest()[:12]}"


_describer: Describer | None = None


def _load(recipe: Recipe, processes: int) -> None:
    global _describer
    _describer = recipe.build()
    if "torch" in sys.modules:  # not every describer is a network
        sys.modules["torch"].set_num_threads(max(1, (os.cpu_count() or 1) // processes))


def _describe_shard(job: tuple[Sequence[str], Path]) -> None:
    paths, file = job
    if _describer is None:
        raise RuntimeError("the worker process was not initialised")
    _write(file, _describer(paths))


def _write(file: Path, descriptors: Descriptors) -> None:
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as opened:
        np.save(opened, descriptors)
    os.replace(partial, file)
