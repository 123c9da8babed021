"""Copies with one or two edits: how many a threshold finds; and how far calibrations differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accuracy.edits.mix import MIXTURE, draw
from sscd_vec.encoder import Encoder
from sscd_vec.files import writing
from sscd_vec.normalize import CalibrationError, Normalizer, calibrate
from sscd_vec.normalize.calibration.precision import clopper_pearson, paired_scores

Rows = NDArray[np.float32]
EDITS = (1, 2)
AT_ONCE = 64
SIZES, DRAWS = (400, 900), 20
RATE, BANK = 1e-3, 1000


def edited(paths: Sequence[str], edits: int, seed: int) -> list[Image.Image]:
    """One copy of every photo, made by so many edits of the DISC-like mix.

    Each copy depends on its photo, the seed and the list alone.
    """
    copies = []
    for place, path in enumerate(paths):
        rng = np.random.default_rng((seed, edits, place))

        def other(rng: np.random.Generator = rng) -> Image.Image:
            return _open(paths[int(rng.integers(len(paths)))])

        image = _open(path)
        for name in draw(rng, edits):
            image, _ = MIXTURE[name].edit(image, rng, other)
        copies.append(image)
    return copies


def describe_copies(
    encoder: Encoder, paths: Sequence[str], edits: int, cache: Path, seed: int = 0
) -> Rows:
    """Descriptors of ``edited``; kept in a file."""
    if cache.exists():
        known: Rows = np.load(cache)
        return known
    parts = []
    for first in range(0, len(paths), AT_ONCE):
        part = edited(paths[first : first + AT_ONCE], edits, seed + first)
        parts.append(encoder.encode([np.asarray(image) for image in part], show_progress=False))
    rows = np.concatenate(parts)
    with writing(cache) as file:
        np.save(file, rows)
    return rows


def recall(
    rules: Normalizer, copies: Rows, originals: Rows, sizes: Sequence[int], rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Share of the copies that score like one, for every size of the bank and every rate."""
    scores = paired_scores(rules, copies, originals, "search")
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for rate in rates:
            threshold = rules.threshold_for(rate, size)
            hits = int((scores >= threshold).sum())
            low, high = clopper_pearson(hits, len(scores))
            rows.append(
                {
                    "bank": size,
                    "promised": rate,
                    "threshold": round(threshold, 4),
                    "copies": len(scores),
                    "recall": round(hits / len(scores), 4),
                    "interval": [round(low, 4), round(high, 4)],
                }
            )
    return rows


def drawn_thresholds(
    rules: Normalizer, strangers: Rows, copies: Rows, originals: Rows, seed: int = 0
) -> list[dict[str, Any]]:
    """What ``calibrate`` says on random draws of a source, and what its thresholds find.

    Args:
        rules: Whose scores are calibrated.
        strangers: Photos to draw from.
        copies: Copies of other photos, for the recall.
        originals: Of what they are copies, row by row.
        seed: Of the draws.
    """
    scores = paired_scores(rules, copies, originals, "search")
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        random = np.random.default_rng((seed, size))
        values, widths, refused = [], [], []
        for _ in range(DRAWS):
            chosen = strangers[random.choice(len(strangers), size, replace=False)]
            try:
                found = calibrate(rules, chosen, false_match_rate=RATE, bank_size=BANK).threshold
            except CalibrationError as error:
                refused.append(str(error))
                continue
            values.append(found.value)
            low, high = found.interval or (found.value, found.value)
            widths.append(high - low)
        if not values:
            raise ValueError(f"calibrate refused all {DRAWS} draws of {size}: {refused[0]}")
        recalls = [float((scores >= value).mean()) for value in values]
        rows.append(
            {
                "photos": size,
                "draws": DRAWS,
                "refused": refused,
                "lowest": round(min(values), 4),
                "median": round(float(np.median(values)), 4),
                "highest": round(max(values), 4),
                "standard deviation": round(float(np.std(values)), 4),
                "widest interval": round(max(widths), 4),
                "shipped": round(rules.threshold_for(RATE, BANK), 4),
                "largest score": rules.largest_score,
                "copies": len(scores),
                "lowest recall": round(min(recalls), 4),
                "best recall": round(max(recalls), 4),
                "lowest / best": round(min(recalls) / max(recalls), 4),
            }
        )
    return rows


def _open(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")
