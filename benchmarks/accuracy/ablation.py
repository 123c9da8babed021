"""The paper's ablations, row by row: train, measure, tabulate.

    python benchmarks accuracy/ablation --photos train.tar --disc SET --work FOLDER

Every run is a folder under ``--work`` and is left alone once it is done: an interrupted command
goes on where it was. Three runs are repeated with three seeds; a difference below two of their
standard deviations is called undecided. ``--rows`` chooses runs, ``--set`` overrides a setting of
all of them.
"""

import argparse
import json
import os
import signal
import statistics
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import results
from accuracy.ablation_table import (
    REPEATED,
    SEEDS,
    TABLE,
    TRAININGS,
    TableRow,
    plot,
    records,
    text,
    train_config,
)
from accuracy.dataset import DiscSet, describe, place, read_disc
from accuracy.evaluation import Row, Transform, dimension_sweep, evaluate_transform
from accuracy.models import EncoderDescriber
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.encoder import Encoder
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.normalize import ScoreNorm
from sscd_vec.trainer import TrainConfig, Trainer

REDUCED = 256

Figures = dict[str, Any]


class TooLong(RuntimeError):
    """A run would take longer than it may."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    disc = read_disc(options.disc)
    wanted = options.rows or list(TRAININGS)
    unknown = sorted(set(wanted) - set(TRAININGS))
    if unknown:
        raise SystemExit(f"unknown rows {unknown}: expected among {list(TRAININGS)}")
    for training in wanted:
        for seed in options.seeds if training in REPEATED else options.seeds[:1]:
            config = train_config(training, seed, dict(options.set))
            run = options.work / f"{training}-seed{seed}"
            measured = run / "measured.json"
            if measured.exists():
                continue
            print(f"{run.name}: {config.steps} steps of {config.batch}", flush=True)
            train(config, options.photos, run, options.minutes)
            partial = measured.with_suffix(".tmp")
            partial.write_text(json.dumps(measure(training, run, disc)))
            os.replace(partial, measured)
    figures = tabulate(options.work)
    figures["tables"] = records(figures)
    print(text(figures))
    if options.name:
        print(results.write(options.name, figures, options.results))
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


def measure(training: str, run: Path, disc: DiscSet) -> list[Figures]:
    """Every way the tables look at one run."""
    asked = sorted({(row.features, row.gem_p) for row in TABLE if row.training == training})
    base = Encoder.from_pretrained(run)
    found = []
    for features, gem_p in asked:
        plain = {**base.config.to_dict(), "features": features, "gem_p": gem_p}
        model = SSCDModel(base.model.trunk, base.model.head, EncoderConfig.from_dict(plain))
        encoder = Encoder(model)
        describer = EncoderDescriber(encoder, 32)
        splits = [
            describe(
                images, describer, place(run / "descriptors", encoder.fingerprint, split, images)
            )
            for split, images in (
                ("queries", disc.queries),
                ("references", disc.references),
                ("training", disc.training),
            )
        ]
        # SimCLR's descriptors often fill a subspace only; the paper then keeps the best dimension.
        sweep = training in ("simclr", "blur", "low_temperature", "wider")
        swept = [*dimension_sweep(encoder.dim), Transform("raw")]
        transforms = swept if sweep else [Transform("whitened")]
        whole = _best(transforms, disc, splits)
        reduced = [Transform("whitened", REDUCED)] if encoder.dim > REDUCED else transforms
        small = _best(reduced, disc, splits)
        if whole is None:
            raise ValueError(f"{run.name}: no transform fits, its descriptors have collapsed")
        found.append(
            {
                "features": features,
                "gem_p": gem_p,
                "dim": encoder.dim,
                "transform": f"{whole[0].transform} {whole[0].dim}d",
                "micro_ap": whole[0].summary.micro_ap,
                "micro_ap_normalized": whole[1].summary.micro_ap,
                "micro_ap_256": small[0].summary.micro_ap if small else None,
                "micro_ap_normalized_256": small[1].summary.micro_ap if small else None,
                "accuracy_at_1": whole[0].summary.accuracy_at_1,
                "mrr": whole[0].summary.mrr,
                "right": first_is_right(whole[0], disc),
            }
        )
    return found


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
            _view(row, figures) for _, figures in sorted(measured.get(row.training, {}).items())
        ]
        if not seeds:
            continue
        entry: Figures = {"table": row.table, "label": row.label, "training": row.training}
        for key in ("micro_ap", "micro_ap_normalized", "micro_ap_256", "accuracy_at_1", "mrr"):
            values = [view[key] for view in seeds if view[key] is not None]
            entry[key] = statistics.mean(values) if values else None
        paper = row.paper or (None, None)
        entry |= {"dim": seeds[0]["dim"], "seeds": len(seeds)}
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
            figures[-1]["micro_ap_normalized"] for figures in measured.get(training, {}).values()
        ]
        if len(views) > 1:
            spreads.append(statistics.variance(views))
    return statistics.mean(spreads) ** 0.5 if spreads else None


def verdict(before: Figures | None, after: Figures, deviation: float | None) -> str:
    """What a step did: a change in µAP points, or ``undecided`` below two standard deviations."""
    if before is None:
        return ""
    change = after["micro_ap_normalized"] - before["micro_ap_normalized"]
    if deviation is None or abs(change) < 2 * deviation:
        return "undecided" if deviation is not None else f"{100 * change:+.1f} (one seed)"
    return f"{100 * change:+.1f}"


def _view(row: TableRow, figures: Sequence[Figures]) -> Figures:
    for view in figures:
        if (view["features"], view["gem_p"]) == (row.features, row.gem_p):
            return view
    raise ValueError(f"{row.training} was not measured with {row.features}, p = {row.gem_p}")


def _first_results(measured: Mapping[str, Mapping[int, list[Figures]]]) -> Figures | None:
    ours, theirs = measured.get("mixup", {}).get(0), measured.get("simclr", {}).get(0)
    if ours is None or theirs is None:
        return None
    trunk = next(view for view in theirs if view["features"] == "trunk" and view["gem_p"] == 3.0)
    right = set(ours[-1]["right"]), set(trunk["right"])
    queries = round(len(right[0]) / ours[-1]["accuracy_at_1"]) if right[0] else len(right[1])
    return {"first": "mixup", "second": "simclr, trunk", **agreement(*right, queries)}


def _best(
    transforms: Sequence[Transform], disc: DiscSet, splits: Sequence[Any]
) -> list[Row] | None:
    """The rows of the best transform; those the descriptors cannot fill are left out."""
    tried = []
    for transform in transforms:
        try:
            tried.append(evaluate_transform(transform, disc, *splits, score_norm=ScoreNorm()))
        except ValueError as error:
            print(f"  {transform.name} {transform.dim}: {error}")
    return max(tried, key=lambda rows: rows[0].summary.micro_ap, default=None)


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
    add("--disc", type=Path, required=True, help="the set to measure on")
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
