"""Images per second of every stage, as a ratio to the paper code's way in the same run.

    python benchmarks/disc.py --disc PATH --model NAME --throughput

The paper code's way is Pillow and torchvision transforms, an eager float32 network in NCHW, and
FAISS for the rest: a ``PCAW,L2norm`` transform, a flat inner-product index, another for the bias.
Rounds of all candidates are interleaved (``measure.py``): on a shared machine only the ratios mean
something.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import faiss
import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import results
from accuracy.dataset import Descriptors, read_disc
from accuracy.models import EagerDescriber, EncoderDescriber, recipe_of
from speed.measure import interleaved
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.milvus import MilvusCollection
from sscd_vec.encoder.backends import BackendName
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.encoder import Encoder
from sscd_vec.encoder.images import Pixels, load_pixels
from sscd_vec.encoder.preprocess import resize, target_size
from sscd_vec.normalize import Normalizer

PAPER = "paper code"
IMAGES, SIZES, QUERIES, BACKGROUND = 1000, (1_000, 10_000, 100_000), 1_000, 20_000
ROUNDS = 5
THREADS = os.cpu_count() or 1
Item = TypeVar("Item")


@dataclass(frozen=True)
class Speed:
    """One candidate of one stage."""

    stage: str
    size: int
    candidate: str
    per_second: float
    ratio: float


def run(
    model: str,
    disc: Path,
    name: str,
    *,
    images: int = IMAGES,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    backends: Sequence[BackendName] = ("torch", "openvino", "onnx"),
    folder: Path = results.RESULTS,
) -> list[Speed]:
    """Measure every stage and write ``name.json`` and ``name.svg``."""
    listed = read_disc(disc)
    paths = (*listed.references.paths, *listed.queries.paths)[:images]
    base = _encoder(model)
    encoders = {backend: Encoder(base.model, backend=backend) for backend in backends}
    speeds = image_stages(base, encoders, paths, rounds)
    for size in sizes:
        speeds += descriptor_stages(base.dim, size, rounds)
    speeds += end_to_end(base, encoders, paths, rounds)
    for speed in speeds:
        print(
            f"{speed.stage:12}{speed.size:>9,}  {speed.candidate:24}"
            f"{speed.per_second:12,.1f}/s {speed.ratio:7.2f}×"
        )
    figures = {
        "model": Path(model).name,
        "trunk": base.config.trunk,
        "size": f"{base.config.size_mode} {base.config.size}",
        "threads": THREADS,
        "rows": [asdict(speed) for speed in speeds],
    }
    print(results.write(name, figures, folder, encoder=base.fingerprint))
    plot(speeds, folder / f"{name}.svg")
    return speeds


def image_stages(
    base: Encoder, encoders: Mapping[BackendName, Encoder], paths: Sequence[str], rounds: int
) -> list[Speed]:
    """Decoding to the network's input, and the network alone; each round takes its own images."""
    reference = EagerDescriber(base.model)
    config = base.config
    parts = _parts(paths, rounds)

    def decode(read: Callable[[str], Tensor], part: Sequence[str]) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(read, part):
                pass

    def needed(height: int, width: int) -> tuple[int, int]:
        return target_size(height, width, config)

    def ours(path: str) -> Tensor:
        return resize(load_pixels(path, reduce_to=needed), config)

    decoders = {PAPER: partial(decode, reference.decode), "ours": partial(decode, ours)}
    speeds = _timed("decode", len(parts[0]), decoders, parts)
    # The network alone sees decoded pictures, so that nothing but it is timed.
    pictures = [_picture(path, config) for path in paths]

    def eager(part: Sequence[Pixels]) -> None:
        mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
        with torch.inference_mode():
            for start in range(0, len(part), 32):
                batch = part[start : start + 32]
                for shape in {picture.shape for picture in batch}:
                    same = [torch.from_numpy(p).permute(2, 0, 1) for p in batch if p.shape == shape]
                    reference.model((torch.stack(same).float() / 255 - mean) / std)

    networks: dict[str, Callable[[Sequence[Pixels]], object]] = {PAPER: eager}
    for backend, encoder in encoders.items():
        networks[f"ours, {backend}"] = partial(_encode, encoder)
    return speeds + _timed("encode", len(parts[0]), networks, _parts(pictures, rounds))


def descriptor_stages(dim: int, size: int, rounds: int) -> list[Speed]:
    """Normalizing, adding and searching ``size`` random descriptors."""
    rng = np.random.default_rng(0)
    background, references = _unit_rows(BACKGROUND, dim, rng), _unit_rows(size, dim, rng)
    queries = _unit_rows(QUERIES, dim, rng)
    ids = [f"R{number:06d}" for number in range(size)]
    normalizer = Normalizer.fit(background)
    paper = PaperSearch(background)
    normalizing = {
        PAPER: lambda _: (paper.references(references), paper.queries(queries)),
        "ours": lambda _: (normalizer.references(references), normalizer.queries(queries)),
    }
    each = [None] * rounds
    speeds = _timed("normalize", size, normalizing, each, counted=size + QUERIES)
    ready = paper.references(references)
    with tempfile.TemporaryDirectory() as folder:
        flat, milvus = FaissIndex(normalizer), _milvus(folder, normalizer)
        flat.add(ids, references)
        milvus.add(ids, references)
        milvus.commit()
        index = paper.index(ready)
        adding: dict[str, Callable[[object], object]] = {
            PAPER: lambda _: paper.index(paper.references(references)),
            "ours, FAISS": lambda _: FaissIndex(normalizer).add(ids, references),
            "ours, Milvus Lite": lambda _: _fresh(folder, normalizer).add(ids, references),
        }
        searching: dict[str, Callable[[object], object]] = {
            PAPER: lambda _: index.search(paper.queries(queries), 10),
            "ours, FAISS": lambda _: flat.search(queries, 10),
            "ours, Milvus Lite": lambda _: milvus.search(queries, 10),
        }
        speeds += _timed("search", size, searching, each, counted=QUERIES)
        speeds += _timed("add", size, adding, each)
        milvus.close()
    return speeds


def end_to_end(
    base: Encoder, encoders: Mapping[BackendName, Encoder], paths: Sequence[str], rounds: int
) -> list[Speed]:
    """From image files to their ten nearest among 10 000 references."""
    rng = np.random.default_rng(0)
    background, references = (
        _unit_rows(BACKGROUND, base.dim, rng),
        _unit_rows(10_000, base.dim, rng),
    )
    normalizer, paper = Normalizer.fit(background), PaperSearch(background)
    index, flat = paper.index(paper.references(references)), FaissIndex(normalizer)
    flat.add([f"R{number:06d}" for number in range(len(references))], references)
    reference = EagerDescriber(base.model)

    def ours(encoder: Encoder, part: Sequence[str]) -> None:
        flat.search(encoder.encode(list(part), show_progress=False), 10)

    whole: dict[str, Callable[[Sequence[str]], object]] = {
        PAPER: lambda part: index.search(paper.queries(reference(part)), 10)
    }
    for backend, encoder in encoders.items():
        whole[f"ours, {backend}"] = partial(ours, encoder)
    parts = _parts(paths, rounds)
    return _timed("end to end", len(parts[0]), whole, parts)


class PaperSearch:
    """Whitening, bias and index as the paper's code has them: FAISS throughout."""

    def __init__(self, background: Descriptors) -> None:
        """Train the transform and index the background for the bias."""
        dim = background.shape[1]
        self.whitening = faiss.PCAMatrix(dim, dim, -0.5)
        self.whitening.train(background)
        self.background = faiss.IndexFlatIP(dim)
        self.background.add(self._whiten(background))

    def references(self, z: Descriptors) -> Descriptors:
        """``[z, 1]``."""
        return np.hstack([self._whiten(z), np.ones((len(z), 1), np.float32)])

    def queries(self, z: Descriptors) -> Descriptors:
        """``[z, -bias]``."""
        whitened = self._whiten(z)
        similarities, _ = self.background.search(whitened, 3)
        return np.hstack([whitened, -similarities.mean(1, keepdims=True)]).astype(np.float32)

    def index(self, references: Descriptors) -> faiss.Index:
        """A flat inner-product index."""
        made = faiss.IndexFlatIP(references.shape[1])
        made.add(references)
        return made

    def _whiten(self, z: Descriptors) -> Descriptors:
        whitened: Descriptors = self.whitening.apply(z)
        faiss.normalize_L2(whitened)
        return whitened


def _timed(
    stage: str,
    size: int,
    candidates: Mapping[str, Callable[..., object]],
    parts: Sequence[object],
    counted: int | None = None,
) -> list[Speed]:
    """Run the candidates in turn, one part of the work per round; the first part warms up."""
    turns = {name: iter([parts[0], *parts]) for name in candidates}
    runs = {name: partial(_next, call, turns[name]) for name, call in candidates.items()}
    timings = interleaved(runs, rounds=len(parts))
    items = counted or size
    return [
        Speed(stage, size, name, items / t.median, t.speedup_over(timings[PAPER]))
        for name, t in timings.items()
    ]


def _next(call: Callable[..., object], turns: Iterator[object]) -> object:
    return call(next(turns))


def _parts(items: Sequence[Item], rounds: int) -> list[Sequence[Item]]:
    each = max(1, len(items) // rounds)
    return [items[number * each : (number + 1) * each] for number in range(rounds)]


def _encode(encoder: Encoder, pictures: Sequence[Pixels]) -> None:
    encoder.encode(list(pictures), num_workers=0, show_progress=False)


def _encoder(model: str) -> Encoder:
    describer = recipe_of(model).build()
    if not isinstance(describer, EncoderDescriber):
        raise ValueError(f"--throughput measures encoders; {model} is not one")
    return describer.encoder


def _picture(path: str, config: EncoderConfig) -> Pixels:
    return resize(load_pixels(path), config).numpy()


def _milvus(folder: str, normalizer: Normalizer) -> MilvusCollection:
    return MilvusCollection(str(Path(folder) / "speed.db"), "searched", normalizer)


def _fresh(folder: str, normalizer: Normalizer) -> MilvusCollection:
    """An empty collection: what an earlier round added is dropped."""
    collection = MilvusCollection(str(Path(folder) / "speed.db"), "added", normalizer)
    if len(collection):
        collection.drop()
    return collection


def _unit_rows(count: int, dim: int, rng: np.random.Generator) -> Descriptors:
    rows = rng.standard_normal((count, dim), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def plot(speeds: Sequence[Speed], path: Path) -> None:
    """Write horizontal bars, one row per stage and size."""
    rows = list(dict.fromkeys((speed.stage, speed.size) for speed in speeds))
    names = list(dict.fromkeys(speed.candidate for speed in speeds))
    palette = matplotlib.colormaps["tab10"]
    colours = {name: palette(number) for number, name in enumerate(names)}
    figure = Figure(figsize=(8, 0.5 + 0.55 * len(rows)), layout="constrained")
    axis = figure.subplots()
    labelled: set[str] = set()
    for place, row in enumerate(rows):
        here = [speed for speed in speeds if (speed.stage, speed.size) == row]
        thick = 0.8 / len(here)
        for offset, speed in enumerate(here):
            y = place - 0.4 + thick * (offset + 0.5)
            label = None if speed.candidate in labelled else speed.candidate
            labelled.add(speed.candidate)
            axis.barh(y, speed.ratio, thick * 0.9, color=colours[speed.candidate], label=label)
    axis.axvline(1, color="0.4", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [f"{stage} {size:,}" for stage, size in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("speed over the paper code's (log scale)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path)
