"""Beyond one million: duplicates through lists, large mapped FAISS banks, encoding on Ray.

    python benchmarks/scale.py PHOTOS... [--parts duplicates bank ray] [--counts 100000 1000000]

Vectors are drawn around whitened descriptors of real photos, and copies are planted at the
distances that real edited copies have (``mix.edit``), kept in ``--cache`` from run to run.

- ``duplicates``: pairs through lists against every pair (timed on ``COMPARED`` images in the same
  run and scaled by the square), with the share of the pairs of sampled images that lists find;
- ``bank``: lists of codes with exact scores from a mapped file, built in parts and merged: recall
  of planted copies against exhaustive search, errors of scores, queries per second, memory, disk;
- ``ray``: images per second and core of two actors against ``Encoder.encode``.

Each part has a record (``results/scale_PART.json``) with one row per size.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import results
from accuracy.edits import mix
from photos import Photo, find_photos
from speed.measure import peak_mib
from sscd_vec import Encoder, FaissIndex, Normalizer
from sscd_vec.adapters.faiss import merge_indexes
from sscd_vec.bank import groups, join
from sscd_vec.encoding import Done, EncodeShard, plan, run_here, run_on_ray

Float32 = NDArray[np.float32]
PARTS = ("duplicates", "bank", "ray")
DIM = 512
SPREAD = 2.0  # noise around two real descriptors: cosine 0.41 with each, 0.17 between neighbours
COMPARED = 16_384  # images of which every pair is compared
BLOCK = 65_536
PART_ROWS = 500_000
QUERIES, BATCH, ROUNDS = 1000, 100, 3
CANDIDATES = 64


def main() -> None:
    """Run the parts and add their rows to the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="folders or tars of photos")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--counts", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--photos", type=int, default=400, help="real photos; two copies of each")
    parser.add_argument("--codes", default="RaBitQ", choices=["RaBitQ", "SQ8"])
    parser.add_argument("--images", type=int, default=2000, help="of the part ray")
    parser.add_argument("--cache", type=Path, help="file that keeps the real descriptors")
    parser.add_argument("--work", type=Path, help="folder for large files")
    asked = parser.parse_args()
    photos = [photo for photo in find_photos(asked.sources) if Path(photo.name).stem[-1:] != "7"]
    np.random.default_rng(23).shuffle(photos)
    if "ray" in asked.parts:
        _record("ray", ray_rates(photos[: asked.images], asked.work))
    if set(asked.parts) != {"ray"}:
        real = Real.make(photos[: asked.photos], asked.cache)
        for count in asked.counts:
            if "duplicates" in asked.parts:
                _record("duplicates", duplicates(real, count, asked.work))
            if "bank" in asked.parts:
                _record("bank", bank(real, count, asked.codes, asked.work))


def _record(part: str, row: dict[str, Any]) -> None:
    """Replace the row of the same size, or add it."""
    print(part, row, flush=True)
    name, rows = f"scale_{part}", []
    if (results.RESULTS / f"{name}.json").exists():
        figures: Any = results.read(name)["figures"]
        rows = [r for r in figures["rows"] if r["images"] != row["images"]]
    results.write(name, {"rows": sorted([*rows, row], key=lambda r: r["images"])})


# ---------------------------------------------------------------------- vectors


@dataclass(frozen=True)
class Real:
    """Whitened descriptors of photos, and of two edited copies of each."""

    photos: Float32
    copies: Float32

    @classmethod
    def make(cls, photos: list[Photo], cache: Path | None) -> "Real":
        """Encode photos and copies, or read what an earlier run kept."""
        if cache is not None and cache.exists():
            with np.load(cache) as kept:
                return cls(kept["photos"], kept["copies"])
        encoder, rules = Encoder.from_pretrained(device="cpu"), Normalizer.from_pretrained()
        rng = np.random.default_rng(0)

        def edited() -> Iterator[Image.Image]:
            for photo in photos:
                for _ in range(2):
                    yield mix.edit(
                        photo.image(), rng, lambda: photos[rng.integers(len(photos))].image()
                    )[0]  # noqa: E501

        originals = encoder.encode((photo.image() for photo in photos), show_progress=False)
        made = cls(rules.whiten(originals), rules.whiten(encoder.encode(edited())))
        if cache is not None:
            np.savez(cache, photos=made.photos, copies=made.copies)
        return made

    def cosines(self) -> Float32:
        """Of every copy with its photo."""
        found: Float32 = (np.repeat(self.photos, 2, axis=0) * self.copies).sum(1)
        return found

    def vectors(self, count: int, seed: int) -> Float32:
        """Unit vectors around two photos each."""
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal((count, DIM), np.float32)
        noise *= SPREAD / DIM**0.5
        for _ in range(2):
            noise += self.photos[rng.integers(len(self.photos), size=count)]
        return _unit(noise)

    def copies_of(self, rows: Float32, seed: int, least: float = -1.0) -> Float32:
        """A copy of each, as far away as a real one that is at least ``least`` alike."""
        rng = np.random.default_rng(seed)
        real = self.cosines()
        which = rng.choice(np.flatnonzero(real >= least), len(rows))
        original, copy = np.repeat(self.photos, 2, axis=0)[which], self.copies[which]
        away = copy - real[which, None] * original  # in the direction a real edit takes
        away -= (away * rows).sum(1, keepdims=True) * rows
        cosine = real[which, None]
        made = (cosine * rows + np.sqrt(1 - cosine**2) * _unit(away)).astype(np.float32)
        return _unit(made)


def _unit(rows: Float32) -> Float32:
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def _write(real: Real, count: int, path: Path) -> Iterator[Float32]:
    """Write vectors to a file block by block, and hand on each."""
    with path.open("wb") as file:
        for begin in range(0, count, BLOCK):
            block = np.ascontiguousarray(_rows(real, begin, min(begin + BLOCK, count)))
            file.write(block.data)
            yield block


# ---------------------------------------------------------------------- duplicates


def duplicates(real: Real, count: int, work: Path | None) -> dict[str, Any]:
    """Pairs among vectors with planted groups of two to six."""
    rules = Normalizer.from_pretrained()
    threshold = rules.threshold("symmetric", count)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        path = Path(folder) / "rows"
        for _ in _write(real, count, path):
            pass
        planted = _plant(real, np.memmap(path, np.float32, "r+").reshape(-1, DIM))
        rows = join.Rows(path=path, dim=DIM)
        z = rows.open()
        biases = np.concatenate(
            [rules.whitened_biases(np.array(z[b : b + BLOCK])) for b in range(0, count, BLOCK)]
        )
        few = np.array(z[: min(count, COMPARED)])
        every = _seconds(lambda: groups.find_pairs(few, biases[: len(few)], threshold))[0]
        taken, found = _seconds(lambda: join.find_pairs(rows, biases, threshold, memory=1 << 28))
        pairs = found.pairs
        grouping, made = _seconds(lambda: groups.group_pairs(z, biases, threshold, pairs))
        scores = (z[planted[:, 0]] * z[planted[:, 1]]).sum(1)
        scores -= np.maximum(biases[planted[:, 0]], biases[planted[:, 1]])
    wanted = np.sort(planted[scores >= threshold], axis=1)
    keys = wanted[:, 0] * count + wanted[:, 1]
    exhaustive = every * (count / len(few)) ** 2
    return {
        "images": count,
        "lists_cpu_seconds": round(taken, 1),
        "every_pair_cpu_seconds": round(exhaustive, 1),
        "every_pair_measured_on": len(few),
        "times_faster": round(exhaustive / taken, 1),
        "recall_of_sampled": None if found.recall is None else round(found.recall, 4),
        "sampled_pairs": found.expected,
        "planted_pairs_above_threshold": len(wanted),
        "recall_of_planted": round(
            float(np.isin(keys, pairs.first * count + pairs.second).mean()), 4
        ),
        "pairs": len(pairs),
        "groups": len(made),
        "grouping_cpu_seconds": round(grouping, 1),
        "memory": _memory(),
    }


def _plant(real: Real, z: Float32) -> NDArray[np.int64]:
    """Replace vectors by copies of others; return who is a copy of whom."""
    rng = np.random.default_rng(1)
    free, pairs = rng.permutation(len(z)), []
    sizes = rng.integers(2, 7, len(z) // 50)
    ends = np.cumsum(sizes)
    for copy in range(1, int(sizes.max())):
        has = sizes > copy
        originals, copies = free[ends[has] - sizes[has]], free[ends[has] - sizes[has] + copy]
        z[copies] = real.copies_of(np.array(z[originals]), seed=copy)
        pairs.append(np.stack([originals, copies], 1))
    return np.concatenate(pairs)


# ---------------------------------------------------------------------- bank


def bank(real: Real, count: int, codes: str, work: Path | None) -> dict[str, Any]:
    """Build a bank in parts, merge it, map it, and look for planted copies."""
    # What is drawn is whitened already.
    rules = replace(Normalizer.from_pretrained(), whitening=None)
    lists = 1 << max(6, round(np.log2(2 * count**0.5)))
    turn = f"RR{rules.lifted_dim}," if codes == "RaBitQ" else ""
    factory = f"{turn}IVF{lists},{codes},Refine(SQfp16)"
    with tempfile.TemporaryDirectory(dir=work) as folder:
        place = Path(folder)
        training = _seconds(partial(_train, real, rules, factory, min(count, 40 * lists), place))[0]
        queries, expected, adding, parts = _add(real, rules, count, place)
        merging = _seconds(lambda: merge_indexes(parts, place / "bank", rules))[0]
        for part in parts:
            part.unlink()
        disk = (place / "bank").stat().st_size
        probes = max(16, lists // 32)
        index = FaissIndex.open(
            place / "bank",
            rules,
            mmap=True,
            parameters={"nprobe": probes, "k_factor_rf": CANDIDATES},
        )
        batches = [queries[b : b + BATCH] for b in range(0, len(queries), BATCH)]
        found = [index.search(batch, k=1) for batch in batches]  # and warms the file's pages
        rounds = [
            _seconds(lambda: [index.search(b, k=1) for b in batches])[0] for _ in range(ROUNDS)
        ]
        memory = _memory()
    ids = np.concatenate([[m[0].id if len(m) else -1 for m in each] for each in found])
    scores = np.concatenate([[m[0].score if len(m) else np.nan for m in each] for each in found])
    right, best = expected
    copies = right == np.arange(len(right)) * (count // QUERIES)  # exhaustive search finds them
    same = ids == right
    called = copies & (best >= rules.threshold("search", count))  # what a search would call a copy
    return {
        "images": count,
        "factory": factory,
        "probes": probes,
        "candidates": CANDIDATES,
        "recall_of_copies_above_threshold": round(float(same[called].mean()), 4),
        "recall_of_exhaustive": round(float(same[copies].mean()), 4),
        "planted": len(copies),
        "found_by_exhaustive": int(copies.sum()),
        "found_by_exhaustive_above_threshold": int(called.sum()),
        "largest_score_error": float(np.abs(scores - best)[same].max()),
        "queries_per_cpu_second": round(len(queries) / float(np.median(rounds)), 1),
        "training_cpu_seconds": round(training, 1),
        "adding_cpu_seconds": round(adding, 1),
        "merging_cpu_seconds": round(merging, 1),
        "bytes_on_disk": disk,
        "memory": memory,
    }


def _train(real: Real, rules: Normalizer, factory: str, rows: int, place: Path) -> None:
    FaissIndex(rules, factory).train(real.vectors(rows, seed=10**6)).save(place / "trained")


def _add(
    real: Real, rules: Normalizer, count: int, place: Path
) -> tuple[Float32, tuple[NDArray[np.int64], Float32], float, list[Path]]:
    """Add the vectors part by part; the queries' best matches are found on the way."""
    step = count // QUERIES
    originals = np.empty((QUERIES, DIM), np.float32)
    for begin in range(0, count, BLOCK):
        block = _rows(real, begin, min(begin + BLOCK, count))
        rows = np.arange(QUERIES)[(np.arange(QUERIES) * step) // BLOCK == begin // BLOCK]
        originals[rows] = block[rows * step - begin]
    queries = real.copies_of(originals, seed=5)
    vectors = rules.queries(queries)
    best, right = np.full(QUERIES, -np.inf, np.float32), np.zeros(QUERIES, np.int64)
    adding, parts = 0.0, []
    for start in range(0, count, PART_ROWS):
        part = FaissIndex.open(place / "trained", rules)
        for begin in range(start, min(count, start + PART_ROWS), BLOCK):
            block = _rows(real, begin, min(begin + BLOCK, start + PART_ROWS, count))
            references = rules.references(block)
            scores = vectors @ references.T
            top = scores.argmax(1)
            value = scores[np.arange(QUERIES), top]
            better = value > best
            best[better], right[better] = value[better], begin + top[better]
            ids = np.arange(begin, begin + len(block))
            adding += _seconds(partial(part.add, ids, block))[0]
        parts.append(place / f"part-{start}")
        adding += _seconds(partial(part.save, parts[-1]))[0]
    return queries, (right, best), adding, parts


def _rows(real: Real, begin: int, end: int) -> Float32:
    """Vectors ``begin`` to ``end``: made block by block, whatever is asked for."""
    blocks = range(begin // BLOCK, -(-end // BLOCK))
    made = np.concatenate([real.vectors(BLOCK, seed=number * BLOCK) for number in blocks])
    return made[begin - blocks.start * BLOCK : end - blocks.start * BLOCK]


# ---------------------------------------------------------------------- ray


def ray_rates(photos: list[Photo], work: Path | None) -> dict[str, Any]:
    """Encode shards of photos here with one thread, and on Ray with two actors of one core."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=work) as folder:
        place = Path(folder)
        for number, photo in enumerate(photos):
            target = place / f"shard-{number % 8}" / f"{number}.jpg"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(photo.read())
        shards = [shard for n in range(8) for shard in plan([place / f"shard-{n}"])]
        rates = {}
        ways: dict[str, Callable[..., Iterator[Done]]] = {
            "here": run_here,
            "ray": partial(run_on_ray, address="local", workers=2),
        }
        for name, run in ways.items():
            to = place / name
            to.mkdir()
            started = [time.perf_counter()]
            rows = []
            for done in run(EncodeShard(to, device="cpu"), shards):
                started.append(time.perf_counter())
                rows.append(done.rows)
            # After start-up: from the first finished shard (the first two, on two actors).
            skip = 2 if name == "ray" else 1
            rates[name] = sum(rows[skip:]) / (started[-1] - started[skip])
            shutil.rmtree(to)
    return {
        "images": len(photos),
        "images_per_second_here_one_core": round(rates["here"], 2),
        "images_per_second_ray_two_actors": round(rates["ray"], 2),
        "per_core_vs_here": round(rates["ray"] / 2 / rates["here"], 2),
    }


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of all threads, which a busy machine does not change, and what was returned."""
    begin = time.process_time()
    result = run()
    return time.process_time() - begin, result


def _memory() -> dict[str, int]:
    """Of this process in MiB: its own, what is mapped from files, and the peak of both."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
    own, mapped = (int(fields[name]) // 1024 for name in ("RssAnon", "RssFile"))
    return {"own_mib": own, "mapped_mib": mapped, "peak_mib": round(peak_mib())}


if __name__ == "__main__":
    main()
