"""Make a copy-detection test in DISC2021's layout from any photos.

    python benchmarks accuracy/make_disc_like PHOTOS... OUT

``PHOTOS`` are folders or tars. They are split, by a seed, into pools that share no photo:
references with a copy, references without (distractors), sources of queries without a match,
photos to compose others with, and a training split. ``OUT`` gets ``references/ queries/
training/``, the ground truth, ``query_edits.jsonl`` (what was done to each query, how strongly)
and ``contact_sheet.png``. The same photos, options and seed give the same bytes; an interrupted
run goes on where it was.
"""

import argparse
import csv
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.random import SeedSequence, default_rng
from PIL import Image

from accuracy import contact_sheet
from accuracy.dataset import RECORDS, read_records
from accuracy.edits.mix import MIX, edit
from photos import Photo, find_photos, usable

PLAN = "disc_like.json"
# What the seed is spent on: the split, the deal of queries, and one stream per query.
SPLIT, DEAL, QUERY = range(3)
LONGEST_SIDE = 1024
Made = tuple[bytes, dict[str, object]]


@dataclass(frozen=True)
class Sizes:
    """How many photos and queries a set has.

    Attributes:
        references: References that at least one query may be a copy of.
        distractors: References that no query is a copy of.
        unmatched_sources: Photos that queries without a match are made from.
        backgrounds: Photos used only to compose others with.
        training: Photos of the training split.
        matched: Queries with a match.
        unmatched: Queries without a match.
    """

    references: int
    distractors: int
    unmatched_sources: int
    backgrounds: int
    training: int
    matched: int
    unmatched: int


@dataclass(frozen=True)
class Query:
    """One query to make: its source, and the reference it is a copy of ("" for none)."""

    query_id: str
    index: int
    source: Photo
    reference_id: str


@dataclass(frozen=True)
class Plan:
    """Who is what in a set: pure bookkeeping, no pixels."""

    references: tuple[Photo, ...]
    training: tuple[Photo, ...]
    backgrounds: tuple[Photo, ...]
    queries: tuple[Query, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    evaluation = list(usable(find_photos(options.photos)))
    training = list(usable(find_photos(options.training_photos))) if options.training_photos else []
    sizes = default_sizes(len(evaluation), len(training) if options.training_photos else None)
    chosen = {f.name: getattr(options, f.name) for f in fields(Sizes)}
    sizes = Sizes(**{**asdict(sizes), **{k: v for k, v in chosen.items() if v is not None}})
    make(
        plan(evaluation, training, sizes, options.seed),
        sizes,
        options.seed,
        options.out,
        options.workers,
    )


def default_sizes(photos: int, training: int | None) -> Sizes:
    """Half the photos get a copy, a quarter are distractors, the rest feed the unmatched queries.

    Without photos for training, 30 % are set aside for it first.
    """
    apart = round(0.3 * photos) if training is None else 0
    rest = photos - apart
    references, distractors, sources = round(0.5 * rest), round(0.25 * rest), round(0.17 * rest)
    return Sizes(
        references=references,
        distractors=distractors,
        unmatched_sources=sources,
        backgrounds=rest - references - distractors - sources,
        training=apart if training is None else training,
        matched=references,
        unmatched=round(1.5 * references),
    )


def plan(evaluation: Sequence[Photo], training: Sequence[Photo], sizes: Sizes, seed: int) -> Plan:
    """Deal the photos into pools that share none, and the queries to their sources.

    Raises:
        ValueError: If there are fewer photos than the sizes ask for.
    """
    order = default_rng(SeedSequence((seed, SPLIT))).permutation(len(evaluation))
    pool = [evaluation[index] for index in order]
    wanted = [sizes.references, sizes.distractors, sizes.unmatched_sources, sizes.backgrounds]
    if not training:
        wanted.append(sizes.training)
    if sum(wanted) > len(pool) or (training and sizes.training > len(training)):
        raise ValueError(
            f"the sizes ask for {sum(wanted)} photos and {sizes.training} for training; there are "
            f"{len(pool)} usable ones and {len(training)}: ask for fewer, or give more photos"
        )
    if min(sizes.references, sizes.unmatched_sources, sizes.backgrounds) < 1:
        raise ValueError(f"expected at least one photo in every pool queries need, got {sizes}")
    starts = np.cumsum([0, *wanted])
    parts = [pool[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)]
    copied, distractors, sources, backgrounds = parts[:4]
    train = list(training[: sizes.training]) if training else parts[4]
    rng = default_rng(SeedSequence((seed, DEAL)))
    references = [*copied, *distractors]
    places = rng.permutation(len(references))
    shuffled = [references[place] for place in places]
    name_of = {int(place): f"R{index:06d}" for index, place in enumerate(places)}
    return Plan(
        tuple(shuffled),
        tuple(train),
        tuple(backgrounds),
        tuple(_deal_queries(copied, sources, name_of, sizes, rng)),
    )


def make(plan: Plan, sizes: Sizes, seed: int, out: Path, workers: int = 1) -> None:
    """Write the set; what is there already from the same plan is kept.

    Raises:
        ValueError: If ``out`` holds a set of other photos, sizes or seed.
    """
    out.mkdir(parents=True, exist_ok=True)
    _claim(out, {"mix": MIX, "seed": seed, "sizes": asdict(sizes), "photos": _fingerprint(plan)})
    for folder, letter, photos in (
        ("references", "R", plan.references),
        ("training", "T", plan.training),
    ):
        (out / folder).mkdir(exist_ok=True)
        for index, photo in enumerate(photos):
            _copy(photo, out / folder / f"{letter}{index:06d}.jpg")
        print(f"{folder}: {len(photos)} photos")
    _make_queries(plan, seed, out, workers)
    half = len(plan.queries) // 2
    _write_ground_truth(out / "dev_queries_groundtruth.csv", plan.queries)
    _write_ground_truth(out / "public_ground_truth.csv", plan.queries[:half])
    contact_sheet.write(out, out / "contact_sheet.png")
    print(f"{out}: done, look at contact_sheet.png")


def make_query(query: Query, seed: int, backgrounds: Sequence[Photo]) -> Made:
    """Make one query: its JPEG bytes and its record. Depends on nothing but its arguments."""
    rng = default_rng(SeedSequence((seed, QUERY, query.index)))
    others: list[str] = []

    def other() -> Image.Image:
        photo = backgrounds[int(rng.integers(len(backgrounds)))]
        others.append(photo.name)
        return _limited(photo.image())

    image, applied = edit(_limited(query.source.image()), rng, other)
    quality = int(rng.integers(60, 96))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    record: dict[str, object] = {
        "query_id": query.query_id,
        "reference_id": query.reference_id or None,
        "source": query.source.name,
        "edits": [{"name": made.name, **made.strengths} for made in applied],
        "others": others,
        "saved_quality": quality,
    }
    return buffer.getvalue(), record


def _deal_queries(
    copied: Sequence[Photo],
    sources: Sequence[Photo],
    name_of: dict[int, str],
    sizes: Sizes,
    rng: np.random.Generator,
) -> Iterable[Query]:
    """Matched queries go round the copied references, unmatched ones round their sources."""
    slots = rng.permutation(sizes.matched + sizes.unmatched)
    for index, slot in enumerate(slots):
        if slot < sizes.matched:
            place = int(slot) % len(copied)
            yield Query(f"Q{index:05d}", index, copied[place], name_of[place])
        else:
            yield Query(f"Q{index:05d}", index, sources[int(slot) % len(sources)], "")


def _make_queries(plan: Plan, seed: int, out: Path, workers: int) -> None:
    folder = out / "queries"
    folder.mkdir(exist_ok=True)
    partial = out / f"{RECORDS}.partial"
    done = read_records(out / RECORDS) | read_records(partial)
    done = {key: record for key, record in done.items() if (folder / f"{key}.jpg").exists()}
    left = [query for query in plan.queries if query.query_id not in done]
    with partial.open("a") as journal, ExitStack() as stack:
        journal.write("\n")  # the last line may have been cut off
        seeds, pools = [seed] * len(left), [plan.backgrounds] * len(left)
        if workers > 1:
            processes = ProcessPoolExecutor(workers, get_context("spawn"))
            made: Iterator[Made] = stack.enter_context(processes).map(
                make_query, left, seeds, pools, chunksize=16
            )
        else:
            made = map(make_query, left, seeds, pools)
        for number, (query, (data, record)) in enumerate(zip(left, made, strict=True), 1):
            _write(folder / f"{query.query_id}.jpg", data)
            done[query.query_id] = record
            journal.write(json.dumps(record) + "\n")
            journal.flush()
            if number % 500 == 0 or number == len(left):
                print(f"queries: {number} of {len(left)} made")
    lines = [json.dumps(done[query.query_id]) + "\n" for query in plan.queries]
    _write(out / RECORDS, "".join(lines).encode())
    partial.unlink()


def _claim(out: Path, settings: dict[str, object]) -> None:
    """Note what is being made, or refuse a folder that holds something else."""
    path = out / PLAN
    if path.exists():
        found = json.loads(path.read_text())
        if found != settings:
            differ = sorted(key for key in settings if found.get(key) != settings[key])
            raise ValueError(
                f"{out} holds a set with other {', '.join(differ)}: "
                "give another folder, or remove it"
            )
    _write(path, (json.dumps(settings, indent=1) + "\n").encode())


def _fingerprint(plan: Plan) -> int:
    """A short number that changes with the photos' names or sizes."""
    photos = (
        *plan.references,
        *plan.training,
        *plan.backgrounds,
        *(q.source for q in plan.queries),
    )
    parts = "\n".join(f"{photo.name} {photo.size}" for photo in photos)
    return zlib.crc32(parts.encode())


def _copy(photo: Photo, path: Path) -> None:
    """JPEGs as they are, everything else as a JPEG of quality 95."""
    if path.exists():
        return
    data = photo.read()
    if not data.startswith(b"\xff\xd8"):
        buffer = io.BytesIO()
        photo.image().save(buffer, "JPEG", quality=95)
        data = buffer.getvalue()
    _write(path, data)


def _limited(image: Image.Image) -> Image.Image:
    """Large photos are edited at 1024 pixels, as they are shared."""
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    return image


def _write_ground_truth(path: Path, queries: Sequence[Query]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["query_id", "reference_id"])
    writer.writerows([query.query_id, query.reference_id] for query in queries)
    _write(path, buffer.getvalue().encode())


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".tmp")
    partial.write_bytes(data)
    os.replace(partial, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Make a copy-detection test in DISC2021's layout from any photos."
    )
    parser.add_argument("photos", nargs="+", type=Path, help="folders or tars of photos")
    parser.add_argument("out", type=Path, help="folder to write the set to")
    parser.add_argument(
        "--training-photos", nargs="+", type=Path, help="photos of the training split"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    for field in fields(Sizes):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, help=f"number of {field.name.replace('_', ' ')}")
    return parser


if __name__ == "__main__":
    main()
