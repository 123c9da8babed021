"""Index files from elsewhere: read by a child process first, once.

A hash in a sidecar shows damage, not malice: whoever alters an index can write its sidecar too, and
FAISS may crash, or take all memory, on a file that lies about itself. So a file that this user has
neither saved nor inspected on this machine is read, walked through and searched in a child process
with limited memory and time. Files that passed are remembered with what the file system knows about
them (inode, size, times) in the user's cache, so each is inspected once.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.faiss.settings import IndexFileError, Settings, States, states
from sscd_vec.adapters.faiss.types import innermost
from sscd_vec.files import write_whole
from sscd_vec.locks import locked
from sscd_vec.models import cache_folder

MARKS = "inspected.json"
REMEMBERED = 512  # files, the latest
SOUND = "sound"
SEARCHES = 8  # of the child, with random vectors
SECONDS, BYTES_PER_SECOND = 120.0, 20e6  # a child may take, beside its file's share
EXTRA_MEMORY = 2 << 30  # bytes a child may take beside three times its file

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------- what was inspected


def is_known(path: Path) -> bool:
    """Whether the file was saved or inspected here, and has not changed since."""
    return _marks().get(str(path.resolve())) == _mark(states(path))


def remember(path: Path, seen: States) -> None:
    """Remember that the file needs no inspection as long as its ``states`` are those ``seen``."""
    if _marks().get(str(path.resolve())) == _mark(seen):
        return
    place = cache_folder() / MARKS
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_name(place.name + ".lock"), wait=5.0):
            marks = _marks()
            marks.pop(str(path.resolve()), None)
            marks[str(path.resolve())] = _mark(seen)
            write_whole(place, json.dumps(dict(list(marks.items())[-REMEMBERED:])))
    except OSError as error:  # a cache that cannot be written costs an inspection per opening
        logger.info("%s: its inspection cannot be remembered (%s)", path, error)


def _mark(seen: States) -> list[Any]:
    return [None if state is None else list(state) for state in seen.values()]


def _marks() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        marks = json.loads((cache_folder() / MARKS).read_text("utf-8"))
        if isinstance(marks, dict):
            return marks
    return {}


# ---------------------------------------------------------------------- the child process


def inspect(path: Path, settings: Settings, mmap: bool) -> None:
    """Read an index file in a child process.

    Raises:
        IndexFileError: If it crashes FAISS, takes too much, or has an inconsistent structure.
    """
    if getattr(sys, "frozen", False) or not sys.executable:  # would start the program itself
        raise IndexFileError(
            f"{path}: not saved here, and there is no Python to inspect it with; open it with "
            "trusted=True if you know who made it"
        )
    logger.info("%s: not saved here, so a child process reads it first", path)
    call = "from sscd_vec.adapters.faiss.inspection import main; main()"
    arguments = [str(path), settings.factory, "mmap" if mmap else ""]
    root = str(Path(__file__).parents[3])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }
    limit = SECONDS + path.stat().st_size / BYTES_PER_SECOND
    try:
        ended = subprocess.run(
            [sys.executable, "-c", call, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
        )
        verdict = _verdict(ended)
    except subprocess.TimeoutExpired:
        verdict = f"no end after {limit:.0f} s"
    if verdict != SOUND:
        raise IndexFileError(
            f"{path}: FAISS must not read this file here ({verdict}); it was altered after it was "
            "saved, or a newer FAISS wrote it. Get it from where it was made, or build it again"
        )


def _verdict(ended: subprocess.CompletedProcess[bytes]) -> str:
    if ended.returncode < 0:
        return f"FAISS crashed with signal {-ended.returncode}"
    said = ended.stdout.decode(errors="replace").strip()
    return said or ended.stderr.decode(errors="replace")[-500:] or f"code {ended.returncode}"


def main() -> None:
    """The child: say that it is sound, or what is wrong."""
    path, factory, mmap = sys.argv[1:]
    _limit_memory(3 * Path(path).stat().st_size + EXTRA_MEMORY)
    from sscd_vec.adapters.faiss.files import read_index  # it imports this module

    faiss.omp_set_num_threads(1)
    try:
        check(read_index(Path(path), bool(mmap), factory), Path(path))
    except (ValueError, RuntimeError, MemoryError) as error:
        sys.stdout.write(f"{type(error).__name__}: {str(error)[:500]}")
        sys.exit(1)
    sys.stdout.write(SOUND)


def _limit_memory(extra: int) -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def check(index: faiss.Index, path: Path) -> None:
    """Walk through an index and search it.

    Raises:
        ValueError: If rows, lists or graphs point outside of what is there.
    """
    for part in _parts(index):
        for examine in (_check_lists, _check_graph):
            examine(part, path)
    vectors = np.random.default_rng(0).normal(size=(SEARCHES, index.d)).astype(np.float32)
    if index.ntotal:
        _, rows = index.search(vectors, min(10, index.ntotal))
        _require(bool((rows < index.ntotal).all()), "a search returns rows that do not exist")


def _parts(index: Any) -> Iterator[Any]:  # noqa: ANN401  (types differ in what they have)
    """An index and all indexes inside of it."""
    inner: Any = innermost(index)
    yield inner
    for name in ("base_index", "refine_index", "quantizer", "storage"):
        part = getattr(inner, name, None)
        if isinstance(part, faiss.Index):
            yield from _parts(part)


def _check_lists(part: Any, path: Path) -> None:  # noqa: ANN401
    if not isinstance(part, faiss.IndexIVF) or part.invlists is None:
        return
    lists: Any = faiss.downcast_InvertedLists(part.invlists)
    if isinstance(lists, faiss.OnDiskInvertedLists):
        # Lists that are mapped from the index file itself have no name.
        own = lists.filename in ("", str(path))
        _require(own, f"its lists are in another file, {lists.filename}")
    _require(lists.nlist == part.nlist, "its lists are not as many as it says")
    for i in range(lists.nlist):
        size = lists.list_size(i)
        if size:
            rows = faiss.rev_swig_ptr(lists.get_ids(i), size)
            _require_rows(rows, 0, part.ntotal, "a list")


def _check_graph(part: Any, _: Path) -> None:  # noqa: ANN401
    graph = getattr(part, "hnsw", None)
    if graph is None or not part.ntotal:
        return
    neighbours, offsets, levels = (
        faiss.rev_swig_ptr(vector.data(), vector.size())
        for vector in (graph.neighbors, graph.offsets, graph.levels)
    )
    _require(len(offsets) == part.ntotal + 1 and len(levels) == part.ntotal, "a node is missing")
    _require(bool((offsets[1:] >= offsets[:-1]).all()), "its nodes overlap")
    _require(int(offsets[0]) == 0 and int(offsets[-1]) == len(neighbours), "a node has no end")
    _require_rows(neighbours, -1, part.ntotal, "its graph")
    depth = graph.cum_nneighbor_per_level.size()
    _require_rows(levels, 1, depth, "a level")
    _require(0 <= graph.entry_point < part.ntotal, "its graph begins nowhere")
    _require(0 <= graph.max_level < int(levels[graph.entry_point]), "its graph has no such level")
    widths = faiss.vector_to_array(graph.cum_nneighbor_per_level)
    reach: NDArray[Any] = widths[levels]
    _require(bool((offsets[1:] - offsets[:-1] == reach).all()), "a node has other neighbours")


def _require_rows(rows: NDArray[Any], lowest: int, end: int, what: str) -> None:
    inside = not len(rows) or (int(rows.min()) >= lowest and int(rows.max()) < end)
    _require(inside, f"{what} points outside of the index")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
