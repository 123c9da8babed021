"""What ``--tiles`` brings on the collages and overlays of a DISC-like set, and what it costs.

    python benchmarks accuracy/tiles SET [--model MODEL] [--tiles 2] [--queries 100]

``SET`` is made by ``make_disc_like.py``. Of its queries those are taken that were pasted onto
another photo (``overlay_on``) or into a collage, with and without a match, and as a control as many
that were not composed at all. Every way to search (query whole or tiled, bank whole or tiled) has
its own threshold, calibrated on the set's training photos for the same rate of false matches per
comparison. Recall is the share of matched queries whose reference scores above it; the unmatched
ones show whether the threshold holds. Where the model's normalizer has thresholds for whole and
tiled searches, the same is said of those.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import results
from accuracy.command_model import fit_normalizer, label, open_encoder
from accuracy.dataset import DiscSet, Images, edits_of_queries, read_disc
from photos import Photo, find_photos
from speed.measure import interleaved
from sscd_vec import Encoder, Normalizer, models
from sscd_vec.bank.describe import describe_pixels
from sscd_vec.bank.views import crop_count
from sscd_vec.normalize import Threshold, calibrate

Views = list[NDArray[np.float32]]  # of each image its crops' descriptors, the whole image first
RATE = 1e-4
HELD_OUT = 300
KINDS = ("overlay_on", "collage", "not composed")
COMPOSED = ("overlay_on", "overlay_under", "collage", "screenshot")
SEARCHES = {
    "whole query, whole bank": (False, False),
    "tiled query, whole bank": (True, False),
    "whole query, tiled bank": (False, True),
    "tiled query, tiled bank": (True, True),
}


@dataclass(frozen=True)
class Described:
    """Queries of one kind: their crops, and the place of their reference in the bank (-1: none)."""

    views: Views
    reference: NDArray[np.int64]


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", type=Path, help="made by make_disc_like.py")
    parser.add_argument("--model", help="a model or imagenet:TRUNK; the shipped one by default")
    parser.add_argument("--tiles", type=int, default=2)
    parser.add_argument("--queries", type=int, default=100, help="of each kind, with a match")
    parser.add_argument("--distractors", type=int, default=100, help="further references")
    asked = parser.parse_args()
    encoder = open_encoder(asked.model)
    disc = read_disc(asked.set)
    training = find_photos([asked.set / "training"])
    normalizer = _normalizer(asked.model, encoder, training[HELD_OUT:])
    chosen = choose_queries(asked.set, disc, asked.queries)
    bank_ids = choose_references(disc, chosen, asked.distractors)
    bank = describe(encoder, paths_of(disc.references, bank_ids), asked.tiles)
    held = describe(encoder, [photo.path for photo in training[:HELD_OUT]], asked.tiles)
    limits = {name: threshold(normalizer, held, *tiled) for name, tiled in SEARCHES.items()}
    truth = dict(disc.matches)
    place = {name: row for row, name in enumerate(bank_ids)}
    rows: list[dict[str, object]] = []
    for kind, names in chosen.items():
        queries = Described(
            describe(encoder, paths_of(disc.queries, names), asked.tiles),
            np.array([place[truth[name]] if name in truth else -1 for name in names]),
        )
        matched = int((queries.reference >= 0).sum())
        rows += [
            {
                "queries": kind,
                "matched": matched,
                "unmatched": len(names) - matched,
                "search": name,
                "threshold": round(limits[name].value, 4),
                **judge(normalizer, queries, bank, tiled, limits[name].value),
                **{
                    f"shipped_{figure}": value
                    for limit in [own_threshold(normalizer, tiled)]
                    if limit is not None
                    for figure, value in judge(normalizer, queries, bank, tiled, limit).items()
                    if figure in ("recall", "false_match_rate")
                },
            }
            for name, tiled in SEARCHES.items()
        ]
    figures = {
        "model": label(asked.model),
        "tiles": asked.tiles,
        "references": len(bank_ids),
        "calibrated_on": HELD_OUT,
        "false_match_rate_per_comparison": RATE,
        "cost": cost(encoder, training[:16], asked.tiles),
        "rows": rows,
    }
    print(figures)
    results.write("tiles", figures, encoder=encoder.fingerprint)


def choose_queries(folder: Path, disc: DiscSet, count: int) -> dict[str, list[str]]:
    """Of each kind ``count`` queries with a match, and as many without."""
    matched = {query for query, _ in disc.matches}
    chosen: dict[str, list[str]] = {}
    for kind in KINDS:
        of_kind = [
            name for name, edits in edits_of_queries(folder).items() if _is_kind(kind, set(edits))
        ]
        chosen[kind] = [n for n in of_kind if n in matched][:count]
        chosen[kind] += [n for n in of_kind if n not in matched][:count]
    return chosen


def choose_references(disc: DiscSet, chosen: dict[str, list[str]], distractors: int) -> list[str]:
    """The references of all chosen queries, and some of no query."""
    truth = dict(disc.matches)
    wanted = {truth[name] for names in chosen.values() for name in names if name in truth}
    copied = set(truth.values())
    others = [name for name in disc.references.ids if name not in copied]
    return sorted(wanted) + others[:distractors]


def paths_of(images: Images, ids: list[str]) -> list[str]:
    """Files of these ids, in their order."""
    known = dict(zip(images.ids, images.paths, strict=True))
    return [known[name] for name in ids]


def describe(encoder: Encoder, paths: list[str], tiles: int) -> Views:
    """Crops of image files, a few files at a time."""
    views: Views = []
    for start in range(0, len(paths), 16):
        images = []
        for path in paths[start : start + 16]:
            with Image.open(path) as image:
                images.append(np.asarray(image.convert("RGB")))
        views += describe_pixels(encoder, images, tiles)
    return views


def threshold(normalizer: Normalizer, held: Views, query: bool, bank: bool) -> Threshold:
    """The threshold of one way to search: half of the photos look for the other half."""
    half = len(held) // 2
    sides = [_crops(held[:half], query), _crops(held[half:], bank)]
    groups = [np.repeat(np.arange(len(side)), [len(image) for image in side]) for side in sides]
    tiled = query or bank
    return calibrate(
        normalizer,
        np.concatenate(sides[0]),
        np.concatenate(sides[1]),
        false_match_rate=RATE,
        per="comparison",
        kind="tiled" if tiled else "search",
        query_groups=groups[0] if tiled else None,
        reference_groups=groups[1] if tiled else None,
    ).threshold


def own_threshold(normalizer: Normalizer, tiled: tuple[bool, bool]) -> float | None:
    """What the normalizer itself says a copy scores in such a search."""
    found = normalizer.thresholds.get("tiled" if any(tiled) else "search")
    return None if found is None else found.value


def judge(
    normalizer: Normalizer, queries: Described, bank: Views, tiled: tuple[bool, bool], limit: float
) -> dict[str, float]:
    """How many references are found, and how many strangers are taken for a copy."""
    scores = best_scores(normalizer, _crops(queries.views, tiled[0]), _crops(bank, tiled[1]))
    rows = np.flatnonzero(queries.reference >= 0)
    right = queries.reference[rows]
    false = scores >= limit
    false[rows, right] = False
    return {
        "recall": round(float((scores[rows, right] >= limit).mean()), 3),
        "best_is_right": round(float((scores[rows].argmax(1) == right).mean()), 3),
        "false_match_rate": float(f"{false.mean():.2g}"),
    }


def best_scores(normalizer: Normalizer, queries: Views, references: Views) -> NDArray[np.float32]:
    """Best score over all crops of each pair of images."""
    scores = normalizer.scores(np.concatenate(queries), np.concatenate(references))
    starts = [
        np.cumsum([0, *(len(views) for views in side)])[:-1] for side in (queries, references)
    ]
    return np.maximum.reduceat(np.maximum.reduceat(scores, starts[0], 0), starts[1], 1)


def cost(encoder: Encoder, photos: list[Photo], tiles: int) -> dict[str, float]:
    """Vectors and time of a tiled image against a whole one."""
    sample = [np.asarray(photo.image()) for photo in photos]
    timings = interleaved(
        {
            "whole": lambda: describe_pixels(encoder, sample, 1),
            "tiled": lambda: describe_pixels(encoder, sample, tiles),
        },
        rounds=3,
    )
    return {
        "vectors_per_image": crop_count(tiles),
        "encoding_time_ratio": round(timings["tiled"].median / timings["whole"].median, 1),
    }


def _normalizer(name: str | None, encoder: Encoder, photos: list[Photo]) -> Normalizer:
    """The model's own, or one fitted on photos that nothing else here uses."""
    if name is not None or models.shipped():
        try:
            beside = models.resolve(name) / "normalizer.safetensors"
        except FileNotFoundError:  # imagenet:TRUNK
            return fit_normalizer(encoder, photos)
        if beside.is_file():
            return Normalizer.load(beside)
    return fit_normalizer(encoder, photos)


def _crops(views: Views, tiled: bool) -> Views:
    return views if tiled else [image[:1] for image in views]


def _is_kind(kind: str, names: set[str]) -> bool:
    return not names & set(COMPOSED) if kind == "not composed" else kind in names


if __name__ == "__main__":
    main()
