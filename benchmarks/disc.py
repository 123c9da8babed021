"""DISC2021: the paper's protocol, or the same on a set made by ``accuracy/make_disc_like``.

    python benchmarks/disc.py --disc PATH --model NAME

``NAME`` is a released model, an encoder folder or checkpoint, ``imagenet:TRUNK``, ``pdq`` or
``phash``; several may be given, and land in one table, each with settings of its own if need be
(``imagenet:resnet50@gem_p=1,size=224``). Descriptors are cached under ``--cache``: an
interrupted run goes on where it was, and a second table costs a search only.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import results
from accuracy.dataset import (
    AT_A_TIME,
    Describer,
    DiscSet,
    Images,
    Shards,
    describe,
    edits_of_queries,
    place,
    read_disc,
    with_counts,
)
from accuracy.evaluation import (
    Row,
    Transform,
    dimension_sweep,
    evaluate_transform,
    standard_transforms,
    without_unfit,
)
from accuracy.models import HashRecipe, Model, recipe_of
from sscd_vec.metrics import by_edit
from sscd_vec.normalize import ScoreNorm
from sscd_vec.normalize.persistence import shipped_whitening
from sscd_vec.normalize.whitening import ROWS_PER_DIMENSION
from sscd_vec.predictions import write_predictions

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sscd-vec" / "benchmarks"


# Figures the paper prints (``tab:results``: whitened, without and with score normalization), in
# percent, by the name of the released model or the method.
@dataclass(frozen=True)
class PaperRow:
    """µAP of a model on DISC2021, whitened, without and with score normalization."""

    method: str
    dim: int
    micro_ap: float
    micro_ap_normalized: float


DISC_RESULTS = {
    "sscd_imagenet_blur": PaperRow("SSCD, ImageNet, strong blur", 512, 50.4, 64.5),
    "sscd_imagenet_advanced": PaperRow("SSCD, ImageNet, advanced", 512, 55.5, 71.0),
    "sscd_imagenet_mixup": PaperRow("SSCD, ImageNet, adv.+mixup", 512, 56.8, 72.2),
    "sscd_disc_blur": PaperRow("SSCD, DISC, strong blur", 512, 54.8, 63.6),
    "sscd_disc_advanced": PaperRow("SSCD, DISC, advanced", 512, 60.4, 71.1),
    "sscd_disc_mixup": PaperRow("SSCD, DISC, adv.+mixup", 512, 61.5, 72.5),
    "sscd_disc_large": PaperRow("SSCD large, DISC, adv.+mixup", 1024, 63.7, 75.3),
}
BASELINES = (
    PaperRow("Multigrain, ImageNet (supervised)", 2048, 20.5, 41.7),
    PaperRow("DINO ViT-B/16, ImageNet", 1500, 32.2, 53.8),
    PaperRow("SimCLR trunk, ImageNet", 2048, 13.1, 33.9),
)

# Of the authors' code for sscd_disc_mixup at short side 288: (µAP, recall@P90, accuracy@1).
AUTHORS_CODE = {
    ("raw", "none"): (60.94, 37.7, 77.6),
    ("whitened", "none"): (61.43, 38.3, 78.2),
    ("raw", "1.0[0,2]"): (71.80, 62.5, 77.6),
    ("whitened", "1.0[0,2]"): (72.43, 63.1, 78.2),
}


@dataclass(frozen=True)
class Judged:
    """A model and its rows."""

    name: str
    rows: list[Row]
    encoder: str = ""  # fingerprint


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    if options.throughput:
        from speed import throughput

        throughput.run(
            options.model[0], options.disc, options.name or "throughput", folder=options.results
        )
        return
    disc = read_disc(options.disc)
    print(
        f"{len(disc.references)} references, {len(disc.queries)} queries of which "
        f"{len({query for query, _ in disc.matches})} have a match, {len(disc.training)} training"
    )
    judged = []
    for name in options.model:
        print(f"\n{name}")
        judged.append(judge(name, disc, options))
        print(table(judged[-1]))
        print("\n".join(paper_lines(name)))
    if options.predictions:
        best = max(judged[-1].rows, key=lambda row: row.summary.micro_ap)
        write_predictions(options.predictions, best.predictions)
        print(f"{options.predictions}: predictions of {judged[-1].name}, {label(best)}")
    if options.name:
        made = figures(disc, judged, options)
        print(results.write(options.name, made, options.results, encoder=judged[0].encoder))


def judge(name: str, disc: DiscSet, options: argparse.Namespace) -> Judged:
    """Describe the set with one model and evaluate every transform."""
    recipe = recipe_of(
        name,
        size=options.size,
        size_mode=options.size_mode,
        gem_p=options.gem_p,
        backend=options.backend,
        precision=options.precision,
        batch_size=options.batch_size,
    )
    describer = recipe.build()
    queries, references, training = describe_all(disc, recipe, describer, options)
    wanted = chosen_transforms(recipe, references.dim, options)
    shipped, _ = shipped_whitening(describer.fingerprint)
    transforms = without_unfit(wanted, len(disc.training), references.dim, shipped)
    if transforms != wanted:
        whose = "what they cannot fit is left out"
        if shipped is not None:
            whose += ", and the shipped whitening added"
        print(
            f"{len(disc.training)} training images are few for {references.dim} dimensions, which "
            f"take {ROWS_PER_DIMENSION * references.dim}: {whose}"
        )
    rows = []
    for transform in transforms:
        rows += evaluate_transform(
            transform,
            disc,
            queries,
            references,
            training,
            score_norm=options.score_norm,
            k=None if options.best else options.k,
            best=options.best or 0,
        )
    return Judged(name, rows, describer.fingerprint)


def describe_all(
    disc: DiscSet, recipe: Model, describer: Describer, options: argparse.Namespace
) -> tuple[Shards, Shards, Shards]:
    """Descriptors of queries, references and training images."""
    shards = []
    for split in ("queries", "references", "training"):
        images: Images = getattr(disc, split)
        shards.append(
            describe(
                images,
                describer,
                place(options.cache, describer.fingerprint, split, images),
                recipe=recipe,
                processes=options.processes,
                part=options.part,
            )
        )
    return shards[0], shards[1], shards[2]


def chosen_transforms(recipe: Model, dim: int, options: argparse.Namespace) -> list[Transform]:
    """The paper's rows; hashes are compared by Hamming distance, so theirs is the raw one."""
    if isinstance(recipe, HashRecipe):
        return [Transform("raw")]
    found = standard_transforms(dim, options.reduced, recipe.trunk_features, options.shrinkage)
    if options.sweep_dimensions:
        known = {(t.label, t.dim or dim) for t in found}
        found += [t for t in dimension_sweep(dim) if (t.name, t.dim) not in known]
    return found


def label(row: Row) -> str:
    """``whitened 512d``, or with ``+ score norm``."""
    return f"{row.transform} {row.dim}d" + (" + score norm" if row.score_norm != "none" else "")


def table(judged: Judged) -> str:
    """The rows as text, in percent."""
    lines = [f"{'':40}{'µAP':>8}{'R@P90':>8}{'acc@1':>8}{'MRR':>8}{'threshold':>11}"]
    for row in judged.rows:
        s = row.summary
        values = (s.micro_ap, s.recall_at_p90, s.accuracy_at_1, s.mrr)
        percents = "".join(f"{100 * value:8.1f}" for value in values)
        lines.append(f"{label(row):40}{percents}{s.threshold_at_p90:11.3f}")
    return "\n".join(lines)


def paper_lines(name: str) -> list[str]:
    """The paper's own row for a released model; its baselines for everything else."""
    stem = Path(name).name.split(".")[0]
    lines = []
    for row in (DISC_RESULTS[stem],) if stem in DISC_RESULTS else BASELINES:
        lines.append(
            f"paper, DISC2021: {row.method}, {row.dim}d: "
            f"µAP {row.micro_ap}, with score norm {row.micro_ap_normalized}"
        )
    if stem == "sscd_disc_mixup":
        for (transform, norm), (ap, recall, first) in AUTHORS_CODE.items():
            lines.append(
                f"authors' code, DISC2021: {transform}, score norm {norm}: "
                f"µAP {ap}, R@P90 {recall}, acc@1 {first}"
            )
    return lines


def figures(disc: DiscSet, judged: Sequence[Judged], options: argparse.Namespace) -> object:
    """What ``results.write`` keeps."""
    return {
        "set": {
            "name": options.disc.name,
            "references": len(disc.references),
            "queries": len(disc.queries),
            "matches": len(disc.matches),
            "training": len(disc.training),
        },
        "candidates": f"best {options.best}" if options.best else f"{options.k} per query",
        "size": options.size,
        "size_mode": options.size_mode,
        "gem_p": options.gem_p,
        "edits": edits_table(disc, judged[0], edits_of_queries(options.disc)),
        "models": [
            {
                "model": model.name if not Path(model.name).exists() else Path(model.name).name,
                "rows": [
                    {
                        "transform": row.transform,
                        "dim": row.dim,
                        "score_norm": row.score_norm,
                        **asdict(row.summary),
                    }
                    for row in model.rows
                ],
            }
            for model in judged
        ],
    }


def edits_table(
    disc: DiscSet, model: Judged, edits: Mapping[str, Sequence[str]]
) -> list[dict[str, object]]:
    """What the best row of a model finds of each edit, worst first, then by number of edits."""
    best = max(model.rows, key=lambda row: row.summary.micro_ap)
    found = by_edit(best.predictions, disc.truth, with_counts(edits))
    order = sorted(found, key=lambda e: (e.endswith(AT_A_TIME), found[e].recall_at_p90))
    return [
        {
            "edit": edit,
            "pairs": found[edit].pairs,
            "recall@P90": round(100 * found[edit].recall_at_p90, 1),
            "accuracy@1": round(100 * found[edit].accuracy_at_1, 1),
        }
        for edit in order
        if found[edit].pairs
    ]


def _part(text: str) -> tuple[int, int]:
    try:
        index, count = (int(number) for number in text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"expected i/n with 0 <= i < n, such as 0/4, got {text!r}")
    return index, count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Evaluate models on DISC2021 or a set in its layout, by the paper's protocol."
    )
    add = parser.add_argument
    add("--disc", type=Path, required=True, help="DISC2021, in either layout")
    add("--model", nargs="+", required=True, help="names, folders, imagenet:TRUNK, pdq, phash")
    add("--size", type=int, help="input size; 288 in the paper, the model's own by default")
    add("--size-mode", choices=["short", "square", "long"], help="what --size is the size of")
    add("--gem-p", type=float, help="GeM exponent at inference; 1 is average pooling")
    add("--backend", default="torch", help="torch, onnx or openvino")
    add("--precision", default="float32")
    add("--batch-size", type=int, default=32)
    add("--score-norm", type=ScoreNorm.parse, default=ScoreNorm(), help="such as 1.0[0,2]")
    add("--reduced", type=int, default=256, help="dimensions of the reduced rows")
    add(
        "--sweep-dimensions", action="store_true", help="whiten to d, 3d/4, d/2, … as for baselines"
    )
    add(
        "--shrinkage",
        nargs="+",
        type=float,
        default=[],
        help="also whiten with the variances shrunk by these, each between 0 and 1",
    )
    add("--k", type=int, default=10, help="candidates per query")
    add("--best", type=int, help="the best N pairs overall instead; 500000 in the challenge")
    add("--predictions", type=Path, help="write the best row's candidates as the challenge's CSV")
    add("--cache", type=Path, default=CACHE, help="folder for descriptors")
    add("--processes", type=int, default=1, help="processes that share the images")
    add("--part", type=_part, default=(0, 1), help="i/n: describe every n-th shard from i only")
    add("--name", help="write the figures to benchmarks/results/NAME.json")
    add("--results", type=Path, default=results.RESULTS, help="another folder for them")
    add("--throughput", action="store_true", help="measure speed instead of accuracy")
    return parser


if __name__ == "__main__":
    main()
