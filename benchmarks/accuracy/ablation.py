"""The paper's ablations, row by row: train, measure, tabulate.

    python benchmarks accuracy/ablation --photos TAR --choose SET --disc SET --work FOLDER

Every run is a folder under ``--work`` and is left alone once it is measured: an interrupted command
goes on where it was. Every row gets the same post-processing steps (``TRANSFORMS``); the one it is
reported with is chosen on ``--choose``, another set than the reported ``--disc``. Three runs are
repeated with three seeds; a difference between two runs has √2 times the deviation σ of one, so
below 2√2 σ it is called undecided. ``--start`` says what runs start from, ``--rows`` chooses runs,
``--set`` overrides a setting of all of them.
"""

import argparse
import json
import os
import signal
import statistics
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import results
from accuracy.ablation_table import (
    COLUMNS,
    REPEATED,
    SEEDS,
    STARTS,
    TABLE,
    TRAININGS,
    plot,
    records,
    text,
    train_config,
)
from accuracy.dataset import DiscSet, describe, place, read_disc
from accuracy.evaluation import Row, Transform, evaluate_transform
from accuracy.models import EncoderDescriber
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.encoder import Encoder
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.normalize import ScoreNorm
from sscd_vec.trainer import TrainConfig, Trainer

REDUCED = 256
RAW, SMALL = "raw", f"whitened, {REDUCED}d"
# The same for every row; the reduced one gives the 256-dimensional columns and is never chosen.
TRANSFORMS = {
    RAW: Transform("raw"),
    "centred": Transform("centred"),
    "whitened": Transform("whitened"),
    "whitened, shrunk by 0.3": Transform("whitened", shrinkage=0.3),
    "whitened, shrunk by 0.8": Transform("whitened", shrinkage=0.8),
    SMALL: Transform("whitened", REDUCED),
}
# Whitening fitted on fewer rows per dimension is noise in its last directions.
ROWS_PER_DIMENSION = 10

Figures = dict[str, Any]


class TooLong(RuntimeError):
    """A run would take longer than it may."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    sets = {"choose": read_disc(options.choose), "report": read_disc(options.disc)}
    wanted = options.rows or list(TRAININGS)
    unknown = sorted(set(wanted) - set(TRAININGS))
    if unknown:
        raise SystemExit(f"unknown rows {unknown}: expected among {list(TRAININGS)}")
    for training in wanted:
        for seed in options.seeds if training in REPEATED else options.seeds[:1]:
            config = train_config(options.start, training, seed, dict(options.set))
            run = options.work / f"{training}-seed{seed}"
            measured = run / "measured.json"
            if measured.exists():
                continue
            print(f"{run.name}: {config.steps} steps of {config.batch}", flush=True)
            train(config, options.photos, run, options.minutes)
            partial = measured.with_suffix(".tmp")
            partial.write_text(json.dumps(measure(training, run, sets)))
            os.replace(partial, measured)
    figures = tabulate(options.work)
    figures["tables"] = records(figures)
    print(text(figures))
    if options.name:
        print(results.write(options.name, figures, options.results))
        keep_logs(options.work, options.results / options.name)
        plot(figures, options.results / f"{options.name}.svg")


def train(config: TrainConfig, photos: Sequence[Path], out: Path, minutes: float) -> None:
    """Train one run, or go on with it.

    Raises:
        TooLong: If it would take more than ``minutes``, with the number of steps that fit.
    """
    left = 60 * minutes - sum(seconds_per_step(out))
    # The trainer saves and returns on SIGTERM; the journal then says how long its steps took.
    limit = threading.Timer(max(left, 0), os.kill, (os.getpid(), signal.SIGTERM))
    if left > 0:
        limit.start()
        try:
            result = Trainer(config).fit(photos, out, resume=True)
        finally:
            limit.cancel()
        if result.finished:
            return
    taken = seconds_per_step(out)
    if sum(taken) < 0.98 * 60 * minutes:
        raise SystemExit(f"{out}: interrupted at step {len(taken)}; run the command again")
    fitting = int(60 * minutes / statistics.mean(taken))
    raise TooLong(
        f"{out.name}: {len(taken)} of {config.steps} steps took {sum(taken) / 60:.0f} minutes, the "
        f"limit is {minutes:.0f}: remove the folder and use --set steps={fitting}"
    )


def seconds_per_step(out: Path) -> list[float]:
    """What each step of a run took so far, from its journal."""
    journal = out / "metrics.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [float(json.loads(line).get("seconds", 0)) for line in lines]


def measure(training: str, run: Path, sets: Mapping[str, DiscSet]) -> list[Figures]:
    """Every way the tables look at one run, with the post-processing chosen on one of two sets."""
    asked = sorted({(row.features, row.gem_p) for row in TABLE if row.training == training})
    base = Encoder.from_pretrained(run)
    found = []
    for features, gem_p in asked:
        plain = {**base.config.to_dict(), "features": features, "gem_p": gem_p}
        model = SSCDModel(base.model.trunk, base.model.head, EncoderConfig.from_dict(plain))
        encoder = Encoder(model)
        evaluated = {name: evaluate_rows(encoder, disc, run) for name, disc in sets.items()}
        micro_ap = {
            name: {label: [row.summary.micro_ap for row in pair] for label, pair in rows.items()}
            for name, rows in evaluated.items()
        }
        report = evaluated["report"]
        chosen = choose_transform(micro_ap["choose"], report)
        plainly, normalized = report[chosen]
        small = report.get(SMALL)
        found.append(
            {
                "features": features,
                "gem_p": gem_p,
                "dim": encoder.dim,
                "background_rows_per_dimension": len(sets["report"].training) / encoder.dim,
                "transform": chosen,
                "raw": report[RAW][0].summary.micro_ap,
                "micro_ap": plainly.summary.micro_ap,
                "micro_ap_normalized": normalized.summary.micro_ap,
                "micro_ap_256": small[0].summary.micro_ap if small else None,
                "micro_ap_normalized_256": small[1].summary.micro_ap if small else None,
                "accuracy_at_1": plainly.summary.accuracy_at_1,
                "mrr": plainly.summary.mrr,
                "right": first_is_right(plainly, sets["report"]),
                "all": micro_ap,
            }
        )
    return found


def choose_transform(micro_ap: Mapping[str, Sequence[float]], available: Collection[str]) -> str:
    """The transform of the largest µAP with score normalization; the reduced one is a column."""
    names = (name for name in micro_ap if name in available and name != SMALL)
    return max(names, key=lambda name: micro_ap[name][1])


def evaluate_rows(encoder: Encoder, disc: DiscSet, run: Path) -> dict[str, list[Row]]:
    """Rows without and with score normalization, by the name of the transform."""
    describer = EncoderDescriber(encoder, 32)
    splits = [
        describe(images, describer, place(run / "descriptors", encoder.fingerprint, split, images))
        for split, images in (
            ("queries", disc.queries),
            ("references", disc.references),
            ("training", disc.training),
        )
    ]
    if len(disc.training) < ROWS_PER_DIMENSION * encoder.dim:
        print(
            f"  {len(disc.training)} background images for {encoder.dim} dimensions: expected at "
            f"least {ROWS_PER_DIMENSION} per dimension; whitening will be noisy",
            flush=True,
        )
    found = {}
    for label, transform in TRANSFORMS.items():
        if transform.dim is not None and transform.dim > encoder.dim:
            continue
        try:
            found[label] = evaluate_transform(transform, disc, *splits, score_norm=ScoreNorm())
        except ValueError as error:  # collapsed descriptors cannot be whitened
            print(f"  {label}: {error}")
    return found


def keep_logs(work: Path, folder: Path) -> None:
    """Copy what every run wrote while training, so that a table's rows can be checked."""
    for journal in sorted(work.glob("*-seed*/metrics.jsonl")):
        if not (journal.parent / "measured.json").exists():
            continue
        kept = folder / f"{journal.parent.name}.jsonl"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(journal.read_text())


def first_is_right(row: Row, disc: DiscSet) -> list[str]:
    """Queries whose first result is a match."""
    p = row.predictions
    order = np.argsort(-p.scores, kind="stable")
    first: dict[str, str] = {}
    for query, reference in zip(p.query_ids[order], p.reference_ids[order], strict=True):
        first.setdefault(str(query), str(reference))
    return sorted(query for query, reference in first.items() if (query, reference) in disc.matches)


def agreement(ours: set[str], theirs: set[str], queries: int) -> dict[str, float]:
    """``tab:recall_at_one_counts``: how often two models' first results are right together."""
    both, either = len(ours & theirs), len(ours | theirs)
    return {
        "both": both / queries,
        "first_only": (len(ours) - both) / queries,
        "second_only": (len(theirs) - both) / queries,
        "neither": (queries - either) / queries,
    }


def tabulate(work: Path) -> dict[str, Any]:
    """All tables of what has been measured so far."""
    measured: dict[str, dict[int, list[Figures]]] = {}
    for file in sorted(work.glob("*-seed*/measured.json")):
        training, seed = file.parent.name.rsplit("-seed", 1)
        measured.setdefault(training, {})[int(seed)] = json.loads(file.read_text())
    deviation = seed_deviation(measured)
    rows: list[Figures] = []
    for row in TABLE:
        seeds = [
            _view(figures, row.features, row.gem_p)
            for _, figures in sorted(measured.get(row.training, {}).items())
        ]
        if not seeds:
            continue
        entry: Figures = {"table": row.table, "label": row.label, "training": row.training}
        for key in COLUMNS.values():
            values = [view[key] for view in seeds if view[key] is not None]
            entry[key] = statistics.mean(values) if values else None
        paper = row.paper or (None, None)
        entry |= {"dim": seeds[0]["dim"], "seeds": len(seeds)}
        entry["transform"] = " or ".join(sorted({view["transform"] for view in seeds}))
        entry |= {"paper_micro_ap": paper[0], "paper_micro_ap_normalized": paper[1]}
        before = next((old for old in reversed(rows) if old["table"] == row.table), None)
        entry["change"] = verdict(before, entry, deviation)
        rows.append(entry)
    return {"rows": rows, "seed_deviation": deviation, "agreement": _first_results(measured)}


def seed_deviation(measured: Mapping[str, Mapping[int, list[Figures]]]) -> float | None:
    """Pooled standard deviation of µAP with score normalization over repeated runs."""
    spreads = []
    for training in REPEATED:
        views = [
            _view(figures, "projected", 3.0)["micro_ap_normalized"]
            for figures in measured.get(training, {}).values()
        ]
        if len(views) > 1:
            spreads.append(statistics.variance(views))
    return statistics.mean(spreads) ** 0.5 if spreads else None


def verdict(before: Figures | None, after: Figures, deviation: float | None) -> str:
    """What a step did: a change in µAP points, or ``undecided`` below 2√2 σ of single runs."""
    if before is None:
        return ""
    change = after["micro_ap_normalized"] - before["micro_ap_normalized"]
    if deviation is None or abs(change) < 2 * 2**0.5 * deviation:
        return "undecided" if deviation is not None else f"{100 * change:+.1f} (one seed)"
    return f"{100 * change:+.1f}"


def _view(figures: Sequence[Figures], features: str, gem_p: float) -> Figures:
    for view in figures:
        if (view["features"], view["gem_p"]) == (features, gem_p):
            return view
    raise ValueError(f"no view was measured with {features} features, p = {gem_p}")


def _first_results(measured: Mapping[str, Mapping[int, list[Figures]]]) -> Figures | None:
    ours, theirs = measured.get("mixup", {}).get(0), measured.get("simclr", {}).get(0)
    if ours is None or theirs is None:
        return None
    first, second = _view(ours, "projected", 3.0), _view(theirs, "trunk", 3.0)
    right = set(first["right"]), set(second["right"])
    queries = round(len(right[0]) / first["accuracy_at_1"]) if right[0] else len(right[1])
    return {"first": "mixup", "second": "simclr, trunk", **agreement(*right, queries)}


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train and measure the paper's ablations.")
    add = parser.add_argument
    add("--photos", type=Path, nargs="+", required=True, help="photos to train on")
    add("--start", choices=STARTS, default="scratch", help="what every run starts from")
    add("--choose", type=Path, required=True, help="the set to choose the post-processing on")
    add("--disc", type=Path, required=True, help="the set to report on")
    add("--work", type=Path, required=True, help="folder for the runs")
    add("--rows", nargs="+", help=f"runs: {' '.join(TRAININGS)}")
    add("--seeds", type=int, nargs="+", default=list(SEEDS), help="of the repeated runs")
    add("--minutes", type=float, default=30, help="longest a run may take")
    add("--set", type=_setting, action="append", default=[], help="setting=value for all runs")
    add("--name", help="write the figures to benchmarks/results/NAME.json, and a plot")
    add("--results", type=Path, default=results.RESULTS, help="another folder for them")
    return parser


if __name__ == "__main__":
    main()
