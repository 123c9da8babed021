"""The search part of ``disc.py`` on random descriptors: time and memory at DISC2021's size.

    python benchmarks speed/dry_run --references 1000000 --queries 50000

Writes random unit descriptors as shards, streams them through the same code as the evaluation, and
reports the seconds and the largest resident memory beyond what the process had before.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import results
from accuracy.dataset import SHARD_ROWS, DiscSet, Images, Shards
from accuracy.evaluation import Transform, evaluate_transform
from speed.measure import peak_mib
from sscd_vec.normalize import ScoreNorm


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time and memory of the search at full size.")
    parser.add_argument("--references", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=50_000)
    parser.add_argument("--training", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--best", type=int, help="the best N pairs overall instead of 10 per query")
    parser.add_argument("--folder", type=Path, help="where the shards go; a temporary folder")
    parser.add_argument("--name", help="write the figures to benchmarks/results/NAME.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = dry_run(
            Path(folder),
            options.references,
            options.queries,
            options.training,
            options.dim,
            options.best,
        )
    for name, value in figures.items():
        print(f"{name:28}{value:>14,.2f}")
    if options.name:
        print(results.write(options.name, figures))


def dry_run(
    folder: Path, references: int, queries: int, training: int, dim: int, best: int | None
) -> dict[str, float]:
    """Search random descriptors in which every tenth query is a noisy copy of a reference."""
    rng = np.random.default_rng(0)
    shards = {
        "references": _random_shards(folder / "references", references, dim, rng),
        "training": _random_shards(folder / "training", training, dim, rng),
    }
    matched = min(max(1, queries // 10), references, SHARD_ROWS)
    first = np.load(shards["references"].files[0])[:matched]
    copies = first + rng.normal(0, 0.5 / np.sqrt(dim), first.shape).astype(np.float32)
    copies /= np.linalg.norm(copies, axis=1, keepdims=True)
    others = _random_shards(folder / "queries", queries - matched, dim, rng)
    file = folder / "copies.npy"
    np.save(file, copies)
    shards["queries"] = Shards((file, *others.files), queries)
    ids = {name: _numbered(name[0].upper(), part.count) for name, part in shards.items()}
    truth = frozenset(
        zip(ids["queries"].ids[:matched], ids["references"].ids[:matched], strict=True)
    )
    disc = DiscSet(ids["references"], ids["queries"], ids["training"], truth)
    before = peak_mib()
    start = time.perf_counter()
    rows = evaluate_transform(
        Transform("whitened"),
        disc,
        shards["queries"],
        shards["references"],
        shards["training"],
        score_norm=ScoreNorm(),
        k=None if best else 10,
        best=best or 0,
    )
    return {
        "references": references,
        "queries": queries,
        "training": training,
        "dim": dim,
        "best_overall": best or 0,
        "seconds": time.perf_counter() - start,
        "descriptors_gib": 4 * dim * (references + queries + training) / 2**30,
        "peak_memory_gib": peak_mib() / 2**10,
        "peak_memory_beyond_start_gib": (peak_mib() - before) / 2**10,
        "micro_ap": rows[1].summary.micro_ap,
    }


def _random_shards(folder: Path, count: int, dim: int, rng: np.random.Generator) -> Shards:
    folder.mkdir()
    files = []
    for start in range(0, count, SHARD_ROWS):
        rows = rng.standard_normal((min(SHARD_ROWS, count - start), dim), np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        files.append(folder / f"{start:09d}.npy")
        np.save(files[-1], rows)
    return Shards(tuple(files), count)


def _numbered(letter: str, count: int) -> Images:
    ids = tuple(f"{letter}{number:06d}" for number in range(count))
    return Images(ids, ids)


if __name__ == "__main__":
    main()
