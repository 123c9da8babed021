"""Beyond one million: duplicates through lists, large mapped FAISS banks, encoding on Ray.

    python benchmarks/scale.py PHOTOS... [--parts duplicates bank ray] [--counts 100000 1000000]

Vectors are drawn around descriptors of real photos, with copies planted as real edits make them
(``scale_vectors``; ``--cache`` keeps the real descriptors from run to run).

- ``duplicates``: pairs through lists against every pair. Blocks of the exhaustive comparison, half
  of them before and half after, give its time (scaled to all blocks) and its pairs;
- ``bank``: lists of codes with exact scores from a mapped file (``scale_bank``);
- ``ray``: images per second of two actors on Ray against ``Encoder.encode``.

Each part has a record (``results/scale_PART.json``) with one row per size.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import results
import scale_bank
from photos import Photo, find_photos
from scale_bank import cpu_seconds
from scale_vectors import BLOCK, COPIES, DIM, Int64, Real
from sscd_vec import Encoder, Normalizer
from sscd_vec.bank import groups, join
from sscd_vec.encoding import EncodeShard, plan, run_on_ray

PARTS = ("duplicates", "bank", "ray")
BLOCKS = 8  # of 1024 rows that are compared with all others
GROUPED = 50  # one group of copies for so many images
MEMORY = 1 << 29  # of the join, besides the descriptors


def main() -> None:
    """Run the parts and add their rows to the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="folders or tars of photos")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--counts", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--photos", type=int, default=15_000, help="real descriptors")
    parser.add_argument("--edited", type=int, default=1000, help="photos of which copies are made")
    parser.add_argument("--cache", type=Path, help="file that keeps the real descriptors")
    parser.add_argument("--work", type=Path, help="folder for large files; a bank in it is resumed")
    bank = parser.add_argument_group("bank")
    bank.add_argument("--codes", default="PQ129x4fs")
    bank.add_argument("--lists", type=int, help="by default 4√n, as a power of two")
    bank.add_argument("--probes", type=int, help="lists looked into; by default 3 of 10")
    bank.add_argument("--candidates", type=int, default=64, help="rescored per query")
    parser.add_argument("--images", type=int, default=2000, help="of the part ray")
    asked = parser.parse_args()
    photos = [photo for photo in find_photos(asked.sources) if Path(photo.name).stem[-1:] != "7"]
    np.random.default_rng(23).shuffle(photos)
    if "ray" in asked.parts:
        _record("ray", ray_rates(photos[: asked.images], asked.work))
    if set(asked.parts) == {"ray"}:
        return
    real = Real.make(photos[: asked.photos], asked.edited, asked.cache)
    for count in asked.counts:
        with tempfile.TemporaryDirectory(dir=asked.work) as temporary:
            if "duplicates" in asked.parts:
                _record("duplicates", duplicates(real, count, Path(temporary)))
            if "bank" in asked.parts:
                folder = Path(temporary) if asked.work is None else asked.work / f"bank-{count}"
                folder.mkdir(exist_ok=True)
                lists = asked.lists or 1 << round(np.log2(4 * count**0.5))
                probes = asked.probes or max(16, 3 * lists // 10)
                row = scale_bank.measure(
                    real, count, asked.codes, lists, probes, asked.candidates, folder
                )
                _record("bank", row | {"drawn": real.compare_with_real()})


def _record(part: str, row: dict[str, Any]) -> None:
    """Replace the row of the same size, or add it."""
    print(part, row, flush=True)
    name, rows = f"scale_{part}", []
    if (results.RESULTS / f"{name}.json").exists():
        figures: Any = results.read(name)["figures"]
        rows = [r for r in figures["rows"] if r["images"] != row["images"]]
    row = row | {"load_average": round(os.getloadavg()[1], 1)}
    results.write(
        name,
        {"rows": sorted([*rows, row], key=lambda r: r["images"])},
        encoder=Encoder.from_pretrained(device="cpu").fingerprint,
    )


# ---------------------------------------------------------------------- duplicates


def duplicates(real: Real, count: int, folder: Path) -> dict[str, Any]:
    """Pairs among vectors with planted groups of two and three."""
    rules = Normalizer.from_pretrained()
    threshold = rules.threshold("symmetric", count)
    rows, planted = _written(real, count, folder / "rows")
    z = rows.open()
    biases = np.concatenate(
        [rules.whitened_biases(np.array(z[b : b + BLOCK])) for b in range(0, count, BLOCK)]
    )
    starts = np.linspace(0, count - groups.ROWS, BLOCKS).astype(int).tolist()
    exhaustive = _Blocks(z, biases, threshold)
    for start in starts[::2]:
        exhaustive.compare(start)
    begin = time.perf_counter()
    taken, found = cpu_seconds(lambda: join.find_pairs(rows, biases, threshold, memory=MEMORY))
    wall = time.perf_counter() - begin
    for start in starts[1::2]:
        exhaustive.compare(start)
    pairs = found.pairs
    grouping, made = cpu_seconds(lambda: groups.group_pairs(z, biases, threshold, pairs))
    scores = np.einsum("nd,nd->n", z[planted[:, 0]], z[planted[:, 1]])
    scores -= np.maximum(biases[planted[:, 0]], biases[planted[:, 1]])
    wanted = np.sort(planted[scores >= threshold], axis=1)
    keys = pairs.first * count + pairs.second
    return {
        "images": count,
        "planted_groups": count // GROUPED,
        "threshold": round(threshold, 3),
        "lists_cpu_seconds": round(taken, 1),
        "lists_wall_seconds": round(wall, 1),
        "every_pair_cpu_seconds": round(exhaustive.scaled(), 1),
        "every_pair_share_measured": round(exhaustive.share(), 5),
        "times_faster": round(exhaustive.scaled() / taken, 1),
        "pairs_of_measured_blocks": len(exhaustive.keys),
        "of_these_found": round(float(np.isin(exhaustive.keys, keys).mean()), 4),
        "planted_pairs_above_threshold": len(wanted),
        "of_these_planted_found": round(
            float(np.isin(wanted[:, 0] * count + wanted[:, 1], keys).mean()), 4
        ),
        "recall_it_states": None if found.recall is None else round(found.recall, 4),
        "pairs": len(pairs),
        "groups": len(made),
        "grouping_cpu_seconds": round(grouping, 1),
        "memory": scale_bank.memory(),
    }


class _Blocks:
    """Blocks of rows compared with all rows after them, as an exhaustive search does."""

    def __init__(self, z: groups.Float32, biases: groups.Float32, threshold: float) -> None:
        self._z, self._biases, self._threshold = z, biases, threshold
        self._seconds, self._compared, self.keys = 0.0, 0, np.empty(0, np.int64)

    def compare(self, start: int) -> None:
        count = len(self._z)
        block = slice(start, min(start + groups.ROWS, count))
        seconds, (first, second, _) = cpu_seconds(
            lambda: groups.row_pairs(self._z, self._biases, self._threshold, block)
        )
        self._seconds += seconds
        self._compared += (block.stop - block.start) * (count - start)
        self.keys = np.append(self.keys, first * count + second)

    def share(self) -> float:
        """Of all comparisons."""
        return self._compared / (len(self._z) ** 2 / 2)

    def scaled(self) -> float:
        """CPU seconds of all blocks."""
        return self._seconds / self.share()


def _written(real: Real, count: int, path: Path) -> tuple[join.Rows, Int64]:
    """Vectors in a file, some replaced by copies of others; and who is a copy of whom."""
    around = []
    with path.open("wb") as file:
        for begin in range(0, count, BLOCK):
            block, theirs = real.rows(begin, min(begin + BLOCK, count))
            file.write(np.ascontiguousarray(block).data)
            around.append(theirs)
    parents, rng = np.concatenate(around), np.random.default_rng(1)
    z = np.memmap(path, np.float32, "r+", shape=(count, DIM))
    has = rng.permutation(np.flatnonzero(parents < real.edited))
    originals = np.sort(has[: count // GROUPED])
    others = rng.permutation(np.setdiff1d(np.arange(count), originals))
    pairs = []
    for which in range(COPIES):
        some = originals if which == 0 else originals[::2]  # every second group has three
        copies, others = np.sort(others[: len(some)]), others[len(some) :]
        z[copies] = real.copies_of(np.array(z[some]), parents[some], which)
        pairs.append(np.stack([some, copies], 1))
    z.flush()
    return join.Rows(path=path, dim=DIM), np.concatenate(pairs)


# ---------------------------------------------------------------------- ray


def ray_rates(photos: list[Photo], work: Path | None) -> dict[str, Any]:
    """Encode photos here with one thread, and on Ray with two actors of one core each.

    Both are measured in CPU seconds of the processes that encode, and by the clock, after start-up.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=work) as folder:
        place = Path(folder)
        for number, photo in enumerate(photos):
            target = place / f"shard-{number % 10}" / f"{number}.jpg"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(photo.read())
        shards = [shard for n in range(10) for shard in plan([place / f"shard-{n}"])]
        files = sorted(place.glob("*/*.jpg"))
        encoder = Encoder.from_pretrained(device="cpu")
        encoder.encode(files[:64])
        begin = time.perf_counter()
        here = cpu_seconds(lambda: encoder.encode(files))[0]
        clock = time.perf_counter() - begin
        to, stamps, rows = place / "ray", [time.perf_counter()], []
        for done in run_on_ray(EncodeShard(to, device="cpu"), shards, "local", workers=2):
            stamps.append(time.perf_counter())
            rows.append(done.rows)
        # After start-up: from the first two finished shards, one of each actor.
        rate = sum(rows[2:]) / (stamps[-1] - stamps[2])
    return {
        "images": len(photos),
        "images_per_second_encoder_one_thread": round(len(files) / clock, 2),
        "images_per_cpu_second_encoder": round(len(files) / here, 2),
        "images_per_second_ray_two_actors": round(rate, 2),
        "per_core_vs_encoder": round(rate / 2 / (len(files) / clock), 2),
    }


if __name__ == "__main__":
    main()
