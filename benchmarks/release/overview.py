"""One table for the README: each model's size, accuracy and speed.

    python benchmarks release/overview --photos FOLDER

Accuracy is the best row of each model in ``results/disc_like.json`` (``python benchmarks/disc.py``
makes it). Speed is measured here, from file to descriptor, all models in turn on the same photos.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accuracy.models import EncoderDescriber, recipe_of
from photos import find_photos
from results import RESULTS, read, write
from speed.measure import interleaved
from sscd_vec.encoder import Encoder
from sscd_vec.models import shipped

NAME = "overview"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Size, accuracy and speed of each model.")
    parser.add_argument("--photos", type=Path, required=True, help="a folder of image files")
    parser.add_argument("--count", type=int, default=256, help="photos per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    paths = [photo.path for photo in find_photos([options.photos])[: options.count]]
    rows = overview(read("disc_like", options.results), paths, options.rounds)
    fingerprint = Encoder.from_pretrained().fingerprint
    print(write(NAME, rows, options.results, encoder=fingerprint))


def overview(evaluation: dict[str, Any], paths: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """A record per model, the best first."""
    best = {model["model"]: _best_row(model) for model in evaluation["figures"]["models"]}
    describers = {name: recipe_of(name).build() for name in best}
    timings = interleaved({name: partial(run, paths) for name, run in describers.items()}, rounds)
    rows = [
        {
            "model": _in_words(name),
            "parameters, millions": _millions(describer),
            "descriptor": f"{row['dim']} {'bits' if name in ('pdq', 'phash') else 'numbers'}",
            "µAP": round(100 * row["micro_ap"], 1),
            "recall at 90 % precision": round(100 * row["recall_at_p90"], 1),
            "images per second": round(len(paths) / timings[name].median),
        }
        for (name, describer), row in zip(describers.items(), best.values(), strict=True)
    ]
    return sorted(rows, key=lambda row: -row["µAP"])


def _best_row(model: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = max(model["rows"], key=lambda row: float(row["micro_ap"]))
    return row


def _millions(describer: object) -> float | None:
    """Parameters that a descriptor passes, in millions; None for what has none."""
    if not isinstance(describer, EncoderDescriber):
        return None
    model = describer.encoder.model
    parts = [model.trunk, model.head] if model.config.features == "projected" else [model.trunk]
    return round(sum(p.numel() for part in parts for p in part.parameters()) / 1e6, 1)


def _in_words(name: str) -> str:
    if name in shipped():
        return f"**{name}** (in the box)"
    if name.startswith("imagenet:"):
        trunk, _, settings = name.removeprefix("imagenet:").partition("@")
        pooling = "average" if "gem_p=1," in settings else "GeM"
        return f"{trunk}, ImageNet weights, {pooling} pooling"
    return {"pdq": "PDQ", "phash": "pHash"}.get(name, name)


if __name__ == "__main__":
    main()
