"""What the second stage brings on a DISC-like set, what it takes for a copy, and what it costs.

    python benchmarks accuracy/verify SET [--k 10 20] [--further 5] [--photos PHOTOS] [--name NAME]

``SET`` is made by ``accuracy/make_disc_like``. Candidates are the ``k`` nearest references by
descriptor; with ``--further`` a query without a verified copy gets so many more, of a look at twice
the size or of its tiles. Scores and threshold are those that lie beside the model. ``--photos`` are
what false friends are made around. Everything is cached: a killed run goes on where it was, and
another ``k`` below the largest costs nothing.
"""

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

import results
from accuracy.dataset import DiscSet, edits_of_queries, read_disc, with_counts
from accuracy.false_friends import judged_friends, measure_friends
from accuracy.verification import Look, Measurements, are_copies, measure_set, supports
from photos import find_photos
from speed.measure import interleaved
from sscd_vec import metrics, models
from sscd_vec.encoder import Encoder
from sscd_vec.encoder.images import load_pixels
from sscd_vec.normalize import Normalizer
from sscd_vec.predictions import GroundTruth, Predictions
from sscd_vec.verify import Candidate, Features, Verifier
from sscd_vec.verify.scoring import figures_of

Scores = NDArray[np.float64]
NEIGHBOURS = 10  # of an unmatched query, among which false accepts are counted
SETS, SEED = 4, 7  # of false friends; the weights were fitted with another seed
TIMED_CANDIDATES, ROUNDS = 20, 15
DOUBTED = 500  # accepted copies of which those in doubt are counted


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the figures."""
    asked = _parser().parse_args(arguments)
    encoder = Encoder.from_pretrained(asked.model)
    normalizer = Normalizer.load(models.normalizer_path(asked.model))
    verifier = Verifier.from_pretrained(asked.model)
    disc = read_disc(asked.set)
    measured = measure_set(
        disc,
        encoder,
        normalizer,
        asked.cache,
        k=max(asked.k),
        further=asked.further,
        look=asked.look,
        count=asked.queries,
        skip=asked.skip,
        processes=asked.processes,
    )
    figures: dict[str, object] = {
        "queries": len(np.unique(measured.query)),
        "references": len(disc.references),
        "look": asked.look if asked.further else None,
        "rows": rows(measured, disc, verifier, asked.k, asked.further),
        "edits": edits(measured, disc, verifier, asked.set, max(asked.k), asked.further),
        "threshold": at_threshold(
            looked_at(measured, verifier, max(asked.k), asked.further), disc, verifier
        )
        | doubted(measured.within(max(asked.k)), disc, verifier),
    }
    if asked.photos:
        photos = find_photos(asked.photos)[: asked.friends]
        friends = measure_friends(encoder, normalizer, photos, SETS, SEED, NEIGHBOURS)
        judged = judged_friends(photos, SETS, SEED, NEIGHBOURS)
        figures["false_friends"] = [
            row | judged[str(row["kind"])] for row in false_friends(friends, verifier, normalizer)
        ]
    if asked.time:
        figures["time"] = cost(encoder, verifier, disc)
    print(figures)
    if asked.name:
        print(results.write(asked.name, figures, encoder=encoder.fingerprint))


def scores_of(verifier: Verifier, measured: Measurements) -> Scores:
    """The verifier's score of every pair."""
    combination = verifier.weights.with_descriptor
    pairs = zip(supports(measured), measured.descriptor.tolist(), strict=True)
    return np.array([combination.score(figures_of(support, score)) for support, score in pairs])


def looked_at(measured: Measurements, verifier: Verifier, k: int, further: int) -> Measurements:
    """Pairs a bank compares: ``k`` of each query, further ones where no copy was verified."""
    pairs = measured.within(k, further)
    accepted = scores_of(verifier, pairs) >= verifier.weights.with_descriptor.threshold
    decided = np.unique(pairs.query[accepted & (pairs.rank < k)])
    return pairs.where((pairs.rank < k) | ~np.isin(pairs.query, decided))


def rows(
    measured: Measurements, disc: DiscSet, verifier: Verifier, ks: Sequence[int], further: int
) -> list[dict[str, object]]:
    """Accuracy of descriptors alone and of verified candidates, per number of candidates."""
    table = [_row("descriptors alone", measured.within(NEIGHBOURS), None, disc)]
    for k, more in [(k, 0) for k in ks] + ([(max(ks), further)] if further else []):
        name = f"verified, {k} candidates" + (f" and {more} of another look" if more else "")
        table.append(_row(name, looked_at(measured, verifier, k, more), verifier, disc))
    return table


def edits(
    measured: Measurements, disc: DiscSet, verifier: Verifier, folder: Path, k: int, further: int
) -> list[dict[str, object]]:
    """Recall at 90 % precision of each edit, by descriptors alone, verified, looked at again."""
    known = with_counts(edits_of_queries(folder))
    names = {disc.queries.ids[row] for row in np.unique(measured.query)}
    chosen = {name: kinds for name, kinds in known.items() if name in names}
    predictions = {
        "descriptors alone": _predictions(measured.within(NEIGHBOURS), None, disc),
        "verified": _predictions(measured.within(k), verifier, disc),
    }
    if further:
        both = looked_at(measured, verifier, k, further)
        predictions["verified, looked at again"] = _predictions(both, verifier, disc)
    truth = _truth(measured, disc)
    found = {name: metrics.by_edit(each, truth, chosen) for name, each in predictions.items()}
    return [
        {"edit": edit, "pairs": one.pairs}
        | {name: _percent(by[edit].recall_at_p90) for name, by in found.items()}
        for edit, one in found["verified"].items()
    ]


def at_threshold(measured: Measurements, disc: DiscSet, verifier: Verifier) -> dict[str, object]:
    """What the shipped threshold gives, and how often an unmatched query is called a copy."""
    limit = verifier.weights.with_descriptor.threshold
    scores, truth = scores_of(verifier, measured), are_copies(measured, disc)
    matched = {query for query, _ in disc.matches}
    stranger = np.array([disc.queries.ids[row] not in matched for row in measured.query])
    near = stranger & (measured.rank < NEIGHBOURS)
    fooled = np.unique(measured.query[near & (scores >= limit)])
    unmatched = len(np.unique(measured.query[stranger]))
    accepted = scores >= limit
    return {
        "threshold": limit,
        "promised precision": verifier.weights.about["with_descriptor"]["precision"],
        "precision": round(float(truth[accepted].mean()), 4),
        "recall": round(float((truth & accepted).sum()) / len(_truth(measured, disc)), 4),
        "unmatched queries": unmatched,
        "unmatched queries called a copy": len(fooled),
        "percent of them": round(100 * len(fooled) / unmatched, 3),
    }


def doubted(measured: Measurements, disc: DiscSet, verifier: Verifier) -> dict[str, object]:
    """How many accepted copies are only to be looked at, since they look like a shared frame."""
    accepted = scores_of(verifier, measured) >= verifier.weights.with_descriptor.threshold
    pairs = measured.where(accepted & are_copies(measured, disc))
    chosen = list(zip(pairs.query.tolist(), pairs.reference.tolist(), strict=True))[:DOUBTED]
    found = 0
    for query, reference in chosen:
        ours = verifier.extract(load_pixels(disc.queries.paths[query]))
        theirs = verifier.extract(load_pixels(disc.references.paths[reference]))
        found += bool(verifier.compare(ours, theirs).doubt)
    return {"accepted copies compared again": len(chosen), "of them to be looked at": found}


def false_friends(
    friends: dict[str, Measurements], verifier: Verifier, normalizer: Normalizer
) -> list[dict[str, object]]:
    """Per kind, queries that are called a copy of any neighbour on the same template."""
    limit = verifier.weights.with_descriptor.threshold
    by_descriptor = normalizer.thresholds["search"].value
    table: list[dict[str, object]] = []
    for kind, measured in friends.items():
        verified = measured.query[scores_of(verifier, measured) >= limit]
        alone = measured.query[measured.descriptor >= by_descriptor]
        table.append(
            {
                "kind": kind,
                "queries": len(np.unique(measured.query)),
                "called a copy by descriptor": len(np.unique(alone)),
                "called a copy when verified": len(np.unique(verified)),
            }
        )
    return table


def cost(encoder: Encoder, verifier: Verifier, disc: DiscSet) -> dict[str, object]:
    """Time of one query with kept features, in encodings of one image, and bytes per image."""
    images = [load_pixels(path) for path in disc.queries.paths[:ROUNDS]]
    references = [
        verifier.extract(load_pixels(path)).best(verifier.kept).to_bytes()
        for path in disc.references.paths[:TIMED_CANDIDATES]
    ]
    turn = iter(range(10**9))

    def image() -> NDArray[np.uint8]:
        return images[next(turn) % len(images)]

    def candidates() -> Iterable[Candidate]:
        for name, blob in enumerate(references):
            yield Candidate(str(name), Features.from_bytes(blob), 0.1)

    ready = [verifier.extract(each).to_bytes() for each in images]
    timings = interleaved(
        {
            "encode": lambda: encoder.encode([image()]),
            "extract": lambda: verifier.extract(image()),
            "compare": lambda: verifier.verify(
                Features.from_bytes(ready[next(turn) % len(ready)]), candidates()
            ),
            "query": lambda: verifier.verify(image(), candidates()),
        }
        | {
            f"odd {kind}": partial(_compare_with_itself, verifier, pixels)
            for kind, pixels in odd_images().items()
        },
        rounds=ROUNDS,
        shuffled=True,
    )
    encode = timings["encode"].median
    return {
        "candidates": len(references),
        "encoding, ms": round(1000 * encode, 1),
        "features of the query, in encodings": round(timings["extract"].median / encode, 2),
        "comparisons, in encodings": round(timings["compare"].median / encode, 2),
        "whole query, in encodings": round(timings["query"].median / encode, 2),
        "bytes per kept image": round(float(np.mean([len(blob) for blob in references]))),
        "odd image and 20 candidates like it, in encodings": {
            name.removeprefix("odd "): round(timing.median / encode, 2)
            for name, timing in timings.items()
            if name.startswith("odd ")
        },
    }


def odd_images() -> dict[str, NDArray[np.uint8]]:
    """Images that cost most, or have nothing to find."""
    rng = np.random.default_rng(0)
    checks = (np.indices((1024, 1024)).sum(axis=0) // 16 % 2 * 255).astype(np.uint8)
    return {
        "flat": np.full((512, 512, 3), 128, np.uint8),
        "one pixel wide": rng.integers(0, 256, (2000, 1, 3), np.uint8),
        "noise": rng.integers(0, 256, (384, 384, 3), np.uint8),
        "checks": np.repeat(checks[:, :, None], 3, axis=2),
        "tiled texture": np.tile(rng.integers(0, 256, (32, 32, 3), np.uint8), (32, 32, 1)),
    }


def _compare_with_itself(verifier: Verifier, pixels: NDArray[np.uint8]) -> None:
    features = verifier.extract(pixels)
    same = Candidate("same", features.best(verifier.kept), 0.1)
    verifier.verify(features, [same] * TIMED_CANDIDATES)


def _row(
    name: str, measured: Measurements, verifier: Verifier | None, disc: DiscSet
) -> dict[str, object]:
    predictions, truth = _predictions(measured, verifier, disc), _truth(measured, disc)
    summary = metrics.evaluate(predictions, truth)
    sure = metrics.recall_at_precision(predictions, truth, 0.99)
    return {
        "search": name,
        "candidate recall": _percent(are_copies(measured, disc).sum() / len(truth)),
        "µAP": _percent(summary.micro_ap),
        "recall@P90": _percent(summary.recall_at_p90),
        "recall@P99": _percent(sure.recall),
        "accuracy@1": _percent(summary.accuracy_at_1),
    }


def _predictions(measured: Measurements, verifier: Verifier | None, disc: DiscSet) -> Predictions:
    scores = measured.descriptor if verifier is None else scores_of(verifier, measured)
    return Predictions(
        np.array(disc.queries.ids)[measured.query],
        np.array(disc.references.ids)[measured.reference],
        scores,
    )


def _truth(measured: Measurements, disc: DiscSet) -> GroundTruth:
    """True pairs of the queries that were measured."""
    names = {disc.queries.ids[row] for row in np.unique(measured.query)}
    pairs = sorted(pair for pair in disc.matches if pair[0] in names)
    return GroundTruth([q for q, _ in pairs], [r for _, r in pairs], sorted(names))


def _percent(share: float) -> float:
    return round(100 * float(share), 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", type=Path, help="made by accuracy/make_disc_like")
    parser.add_argument("--model", help="the shipped one by default")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--k", type=int, nargs="+", default=[10, 20], help="candidates per query")
    parser.add_argument("--further", type=int, default=0, help="candidates of another look")
    parser.add_argument("--look", choices=get_args(Look), default="larger", help="which that is")
    parser.add_argument("--queries", type=int, help="take only so many")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them")
    parser.add_argument("--photos", type=Path, nargs="+", help="to make false friends of")
    parser.add_argument("--friends", type=int, default=120, help="images of each kind")
    parser.add_argument("--time", action="store_true", help="measure the time of a query too")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--name", help="write results/NAME.json")
    return parser


if __name__ == "__main__":
    main()
