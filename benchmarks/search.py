"""What the adapters cost over the libraries they wrap: search, add, and the memory of a big build.

Interleaved in one run, as ratios. The baseline gets vectors that are already transformed, so it
does what FAISS or pymilvus alone would do. The adapter is timed in several settings:

- ``adapter``: whitening and lift included, without score normalization. This is what the targets
  are about (search at most 1.05x of FAISS and 1.10x of pymilvus, add at least 0.9x of the rate).
- ``with_bias``: the search of the background for the bias as well, work FAISS does not do.
- ``transform_apart``: adding vectors that are transformed already, as the baseline does.

    python benchmarks/search.py
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import faiss
import numpy as np
import results
from milvus_server import running
from numpy.typing import NDArray
from pymilvus import MilvusClient
from timing import Timing, interleaved

from sscd_vec.adapters.arguments import Batch
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.milvus import MilvusCollection
from sscd_vec.normalize import Normalizer

Float32 = NDArray[np.float32]
DIM, QUERIES, K = 512, 100, 10
BACKGROUND = 11_000


def descriptors(rows: int, seed: int) -> Float32:
    """Made-up unit descriptors."""
    made = np.random.default_rng(seed).standard_normal((rows, DIM), dtype=np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made


def ratio(slower: Timing, baseline: Timing) -> float:
    """Median over rounds of this time over the baseline's: below 1 is faster."""
    return round(1 / slower.speedup_over(baseline), 3)


def faiss_search(rules: Normalizer, rows: int, factory: str, rounds: int) -> dict[str, object]:
    """Search time over raw FAISS."""
    index = FaissIndex(rules, factory, parameters={"nprobe": 16} if "IVF" in factory else None)
    index.add_batches(_stream(rows))
    plain = rules.with_score_norm(None)
    queries = descriptors(QUERIES, 7)
    lifted = plain.queries(queries)
    raw = index.index

    def adapter(normalizer: Normalizer) -> None:
        index.normalizer = normalizer
        index.search(queries, K)

    taken = interleaved(
        {
            "raw": lambda: raw.search(lifted, K),
            "adapter": lambda: adapter(plain),
            "with_bias": lambda: adapter(rules),
        },
        rounds=rounds,
        warmup=2,
    )
    return {
        "rows": rows,
        "adapter_over_raw": ratio(taken["adapter"], taken["raw"]),
        "with_bias_over_raw": ratio(taken["with_bias"], taken["raw"]),
        "raw_ms": round(1e3 * taken["raw"].median, 2),
        "bias_ms": round(1e3 * (taken["with_bias"].median - taken["adapter"].median), 2),
    }


class Ready:
    """Stands in for a normalizer where the transform is left out: rows are vectors already."""

    background = None

    def references(self, rows: Float32) -> Float32:
        """What comes."""
        return rows


def faiss_add(rules: Normalizer, rows: int, factory: str, rounds: int) -> dict[str, object]:
    """Rate of adding over raw FAISS, with the transform and without it."""
    given = descriptors(rows, 3)
    lifted = rules.references(given)
    ids = [f"photo-{i:08d}" for i in range(rows)]
    trained = FaissIndex(rules, factory)
    if not trained.index.is_trained:
        trained.train(given)

    def adapter(normalizer: Normalizer, vectors: Float32) -> None:
        index = FaissIndex(rules, factory)
        index._take(faiss.clone_index(trained.index), index._table)
        index.normalizer = normalizer
        index.add(ids, vectors)

    taken = interleaved(
        {
            "raw": lambda: faiss.clone_index(trained.index).add(lifted),
            "adapter": lambda: adapter(rules, given),
            "apart": lambda: adapter(cast(Normalizer, Ready()), lifted),
        },
        rounds=rounds,
    )
    return {
        "rows": rows,
        "rate_over_raw": round(taken["adapter"].speedup_over(taken["raw"]), 3),
        "rate_over_raw_transform_apart": round(taken["apart"].speedup_over(taken["raw"]), 3),
        "raw_rows_per_second": round(rows / taken["raw"].median),
    }


def milvus(rules: Normalizer, uri: str, rows: int, rounds: int) -> dict[str, object]:
    """Search time and rate of adding over raw pymilvus."""
    plain = rules.with_score_norm(None)
    index = MilvusCollection(uri, "adapter", plain)
    index.add_batches(_stream(rows))
    client: MilvusClient = index._table.connection.client
    queries = descriptors(QUERIES, 7)
    lifted = plain.queries(queries)
    params = {"metric_type": "IP", "params": {}}

    def raw_search() -> None:
        found = client.search(
            "adapter",
            data=lifted,
            anns_field="vector",
            limit=K,
            search_params=params,
            output_fields=["$meta"],
            consistency_level="Strong",
        )
        [[(hit["id"], hit["distance"], hit["entity"]) for hit in hits] for hits in found]

    def search(normalizer: Normalizer) -> None:
        index.normalizer = normalizer
        index.search(queries, K)

    searching = interleaved(
        {"raw": raw_search, "adapter": lambda: search(plain), "with_bias": lambda: search(rules)},
        rounds=rounds,
        warmup=2,
    )
    adding = interleaved(_adding(index, client, plain), rounds=rounds)
    index.drop()
    index.close()
    return {
        "rows": rows,
        "search_adapter_over_raw": ratio(searching["adapter"], searching["raw"]),
        "search_with_bias_over_raw": ratio(searching["with_bias"], searching["raw"]),
        "search_raw_ms": round(1e3 * searching["raw"].median, 1),
        "add_rate_over_raw": round(adding["adapter"].speedup_over(adding["raw"]), 3),
        "add_raw_rows_per_second": round(ADDED / adding["raw"].median),
    }


ADDED = 2000


def _adding(
    index: MilvusCollection, client: MilvusClient, rules: Normalizer
) -> dict[str, Callable[[], object]]:
    given = descriptors(ADDED, 11)
    lifted = rules.references(given)
    raw_ids = [f"raw-{i:08d}" for i in range(ADDED)]
    our_ids = [f"our-{i:08d}" for i in range(ADDED)]
    verb = client.insert if index.is_lite else client.upsert

    def raw() -> None:
        rows = [{"id": i, "vector": v} for i, v in zip(raw_ids, lifted, strict=True)]
        verb("adapter", rows)

    return {"raw": raw, "adapter": lambda: index.add(our_ids, given)}


def _stream(rows: int, batch: int = 4096) -> Iterator[Batch]:
    for begin in range(0, rows, batch):
        count = min(batch, rows - begin)
        yield [f"photo-{i:08d}" for i in range(begin, begin + count)], descriptors(count, begin)


def build(rows: int) -> None:
    """Build and save in this process; print the memory it took."""
    rules = Normalizer.fit(descriptors(BACKGROUND, 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index = FaissIndex(rules)
    index.add_batches(_stream(rows))
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "index.faiss")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(before // 1024, after // 1024)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--milvus-rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--build", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build(options.build)
        return
    child = subprocess.run(
        [sys.executable, __file__, "--build", str(options.rows)], capture_output=True, check=True
    )
    before, after = map(int, child.stdout.split())
    figures: dict[str, object] = {
        "build": {
            "rows": options.rows,
            "dim": DIM,
            "vectors_mib": options.rows * (DIM + 2) * 4 >> 20,
            "peak_mib_above_start": after - before,
        }
    }
    rules = Normalizer.fit(descriptors(BACKGROUND, 1))
    for factory in ("Flat", "IVF256,Flat"):
        figures[f"search_faiss_{factory}"] = faiss_search(
            rules, options.rows, factory, options.rounds
        )
    for factory in ("Flat", "IVF256,Flat", "HNSW32"):
        rows = options.rows // (50 if factory == "HNSW32" else 4)
        figures[f"add_faiss_{factory}"] = faiss_add(rules, rows, factory, options.rounds // 2 + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "bench.db")
        figures["milvus_lite"] = milvus(rules, path, options.milvus_rows, options.rounds)
        with running(Path(folder) / "milvus") as server:
            figures["milvus_server"] = milvus(
                rules, server.uri, options.milvus_rows, options.rounds
            )
    for name, figure in figures.items():
        print(name, figure)
    print(results.write("search", figures))


if __name__ == "__main__":
    main()
