"""Copydays with distractors (CD10K): mAP on ``strong`` and µAP on everything, at four input sizes.

    python benchmarks/copydays.py --copydays PATH --distractors PATH --training PATH --model NAME

The search is among the originals and the distractors (10 000 photos of YFCC100M in the paper, any
folder here); the queries are all blocks. Whitening is fitted on the training photos.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import results
from accuracy.dataset import Describer, DiscSet, Images, Shards, describe, list_images, place
from accuracy.evaluation import Transform, evaluate_transform
from accuracy.models import Model, recipe_of
from disc import CACHE
from sscd_vec.encoder.config import SizeMode
from sscd_vec.metrics import mean_average_precision
from sscd_vec.normalize import ScoreNorm
from sscd_vec.predictions import GroundTruth

BLOCKS = (
    "original",
    "strong",
    *(f"jpegqual/{quality}" for quality in (3, 5, 8, 10, 15, 20, 30, 50, 75)),
    *(f"crops/{percent}" for percent in (10, 15, 20, 30, 40, 50, 60, 70, 80)),
)
SIZES: tuple[tuple[SizeMode, int], ...] = (
    ("square", 224),
    ("square", 320),
    ("short", 288),
    ("long", 800),
)
# tab:copydays_full: (mAP on strong, µAP) of the paper, by model and size.
PAPER = {
    "SSCD": {
        "224²": (84.9, 98.3),
        "320²": (87.4, 98.3),
        "short 288": (86.6, 98.1),
        "long 800": (90.0, 93.9),
    },
    "SSCD large": {
        "224²": (87.3, 98.6),
        "320²": (90.6, 98.6),
        "short 288": (91.8, 98.7),
        "long 800": (93.6, 97.1),
    },
}
SAME_PICTURE = 4  # characters of the name that two files of one picture share
CANDIDATES = 100


@dataclass(frozen=True)
class Copydays:
    """The blocks on disk.

    Attributes:
        strong: The block that mAP is measured on.
        other: All other blocks, the originals among them.
        references: Originals, then distractors.
        matches: True ``(query id, reference id)`` pairs.
    """

    strong: Images
    other: Images
    references: Images
    matches: frozenset[tuple[str, str]]

    @property
    def queries(self) -> Images:
        """Every query: ``strong`` first."""
        return _joined([self.strong, self.other])


def read_copydays(folder: Path, distractors: Images) -> Copydays:
    """Read a Copydays folder; ids are ``block/name``.

    Raises:
        FileNotFoundError: If a block is missing.
    """
    missing = [block for block in BLOCKS if not (folder / block).is_dir()]
    if missing:
        raise FileNotFoundError(
            f"{folder}: expected the blocks {', '.join(BLOCKS)}; {', '.join(missing)} missing"
        )
    blocks = {block: _block(folder, block) for block in BLOCKS}
    strong = blocks["strong"]
    other = _joined([images for block, images in blocks.items() if block != "strong"])
    originals: dict[str, list[str]] = {}
    for name in blocks["original"].ids:
        originals.setdefault(_picture(name), []).append(name)
    matches = frozenset(
        (query, reference)
        for query in (*strong.ids, *other.ids)
        for reference in originals.get(_picture(query), ())
    )
    return Copydays(strong, other, _joined([blocks["original"], distractors]), matches)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    distractors = list_images(options.distractors) if options.distractors else Images((), ())
    data = read_copydays(options.copydays, distractors)
    training = list_images(options.training)
    print(f"{len(data.queries)} queries, {len(data.references)} references")
    rows: list[dict[str, object]] = []
    for name in options.model:
        for mode, size in SIZES:
            recipe = recipe_of(name, size=size, size_mode=mode, backend=options.backend)
            rows += judge(name, _label(mode, size), data, training, recipe, options.cache)
            for row in rows[-len(TRANSFORMS) :]:
                print("  ".join(f"{key} {value}" for key, value in row.items()))
    for paper, sizes in PAPER.items():
        for label, (strong, overall) in sizes.items():
            print(f"paper: {paper}, {label}: mAP {strong}, µAP {overall}")
    if options.name:
        print(results.write(options.name, rows, options.results))


TRANSFORMS = (Transform("raw"), Transform("centred"), Transform("whitened"))


def judge(
    name: str, label: str, data: Copydays, training: Images, recipe: Model, cache: Path
) -> list[dict[str, object]]:
    """One row per transform, in percent."""
    describer = recipe.build()
    strong = _describe(data.strong, describer, cache, "strong")
    other = _describe(data.other, describer, cache, "blocks")
    references = _describe(data.references, describer, cache, "originals")
    background = _describe(training, describer, cache, "training")
    everything = Shards((*strong.files, *other.files), strong.count + other.count)
    whole = DiscSet(data.references, data.queries, training, data.matches)
    names = set(data.strong.ids)
    truth = frozenset(pair for pair in data.matches if pair[0] in names)
    part = DiscSet(data.references, data.strong, training, truth)
    rows: list[dict[str, object]] = []
    for transform in TRANSFORMS:
        norm = ScoreNorm()
        plain, shifted = evaluate_transform(
            transform, whole, everything, references, background, score_norm=norm, k=CANDIDATES
        )
        # A rank anywhere counts in mAP, so strong queries keep all their candidates.
        ranked, _ = evaluate_transform(
            transform, part, strong, references, background, score_norm=norm, k=len(data.references)
        )
        precision = mean_average_precision(
            ranked.predictions, GroundTruth.from_pairs(sorted(truth)), "trapezoid"
        )
        rows.append(
            {
                "model": Path(name).name,
                "size": label,
                "descriptor": f"{transform.name} {plain.dim}d",
                "mAP strong": round(100 * precision, 1),
                "µAP": round(100 * plain.summary.micro_ap, 1),
                "µAP score norm": round(100 * shifted.summary.micro_ap, 1),
            }
        )
    return rows


def _describe(images: Images, describer: Describer, cache: Path, split: str) -> Shards:
    return describe(images, describer, place(cache, describer.fingerprint, split, images))


def _block(folder: Path, block: str) -> Images:
    images = list_images(folder / block)
    return Images(tuple(f"{block}/{name}" for name in images.ids), images.paths)


def _picture(name: str) -> str:
    return Path(name).name[:SAME_PICTURE]


def _joined(parts: Sequence[Images]) -> Images:
    ids = tuple(name for part in parts for name in part.ids)
    return Images(ids, tuple(path for part in parts for path in part.paths))


def _label(mode: SizeMode, size: int) -> str:
    return f"{size}²" if mode == "square" else f"{cast(str, mode)} {size}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Copydays by the paper's protocol (CD10K).")
    parser.add_argument("--copydays", type=Path, required=True, help="folder with the blocks")
    parser.add_argument("--distractors", type=Path, help="folder of photos to search among")
    parser.add_argument("--training", type=Path, required=True, help="folder to fit whitening on")
    parser.add_argument("--model", nargs="+", required=True, help="as in disc.py")
    parser.add_argument("--backend", default="torch", help="torch, onnx or openvino")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for descriptors")
    parser.add_argument("--name", help="write the figures to benchmarks/results/NAME.json")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="another folder")
    return parser


if __name__ == "__main__":
    main()
