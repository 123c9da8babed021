"""The bias search against FAISS, its memory, and the time of the metrics.

    python benchmarks speed/normalize     # 10 000 queries, 100 000 background, 512 d

The same search four ways, in turn: ``faiss.IndexFlatIP``; ours in numpy; and
``Normalizer.with_products`` with two supplied from outside: a torch matrix product with top-k, and
``BackgroundSearch``, which is not exhaustive.
"""

import argparse
import functools
import time
import tracemalloc
from collections.abc import Callable

import faiss
import numpy as np
import torch

import results
from speed.measure import interleaved
from sscd_vec.adapters.faiss import BackgroundSearch
from sscd_vec.metrics import evaluate
from sscd_vec.normalize import Normalizer, ScoreNorm, nearest_similarities
from sscd_vec.normalize.descriptors import MEMORY, Float32
from sscd_vec.predictions import GroundTruth, Predictions

PARTS = ("bias_search", "memory", "metrics")
TORCH_ROWS = 8192
QUERY_ROWS = 1024


class TorchSearch:
    """``search(queries, k)`` over a background held as a torch tensor."""

    def __init__(self, background: Float32, rows: int = TORCH_ROWS) -> None:
        """Keep a copy of the background, which torch wants writable."""
        self._background = torch.from_numpy(background.copy())
        self._rows = rows

    def __call__(self, queries: Float32, k: int) -> Float32:
        """The ``k`` largest inner products of each query, largest first."""
        found = []
        rows = torch.from_numpy(queries)
        for start in range(0, len(rows), QUERY_ROWS):
            block = rows[start : start + QUERY_ROWS]
            best = torch.full((len(block), 0), -torch.inf)
            for first in range(0, len(self._background), self._rows):
                part = self._background[first : first + self._rows]
                top = (block @ part.T).topk(min(k, len(part)), sorted=False).values
                best = torch.cat([best, top], dim=1)
            found.append(best.topk(k).values)
        return np.asarray(torch.cat(found).numpy(), dtype=np.float32)


def bias_search(queries: int, background: int, dim: int, rounds: int) -> dict[str, object]:
    """Ratios to ``faiss.IndexFlatIP``, above 1 is faster, and how far the biases are from its."""
    normalizer = Normalizer.fit(unit_rows(background, dim, 0), whitening=None)
    kept = normalizer.background
    if kept is None:
        raise RuntimeError("expected a background after a fit with score normalization")
    q = unit_rows(queries, dim, 1)
    index = faiss.IndexFlatIP(dim)
    index.add(kept)
    norm = ScoreNorm()
    ways = {
        "numpy": normalizer,
        "torch": normalizer.with_products(search=TorchSearch(kept)),
        "BackgroundSearch": normalizer.with_products(search=BackgroundSearch(kept)),
    }

    def exhaustive() -> Float32:
        return norm.bias_from_neighbours(index.search(q, norm.n_end)[0])

    runs: dict[str, Callable[[], object]] = {"faiss": exhaustive}
    for name, way in ways.items():
        runs[name] = functools.partial(way.whitened_biases, q)
    taken = interleaved(runs, rounds=rounds)
    expected = exhaustive()
    rows = []
    for name, way in ways.items():
        difference = np.abs(way.whitened_biases(q) - expected)
        rows.append(
            {
                "search": name,
                "times as fast as IndexFlatIP": round(taken[name].speedup_over(taken["faiss"]), 2),
                "mean difference": float(f"{difference.mean():.1e}"),
                "largest difference": float(f"{difference.max():.1e}"),
            }
        )
    seconds = {name: [round(s, 2) for s in timing.seconds] for name, timing in taken.items()}
    sizes = {"queries": queries, "background": background, "dim": dim}
    spread = {"standard deviation of the biases": float(f"{expected.std():.1e}")}
    return {**sizes, **spread, "rows": rows, "seconds": seconds}


def memory_of_search(dim: int) -> list[dict[str, float]]:
    """Peak bytes allocated by the numpy search for several settings, in MiB."""
    q, background = unit_rows(4096, dim, 0), unit_rows(8192, dim, 1)
    figures = []
    for setting in (MEMORY // 16, MEMORY // 4, MEMORY):
        tracemalloc.start()
        nearest_similarities(q, background, 3, setting)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        figures.append({"setting_mib": setting / 2**20, "peak_mib": round(peak / 2**20, 1)})
    return figures


def metrics_seconds(count: int = 500_000) -> float:
    """Process seconds of ``evaluate`` on ``count`` predictions with string ids."""
    random = np.random.default_rng(0)
    cells = np.unique(random.integers(0, 50_000 * 1_000_000, count + count // 100))
    cells = random.permutation(cells)[:count]
    queries = [f"Q{cell // 1_000_000:05d}" for cell in cells.tolist()]
    references = [f"R{cell % 1_000_000:06d}" for cell in cells.tolist()]
    predictions = Predictions(queries, references, random.random(count))
    truth = GroundTruth(queries[:10_000], references[:10_000])
    taken = []
    for _ in range(3):
        start = time.process_time()
        evaluate(predictions, truth)
        taken.append(time.process_time() - start)
    return round(min(taken), 2)


def unit_rows(count: int, dim: int, seed: int) -> Float32:
    """Seeded random unit vectors."""
    rows = np.random.default_rng(seed).standard_normal((count, dim), dtype=np.float32)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def main() -> None:
    """Run the parts asked for; each writes ``results/normalize_PART.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--background", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    sizes = (options.queries, options.background, options.dim, options.rounds)
    parts: dict[str, Callable[[], object]] = {
        "bias_search": lambda: bias_search(*sizes),
        "memory": lambda: memory_of_search(options.dim),
        "metrics": metrics_seconds,
    }
    for name in options.parts:
        figures = {name: parts[name](), "threads": torch.get_num_threads()}
        print(figures)
        print(results.write(f"normalize_{name}", figures))


if __name__ == "__main__":
    main()
