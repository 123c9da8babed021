"""What the adapters cost over the libraries they wrap: search, add, and the memory of a big build.

Interleaved in one run, as ratios. Four ways to do the same:

- ``raw``: FAISS or pymilvus alone, given vectors that are transformed already. Milvus is asked for
  the same fields at the same consistency.
- ``native`` (FAISS only): FAISS given the same descriptors, whitened by its own transforms
  (``IndexPreTransform``), as a program without string ids, checks or score normalization has it.
- ``by hand``: what one writes around it to get the same answers: whitening and lift in numpy, and
  on FAISS, which knows only row numbers, a list and a dict of string ids. No check of anything.
- the adapter: ids and descriptors in, matches out; everything included.

Every round has another order, and raw is timed twice: how far ``raw_vs_itself`` is from 1 is how
far any of these ratios can be trusted. Searches are compared with ``raw`` (at most 1.05x of FAISS
and 1.10x of pymilvus, 100 queries at a time), the search of the background for the bias apart. A
small graph may exceed that: whitening alone is more than a twentieth of its search. Adding is
compared with what does the same work, ``native`` and ``by hand`` (at least 0.9x of their rates),
and not with ``raw``, which only copies what comes into a flat index, in less time than the matrix
product of whitening takes. The transform is reported on its own for both, and the adapter without
it (``excluding whitening``) for adding.

    python benchmarks speed/search --parts build faiss lite server
"""

import argparse
import copy
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import faiss
import numpy as np
from numpy.typing import NDArray
from pymilvus import MilvusClient

import results
from faults.milvus_server import running
from speed.measure import Timing, interleaved, peak_mib, resident_mib
from sscd_vec.adapters.arguments import Batch
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.milvus import MilvusCollection
from sscd_vec.adapters.products import by_faiss
from sscd_vec.normalize import Normalizer

Float32 = NDArray[np.float32]
Figures = dict[str, object]
Index = TypeVar("Index", FaissIndex, MilvusCollection)
PARTS = ("build", "faiss", "lite", "server")
DIM, QUERIES, K = 512, 100, 10
BACKGROUND = 11_000
BATCH = 4096
ADDED = 2000  # rows per round on Milvus
# How each factory is searched, and in which parts of the rows. HNSW at FAISS's own efSearch, which
# is quick and misses much, and at that of the recall in docs/adapters.md.
FACTORIES: dict[str, list[tuple[dict[str, float], int]]] = {
    "Flat": [({}, 1)],
    "IVF256,Flat": [({"nprobe": 16}, 1)],
    "HNSW32": [({"efSearch": 16}, 10), ({"efSearch": 64}, 10), ({"efSearch": 64}, 1)],
}
OTHERS = ("native", "by_hand")  # what else the adapter is compared with
QUICK = 5  # times as many rounds where each takes milliseconds


def descriptors(rows: int, seed: int) -> Float32:
    """Made-up unit descriptors."""
    made = np.random.default_rng(seed).standard_normal((rows, DIM), dtype=np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made


def names(rows: int, prefix: str = "photo") -> list[str]:
    """One string id per row."""
    return [f"{prefix}-{i:08d}" for i in range(rows)]


def stream(rows: int) -> Iterator[Batch]:
    """Rows as a generator gives them: nothing is kept here."""
    for begin in range(0, rows, BATCH):
        count = min(BATCH, rows - begin)
        yield [f"photo-{i:08d}" for i in range(begin, begin + count)], descriptors(count, begin)


def lifted_by_hand(rules: Normalizer, rows: Float32, appended: float = 1) -> Float32:
    """The transform as one would write it: whiten, unit length, append 1 (references) and 0."""
    assert rules.whitening is not None
    whitened = (rows - rules.whitening.mean) @ rules.whitening.matrix.T
    whitened /= np.linalg.norm(whitened, axis=1, keepdims=True)
    lifted = np.zeros((len(rows), whitened.shape[1] + 2), dtype=np.float32)
    lifted[:, :-2] = whitened
    lifted[:, -2] = appended
    return lifted


def whitened_by_faiss(rules: Normalizer, index: faiss.Index) -> faiss.IndexPreTransform:
    """The index behind FAISS's own whitening and unit length; missing dimensions are zeros."""
    assert rules.whitening is not None
    matrix, mean = rules.whitening.matrix, rules.whitening.mean
    linear = faiss.LinearTransform(matrix.shape[1], matrix.shape[0], True)
    faiss.copy_array_to_vector(matrix.ravel(), linear.A)
    faiss.copy_array_to_vector(-(matrix @ mean), linear.b)
    linear.is_trained = True
    wrapped = faiss.IndexPreTransform(index)
    if index.d > len(matrix):
        places = np.r_[np.arange(len(matrix)), np.full(index.d - len(matrix), -1)].astype(np.int32)
        wrapped.prepend_transform(
            faiss.RemapDimensionsTransform(len(matrix), index.d, faiss.swig_ptr(places))
        )
    wrapped.prepend_transform(faiss.NormalizationTransform(len(matrix), 2.0))
    wrapped.prepend_transform(linear)
    return wrapped


def with_normalizer(index: Index, normalizer: Normalizer) -> Index:
    """The same index behind another normalizer."""
    other = copy.copy(index)
    other.normalizer = normalizer
    return other


def searching(backend: str, rows: int, taken: dict[str, Timing]) -> Figures:
    """Search times as ratios."""
    raw, adapter, biased = (taken[name] for name in ("raw", "adapter", "with_bias"))
    others = [name for name in OTHERS if name in taken]
    return {
        "backend": backend,
        "rows": rows,
        "time_vs_raw": round(1 / adapter.speedup_over(raw), 3),
        "raw_vs_itself": round(1 / taken["raw_again"].speedup_over(raw), 3),
        **{f"time_vs_{name}": round(1 / adapter.speedup_over(taken[name]), 3) for name in others},
        "time_with_bias_vs_raw": round(1 / biased.speedup_over(raw), 3),
        "raw_ms": round(1e3 * raw.median, 2),
        "whitening_ms": round(1e3 * taken["transform"].median, 2),
        "bias_ms": round(1e3 * (biased.median - adapter.median), 2),
    }


def adding(backend: str, rows: int, taken: dict[str, Timing]) -> Figures:
    """Rates of adding as ratios."""
    raw, adapter = taken["raw"], taken["adapter"]
    others = [name for name in OTHERS if name in taken]
    return {
        "backend": backend,
        "rows": rows,
        **{f"rate_vs_{name}": round(adapter.speedup_over(taken[name]), 3) for name in others},
        "rate_vs_raw": round(adapter.speedup_over(raw), 3),
        "raw_vs_itself": round(taken["raw_again"].speedup_over(raw), 3),
        "rate_vs_raw_excluding_whitening": round(taken["apart"].speedup_over(raw), 3),
        "adapter_rows_per_second": round(rows / adapter.median),
        "whitening_rows_per_second": round(rows / taken["transform"].median),
    }


class Ready:
    """Stands in for a normalizer where the transform is left out: rows are vectors already."""

    def check(self, rows: Float32) -> None:
        """Nothing."""

    def references(self, rows: Float32) -> Float32:
        """What comes."""
        return rows


READY = cast(Normalizer, Ready())


# ------------------------------------------------------------------ FAISS


def faiss_search(
    rules: Normalizer, rows: int, factory: str, parameters: dict[str, float], rounds: int
) -> Figures:
    """Search time over raw FAISS."""
    plain = rules.with_score_norm(None)
    index = FaissIndex(plain, factory, parameters=parameters)
    if not index.index.is_trained:
        index.train(descriptors(BACKGROUND, 1))
    index.add_batches(stream(rows))
    biased = with_normalizer(index, rules)
    queries = descriptors(QUERIES, 7)
    lifted, kept = plain.queries(queries), names(rows)
    native = whitened_by_faiss(plain, index.index)
    np.testing.assert_allclose(
        native.search(queries, K)[0], index.index.search(lifted, K)[0], atol=1e-4
    )

    def by_hand() -> object:
        scores, found = index.index.search(lifted_by_hand(plain, queries, appended=0), K)
        return scores, [[kept[row] for row in each] for each in found.tolist()]

    taken = interleaved(
        {
            "raw": lambda: index.index.search(lifted, K),
            "adapter": lambda: index.search(queries, K),
            "raw_again": lambda: index.index.search(lifted, K),
            "transform": lambda: index._queries(index.normalizer, queries),
            "by_hand": by_hand,
            "native": lambda: native.search(queries, K),
            "with_bias": lambda: biased.search(queries, K),
        },
        rounds=rounds,
        warmup=2,
        shuffled=True,
    )
    settings = "".join(f", {name} {value}" for name, value in parameters.items())
    return searching(f"FAISS {factory}{settings}", rows, taken)


def faiss_add(rules: Normalizer, rows: int, factory: str, rounds: int) -> Figures:
    """Rate of adding, beside raw FAISS and what one would write around it."""
    given, ids = descriptors(rows, 3), names(rows)
    lifted = rules.references(given)
    trained = FaissIndex(rules, factory)
    if not trained.index.is_trained:
        trained.train(given)

    def empty() -> faiss.Index:
        return faiss.clone_index(trained.index)

    inner = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
    if not inner.is_trained:
        inner.train(np.ascontiguousarray(lifted[:, :DIM]))

    def native() -> None:
        whitened_by_faiss(rules, faiss.clone_index(inner)).add(given)

    def by_hand() -> None:
        row_of: dict[str, int] = {}
        index, kept = empty(), list[str]()
        index.add(lifted_by_hand(rules, given))
        kept.extend(ids)
        row_of.update(zip(ids, range(rows), strict=True))

    transform = by_faiss(rules)

    def adapter(normalizer: Normalizer, vectors: Float32) -> None:
        index = FaissIndex(rules, factory)
        index._storage.index = empty()
        index._normalizer = normalizer
        index.add(ids, vectors)

    taken = interleaved(
        {
            "raw": lambda: empty().add(lifted),
            "by_hand": by_hand,
            "native": native,
            "transform": lambda: transform.references(given),
            "adapter": lambda: adapter(transform, given),
            "raw_again": lambda: empty().add(lifted),
            "apart": lambda: adapter(READY, lifted),
        },
        rounds=rounds,
        shuffled=True,
    )
    return adding(f"FAISS {factory}", rows, taken)


def on_faiss(rules: Normalizer, rows: int, rounds: int) -> Figures:
    """All of FAISS."""
    search: list[Figures] = []
    add: list[Figures] = []
    for factory, searches in FACTORIES.items():
        repeats = rounds if factory == "Flat" else QUICK * rounds
        for parameters, part in searches:
            search.append(faiss_search(rules, rows // part, factory, parameters, repeats))
        add.append(faiss_add(rules, rows // searches[0][1] // 4, factory, rounds))
    return {"search": search, "add": add}


# ------------------------------------------------------------------ Milvus


def on_milvus(rules: Normalizer, backend: str, uri: str, rows: int, rounds: int) -> Figures:
    """Search time and rate of adding over raw pymilvus."""
    plain = rules.with_score_norm(None)
    index = MilvusCollection(uri, "photos", plain)
    index.add_batches(stream(rows))
    _wait_until_indexed(index, rows)
    timed = partial(interleaved, rounds=QUICK * rounds, warmup=3, shuffled=True)
    search = searching(backend, rows, timed(_milvus_searches(index, plain, rules)))
    add = adding(backend, ADDED, timed(_milvus_adds(index, plain)))
    index.drop()
    index.close()
    return {"search": [search], "add": [add]}


def _milvus_searches(
    index: MilvusCollection, plain: Normalizer, rules: Normalizer
) -> dict[str, Callable[[], object]]:
    client: MilvusClient = index._storage.connection.client
    queries = descriptors(QUERIES, 7)
    lifted = plain.queries(queries)

    def raw(vectors: Float32) -> object:
        found = client.search(
            index.name,
            data=vectors,
            anns_field="vector",
            limit=K,
            search_params={"metric_type": "IP", "params": {}},
            output_fields=["$meta"],
            consistency_level="Strong",
        )
        return [[(hit["id"], hit["distance"], hit["entity"]) for hit in hits] for hits in found]

    biased = with_normalizer(index, rules)
    return {
        "raw": lambda: raw(lifted),
        "adapter": lambda: index.search(queries, K),
        "raw_again": lambda: raw(lifted),
        "transform": lambda: index._queries(index.normalizer, queries),
        "by_hand": lambda: raw(lifted_by_hand(plain, queries, appended=0)),
        "with_bias": lambda: biased.search(queries, K),
    }


def _milvus_adds(index: MilvusCollection, rules: Normalizer) -> dict[str, Callable[[], object]]:
    client: MilvusClient = index._storage.connection.client
    given = descriptors(ADDED, 11)
    lifted = rules.references(given)
    ids = {name: names(ADDED, name) for name in ("raw", "hand", "adapter", "apart")}
    verb, transform = client.insert if index.is_lite else client.upsert, by_faiss(rules)

    def send(prefix: str, vectors: Float32) -> None:
        rows = [{"id": i, "vector": v} for i, v in zip(ids[prefix], vectors, strict=True)]
        verb(index.name, rows)

    def adapter(prefix: str, normalizer: Normalizer, rows: Float32) -> None:
        index._normalizer = normalizer
        index.add(ids[prefix], rows)

    return {
        "raw": lambda: send("raw", lifted),
        "by_hand": lambda: send("hand", lifted_by_hand(rules, given)),
        "transform": lambda: transform.references(given),
        "adapter": lambda: adapter("adapter", transform, given),
        "raw_again": lambda: send("raw", lifted),
        "apart": lambda: adapter("apart", READY, lifted),
    }


def _wait_until_indexed(index: MilvusCollection, rows: int) -> None:
    """Until a server has sealed, indexed and handed over what was loaded, its times drift."""
    if index.is_lite:
        return
    while index._storage.call("describe_index", index_name="vector")["indexed_rows"] < rows:
        time.sleep(0.5)
    time.sleep(10)


# ------------------------------------------------------------------ the big build


def build(rows: int) -> None:
    """Build from a stream and save, in this process; print the memory it took and the time."""
    rules = Normalizer.fit(descriptors(BACKGROUND, 1))
    before = resident_mib()
    begin = time.perf_counter()
    index = FaissIndex(rules)
    index.add_batches(stream(rows))
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "index.faiss")
    seconds = time.perf_counter() - begin
    print(round(before), round(peak_mib()), round(seconds))


def build_apart(rows: int) -> Figures:
    """The figures of ``build`` in a process of its own."""
    command = [*results.RUN, "speed/search", "--build", str(rows)]
    child = subprocess.run(command, capture_output=True, check=True)
    before, after, seconds = map(int, child.stdout.split())
    return {
        "rows": rows,
        "dim": DIM,
        "stored_mib": rows * (DIM + 2) * 4 >> 20,
        "peak_mib_above_start": after - before,
        "seconds_with_save": seconds,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--milvus-rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--build", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build(options.build)
        return
    rules = Normalizer.fit(descriptors(BACKGROUND, 1))
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            if part == "build":
                figures = build_apart(options.rows)
            elif part == "faiss":
                figures = on_faiss(rules, options.rows, options.rounds)
            elif part == "lite":
                place = str(Path(folder) / "photos.db")
                figures = on_milvus(
                    rules, "Milvus Lite", place, options.milvus_rows, options.rounds
                )
            else:
                with running(Path(folder) / "milvus") as server:
                    figures = on_milvus(
                        rules, "Milvus 2.3.5", server.uri, options.milvus_rows, options.rounds
                    )
        print(part, figures)
        print(results.write(f"search_{part}", figures))


if __name__ == "__main__":
    main()
