"""A FAISS bank of millions, built in parts, merged and mapped: recall, speed, memory, disk."""

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scale_vectors import BLOCK, COPIES, Float32, Int64, Real
from speed.measure import peak_mib
from sscd_vec import FaissIndex, Normalizer
from sscd_vec.adapters.faiss import merge_indexes

PART_ROWS = 4 * BLOCK
QUERIES, FROM_BLOCKS, BATCH, ROUNDS = 1000, 40, 100, 5
TRAINED_PER_LIST = 20
COMPARED = 8192  # rows of a block that are compared with all queries at a time


@dataclass(frozen=True)
class Job:
    """What a process needs to build a part.

    Attributes:
        real: What vectors are drawn around.
        count: Rows of the whole bank.
        folder: Where the trained index and the parts lie.
    """

    real: Real
    count: int
    folder: Path

    @property
    def rules(self) -> Normalizer:
        """The shipped normalizer without whitening: what is drawn is whitened already."""
        return replace(Normalizer.from_pretrained(), whitening=None)

    def queries(self) -> tuple[Float32, Int64]:
        """Copies of rows from all over the bank, and which rows."""
        blocks = -(-self.count // BLOCK)
        chosen = np.unique(np.linspace(0, blocks - 1, FROM_BLOCKS).astype(int))
        made, originals = [], []
        for block in chosen.tolist():
            begin = block * BLOCK
            rows, around = self.real.rows(begin, min(begin + BLOCK, self.count))
            has = np.flatnonzero(around < self.real.edited)[: -(-QUERIES // len(chosen))]
            which = np.arange(len(has)) % COPIES
            for copy in range(COPIES):
                some = has[which == copy]
                made.append(self.real.copies_of(rows[some], around[some], copy))
                originals.append(begin + some)
        return np.concatenate(made), np.concatenate(originals)

    def __call__(self, begin: int) -> tuple[Path, float]:
        """Build the part from row ``begin`` on, unless it is there; its path and CPU seconds.

        The best match of every query among its rows is found on the way and kept beside it.
        """
        path, answers = self.folder / f"part-{begin}", self.folder / f"answers-{begin}.npz"
        if answers.exists():
            with np.load(answers) as kept:
                return path, float(kept["seconds"])
        rules = self.rules
        queries = np.load(self.folder / "queries.npy")
        best = np.full(len(queries), -np.inf, np.float32)
        right = np.zeros(len(queries), np.int64)
        part, seconds = FaissIndex.open(self.folder / "trained", rules), 0.0
        end = min(self.count, begin + PART_ROWS)
        for start in range(begin, end, BLOCK):
            rows, _ = self.real.rows(start, min(start + BLOCK, end))
            ids = np.arange(start, start + len(rows))
            seconds += cpu_seconds(partial(part.add, ids, rows))[0]
            for at in range(0, len(rows), COMPARED):
                scores = queries @ rules.references(rows[at : at + COMPARED]).T
                top = scores.argmax(1)
                value = scores[np.arange(len(queries)), top]
                better = value > best
                best[better], right[better] = value[better], start + at + top[better]
        seconds += cpu_seconds(partial(part.save, path))[0]
        np.savez(answers, seconds=seconds, best=best, right=right)
        return path, seconds


def measure(
    real: Real, count: int, codes: str, lists: int, probes: int, candidates: int, folder: Path
) -> dict[str, Any]:
    """Build a bank in parts by two processes, merge it, map it, and look for planted copies.

    What an interrupted run left in ``folder`` is used again.
    """
    factory = f"IVF{lists},{codes},Refine(SQfp16)"
    job, started = Job(real, count, folder), time.perf_counter()
    rules = job.rules
    queries, originals = job.queries()
    np.save(folder / "queries.npy", rules.queries(queries))
    training = 0.0
    if not (folder / "trained").exists():
        sample = real.rows(0, min(count, TRAINED_PER_LIST * lists))[0]
        training = cpu_seconds(lambda: FaissIndex(rules, factory).train(sample).save(
            folder / "trained"))[0]  # fmt: skip
    parts, adding = _build(job)
    merging = 0.0
    if not (folder / "bank").exists():
        merging = cpu_seconds(lambda: merge_indexes(parts, folder / "bank", rules))[0]
    building, peak = time.perf_counter() - started, peak_mib()
    best, right = _exhaustive(folder, parts)
    searched = _in_new_process(_search, folder, queries, probes, candidates)
    ids, scores = searched.pop("ids"), searched.pop("scores")
    first, same = right == originals, ids == right  # what exhaustive search ranks first
    called = first & (best >= rules.threshold("search", count))  # and would call a copy
    return {
        "images": count,
        "factory": factory,
        "lists_looked_into": probes,
        "candidates_rescored": candidates,
        "planted": len(originals),
        "ranked_first_by_exhaustive": int(first.sum()),
        "of_these_found": round(float(same[first].mean()), 4),
        "above_threshold": int(called.sum()),
        "of_these_above_threshold_found": round(float(same[called].mean()), 4),
        "largest_score_error": float(np.abs(scores - best)[same].max()),
        **searched,
        "training_cpu_seconds": round(training, 1),
        "adding_cpu_seconds": round(adding, 1),
        "merging_cpu_seconds": round(merging, 1),
        "building_wall_seconds": round(building),
        "merging_peak_mib": round(peak),
        "bytes_on_disk": sum(f.stat().st_size for f in folder.glob("bank*")),
    }


def _build(job: Job) -> tuple[list[Path], float]:
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        done = pool.map(job, range(0, job.count, PART_ROWS), chunksize=1)
    return [path for path, _ in done], sum(seconds for _, seconds in done)


def _exhaustive(folder: Path, parts: list[Path]) -> tuple[Float32, Int64]:
    """Score and row of each query's best match among all rows."""
    kept = [np.load(folder / f"{part.name.replace('part', 'answers')}.npz") for part in parts]
    best = np.stack([each["best"] for each in kept])
    which = best.argmax(0)
    columns = np.arange(best.shape[1])
    return best[which, columns], np.stack([each["right"] for each in kept])[which, columns]


def _in_new_process(run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    """Run something where nothing else has taken memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, arguments)


def _search(folder: Path, queries: Float32, probes: int, candidates: int) -> dict[str, Any]:
    """Search as a user would: the bank mapped, 100 queries at a time."""
    rules = replace(Normalizer.from_pretrained(), whitening=None)
    parameters = {"nprobe": probes, "k_factor_rf": candidates}
    index = FaissIndex.open(folder / "bank", rules, mmap=True, parameters=parameters)
    batches = [queries[b : b + BATCH] for b in range(0, len(queries), BATCH)]
    found = [index.search(batch, k=1) for batch in batches]  # and warms the file's pages
    rounds, walls = [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        rounds.append(cpu_seconds(lambda: [index.search(b, k=1) for b in batches])[0])
        walls.append(time.perf_counter() - begin)
    matches = [m for each in found for m in each]
    return {
        "ids": np.array([m[0].id if len(m) else -1 for m in matches]),
        "scores": np.array([m[0].score if len(m) else np.nan for m in matches]),
        "queries_per_second": round(len(queries) / min(walls), 1),
        "queries_per_cpu_second": round(len(queries) / float(np.median(rounds)), 1),
        "memory": memory(),
    }


def cpu_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of all threads, which a busy machine changes little, and what was returned."""
    begin = time.process_time()
    result = run()
    return time.process_time() - begin, result


def memory() -> dict[str, int]:
    """Of this process in MiB: its own, what is mapped from files, and the peak of both."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
    own, mapped = (int(fields[name]) // 1024 for name in ("RssAnon", "RssFile"))
    return {"own_mib": own, "mapped_mib": mapped, "peak_mib": round(peak_mib())}
