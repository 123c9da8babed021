"""Fit how often strangers score how high, and store it in a model's normalizer.

    python benchmarks release/curves MODEL PHOTOS... --digits 01245689 --cache DIR [--kinds tiled]

Photos are taken at random from those whose name ends in one of ``--digits`` (COCO's ids ending in 3
and 7 are for choosing and testing), without those the background knows. Every kind of score gets a
curve, with pairs that are not strangers left out (``accuracy/related.py``), and a threshold for one
false match in 1 000 queries. Descriptors are kept in ``--cache``, so that an interrupted run goes
on where it was.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from accuracy.dataset import Images, describe, place
from accuracy.models import BATCH, EncoderDescriber
from accuracy.related import RelatedPairs
from accuracy.tiles import describe as describe_tiles
from photos import find_photos
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import COPY_RATE, STANDARD_BANK, Kind, Normalizer, calibrate
from sscd_vec.normalize.calibration import Options
from sscd_vec.normalize.descriptors import overlapping_pairs

PHOTOS = 20_000
VIEWED = 600  # queries seen in tiles or at several scales
TILES = 2
LOOKED_AT = 1500  # highest pairs judged related or not
FITTED: tuple[Kind, ...] = ("search", "symmetric", "tiled")
SAME = 1e-3  # 1 - cosine of one photo under two names, of which COCO has some

Rows = NDArray[np.float32]


def with_curves(
    normalizer: Normalizer,
    encoder: Encoder,
    paths: Sequence[str],
    rows: Rows,
    related: RelatedPairs,
    *,
    kinds: Sequence[Kind] = FITTED,
    force: bool = False,
) -> Normalizer:
    """The normalizer with a curve and a threshold for kinds of score.

    Args:
        normalizer: With its final background.
        encoder: The model.
        paths: Photos like those in use, not in the background.
        rows: Their descriptors.
        related: Judges pairs.
        kinds: Which ones.
        force: Keep what calibration refuses, for a trial on few photos.
    """
    apart = strangers(normalizer, rows)
    paths, rows = [paths[row] for row in apart], rows[apart]
    for kind in ("search", "symmetric"):
        if kind in kinds:
            normalizer = _add(normalizer, related, paths, paths, rows, kind=kind, force=force)
    if "tiled" not in kinds:
        return normalizer
    # A query is looked at in several views, its references are whole.
    viewed, whole = paths[:VIEWED], paths[VIEWED:]
    views = describe_tiles(encoder, viewed, TILES)
    groups = np.repeat(np.arange(len(views)), [len(view) for view in views])
    tiles = np.concatenate(views)
    sides = viewed, whole, tiles, rows[VIEWED:]
    return _add(normalizer, related, *sides, kind="tiled", query_groups=groups, force=force)


def strangers(normalizer: Normalizer, rows: Rows) -> NDArray[np.int64]:
    """The rows that stand neither in the background nor earlier among themselves."""
    whitened = normalizer.whiten(rows)
    twice = overlapping_pairs(whitened, whitened, SAME)
    out = set(twice[twice[:, 0] < twice[:, 1]][:, 1].tolist())
    if normalizer.background is not None:
        out |= set(overlapping_pairs(normalizer.background, whitened, SAME)[:, 1].tolist())
    return np.array([row for row in range(len(rows)) if row not in out], dtype=np.int64)


def _add(
    normalizer: Normalizer,
    judge: RelatedPairs,
    queries: Sequence[str],
    references: Sequence[str],
    query_rows: Rows,
    reference_rows: Rows | None = None,
    **options: Unpack[Options],
) -> Normalizer:
    """Calibrate twice: to see the highest pairs, and again without those that are related."""
    options |= {"false_match_rate": COPY_RATE, "bank_size": STANDARD_BANK, "leave_out": 0}
    first: Options = {**options, "force": True, "highest": LOOKED_AT}
    pairs = calibrate(normalizer, query_rows, reference_rows, **first).highest_pairs
    judged = judge([queries[a] for a, _ in pairs], [references[b] for _, b in pairs])
    options["related"] = pairs[judged]
    found = calibrate(normalizer, query_rows, reference_rows, **options)
    print(f"{judged.sum()} of the {len(pairs)} highest pairs are related. {found.threshold}")
    made = normalizer.with_calibration(found)
    kind = found.threshold.kind
    print({size: round(made.threshold(kind, size), 3) for size in (10**n for n in range(3, 8))})
    return made


def choose(places: Sequence[Path], digits: str, count: int, seed: int = 0) -> Images:
    """Photos at random whose names end in one of the digits (any, if there are none)."""
    found = [
        photo.path
        for photo in find_photos(places)
        if not digits or Path(photo.name).stem[-1] in digits
    ]
    order = np.random.default_rng(seed).permutation(len(found))[:count]
    chosen = [found[row] for row in order]
    return Images(tuple(Path(path).stem for path in chosen), tuple(chosen))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a model folder; its normalizer is replaced")
    parser.add_argument("photos", nargs="+", type=Path, help="folders of photos")
    parser.add_argument("--digits", default="", help="last digits of the names to take")
    parser.add_argument("--count", type=int, default=PHOTOS)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--backend", default="torch", help="torch, openvino or onnx")
    parser.add_argument("--kinds", nargs="+", choices=FITTED, default=FITTED)
    parser.add_argument("--force", action="store_true", help="keep what calibration refuses")
    options = parser.parse_args(arguments)
    encoder = Encoder.from_pretrained(options.model, backend=options.backend)
    normalizer = Normalizer.from_pretrained(options.model)
    normalizer.check_encoder(encoder)
    images = choose(options.photos, options.digits, options.count)
    folder = place(options.cache, encoder.fingerprint, "strangers", images)
    rows = describe(images, EncoderDescriber(encoder, BATCH), folder).array()
    related = RelatedPairs(options.cache / "related.json")
    made = with_curves(
        normalizer,
        encoder,
        images.paths,
        rows,
        related,
        kinds=options.kinds,
        force=options.force,
    )
    made.save(options.model / "normalizer.safetensors")


if __name__ == "__main__":
    main()
