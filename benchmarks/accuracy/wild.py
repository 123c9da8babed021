"""How well copies are found whose edits training has seen, and those it has not.

    python benchmarks accuracy/wild SET --model MODEL [--scales 224 320 448]

``SET`` is made by ``make_wild.py`` (or by ``augly_set.py``, whose edits are another library's). The
table has a column for seen and one for unseen families, and of every family the share of copies
found first, among ten and among fifty candidates: what a second stage can still save. With several
scales a query is encoded once per scale, and a pair scores the best of them
(``sscd_vec.bank.views``).
"""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import results
from accuracy.dataset import DiscSet, Images, read_disc
from accuracy.families import UNSEEN
from sscd_vec.bank.views import PENALTY, best_over_scales
from sscd_vec.encoder import Encoder
from sscd_vec.metrics import evaluate
from sscd_vec.normalize import Normalizer
from sscd_vec.predictions import GroundTruth, Predictions

Scores = NDArray[np.float32]  # (queries, references)
CANDIDATES = 50
SHRINKAGE = 0.8


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="an encoder's folder")
    parser.add_argument("--size", type=int, help="of references, and of queries without --scales")
    parser.add_argument("--scales", type=int, nargs="+", help="sizes of queries, best score wins")
    parser.add_argument(
        "--penalty", type=float, default=PENALTY, help="of all scales but the first"
    )
    parser.add_argument(
        "--refit", action="store_true", help="fit a normalizer on the training split"
    )
    parser.add_argument("--cache", type=Path, help="folder to keep descriptors in")
    parser.add_argument("--name", help="write results/NAME.json")
    options = parser.parse_args(arguments)
    disc = read_disc(options.set)
    encoder = Encoder.from_pretrained(options.model, size=options.size)
    references = described(encoder, disc.references, options.cache)
    normalizer = _normalizer(options, encoder, disc)
    stored = normalizer.references(references)
    by_scale = {}
    for scale in options.scales or [encoder.config.size]:
        seeing = Encoder.from_pretrained(options.model, size=scale)
        queries = described(seeing, disc.queries, options.cache)
        by_scale[scale] = normalizer.queries(queries) @ stored.T
    families = read_families(options.set)
    figures = {
        "model": options.model.name,
        "set": options.set.name,
        "references": len(disc.references),
        "reference_size": encoder.config.size,
        **{
            "+".join(map(str, scales)): judge(
                disc, best_over_scales([by_scale[s] for s in scales], options.penalty), families
            )
            for scales in _prefixes(list(by_scale))
        },
    }
    print(table(figures))
    if options.name:
        print(results.write(options.name, figures, encoder=encoder.fingerprint))


def judge(disc: DiscSet, scores: Scores, families: Mapping[str, str]) -> dict[str, object]:
    """Figures of each column, and of each family."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :CANDIDATES]
    found = np.take_along_axis(scores, best, axis=1)
    truth = dict(disc.matches)
    place = {name: row for row, name in enumerate(disc.references.ids)}
    right = np.array([place[truth[name]] if name in truth else -1 for name in disc.queries.ids])
    family = np.array([families[name] for name in disc.queries.ids])
    unseen = np.isin(family, UNSEEN)
    columns = {"seen": ~unseen, "unseen": unseen} if unseen.any() else {}
    return {
        **{name: column(disc, best, found, rows) for name, rows in columns.items()},
        "all": column(disc, best, found, np.ones(len(family), bool)),
        "families": {
            name: recalls(best[mine], right[mine])
            for name in dict.fromkeys(families.values())
            for mine in [(family == name) & (right >= 0)]
        },
    }


def column(
    disc: DiscSet, best: NDArray[np.int64], found: Scores, rows: NDArray[np.bool_]
) -> dict[str, float]:
    """µAP, recall at 90 % precision and accuracy@1 of some queries, in percent."""
    queries, references = np.array(disc.queries.ids), np.array(disc.references.ids)
    names = queries[rows]
    pairs = [pair for pair in sorted(disc.matches) if pair[0] in set(names.tolist())]
    truth = GroundTruth([q for q, _ in pairs], [r for _, r in pairs], names)
    summary = evaluate(
        Predictions(
            np.repeat(names, best.shape[1]), references[best[rows].ravel()], found[rows].ravel()
        ),
        truth,
    )
    parts = {
        "µAP": summary.micro_ap,
        "recall@P90": summary.recall_at_p90,
        "accuracy@1": summary.accuracy_at_1,
    }
    return {"pairs": len(pairs), **{name: round(100 * part, 1) for name, part in parts.items()}}


def recalls(best: NDArray[np.int64], right: NDArray[np.int64]) -> dict[str, float]:
    """Share of copies among the first 1, 10 and 50 candidates, in percent."""
    hit = best == right[:, None]
    parts = {f"recall@{k}": hit[:, :k].any(axis=1).mean() for k in (1, 10, 50)}
    return {
        "pairs": len(right),
        **{name: round(100 * float(part), 1) for name, part in parts.items()},
    }


def described(encoder: Encoder, images: Images, cache: Path | None) -> NDArray[np.float32]:
    """Descriptors of image files, kept if there is a place for them."""
    if cache is None:
        return encoder.encode(list(images.paths))
    folder = Path(images.paths[0]).parent
    model = hashlib.sha256(encoder.fingerprint.encode()).hexdigest()[:12]
    key = f"{folder.parent.name}-{folder.name}-{len(images)}-{model}.npy"
    if not (cache / key).exists():
        cache.mkdir(parents=True, exist_ok=True)
        np.save(cache / key, encoder.encode(list(images.paths)))
    rows: NDArray[np.float32] = np.load(cache / key)
    return rows


def read_families(folder: Path) -> dict[str, str]:
    """The family of each query."""
    records = map(json.loads, (folder / "query_edits.jsonl").read_text().splitlines())
    return {record["query_id"]: record["family"] for record in records}


def table(figures: Mapping[str, object]) -> str:
    """The figures as lines of text: columns first, then families."""
    lines = []
    for scales, judged in figures.items():
        if not isinstance(judged, dict):
            lines.append(f"{scales}: {judged}")
            continue
        lines += [
            f"{scales} {name}: {figure}" for name, figure in judged.items() if name != "families"
        ]
        lines += [f"    {name:15} {figure}" for name, figure in judged["families"].items()]
    return "\n".join(lines)


def _normalizer(options: argparse.Namespace, encoder: Encoder, disc: DiscSet) -> Normalizer:
    """The model's own, or one fitted on the set's training split."""
    beside = options.model / "normalizer.safetensors"
    if beside.exists() and not options.refit:
        return Normalizer.load(beside)
    background = described(encoder, disc.training, options.cache)
    return Normalizer.fit(background, eps=SHRINKAGE, encoder=encoder)


def _prefixes(scales: list[int]) -> list[list[int]]:
    """Each scale alone, then the first two, three and so on together."""
    alone = [[scale] for scale in scales]
    return alone + [scales[:count] for count in range(2, len(scales) + 1)]


if __name__ == "__main__":
    main()
