"""The weights of the second stage: fitted on a set of photos that no test uses.

    python benchmarks release/fit_verifier SET OUT [--model MODEL] [--cache CACHE]

``SET`` is made by ``accuracy/make_disc_like``. Weights are those of a logistic regression on the
ten nearest references of every query, in which no figure may speak against a copy; a figure whose
weight comes out negative is left out. The threshold is the least score with the promised precision
over all queries at which at most ``FALSE_ACCEPTS`` of the queries without a match are accepted, and
of each kind of false friends in ``REFUSED``, made around the set's references. Other kinds share
more than half of the image: by geometry they are copies, and ``accuracy/verify`` reports them.
``OUT`` is ``verifier.json`` in the model's folder.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accuracy.dataset import DiscSet, read_disc
from accuracy.false_friends import measure_friends
from accuracy.verification import Measurements, are_copies, measure_set, supports
from photos import find_photos
from sscd_vec import models
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Normalizer
from sscd_vec.verify import Combination, Weights
from sscd_vec.verify.scoring import FIGURES, figures_of

K = 10
PRECISION, FALSE_ACCEPTS = 0.99, 0.0005
REFUSED = ("logo", "caption", "meme")
RIDGE = 1.0
SETS, SEED = 4, 1  # of false friends; benchmarks use other seeds

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Labelled:
    """Pairs to fit on.

    Attributes:
        figures: ``(n, columns)``.
        copy: Which are copies.
        query: A number per query; negative for false friends, one per kind and query.
        kind: ``""``, or the kind of false friends.
    """

    figures: Float64
    copy: NDArray[np.bool_]
    query: NDArray[np.int64]
    kind: NDArray[np.str_]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="the shipped one by default")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--queries", type=int, help="take only so many")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--friends", type=int, default=60, help="images of each kind")
    asked = parser.parse_args(arguments)
    encoder = Encoder.from_pretrained(asked.model)
    normalizer = Normalizer.load(models.normalizer_path(asked.model))
    disc = read_disc(asked.set)
    measured = measure_set(
        disc,
        encoder,
        normalizer,
        asked.cache,
        k=K,
        count=asked.queries,
        processes=asked.processes,
    )
    photos = find_photos([asked.set / "references"])[: asked.friends]
    friends = measure_friends(encoder, normalizer, photos, SETS, SEED, K)
    weights = fit(measured, friends, disc, encoder.fingerprint, normalizer.reference_fingerprint)
    weights.save(asked.out)
    print(asked.out.read_text())


def fit(
    measured: Measurements,
    friends: dict[str, Measurements],
    disc: DiscSet,
    encoder: str,
    normalizer: str,
) -> Weights:
    """Both combinations with their thresholds."""
    refused = {kind: pairs for kind, pairs in friends.items() if kind in REFUSED}
    truth = are_copies(measured, disc)
    matched = {query for query, _ in disc.matches}
    unmatched = [row for row, name in enumerate(disc.queries.ids) if name not in matched]
    made: list[Combination] = []
    promises = []
    for columns in ((*FIGURES, "descriptor"), FIGURES):
        pairs = _labelled(measured, truth, refused, columns)
        real = pairs.kind == ""
        bias, values = _regress(pairs.figures[real], pairs.copy[real])
        scores = 1 / (1 + np.exp(-np.clip(pairs.figures @ values + bias, -50, 50)))
        threshold = _threshold(scores, pairs, np.array(unmatched))
        kept = {n: round(float(v), 5) for n, v in zip(columns, values, strict=True) if v}
        made.append(Combination(round(bias, 5), kept, math.ceil(1e6 * threshold) / 1e6))
        accepted = scores[real] >= threshold
        promises.append(
            {
                "precision": PRECISION,
                "false_accepts_per_unmatched_query": FALSE_ACCEPTS,
                "recall": round(float((accepted & truth).sum()) / len(disc.matches), 4),
            }
        )
    about = {
        "encoder": encoder,
        "normalizer": normalizer,
        "queries": len(disc.queries),
        "references": len(disc.references),
        "pairs": len(measured.query),
        "false_friends": sorted(refused),
        "with_descriptor": promises[0],
        "geometry": promises[1],
    }
    return Weights(made[0], made[1], about)


def _labelled(
    measured: Measurements,
    truth: NDArray[np.bool_],
    friends: dict[str, Measurements],
    columns: Sequence[str],
) -> Labelled:
    parts = [measured, *friends.values()]
    figures = np.array([row for part in parts for row in _rows(part, columns)])
    copies = np.concatenate([truth, *(np.zeros(len(f.query), bool) for f in friends.values())])
    queries = np.concatenate([measured.query, *(-1 - f.query for f in friends.values())])
    kinds = np.repeat(["", *friends], [len(part.query) for part in parts])
    return Labelled(figures, copies, queries, kinds)


def _rows(measured: Measurements, columns: Sequence[str]) -> list[list[float]]:
    pairs = zip(supports(measured), measured.descriptor.tolist(), strict=True)
    found = [figures_of(support, score) for support, score in pairs]
    return [[each[name] for name in columns] for each in found]


def _regress(figures: Float64, copy: NDArray[np.bool_]) -> tuple[float, Float64]:
    """Logistic regression by Newton's method; figures with a negative weight are left out."""
    kept = np.arange(figures.shape[1])
    while True:
        bias, values = _newton(figures[:, kept], copy.astype(np.float64))
        if (values >= 0).all():
            weights = np.zeros(figures.shape[1])
            weights[kept] = values
            return bias, weights
        kept = np.delete(kept, int(np.argmin(values * figures[:, kept].std(axis=0))))


def _newton(figures: Float64, copy: Float64) -> tuple[float, Float64]:
    mean, spread = figures.mean(axis=0), figures.std(axis=0) + 1e-9
    columns = np.column_stack([(figures - mean) / spread, np.ones(len(figures))])
    ridge = RIDGE * np.diag([1.0] * len(mean) + [0.0])
    weights = np.zeros(columns.shape[1])
    for _ in range(100):
        share = 1 / (1 + np.exp(-np.clip(columns @ weights, -50, 50)))
        slope = columns.T @ (copy - share) - ridge @ weights
        curve = (columns * (share * (1 - share))[:, None]).T @ columns + ridge
        step = np.linalg.solve(curve, slope)
        weights += step
        if np.abs(step).max() < 1e-10:
            break
    values = weights[:-1] / spread
    return float(weights[-1] - values @ mean), values


def _threshold(scores: Float64, pairs: Labelled, unmatched: NDArray[np.int64]) -> float:
    """The least score that keeps every promise."""
    real = pairs.kind == ""
    limits = [_precise(scores[real], pairs.copy[real])]
    strangers = real & np.isin(pairs.query, unmatched)
    limits.append(_rare(scores[strangers], pairs.query[strangers], len(unmatched)))
    for kind in set(pairs.kind.tolist()) - {""}:
        of_kind = pairs.kind == kind
        count = len(np.unique(pairs.query[of_kind]))
        limits.append(_rare(scores[of_kind], pairs.query[of_kind], count))
    return max(limits)


def _precise(scores: Float64, copy: NDArray[np.bool_]) -> float:
    order = np.argsort(-scores, kind="stable")
    precision = np.cumsum(copy[order]) / np.arange(1, len(order) + 1)
    good = np.flatnonzero(precision >= PRECISION)
    return float(scores[order[good[-1]]]) if len(good) else 1.0


def _rare(scores: Float64, queries: NDArray[np.int64], count: int) -> float:
    """Just above the best score of all but ``FALSE_ACCEPTS`` of the queries."""
    best = np.sort([scores[queries == query].max() for query in np.unique(queries)])[::-1]
    allowed = int(FALSE_ACCEPTS * count)
    return float(np.nextafter(best[allowed], 2.0)) if allowed < len(best) else 0.0


if __name__ == "__main__":
    main()
