"""Attack FAISS indexes: threads that add and search one at once, and altered files from strangers.

- ``threads``: four threads add and remove, three search, one saves, all on one index, in a process
  of its own. Afterwards every id must find its own vector, in memory and in the file.
- ``altered``: bytes of a saved index are changed at random, most of them in its head, and its
  sidecar is forged to match, as a stranger would. Another process opens and searches the file. It
  must answer or refuse, read or mapped; if it dies, that is a crash.

    python benchmarks faults/indexes --rounds 5 --files 180
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import results
from sscd_vec.adapters.faiss import FaissIndex, IndexFileError
from sscd_vec.adapters.faiss.settings import KEY, ends_digest, sidecar_path
from sscd_vec.normalize import Normalizer

CAMPAIGNS = ("threads", "altered")
FACTORIES = ("Flat", "HNSW16", "IVF1,Flat")
ALTERED = ("Flat", "HNSW8", "IVF8,Flat", "IVF4,PQ6x4", "PQ6x4,RFlat")
WRITERS, SEARCHERS, TURNS = 4, 3, 9
DIM, ALTERED_DIM, ALTERED_ROWS = 128, 16, 300
HEAD = 200  # bytes that say what an index is
PATIENCE = 900.0
Float32 = NDArray[np.float32]


def descriptors(rows: int, dim: int, seed: int) -> Float32:
    """Made-up unit descriptors."""
    made = np.random.default_rng(seed).standard_normal((rows, dim), dtype=np.float32)
    unit: Float32 = made / np.linalg.norm(made, axis=1, keepdims=True)
    return unit


# ------------------------------------------------------------------ threads


class Together:
    """Threads on one index: writers with rows of their own, searchers, and one that saves."""

    def __init__(self, factory: str, path: Path) -> None:
        """Make an empty index."""
        self._factory, self._path = factory, path
        self._rows = 120 if "HNSW" in factory else 600
        self._index = FaissIndex(Normalizer.identity(DIM), factory, compact_at=0.01)
        if not self._index.index.is_trained:
            self._index.train(descriptors(self._rows, DIM, 99))
        self._done = threading.Event()
        self._failures: list[str] = []

    def run(self) -> None:
        """All at once, then look.

        Raises:
            AssertionError: If a thread failed, or an id does not find its own vector.
        """
        writers = [self._thread(lambda w=w: self._write(w)) for w in range(WRITERS)]  # type: ignore[misc]
        others = [self._thread(self._search) for _ in range(SEARCHERS)]
        others.append(self._thread(self._save))
        for thread in writers:
            thread.join()
        self._done.set()
        for thread in others:
            thread.join()
        if self._failures:
            raise AssertionError(self._failures)
        self._check(self._index)
        self._index.save(self._path)
        self._check(FaissIndex.open(self._path, self._index.normalizer))

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._failures.append(repr(error))
                self._done.set()

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def _write(self, writer: int) -> None:
        for turn in range(TURNS):
            ids = [f"{writer}-{turn}-{i}" for i in range(self._rows)]
            self._index.add(ids, descriptors(self._rows, DIM, 1000 * writer + turn))
            if turn % 3 == 2:
                self._index.remove(ids[::2])

    def _search(self) -> None:
        queries = descriptors(50, DIM, 0)
        while not self._done.is_set():
            if len(self._index.search(queries, 5)) != len(queries):
                raise AssertionError("a search lost queries")
            self._index.range_search(queries[:5], 0.9)
            self._index.present(["0-0-1", "none"])

    def _save(self) -> None:
        while not self._done.is_set():
            self._index.save(self._path)
            time.sleep(0.05)

    def _check(self, index: FaissIndex) -> None:
        kept = [
            (writer, turn, i)
            for writer in range(WRITERS)
            for turn in range(TURNS)
            for i in range(self._rows)
            if turn % 3 != 2 or i % 2
        ]
        names = {f"{writer}-{turn}-{i}" for writer, turn, i in kept}
        if len(index) != len(names) or index.present(list(names)) != names:
            raise AssertionError(f"{len(index)} rows for {len(names)} ids")
        chosen = kept[:: len(kept) // 300]
        own = [descriptors(self._rows, DIM, 1000 * w + turn)[i] for w, turn, i in chosen]
        found = index.search(np.stack(own), 1)
        wrong = sum(
            row[0].id != f"{w}-{turn}-{i}" for row, (w, turn, i) in zip(found, chosen, strict=True)
        )
        if wrong > (0.05 if "HNSW" in self._factory else 0) * len(chosen):
            raise AssertionError(f"{wrong} of {len(chosen)} ids are out of step with their vectors")


def run_threads(factory: str, path: Path) -> str:
    """One round in a process of its own; what went wrong, or nothing."""
    command = [*results.RUN, "faults/indexes", "--together", factory, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if ended.returncode < 0:
        return f"killed by signal {-ended.returncode}"
    return ended.stderr[-2000:] if ended.returncode else ""


# ------------------------------------------------------------------ altered files


def forge(path: Path, content: bytes) -> None:
    """Replace an index file, and make its sidecar say that this is how it was saved."""
    path.write_bytes(content)
    beside = sidecar_path(path)
    raw = beside.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    about = json.loads(header["__metadata__"][KEY])
    about |= {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "ends": ends_digest(path),
    }
    header["__metadata__"][KEY] = json.dumps(about)
    text = json.dumps(header).encode()
    beside.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def altered(raw: bytes, seed: int) -> bytes:
    """An index file with three bytes changed: its vectors may be anything, its head may not."""
    chance, content = np.random.default_rng(seed), bytearray(raw)
    for _ in range(3):
        end = min(HEAD, len(raw)) if chance.random() < 0.7 else len(raw)
        content[int(chance.integers(end))] = int(chance.integers(256))
    return bytes(content)


def run_altered(factory: str, seeds: range, folder: Path) -> Counter[str]:
    """Let another process open one altered file after another; count what became of it."""
    path = folder / "a.faiss"
    rows = descriptors(ALTERED_ROWS, ALTERED_DIM, 0)
    made = FaissIndex(Normalizer.identity(ALTERED_DIM), factory)
    if not made.index.is_trained:
        made.train(rows)
    made.add(range(ALTERED_ROWS), rows)
    made.save(path)
    raw = path.read_bytes()
    told: Counter[str] = Counter()
    reader: subprocess.Popen[str] | None = None
    for seed in seeds:
        forge(path, altered(raw, seed))
        if reader is None:
            command = [*results.RUN, "faults/indexes", "--read"]
            reader = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write(f"{seed % 2} {path}\n")
        reader.stdin.flush()
        answer = reader.stdout.readline().strip()
        told[answer or "crashed"] += 1
        if not answer:
            reader.communicate()
            reader = None
    if reader is not None:
        reader.communicate()
    return told


def read_files() -> Iterator[str]:
    """Open and search the files that standard input names; say what came of each."""
    queries = descriptors(50, ALTERED_DIM, 1)
    for line in sys.stdin:
        mmap, _, path = line.strip().partition(" ")
        try:
            rules = Normalizer.identity(ALTERED_DIM)
            index = FaissIndex.open(path, rules, mmap=mmap == "1")
            index.search(queries, 10)
            index.range_search(queries[:5], 0.5)
            yield "answered"
        except IndexFileError:
            yield "refused"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaigns", nargs="+", choices=CAMPAIGNS, default=CAMPAIGNS)
    parser.add_argument("--rounds", type=int, default=5, help="of threads, per index type")
    parser.add_argument("--files", type=int, default=180, help="altered, per index type")
    parser.add_argument("--together", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.together:
        Together(options.together[0], Path(options.together[1])).run()
        return
    if options.read:
        for answer in read_files():
            print(answer, flush=True)
        return
    figures: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.faiss"
        if "threads" in options.campaigns:
            for factory in FACTORIES:
                faults = [f for _ in range(options.rounds) if (f := run_threads(factory, path))]
                figures.append({"index": factory, "rounds": options.rounds, "faults": len(faults)})
                print(figures[-1], *faults, flush=True)
            results.write("faults_threads", figures)
        figures = []
        if "altered" in options.campaigns:
            for factory in ALTERED:
                told = run_altered(factory, range(options.files), Path(folder))
                counts = {name: told[name] for name in ("answered", "refused", "crashed")}
                figures.append({"index": factory, "altered_files": options.files, **counts})
                print(figures[-1], flush=True)
            results.write("faults_altered", figures)


if __name__ == "__main__":
    main()
