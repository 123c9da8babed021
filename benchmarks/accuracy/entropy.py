"""What the entropy loss does to descriptors: the paper's three figures on the ablation's own runs.

    python benchmarks accuracy/entropy --work FOLDER --disc SET [--labelled FOLDER] --name entropy

``--work`` is the folder of ``accuracy/ablation``. For every λ measured there: how far matches and
nearest non-matches are apart (``fig:histograms``), how evenly the descriptors fill their space
(``fig:principal_values``), and how well a linear classifier reads classes from the frozen trunk
(``fig:simclr_entropy_ablation``: entropy helps copies and hurts classes). ``--labelled`` holds
``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg``; without it the classes are left out.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

import results
from accuracy.dataset import Descriptors, DiscSet, Images, describe, place, read_disc
from accuracy.models import EncoderDescriber
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.encoder import Encoder
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.files import find_images

RUNS = {0: "linear", 1: "lambda_1", 3: "lambda_3", 10: "entropy", 30: "lambda_30"}
BINS = np.linspace(0, 2, 41)
WEIGHT_DECAYS = (1e-4, 1e-3, 1e-2)


@dataclass(frozen=True)
class Labelled:
    """Images, a class number each, and the names of the classes."""

    images: Images
    labels: NDArray[np.int64]
    classes: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="the ablation's runs")
    parser.add_argument("--disc", type=Path, required=True, help="the set whose pairs are compared")
    parser.add_argument("--labelled", type=Path, help="train/CLASS/ and test/CLASS/ of images")
    parser.add_argument("--name", help="write results/NAME.json and its plots")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    options = parser.parse_args(arguments)
    disc = read_disc(options.disc)
    measured = {
        weight: options.work / f"{run}-seed0"
        for weight, run in RUNS.items()
        if (options.work / f"{run}-seed0" / "measured.json").exists()
    }
    if not measured:
        raise SystemExit(f"{options.work}: no measured run among {list(RUNS.values())}; run them")
    rows = [figures_of(weight, run, disc, options.labelled) for weight, run in measured.items()]
    for row in rows:
        shown = {key: value for key, value in row.items() if not isinstance(value, list)}
        print(json.dumps(shown), flush=True)
    if options.name:
        print(results.write(options.name, {"rows": rows}, options.results))
        draw(rows, options.results, options.name)


def figures_of(weight: int, run: Path, disc: DiscSet, labelled: Path | None) -> dict[str, Any]:
    """Everything about one run."""
    encoder = Encoder.from_pretrained(run)
    queries, references, training = (
        described(encoder, images, split, run)
        for split, images in (
            ("queries", disc.queries),
            ("references", disc.references),
            ("training", disc.training),
        )
    )
    matches, others = distances(queries, references, disc)
    values = principal_values(training)
    measured = json.loads((run / "measured.json").read_text())
    view = next(v for v in measured if (v["features"], v["gem_p"]) == ("projected", 3.0))
    return {
        "entropy weight": weight,
        "raw µAP": view["raw"],
        "µAP with score norm": view["micro_ap_normalized"],
        "median distance of matches": float(np.median(matches)),
        "median distance of nearest non-matches": float(np.median(others)),
        "largest over smallest principal value": float(values[0] / values[-1]),
        "classes": None if labelled is None else probe(encoder, labelled, run),
        "matches": np.histogram(matches, BINS)[0].tolist(),
        "nearest non-matches": np.histogram(others, BINS)[0].tolist(),
        "principal values": values.tolist(),
    }


def described(encoder: Encoder, images: Images, split: str, run: Path) -> Descriptors:
    """Descriptors of images, kept with the run."""
    folder = place(run / "descriptors", encoder.fingerprint, split, images)
    shards = describe(images, EncoderDescriber(encoder, 32), folder)
    return np.concatenate(list(shards.blocks()))


def distances(
    queries: Descriptors, references: Descriptors, disc: DiscSet
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Distance of every true pair, and of every query to its nearest reference that is no match."""
    similarity = queries @ references.T
    rows = {query: row for row, query in enumerate(disc.queries.ids)}
    columns = {reference: column for column, reference in enumerate(disc.references.ids)}
    pairs = [(rows[query], columns[reference]) for query, reference in sorted(disc.matches)]
    q, r = np.array(pairs).T
    true = similarity[q, r]
    similarity[q, r] = -np.inf
    return _distance(true), _distance(similarity.max(axis=1))


def principal_values(descriptors: Descriptors) -> NDArray[np.float64]:
    """Standard deviations along the principal directions, largest first, of centred descriptors."""
    centred = descriptors.astype(np.float64) - descriptors.mean(axis=0, dtype=np.float64)
    variances = np.linalg.eigvalsh(centred.T @ centred / len(centred))[::-1]
    return np.sqrt(np.maximum(variances, 0))


def probe(encoder: Encoder, folder: Path, run: Path) -> float:
    """Share of the test images a linear classifier on frozen trunk features puts in their class.

    The weight decay is chosen on a fifth of the training images, which it is then fitted with.
    """
    plain = {**encoder.config.to_dict(), "features": "trunk", "gem_p": 1.0}
    trunk = Encoder(
        SSCDModel(encoder.model.trunk, encoder.model.head, EncoderConfig.from_dict(plain))
    )
    train, test = (read_labelled(folder / part) for part in ("train", "test"))
    if train.classes != test.classes:
        raise ValueError(f"{folder}: train/ has the classes {train.classes}, test/ {test.classes}")
    x, y = (
        torch.from_numpy(described(trunk, part.images, name, run))
        for part, name in ((train, "probe-train"), (test, "probe-test"))
    )
    mean, deviation = x.mean(0), x.std(0).clamp(min=1e-6)
    x, y = (x - mean) / deviation, (y - mean) / deviation
    labels, expected = torch.from_numpy(train.labels), torch.from_numpy(test.labels)
    held_out = torch.arange(len(x)) % 5 == 0
    decay = max(
        WEIGHT_DECAYS,
        key=lambda d: accuracy(
            fit_linear(x[~held_out], labels[~held_out], len(train.classes), d),
            x[held_out],
            labels[held_out],
        ),
    )
    return accuracy(fit_linear(x, labels, len(train.classes), decay), y, expected)


def read_labelled(folder: Path) -> Labelled:
    """The images of a folder that has one folder per class."""
    classes = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    if len(classes) < 2:
        raise ValueError(f"{folder}: expected a folder per class, found {list(classes)}")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = [str(image.path) for image in find_images([folder / name])]
        paths += found
        labels += [label] * len(found)
    ids = tuple(f"{label}/{Path(path).name}" for label, path in zip(labels, paths, strict=True))
    return Labelled(Images(ids, tuple(paths)), np.array(labels), classes)


def fit_linear(x: torch.Tensor, labels: torch.Tensor, classes: int, decay: float) -> torch.Tensor:
    """Weights ``(d + 1, classes)`` of multinomial logistic regression, by L-BFGS from zero."""
    weights = torch.zeros(x.shape[1] + 1, classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = x @ weights[:-1] + weights[-1]
        value = torch.nn.functional.cross_entropy(logits, labels)
        value = value + decay * weights[:-1].square().sum() / 2
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()


def accuracy(weights: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of rows whose largest logit is that of their label."""
    found = (x @ weights[:-1] + weights[-1]).argmax(dim=1)
    return float((found == labels).float().mean())


def draw(rows: Sequence[Mapping[str, Any]], folder: Path, name: str) -> None:
    """µAP and classes over λ; distances of the least and the best λ; principal values."""
    weights = [row["entropy weight"] for row in rows]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for key in ("µAP with score norm", "raw µAP", "classes"):
        if all(row[key] is not None for row in rows):
            label = "accuracy of a linear classifier" if key == "classes" else key
            axis.plot(weights, [100 * row[key] for row in rows], "o-", label=label)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlabel("weight of the entropy loss, λ")
    axis.set_ylabel("%")
    axis.legend(frameon=False)
    figure.savefig(folder / f"{name}_weights.svg")

    best = max(rows, key=lambda row: row["µAP with score norm"])
    shown = [rows[0]] if best is rows[0] else [rows[0], best]
    figure = Figure(figsize=(7, 2.6 * len(shown)), layout="constrained")
    for axis, row in zip(np.atleast_1d(figure.subplots(len(shown))), shown, strict=True):
        for key in ("matches", "nearest non-matches"):
            counts = np.array(row[key], float)
            axis.stairs(counts / counts.sum(), BINS, fill=True, alpha=0.6, label=key)
        axis.set_title(f"λ = {row['entropy weight']}")
        axis.set_xlabel("distance")
        axis.legend(frameon=False)
    figure.savefig(folder / f"{name}_distances.svg")

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        axis.semilogy(row["principal values"], label=f"λ = {row['entropy weight']}")
    dim = len(rows[0]["principal values"])
    axis.axhline(dim**-0.5, color="0.6", linestyle="--", label="uniform on the sphere")
    axis.set_xlabel("principal direction")
    axis.set_ylabel("standard deviation")
    axis.legend(frameon=False)
    figure.savefig(folder / f"{name}_principal_values.svg")


def _distance(similarity: NDArray[np.float32]) -> NDArray[np.float32]:
    distance: NDArray[np.float32] = np.sqrt(np.maximum(2 - 2 * similarity, 0))
    return distance


if __name__ == "__main__":
    main()
