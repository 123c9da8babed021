"""What ``--tiles`` brings on collages and overlays, and what it costs.

    python benchmarks/tiles.py PHOTOS... --model MODEL [--images 200] [--tiles 2]

References are whole photos (and, in a second bank, tiled ones). Queries are composed pictures with
one reference inside, and as many without any. Every kind of score gets its own threshold,
calibrated on photos that are in no other part, for the same rate of false matches per comparison;
recall is the share of composed queries whose reference scores above it.
"""

import argparse
from pathlib import Path

import numpy as np
import results
from composed import KINDS, compose
from numpy.typing import NDArray
from photos import Photo, find_photos
from timing import interleaved

from sscd_vec import Encoder, Normalizer
from sscd_vec.photos.encode_files import describe_pixels
from sscd_vec.photos.tiles import crop_count

RATE = 1e-4


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="folders or tars of photos")
    parser.add_argument("--model", required=True, help="model folder with its normalizer")
    parser.add_argument("--images", type=int, default=200, help="references, and queries per kind")
    parser.add_argument("--held-out", type=int, default=200, help="photos to calibrate on")
    parser.add_argument("--tiles", type=int, default=2)
    asked = parser.parse_args()
    encoder = Encoder.from_pretrained(asked.model)
    normalizer = Normalizer.load(Path(asked.model, "normalizer.safetensors"))
    photos = find_photos(asked.sources)
    np.random.default_rng(1).shuffle(photos)
    references, held, others = np.split(
        np.array(photos, object), [asked.images, asked.images + asked.held_out]
    )
    whole, tiled = (_views(encoder, references.tolist(), n) for n in (1, asked.tiles))
    plain = {n: _views(encoder, held.tolist(), n) for n in (1, asked.tiles)}
    limits = {
        (q, r): float(np.quantile(_off_diagonal(_scores(normalizer, plain[q], plain[r])), 1 - RATE))
        for q in plain
        for r in plain
    }
    figures: dict[str, object] = {"tiles": asked.tiles, "false_match_rate": RATE}
    for kind in KINDS:
        queries = list(compose(references.tolist(), others.tolist(), kind))
        arrays = [np.asarray(query.image) for query in queries]
        asked_views = {n: _described(encoder, arrays, n) for n in plain}
        rows = np.arange(len(queries))
        recall = {}
        for name, q, bank in (
            ("whole query, whole bank", 1, whole),
            ("tiled query, whole bank", asked.tiles, whole),
            ("whole query, tiled bank", 1, tiled),
            ("tiled query, tiled bank", asked.tiles, tiled),
        ):
            scores = _scores(normalizer, asked_views[q], bank)
            limit = limits[q, 1 if bank is whole else asked.tiles]
            recall[name] = {
                "recall": round(float((scores[rows, rows] >= limit).mean()), 3),
                "best_is_right": round(float((scores.argmax(1) == rows).mean()), 3),
                "threshold": round(limit, 4),
            }
        figures[kind] = {
            "queries": len(queries),
            "mean_share": round(float(np.mean([query.share for query in queries])), 3),
            **recall,
        }
    sample = [np.asarray(photo.image()) for photo in references[:16]]
    timings = interleaved(
        {
            "whole": lambda: encoder.encode(sample, show_progress=False),
            "tiled": lambda: _described(encoder, sample, asked.tiles),
        },
        rounds=3,
    )
    figures["cost"] = {
        "vectors_per_image": crop_count(asked.tiles),
        "encoding_time_ratio": round(timings["tiled"].median / timings["whole"].median, 1),
    }
    print(figures)
    results.write("tiles", {"model": encoder.config.to_dict(), "figures": figures})


def _views(encoder: Encoder, photos: list[Photo], n: int) -> list[NDArray[np.float32]]:
    return _described(encoder, [np.asarray(photo.image()) for photo in photos], n)


def _described(
    encoder: Encoder, images: list[NDArray[np.uint8]], n: int, part: int = 16
) -> list[NDArray[np.float32]]:
    return [
        rows
        for start in range(0, len(images), part)
        for rows in describe_pixels(encoder, images[start : start + part], n)
    ]


def _scores(
    normalizer: Normalizer,
    queries: list[NDArray[np.float32]],
    references: list[NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Best score over all crops of each pair of images."""
    scores = normalizer.scores(np.concatenate(queries), np.concatenate(references))
    starts = [
        np.cumsum([0, *(len(views) for views in side)])[:-1] for side in (queries, references)
    ]
    return np.maximum.reduceat(np.maximum.reduceat(scores, starts[0], 0), starts[1], 1)


def _off_diagonal(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    return scores[~np.eye(len(scores), dtype=bool)]


if __name__ == "__main__":
    main()
