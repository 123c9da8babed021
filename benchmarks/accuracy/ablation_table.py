"""What the ablations train, what the paper measured for it, and the tables and plot of both.

The paper trains ResNet-50 from scratch for 100 epochs of a million images; a row here has an hour
of a CPU at most. So what can be compared with the paper is the direction of a step, not the figure.
Rows start in one of two ways (``STARTS``): from scratch with LARS, as in the paper, on a network
small enough to see many images; or from an ImageNet trunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from sscd_vec.trainer.config import TrainConfig

# ResNet-18 at half its width takes 64-pixel views at 320 a second and core; at full width 50. Its
# trunk has 256 channels, so more than 256 projected dimensions would be linearly dependent.
SCRATCH: Mapping[str, Any] = {
    "trunk": "resnet18_w32",
    "size": 64,
    "inference_size": 96,
    "size_mode": "square",
    "crops": "own",
    "batch": 256,
    "steps": 600,
    "warmup": 0.1,
    "largest_dim": 256,
    "holdout": 0.0,
}
IMAGENET: Mapping[str, Any] = {
    "trunk": "efficientnet_lite0",
    "init_from": "imagenet",
    "frozen_stages": 3,
    "size": 128,
    "inference_size": 160,
    "size_mode": "square",
    "batch": 128,
    "steps": 320,
    "optimizer": "adamw",
    "learning_rate": 3e-4,
    "entropy_ramp": 0.3,
    "holdout": 0.0,
}
STARTS: Mapping[str, Mapping[str, Any]] = {"scratch": SCRATCH, "imagenet": IMAGENET}
# The paper's weight is 30 for its batch of 4096; a new setting starts safer at 10.
ENTROPY_WEIGHT = 10.0

SIMCLR = {
    "head": "mlp",
    "dim": 128,
    "tau": 0.1,
    "augmentations": "simclr",
    "entropy_weight": 0.0,
    "train_gem_p": 1.0,
}
BLUR = {**SIMCLR, "augmentations": "strong_blur"}
LOW_TEMPERATURE = {**BLUR, "tau": 0.05}
WIDER = {**LOW_TEMPERATURE, "dim": 512}
LINEAR = {**WIDER, "head": "linear"}
# With the entropy loss, GeM pooling in training helps too; without it, average pooling is better.
ENTROPY = {**LINEAR, "entropy_weight": ENTROPY_WEIGHT, "train_gem_p": 3.0}
ADVANCED = {**ENTROPY, "augmentations": "advanced"}
MIXUP = {**ADVANCED, "augmentations": "advanced+mixup"}

TRAININGS: dict[str, Mapping[str, Any]] = {
    "simclr": SIMCLR,
    "blur": BLUR,
    "low_temperature": LOW_TEMPERATURE,
    "wider": WIDER,
    "linear": LINEAR,
    "entropy": ENTROPY,
    "advanced": ADVANCED,
    "mixup": MIXUP,
    "linear_gem": {**LINEAR, "train_gem_p": 3.0},
    **{f"lambda_{w}": {**ENTROPY, "entropy_weight": float(w)} for w in (1, 3, 30)},
    **{f"batch_{f}": {**ADVANCED, "batch_factor": f} for f in (0.5, 2.0)},
    **{f"dim_{d}": {**ADVANCED, "dim": d} for d in (128, 256, 1024, 2048)},
    **{f"length_{part}": {**ADVANCED, "length": part} for part in (0.25, 0.5, 2.0)},
}
REPEATED = ("linear", "entropy", "mixup")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class TableRow:
    """One row of a table.

    Attributes:
        table: Which one.
        label: As the paper has it.
        training: The run it is measured on.
        features: What the descriptor is.
        gem_p: Pooling at inference.
        paper: µAP without and with score normalization in the paper.
    """

    table: str
    label: str
    training: str
    features: Literal["projected", "trunk"]
    gem_p: float
    paper: tuple[float, float] | None = None


def _step(label: str, training: str, paper: tuple[float, float]) -> TableRow:
    return TableRow("steps", label, training, "projected", 3.0, paper)


TABLE = (
    TableRow("steps", "SimCLR, trunk features", "simclr", "trunk", 1.0, (13.1, 33.9)),
    TableRow("steps", "+ GeM pooling", "simclr", "trunk", 3.0, (21.5, 45.3)),
    TableRow("steps", "SimCLR, projection", "simclr", "projected", 1.0, (9.4, 17.3)),
    _step("+ GeM pooling", "simclr", (11.1, 18.8)),
    _step("+ strong blur", "blur", (14.1, 26.0)),
    _step("+ low temperature", "low_temperature", (26.0, 41.5)),
    _step("+ 512d projection", "wider", (27.5, 43.5)),
    _step("+ linear projection", "linear", (33.0, 51.6)),
    _step("+ entropy loss", "entropy", (50.4, 64.5)),
    _step("+ advanced augmentations", "advanced", (55.5, 71.0)),
    _step("+ mixup", "mixup", (56.8, 72.2)),
    TableRow("lambda", "λ = 0", "linear", "projected", 3.0, (33.0, 51.6)),
    TableRow("lambda", "λ = 1", "lambda_1", "projected", 3.0, (33.1, 51.9)),
    TableRow("lambda", "λ = 3", "lambda_3", "projected", 3.0, (38.0, 56.1)),
    TableRow("lambda", "λ = 10", "entropy", "projected", 3.0, (45.3, 61.5)),
    TableRow("lambda", "λ = 30", "lambda_30", "projected", 3.0, (50.4, 64.5)),
    TableRow("batch", "half the batch", "batch_0.5", "projected", 3.0),
    TableRow("batch", "the batch", "advanced", "projected", 3.0),
    TableRow("batch", "twice the batch", "batch_2.0", "projected", 3.0),
    TableRow("length", "a quarter as long", "length_0.25", "projected", 3.0),
    TableRow("length", "half as long", "length_0.5", "projected", 3.0),
    TableRow("length", "as long", "advanced", "projected", 3.0),
    TableRow("length", "twice as long", "length_2.0", "projected", 3.0),
    TableRow("dim", "128 dimensions", "dim_128", "projected", 3.0),
    TableRow("dim", "256 dimensions", "dim_256", "projected", 3.0),
    TableRow("dim", "512 dimensions", "advanced", "projected", 3.0),
    TableRow("dim", "1024 dimensions", "dim_1024", "projected", 3.0),
    TableRow("dim", "2048 dimensions", "dim_2048", "projected", 3.0),
    TableRow("features", "λ = 0, trunk", "linear", "trunk", 3.0),
    TableRow("features", "λ = 0, projection", "linear", "projected", 3.0),
    TableRow("features", "entropy loss, trunk", "entropy", "trunk", 3.0),
    TableRow("features", "entropy loss, projection", "entropy", "projected", 3.0),
    TableRow("pooling", "λ = 0, average pooling throughout", "linear", "projected", 1.0),
    TableRow("pooling", "λ = 0, GeM at inference", "linear", "projected", 3.0),
    TableRow("pooling", "λ = 0, GeM throughout", "linear_gem", "projected", 3.0),
)


def train_config(start: str, training: str, seed: int, overrides: Mapping[str, Any]) -> TrainConfig:
    """The configuration of one run; ``overrides`` shrink it for a smoke test or another machine."""
    settings = {**STARTS[start], **TRAININGS[training], **overrides, "seed": seed}
    # As many epochs with another batch, as in the paper.
    factor = settings.pop("batch_factor", 1.0)
    length = settings.pop("length", 1.0) / factor
    settings["batch"] = max(2, round(settings["batch"] * factor))
    settings["steps"] = max(1, round(settings["steps"] * length))
    settings["dim"] = min(settings["dim"], settings.pop("largest_dim", settings["dim"]))
    return TrainConfig.from_dict(settings)


COLUMNS = {
    "raw µAP": "raw",
    "µAP": "micro_ap",
    "with score norm": "micro_ap_normalized",
    "256d": "micro_ap_256",
    "256d with score norm": "micro_ap_normalized_256",
    "accuracy@1": "accuracy_at_1",
    "MRR": "mrr",
}


def text(figures: Mapping[str, Any]) -> str:
    """All tables in percent, with the paper's figures beside ours."""
    lines = []
    for name, rows in figures["tables"].items():
        lines += ["", f"{name:34}" + "".join(f"{head:>21}" for head in (*COLUMNS, "change"))]
        for row in rows:
            cells = (row[head] for head in (*COLUMNS, "change"))
            lines.append(
                f"{row['row']:34}" + "".join(f"{'–' if c is None else c:>21}" for c in cells)
            )
    deviation = figures["seed_deviation"]
    if deviation is not None:
        lines += ["", f"standard deviation over seeds: {100 * deviation:.2f} µAP points"]
    if figures["agreement"]:
        parts = figures["agreement"]
        shares = (
            f"{key} {100 * parts[key]:.1f} %" for key in parts if key not in ("first", "second")
        )
        lines.append(
            f"first result right, {parts['first']} and {parts['second']}: {', '.join(shares)}"
        )
    return "\n".join(lines)


def records(figures: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The tables as records by name, in percent, for the pages that show them."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in figures["rows"]:
        tables.setdefault(row["table"], []).append(
            {
                "row": row["label"],
                **{head: _percent(row[key]) for head, key in COLUMNS.items()},
                "post-processing": row["transform"],
                "runs": row["seeds"],
                "change": row["change"],
                "paper µAP": row["paper_micro_ap"],
                "paper with score norm": row["paper_micro_ap_normalized"],
            }
        )
    return tables


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """µAP of the stepwise rows, ours and the paper's, with two standard deviations."""
    rows = [row for row in figures["rows"] if row["table"] == "steps"]
    labels = [row["label"] for row in rows]
    figure = Figure(figsize=(8, 0.8 + 0.4 * len(rows)), layout="constrained")
    axis = figure.subplots()
    places = list(range(len(rows)))
    error = 200 * (figures["seed_deviation"] or 0)
    ours = [100 * row["micro_ap_normalized"] for row in rows]
    axis.barh(places, ours, 0.6, xerr=error or None, label="here, µAP with score norm")
    paper = [row["paper_micro_ap_normalized"] for row in rows]
    axis.plot(paper, places, "D", color="0.2", label="paper, DISC2021")
    axis.set_yticks(places, labels)
    axis.invert_yaxis()
    axis.set_xlabel("µAP, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path)
