"""dedup against other ways to find copies in a folder, interleaved in one run.

    python benchmarks/dedup.py PHOTOS... --model MODEL [--photos 1000] [--rounds 3]

Three questions, each as a ratio within the run:

- the whole job on photos and edited copies of a tenth of them: ours (cold: every file encoded),
  ours again (descriptors cached), and imagededup's PHash and CNN where that package and its
  weights are there; with the share of the copies each one finds;
- the comparison alone on random descriptors: ours, FAISS range search, and pairs in a Python loop
  (timed on few images and scaled by the square);
- the largest comparison that fits: pairs of ``--large`` descriptors, with its memory.
"""

import argparse
import contextlib
import importlib
import io
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import edits_pixels
import faiss
import numpy as np
import results
from numpy.typing import NDArray
from photos import find_photos
from PIL import Image
from timing import interleaved

from sscd_vec import Encoder, Normalizer
from sscd_vec.photos import dedup
from sscd_vec.photos.dedup_files import find_copies
from sscd_vec.photos.descriptor_cache import DescriptorCache

DIM = 512
LOOP = 300  # images of the Python loop


def main() -> None:
    """Run the three parts and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="folders or tars of photos")
    parser.add_argument("--model", required=True, help="model folder with its normalizer")
    parser.add_argument("--photos", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compared", type=int, default=20_000)
    parser.add_argument("--large", type=int, default=100_000)
    asked = parser.parse_args()
    figures = {
        "photos": whole_job(asked.sources, asked.model, asked.photos, asked.rounds),
        "comparison": comparison(asked.compared, asked.rounds),
        "large": large(asked.large),
    }
    print(figures)
    results.write("dedup", figures)


def whole_job(sources: list[str], model: str, count: int, rounds: int) -> dict[str, object]:
    """Folder in, groups out."""
    encoder = Encoder.from_pretrained(model)
    normalizer = Normalizer.load(Path(model, "normalizer.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        pairs = _make_folder(sources, count, Path(folder))
        cached = DescriptorCache(None)
        found: dict[str, set[frozenset[str]]] = {}

        def ours(name: str, cache: DescriptorCache) -> None:
            copies = find_copies(
                encoder,
                normalizer,
                [Path(folder)],
                threshold=normalizer.threshold("symmetric"),
                cache=cache,
            )
            found[name] = {
                frozenset((a.name, b.name))
                for group in copies.groups
                for paths in [[group.keep.path, *(c.picture.path for c in group.copies)]]
                for a in paths
                for b in paths
                if a != b
            }

        candidates: dict[str, Callable[[], object]] = {
            "ours": lambda: ours("ours", DescriptorCache(None)),
            "ours, cached": lambda: ours("ours, cached", cached),
        }
        missing = {}
        for method in ("PHash", "CNN"):
            try:
                candidates[f"imagededup {method}"] = _imagededup(method, folder, found)
            except Exception as error:  # not installed, or its weights cannot be fetched
                missing[f"imagededup {method}"] = f"{type(error).__name__}: {error}"[:200]
        timings = interleaved(candidates, rounds=rounds)
    files = count + len(pairs)
    return {
        "files": files,
        "copies": len(pairs),
        "methods": {
            name: {
                "speedup_over_ours": round(timing.speedup_over(timings["ours"]), 2),
                "seconds_per_1000": round(timing.median * 1000 / files, 2),
                "copies_found": round(len(found[name] & pairs) / len(pairs), 3),
                "pairs_that_are_no_copies": len(found[name] - pairs),
            }
            for name, timing in timings.items()
        },
        "not_run": missing,
    }


def comparison(count: int, rounds: int) -> dict[str, object]:
    """Pairs of random descriptors above a threshold that none of them reaches by chance."""
    z = _random(count)
    biases = np.zeros(count, np.float32)
    few = z[:LOOP]

    def with_faiss() -> object:
        index = faiss.IndexFlatIP(DIM)
        index.add(z)
        return index.range_search(z, 0.5)

    def in_python() -> int:
        return sum(float(few[a] @ few[b]) >= 0.5 for a in range(LOOP) for b in range(a + 1, LOOP))

    timings = interleaved(
        {
            "ours": lambda: dedup.find_pairs(z, biases, 0.5),
            "FAISS range search": with_faiss,
            "Python loop": in_python,
        },
        rounds=rounds,
    )
    scale = (count / LOOP) ** 2
    ours = timings["ours"].median
    return {
        "images": count,
        "times_slower_than_ours": {
            "FAISS range search": round(timings["FAISS range search"].median / ours, 2),
            "Python loop (scaled)": round(timings["Python loop"].median * scale / ours, 1),
        },
    }


def large(count: int) -> dict[str, object]:
    """One large comparison, groups included."""
    z = _random(count)
    z[count // 2 : count // 2 + count // 100] = z[: count // 100]  # one in a hundred has a copy
    biases = np.zeros(count, np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    pairs = dedup.find_pairs(z, biases, 0.5)
    groups = dedup.group(z, biases, 0.5, pairs)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "images": count,
        "groups": len(groups),
        "expected_groups": count // 100,
        "seconds": round(seconds, 1),
        "descriptors_mib": round(z.nbytes / 2**20),
        "peak_grew_by_mib": round(max(0.0, after - before)),
    }


def _random(count: int) -> NDArray[np.float32]:
    z = np.random.default_rng(0).normal(size=(count, DIM)).astype(np.float32)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    return z


def _make_folder(sources: list[str], count: int, folder: Path) -> set[frozenset[str]]:
    """Write photos, and an edited copy of every tenth; return the names that belong together."""
    photos = find_photos(sources)
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(photos), min(count, len(photos)), replace=False)
    kinds = (edits_pixels.compress, edits_pixels.crop, edits_pixels.brightness)
    pairs = set()
    for number, place in enumerate(chosen.tolist()):
        (folder / f"{number:06}.jpg").write_bytes(photos[place].read())
        if number % 10 == 0:
            image = Image.open(io.BytesIO(photos[place].read())).convert("RGB")
            edited, _ = kinds[number // 10 % 3](image, rng, image.copy)
            edited.save(folder / f"{number:06}-copy.jpg", quality=80)
            pairs.add(frozenset((f"{number:06}.jpg", f"{number:06}-copy.jpg")))
    return pairs


def _imagededup(
    method: str, folder: str, found: dict[str, set[frozenset[str]]]
) -> Callable[[], None]:
    methods = importlib.import_module("imagededup.methods")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finder = getattr(methods, method)(verbose=False)

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            duplicates = finder.find_duplicates(image_dir=folder)
        found[f"imagededup {method}"] = {
            frozenset((os.path.basename(a), os.path.basename(b)))
            for a, others in duplicates.items()
            for b in others
        }

    return run


if __name__ == "__main__":
    main()
