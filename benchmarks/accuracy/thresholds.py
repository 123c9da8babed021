"""Promised against measured false-match rates, on photos that no fit has seen.

    python benchmarks accuracy/thresholds --bank COCO --digits 01245689 --source other=FOLDER ...

Every source's photos search banks of several sizes, disjoint parts of ``--bank``. Pairs that show
one scene are not strangers: of a source that shares its origin with the bank (``--related``) the
highest pairs are judged by ``accuracy/related``, the others count as strangers. Descriptors are
kept under ``--cache``.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import results
from accuracy.dataset import Images, describe, place
from accuracy.models import BATCH, EncoderDescriber
from accuracy.related import RelatedPairs
from disc import CACHE
from release.curves import choose
from sscd_vec import plots
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Normalizer
from sscd_vec.normalize.calibration.precision import clopper_pearson

RATES = (1e-2, 1e-3)
PART = 1000  # references of the smallest bank
LOOKED_AT = 100  # highest pairs judged related or not
BLOCK = 250  # queries at a time


@dataclass(frozen=True)
class Found:
    """The best reference of every query in every part of the bank: both ``(queries, parts)``."""

    scores: NDArray[np.float32]
    rows: NDArray[np.int64]

    @classmethod
    def search(
        cls, rules: Normalizer, queries: NDArray[np.float32], bank: NDArray[np.float32]
    ) -> "Found":
        """Score all pairs; the rest of a bank that fills no part is left out."""
        parts = len(bank) // PART
        references = rules.whiten(bank[: parts * PART]).T
        scores, rows = [], []
        for begin in range(0, len(queries), BLOCK):
            z = rules.whiten(queries[begin : begin + BLOCK])
            block = (z @ references - rules.whitened_biases(z)[:, None]).reshape(-1, parts, PART)
            scores.append(block.max(2))
            rows.append(block.argmax(2) + PART * np.arange(parts))
        return cls(np.concatenate(scores), np.concatenate(rows))

    def without(self, related: NDArray[np.int64]) -> "Found":
        """The same with some cells ``(query, part)`` left out."""
        scores = self.scores.copy()
        scores[related[:, 0], related[:, 1]] = -np.inf
        return Found(scores, self.rows)

    def best_in(self, size: int) -> NDArray[np.float32]:
        """Best scores in disjoint banks of a size, a multiple of ``PART``: ``(queries, banks)``."""
        wide = size // PART
        banks = self.scores.shape[1] // wide
        best: NDArray[np.float32] = (
            self.scores[:, : banks * wide].reshape(len(self.scores), banks, wide).max(2)
        )
        return best


def measure(rules: Normalizer, found: Found, sizes: Sequence[int]) -> list[dict[str, object]]:
    """What is promised and what is counted, for every size and rate."""
    rows: list[dict[str, object]] = []
    for size in sizes:
        best = found.best_in(size)
        for rate in RATES if best.size else ():
            threshold = rules.threshold_for(rate, size)
            hits = int((best >= threshold).sum())
            low, high = clopper_pearson(hits, best.size)
            rows.append(
                {
                    "bank": size,
                    "banks": best.shape[1],
                    "promised": rate,
                    "threshold": round(threshold, 4),
                    "searches": best.size,
                    "false matches": hits,
                    "measured": round(hits / best.size, 6),
                    "interval": [round(low, 6), round(high, 6)],
                    "measured / promised": round(hits / best.size / rate, 2),
                }
            )
    return rows


def related_cells(
    found: Found, queries: Images, bank: Images, judge: RelatedPairs
) -> NDArray[np.int64]:
    """Cells whose best pair shows one scene, of the highest ones."""
    order = np.argsort(-found.scores, axis=None)[:LOOKED_AT]
    cells = np.stack(np.unravel_index(order, found.scores.shape), axis=1)
    names = [bank.paths[row] for row in found.rows[cells[:, 0], cells[:, 1]]]
    return cells[judge([queries.paths[row] for row in cells[:, 0]], names)]


def draw(figures: dict[str, list[dict[str, object]]], path: Path) -> None:
    """Promised against measured rates, a point for each source, size and rate."""
    figure = plots.new_figure()
    axes = figure.add_subplot()
    for name, rows in figures.items():
        shown = [row for row in rows if row["measured"]]
        points = np.array([[row["promised"], row["measured"]] for row in shown], dtype=float)
        axes.plot(*points.reshape(-1, 2).T, "o", label=name)
    ends = np.array([RATES[-1] / 3, RATES[0] * 3])
    axes.plot(ends, ends, color="0.5")
    axes.fill_between(ends, ends / 2, ends * 2, color="0.9")
    axes.set(xscale="log", yscale="log", xlabel="promised false-match rate", ylabel="measured")
    axes.legend()
    plots.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    encoder = Encoder.from_pretrained(options.model, backend=options.backend)
    rules = Normalizer.from_pretrained(options.model)

    def described(split: str, images: Images) -> NDArray[np.float32]:
        folder = place(options.cache, encoder.fingerprint, split, images)
        return describe(images, EncoderDescriber(encoder, BATCH), folder).array()

    bank = choose(options.bank, options.digits, max(options.sizes))
    references = described("bank", bank)
    judge = RelatedPairs(options.cache / "related.json")
    figures: dict[str, list[dict[str, object]]] = {}
    for given in options.source:
        name, _, where = given.partition("=")
        where, _, digits = where.partition(":")
        queries = choose([Path(where)], digits, options.count)
        found = Found.search(rules, described(name, queries), references)
        if name in options.related:
            found = found.without(related_cells(found, queries, bank, judge))
        figures[name] = measure(rules, found, options.sizes)
        for row in figures[name]:
            print(name, row, flush=True)
    if options.name:
        print(results.write(options.name, figures, encoder=encoder.fingerprint))
        draw(figures, results.RESULTS / f"{options.name}.svg")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--bank", nargs="+", type=Path, required=True, help="folders of references")
    add("--digits", default="", help="last digits of the references' names to take")
    add("--source", action="append", required=True, metavar="NAME=FOLDER[:DIGITS]")
    add("--related", nargs="*", default=[], help="sources of the same origin as the bank")
    add("--sizes", nargs="+", type=int, default=[1000, 10_000, 100_000])
    add("--count", type=int, default=2000, help="queries of each source")
    add("--model", help="name or folder; the shipped one by default")
    add("--backend", default="torch", choices=["torch", "openvino", "onnx"])
    add("--cache", type=Path, default=CACHE / "thresholds", help="folder for descriptors")
    add("--name", help="write benchmarks/results/NAME.json and NAME.svg")
    return parser


if __name__ == "__main__":
    main()
