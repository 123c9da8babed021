"""Make the test that generalization is read from: one strong edit per query, by family.

    python benchmarks accuracy/make_wild PHOTOS... OUT

``PHOTOS`` are folders, tars or list files. They are dealt into references, sources of queries
without a match, and images to compose with, which share none. Every query has one edit of one
family of ``families.py``, half of them a second one of a seen family (``--further``: or more), and
all are resized and saved as JPEG at the end, as images are when they are shared. ``OUT`` has
DISC2021's layout, so every script here reads it. The same images and seed give the same bytes.
"""

import argparse
import csv
import io
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.random import SeedSequence, default_rng
from PIL import Image

from accuracy import wild_seen, wild_unseen
from sscd_vec.files import ImageFile, find_images

EDITS = wild_seen.EDITS | wild_unseen.EDITS
LARGER = ("border", "collage", "backdrop", "interface", "cut_out")  # always the last edit
# A second edit that leaves too little to recognize next to the first is not drawn.
SECOND = ("crop", "flip", "light", "gray", "blur", "jpeg", "text", "stickers", "turn", "channels")
SPLIT, QUERY = range(2)  # what the seed is spent on
LONGEST_SIDE = 640


@dataclass(frozen=True)
class Query:
    """One query to make; ``reference`` is empty if it has no match."""

    name: str
    number: int
    family: str
    source: ImageFile
    reference: str


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", nargs="+", type=Path, help="folders, tars or lists of images")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--training", nargs="+", type=Path, required=True, help="the training split"
    )
    parser.add_argument("--references", type=int, default=6000)
    parser.add_argument("--backgrounds", type=int, default=500, help="images to compose with")
    parser.add_argument("--matched", type=int, default=60, help="queries with a match, per family")
    parser.add_argument("--unmatched", type=int, default=40, help="queries without, per family")
    parser.add_argument("--further", type=int, default=1, help="seen edits, each as likely as not")
    parser.add_argument("--training-images", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    photos = find_images(options.photos)
    order = default_rng(SeedSequence((options.seed, SPLIT))).permutation(len(photos))
    pool = [photos[index] for index in order]
    needed = options.references + options.backgrounds + options.unmatched * len(EDITS)
    if needed > len(pool):
        raise SystemExit(f"the sizes ask for {needed} images, there are {len(pool)}: ask for fewer")
    references, rest = pool[: options.references], pool[options.references :]
    backgrounds, strangers = rest[: options.backgrounds], rest[options.backgrounds :]
    queries = deal(references, strangers, options.matched, options.unmatched)
    _write_all(options.out / "references", references, "R")
    training = find_images(options.training)
    chosen = np.linspace(0, len(training) - 1, options.training_images).astype(int)
    _write_all(options.out / "training", [training[index] for index in chosen], "T")
    _write_queries(
        options.out,
        queries,
        backgrounds,
        seed=options.seed,
        further=options.further,
        workers=options.workers,
    )


def deal(
    references: Sequence[ImageFile], strangers: Sequence[ImageFile], matched: int, unmatched: int
) -> list[Query]:
    """Give every family its queries; no source is used twice."""
    queries: list[Query] = []
    for place, family in enumerate(EDITS):
        for turn in range(matched + unmatched):
            number = len(queries)
            copied = place * matched + turn
            stranger = place * unmatched + turn - matched
            is_copy = turn < matched
            queries.append(
                Query(
                    f"Q{number:05d}",
                    number,
                    family,
                    references[copied] if is_copy else strangers[stranger],
                    f"R{copied:06d}" if is_copy else "",
                )
            )
    return queries


def make_query(
    query: Query, backgrounds: Sequence[ImageFile], seed: int, further: int
) -> tuple[bytes, list[str]]:
    """Edit one source; returns the JPEG file and the names of the edits in order."""
    rng = default_rng(SeedSequence((seed, QUERY, query.number)))
    image = _image(query.source)
    edits = [query.family]
    for _ in range(further):
        others = [name for name in SECOND if name not in edits]
        if rng.random() < 0.5:
            first = query.family in LARGER or rng.random() < 0.5
            edits.insert(0 if first else len(edits), str(rng.choice(others)))
    for name in edits:
        image = EDITS[name](
            image, rng, lambda: _image(backgrounds[int(rng.integers(len(backgrounds)))])
        )
    scale = min(float(rng.uniform(0.7, 1.2)), LONGEST_SIDE / max(image.size))
    shared = image.resize(
        (max(32, round(image.width * scale)), max(32, round(image.height * scale))),
        Image.Resampling.BICUBIC,
    )
    file = io.BytesIO()
    shared.save(file, "JPEG", quality=int(rng.integers(60, 96)))
    return file.getvalue(), edits


def _write_queries(
    out: Path,
    queries: Sequence[Query],
    backgrounds: Sequence[ImageFile],
    *,
    seed: int,
    further: int,
    workers: int,
) -> None:
    folder = out / "queries"
    folder.mkdir(parents=True, exist_ok=True)
    make = partial(make_query, backgrounds=backgrounds, seed=seed, further=further)
    with ExitStack() as stack:
        made: Iterable[tuple[bytes, list[str]]] = map(make, queries)
        if workers > 1:
            pool = stack.enter_context(ProcessPoolExecutor(workers, get_context("spawn")))
            made = pool.map(make, queries, chunksize=16)
        log = stack.enter_context((out / "query_edits.jsonl").open("w"))
        for query, (data, edits) in zip(queries, made, strict=True):
            (folder / f"{query.name}.jpg").write_bytes(data)
            named = [{"name": name} for name in edits]
            record = {"query_id": query.name, "family": query.family, "edits": named}
            log.write(json.dumps(record) + "\n")
    with (out / "dev_queries_groundtruth.csv").open("w", newline="") as table:
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["query_id", "reference_id"])
        writer.writerows([query.name, query.reference] for query in queries)


def _write_all(folder: Path, photos: Sequence[ImageFile], letter: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, photo in enumerate(photos):
        (folder / f"{letter}{number:06d}.jpg").write_bytes(photo.read())


def _image(photo: ImageFile) -> Image.Image:
    with Image.open(io.BytesIO(photo.read())) as opened:
        image = opened.convert("RGB")
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    return image


if __name__ == "__main__":
    main()
