"""A copy-detection set on disk and the descriptors of its images.

``read_disc`` reads DISC2021 in the challenge's layout or the authors': lists of images, true pairs,
and the edits of a set made here. ``describe`` keeps descriptors in shards: resumable, shared by
processes, streamed.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from sscd_vec.predictions import GroundTruth, read_ground_truth

# Folder of references, of queries, and the files that may hold the ground truth, best first.
LAYOUTS = (
    ("references", "queries", ("dev_queries_groundtruth.csv", "public_ground_truth.csv")),
    ("val_ref", "val_query", ("val_groundtruth_matches.csv",)),
)
TRAINING = "training"
RECORDS = "query_edits.jsonl"
AT_A_TIME = " at a time"
ENDINGS = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Images:
    """Image files and their ids, in the order of the ids."""

    ids: tuple[str, ...]
    paths: tuple[str, ...]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.ids)

    def only(self, ids: Iterable[str]) -> "Images":
        """The images with these ids."""
        wanted = set(ids)
        kept = [pair for pair in zip(self.ids, self.paths, strict=True) if pair[0] in wanted]
        return Images(tuple(pair[0] for pair in kept), tuple(pair[1] for pair in kept))


@dataclass(frozen=True)
class DiscSet:
    """A copy-detection test.

    Attributes:
        references: What is searched.
        queries: The queries that are judged, with and without a match.
        training: Images to fit whitening and bias on; never references or queries.
        matches: True ``(query id, reference id)`` pairs.
    """

    references: Images
    queries: Images
    training: Images
    matches: frozenset[tuple[str, str]]

    @property
    def truth(self) -> GroundTruth:
        """Matches and judged queries as the metrics take them."""
        pairs = sorted(self.matches)
        return GroundTruth([q for q, _ in pairs], [r for _, r in pairs], self.queries.ids)


def read_disc(folder: Path) -> DiscSet:
    """Read a DISC2021 folder in either layout.

    A ground truth that lists queries without a reference says which queries are judged: the
    challenge's public part names half of them, and only those count. One that lists matches only
    (the authors') judges every query in the folder.

    Raises:
        FileNotFoundError: If the folder has neither layout.
        ValueError: If the ground truth names images that are not there.
    """
    for references, queries, truths in LAYOUTS:
        found = [folder / name for name in truths if (folder / name).exists()]
        if (folder / references).is_dir() and (folder / queries).is_dir() and found:
            truth = read_ground_truth(found[0])
            listed = list_images(folder / queries)
            if truth.judged is not None:
                listed = listed.only(truth.judged.tolist())
            disc = DiscSet(
                list_images(folder / references),
                listed,
                list_images(folder / TRAINING),
                frozenset(zip(truth.query_ids.tolist(), truth.reference_ids.tolist(), strict=True)),
            )
            _check(disc, found[0])
            return disc
    wanted = "; ".join(f"{r}/, {q}/, training/ and {' or '.join(t)}" for r, q, t in LAYOUTS)
    have = ", ".join(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ""
    raise FileNotFoundError(
        f"{folder}: expected {wanted}; it holds {have or 'nothing'}. Without DISC2021, make a set "
        "of your own photos with python benchmarks accuracy/make_disc_like"
    )


def list_images(folder: Path) -> Images:
    """The images of a folder; ids are the file names without their ending."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a folder of images")
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name.lower().endswith(ENDINGS))
    ids = tuple(os.path.splitext(name)[0] for name in names)
    return Images(ids, tuple(str(folder / name) for name in names))


def read_records(path: Path) -> dict[str, dict[str, object]]:
    """Read the queries' records by query id; a line cut off by an interruption is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["query_id"]] = record
    return found


def edits_of_queries(folder: Path) -> dict[str, list[str]]:
    """Names of the edits of each query of a set; empty for sets made by others."""
    return {
        query: [str(edit["name"]) for edit in cast(list[dict[str, object]], record["edits"])]
        for query, record in read_records(folder / RECORDS).items()
    }


def with_counts(edits: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The same with how many edits a query has as one more kind, ``"2 at a time"``."""
    return {query: [*names, f"{len(names)}{AT_A_TIME}"] for query, names in edits.items()}


def _check(disc: DiscSet, truth: Path) -> None:
    queries, references = set(disc.queries.ids), set(disc.references.ids)
    lost = [pair for pair in disc.matches if pair[0] not in queries or pair[1] not in references]
    if lost:
        raise ValueError(
            f"{truth}: {len(lost)} of {len(disc.matches)} pairs name an image that is not in the "
            f"folders, such as {sorted(lost)[0]}: the set is incomplete"
        )
    if not len(disc.training):
        raise ValueError("training/: no image; whitening and bias are fitted on it")


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
