"""dedup against other ways to find copies in a folder, interleaved in one run.

    python benchmarks speed/dedup PHOTOS... [--model MODEL] [--photos 1000] [--rounds 3]

Three questions, each as a ratio within the run:

- ``large``: pairs and groups among 100 000 descriptors with planted copies, against FAISS's
  brute-force range search on the same, and the memory it takes;
- ``comparison``: the same on fewer, with pairs in a Python loop too (timed on few images and scaled
  by the square);
- ``photos``: the whole job on photos and edited copies of a tenth of them: ours (cold: every file
  encoded), ours again (descriptors cached), and imagededup's PHash and CNN where that package is
  there; with the share of the copies each one finds. Where the CNN's weights cannot be had, its
  network runs without: that shows its speed and nothing else.

Each part has a record of its own (``results/dedup_PART.json``); ``--parts`` runs some of them.
"""

import argparse
import contextlib
import importlib
import io
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import torchvision
from numpy.typing import NDArray
from torch import nn

import results
from accuracy.command_model import label, model_folder, open_encoder
from accuracy.edits import pixels
from photos import Photo, find_photos
from speed.measure import interleaved, resident_mib
from sscd_vec import Encoder, Normalizer
from sscd_vec.bank import Bank
from sscd_vec.bank.groups import Group, find_pairs, group_pairs

DIM = 512
LOOP = 300  # images of the Python loop
THRESHOLD = 0.5  # no two random unit vectors of 512 dimensions are that close
NOISE = 0.5  # of a planted copy: cosine 0.89 with its original, 0.8 with another copy
SPEED_ONLY = "CNN (without weights: speed only)"
PARTS = ("large", "comparison", "photos")


def main() -> None:
    """Run the parts and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="folders or tars of photos")
    parser.add_argument("--model", help="a model or imagenet:TRUNK; the shipped one by default")
    parser.add_argument("--photos", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compared", type=int, default=20_000)
    parser.add_argument("--large", type=int, default=100_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    asked = parser.parse_args()
    # The large one first: what came before would hide its peak of memory.
    parts: dict[str, Callable[[], dict[str, object]]] = {
        "large": lambda: large(asked.large),
        "comparison": lambda: comparison(asked.compared, asked.rounds),
        "photos": lambda: whole_job(asked.sources, asked.model, asked.photos, asked.rounds),
    }
    for name, measure in parts.items():
        if name in asked.parts:
            figures = measure()
            print(name, figures)
            used = open_encoder(asked.model).fingerprint if name == "photos" else None
            results.write(f"dedup_{name}", figures, encoder=used)


def whole_job(sources: list[str], model: str | None, count: int, rounds: int) -> dict[str, object]:
    """Folder in, groups out."""
    photos = find_photos(sources)
    np.random.default_rng(0).shuffle(photos)
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as folder:
        ready = model_folder(model, photos[count:][:900], Path(place))
        encoder = Encoder.from_pretrained(ready)
        normalizer = Normalizer.load(ready / "normalizer.safetensors")
        pairs = _make_folder(photos[:count], Path(folder))
        cached = Path(place) / "descriptors"
        found: dict[str, set[frozenset[str]]] = {}

        def ours(name: str, cache: Path | None) -> None:
            with Bank(model=encoder, normalizer=normalizer, cache=cache) as bank:
                bank.add(folder, show_progress=False)
                copies = bank.duplicates(show_progress=False)
            found[name] = {
                frozenset((Path(a.image.id).name, Path(b.image.id).name))
                for group in copies.groups
                for a in group.members
                for b in group.members
                if a is not b
            }

        candidates: dict[str, Callable[[], object]] = {
            "ours": lambda: ours("ours", None),
            "ours, cached": lambda: ours("ours, cached", cached),
        }
        missing = {}
        for method in ("PHash", "CNN", SPEED_ONLY):
            if method == SPEED_ONLY and "imagededup CNN" in candidates:
                continue
            try:
                candidates[f"imagededup {method}"] = _imagededup(method, folder, found)
            except Exception as error:  # not installed, or its weights cannot be fetched
                missing[f"imagededup {method}"] = f"{type(error).__name__}: {error}"[:200]
        timings = interleaved(candidates, rounds=rounds)
        files = len(list(Path(folder).iterdir()))
    return {
        "model": label(model),
        "files": files,
        "copies": len(pairs),
        "rows": [
            {
                "method": name,
                "speed": round(timing.speedup_over(timings["ours"]), 2),
                "seconds_per_1000": round(timing.median * 1000 / files, 2),
                **(_accuracy(found[name], pairs) if SPEED_ONLY not in name else {}),
            }
            for name, timing in timings.items()
        ],
        "not_run": missing,
    }


def _accuracy(found: set[frozenset[str]], pairs: set[frozenset[str]]) -> dict[str, float]:
    return {
        "copies_found": round(len(found & pairs) / len(pairs), 3),
        "false_pairs": len(found - pairs),
    }


def comparison(count: int, rounds: int) -> dict[str, object]:
    """All ways to find the pairs among planted copies."""
    z, _ = planted(count)
    few = z[:LOOP]

    def in_python() -> int:
        return sum(
            float(few[a] @ few[b]) >= THRESHOLD for a in range(LOOP) for b in range(a + 1, LOOP)
        )

    timings = interleaved(
        {
            "ours": lambda: _groups(z),
            "FAISS range search": lambda: _faiss_pairs(z),
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
    z, expected = planted(count)
    _groups(z[:2000])  # what is loaded once is no part of it
    found: dict[str, set[tuple[int, ...]]] = {}
    memory = Memory()

    def ours() -> None:
        with memory:
            found["ours"] = {group.members for group in _groups(z)}

    timings = interleaved(
        {"ours": ours, "FAISS range search": lambda: _faiss_pairs(z)}, rounds=1, warmup=0
    )
    return {
        "images": count,
        "planted_groups": len(expected),
        "groups_found_exactly": len(found["ours"] & expected),
        "other_groups": len(found["ours"] - expected),
        "seconds": round(timings["ours"].median, 1),
        "faiss_range_search_times_slower": round(
            timings["FAISS range search"].median / timings["ours"].median, 2
        ),
        "descriptors_mib": round(z.nbytes / 2**20),
        "memory_grew_by_mib": round(memory.grew),
    }


def planted(count: int) -> tuple[NDArray[np.float32], set[tuple[int, ...]]]:
    """Random unit descriptors, one in fifty with one to five copies; and who belongs together."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((count, DIM), np.float32)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    free = rng.permutation(count).tolist()
    groups = set()
    for _ in range(count // 50):
        members = [free.pop() for _ in range(int(rng.integers(2, 7)))]
        noise = rng.standard_normal((len(members) - 1, DIM), np.float32)
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        copies = z[members[0]] + NOISE * noise
        z[members[1:]] = copies / np.linalg.norm(copies, axis=1, keepdims=True)
        groups.add(tuple(sorted(members)))
    return z, groups


def _groups(z: NDArray[np.float32]) -> list[Group]:
    biases = np.zeros(len(z), np.float32)
    return group_pairs(z, biases, THRESHOLD, find_pairs(z, biases, THRESHOLD))


def _faiss_pairs(z: NDArray[np.float32]) -> object:
    index = faiss.IndexFlatIP(DIM)
    index.add(z)
    return index.range_search(z, THRESHOLD)


class Memory:
    """By how many MiB this process grew, at most, inside a ``with`` block; sampled."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.grew = 0.0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        """Start watching."""
        self._thread = threading.Thread(target=self._watch, args=(resident_mib(),))
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, before: float) -> None:
        while not self._done.wait(0.05):
            self.grew = max(self.grew, resident_mib() - before)


def _make_folder(photos: list[Photo], folder: Path) -> set[frozenset[str]]:
    """Write photos, and an edited copy of every tenth; return the names that belong together."""
    rng = np.random.default_rng(0)
    kinds = (pixels.compress, pixels.crop, pixels.brightness)
    pairs = set()
    for number, photo in enumerate(photos):
        (folder / f"{number:06}.jpg").write_bytes(photo.read())
        if number % 10 == 0:
            image = photo.image()
            edited, _ = kinds[number // 10 % 3](image, rng, image.copy)
            edited.save(folder / f"{number:06}-copy.jpg", quality=80)
            pairs.add(frozenset((f"{number:06}.jpg", f"{number:06}-copy.jpg")))
    return pairs


def _imagededup(
    method: str, folder: str, found: dict[str, set[frozenset[str]]]
) -> Callable[[], None]:
    methods = importlib.import_module("imagededup.methods")
    untrained = method == SPEED_ONLY
    options = {"model_config": _untrained_mobilenet()} if untrained else {}
    # Untrained, everything looks the same to it: nothing is to be listed.
    limit = {"min_similarity_threshold": 1.0} if untrained else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finder = getattr(methods, method.partition(" ")[0])(verbose=False, **options)

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            duplicates = finder.find_duplicates(image_dir=folder, **limit)
        found[f"imagededup {method}"] = {
            frozenset((os.path.basename(a), os.path.basename(b)))
            for a, others in duplicates.items()
            for b in others
        }

    return run


def _untrained_mobilenet() -> object:
    """The network imagededup's CNN uses, cut where it cuts it, untrained."""
    models = importlib.import_module("imagededup.utils.models")
    network = torchvision.models.mobilenet_v3_small(weights=None).eval()
    pooled = nn.Sequential(network.features, network.avgpool, nn.Flatten())
    return models.CustomModel("mobilenet_v3_small", pooled, models.MobilenetV3.transform)


if __name__ == "__main__":
    main()
