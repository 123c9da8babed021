"""Promised against measured false-match rates, on photos that no fit has seen.

    python benchmarks accuracy/thresholds --bank COCO --digits 01245689 --source other=FOLDER ...

Every source's photos search banks of several sizes, disjoint parts of ``--bank``. Pairs that show
one scene are not strangers: of a source that shares its origin with the bank (``--related``) the
highest pairs are judged by ``accuracy/related``, the others count as strangers. Photos of the
normalizer's own background are left out of the bank.

``--views`` queries of each source are also searched as ``Bank.search`` does by default, with a
second look at twice the size, and in crops. Beside it stands the recall of copies of each source's
photos with one and with two edits, and of ``--draw-from`` sources what ``calibrate`` finds on 20
random draws of 400 and of 900 photos.
Descriptors are kept under ``--cache``.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import results
from accuracy.copies import EDITS, describe_copies, drawn_thresholds, recall
from accuracy.dataset import Images, describe, place
from accuracy.models import BATCH, EncoderDescriber
from accuracy.related import RelatedPairs
from accuracy.tiles import describe as describe_tiles
from disc import CACHE
from release.curves import SAME, TILES, choose, strangers
from sscd_vec import plots
from sscd_vec.bank.views import PENALTY, SCALES
from sscd_vec.encoder import Encoder
from sscd_vec.files import writing
from sscd_vec.normalize import Kind, Normalizer
from sscd_vec.normalize.calibration.precision import clopper_pearson
from sscd_vec.normalize.descriptors import overlapping_pairs

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

    def best_of(self, views: int) -> "Found":
        """The same with so many rows of a query side by side as one: the best of its views."""
        grouped = self.scores.reshape(-1, views, self.scores.shape[1])
        best = grouped.argmax(1, keepdims=True)
        rows = self.rows.reshape(grouped.shape)
        return Found(
            np.take_along_axis(grouped, best, 1)[:, 0], np.take_along_axis(rows, best, 1)[:, 0]
        )

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


def measure(
    rules: Normalizer, found: Found, sizes: Sequence[int], kind: Kind = "search", views: int = 1
) -> list[dict[str, object]]:
    """What is promised and what is counted, for every size and rate, as a bank judges."""
    rows: list[dict[str, object]] = []
    for size in sizes:
        best = found.best_in(size)
        for rate in RATES if best.size else ():
            threshold = rules.threshold_for(rate, size, kind, views)
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
    found: Found, queries: Sequence[str], bank: Sequence[str], judge: RelatedPairs
) -> NDArray[np.int64]:
    """Cells whose best pair shows one scene, of the highest ones."""
    order = np.argsort(-found.scores, axis=None)[:LOOKED_AT]
    cells = np.stack(np.unravel_index(order, found.scores.shape), axis=1)
    names = [bank[row] for row in found.rows[cells[:, 0], cells[:, 1]]]
    return cells[judge([queries[row] for row in cells[:, 0]], names)]


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Promised against measured rates with intervals: a panel for each rate, points by bank."""
    figure = plots.new_figure()
    panels = figure.subplots(1, len(RATES), sharex=True)
    for axes, rate in zip(panels, RATES, strict=True):
        for number, (name, found) in enumerate(figures.items()):
            rows = [row for row in found["rates"] if row["promised"] == rate]
            # Side by side, not on top of each other.
            sizes = [row["bank"] * 1.12 ** (number - len(figures) / 2) for row in rows]
            rates = np.array([row["measured"] for row in rows], dtype=float)
            low, high = np.array([row["interval"] for row in rows], dtype=float).reshape(-1, 2).T
            axes.errorbar(sizes, rates, [rates - low, high - rates], fmt="o", label=name, ms=4)
        ends = np.array(sorted(axes.get_xlim()))
        axes.axhline(rate, color="0.4")
        axes.fill_between(ends, rate / 2, rate * 2, color="0.9", zorder=0)
        axes.axhline(3 * rate, color="0.6", linestyle=":")
        axes.set(
            xscale="log", yscale="log", xlabel="images in the bank", ylim=(rate / 10, rate * 6)
        )
        axes.set_title(f"promised: 1 false match in {round(1 / rate):,} queries", fontsize=9)
    panels[0].set_ylabel("measured false-match rate per query")
    panels[-1].legend(fontsize=8)
    plots.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    encoder = Encoder.from_pretrained(options.model, backend=options.backend)
    rules = Normalizer.from_pretrained(options.model)

    def described(split: str, images: Images) -> NDArray[np.float32]:
        folder = place(options.cache, encoder.fingerprint, split, images)
        return describe(images, EncoderDescriber(encoder, BATCH), folder).array()

    bank = choose(options.bank, options.digits, options.bank_count or max(options.sizes))
    references = described("bank", bank)
    known = in_background(rules, references)
    references = np.delete(references, known, axis=0)
    left_out = set(known.tolist())
    bank_paths = [path for row, path in enumerate(bank.paths) if row not in left_out]
    judge = RelatedPairs(options.cache / "related.json")
    figures: dict[str, dict[str, Any]] = {}
    for given in options.source:
        name, _, where = given.partition("=")
        where, _, digits = where.partition(":")
        queries = choose([Path(where)], digits, options.count)
        rows = described(name, queries)
        found = Found.search(rules, rows, references)
        related = np.zeros((0, 2), np.int64)
        if name in options.related:
            related = related_cells(found, queries.paths, bank_paths, judge)
        found = found.without(related)
        figures[name] = {
            "related pairs": len(related),
            "rates": measure(rules, found, options.sizes),
        }
        print(name, *(figures[name]["rates"]), sep="\n", flush=True)
        if options.views:
            shown = view_figures(rules, encoder, queries, found, references, name, options)
            print(name, shown, flush=True)
            figures[name] |= shown
        if options.copies:
            figures[name] |= copy_figures(rules, encoder, queries, rows, name, options)
    if options.name:
        record = {"bank": {"photos": len(references), "in the background": len(known)}} | figures
        print(results.write(options.name, record, encoder=encoder.fingerprint))
        draw(figures, results.RESULTS / f"{options.name}.svg")


def in_background(rules: Normalizer, rows: NDArray[np.float32]) -> NDArray[np.int64]:
    """Rows of photos that the background holds: every query's bias knows them."""
    if rules.background is None:
        return np.zeros(0, np.int64)
    pairs = overlapping_pairs(rules.background, rules.whiten(rows), SAME)
    return np.unique(pairs[:, 1])


def view_figures(
    rules: Normalizer,
    encoder: Encoder,
    queries: Images,
    whole: Found,
    references: NDArray[np.float32],
    name: str,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Rates of the first queries with the second, larger look, and with crops."""
    count: int = options.views
    folder = place(options.cache, encoder.fingerprint, name, queries)
    paths = list(queries.paths[:count])
    larger = _kept(folder / f"larger-{count}.views", lambda: encoder.encode(paths, scale=SCALES[1]))
    crops = _kept(
        folder / f"crops-{count}.views",
        lambda: np.concatenate(describe_tiles(encoder, paths, TILES)),
    )
    first = Found(whole.scores[:count], whole.rows[:count])
    second = Found.search(rules, larger, references).scores - np.float32(PENALTY)
    looks = Found(np.maximum(first.scores, second), first.rows)
    looks.scores[np.isneginf(first.scores)] = -np.inf  # related pairs
    tiled = Found.search(rules, crops, references).best_of(len(crops) // count)
    tiled.scores[np.isneginf(first.scores)] = -np.inf
    return {
        "one look": measure(rules, first, options.sizes),
        "second look": measure(rules, looks, options.sizes),
        "tiled": measure(rules, tiled, options.sizes, "tiled", len(crops) // count),
    }


def _kept(path: Path, make: Callable[[], NDArray[np.float32]]) -> NDArray[np.float32]:
    if not path.exists():
        rows = make()
        with writing(path) as file:
            np.save(file, rows)
    kept: NDArray[np.float32] = np.load(path)
    return kept


def copy_figures(
    rules: Normalizer,
    encoder: Encoder,
    queries: Images,
    rows: NDArray[np.float32],
    name: str,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Recall of copies of the first photos; and thresholds from draws of the others."""
    count: int = options.copies
    found: dict[str, object] = {}
    folder = place(options.cache, encoder.fingerprint, name, queries)
    copies = {
        edits: describe_copies(
            encoder, queries.paths[:count], edits, folder / f"{edits}-edits-{count}.copies"
        )
        for edits in EDITS
    }
    found["recall"] = {
        f"{edits} edit{'s' * (edits > 1)}": recall(
            rules, copied, rows[:count], options.sizes, RATES
        )
        for edits, copied in copies.items()
    }
    if name in options.draw_from:
        apart = rows[strangers(rules, rows)]
        found["draws"] = drawn_thresholds(rules, apart, copies[1], rows[:count])
    print(name, found, flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--bank", nargs="+", type=Path, required=True, help="folders of references")
    add("--digits", default="", help="last digits of the references' names to take")
    add("--source", action="append", required=True, metavar="NAME=FOLDER[:DIGITS]")
    add("--related", nargs="*", default=[], help="sources of the same origin as the bank")
    add("--sizes", nargs="+", type=int, default=[1000, 10_000, 100_000])
    add("--bank-count", type=int, help="references taken, some more for those left out")
    add("--count", type=int, default=2000, help="queries of each source")
    add("--copies", type=int, default=0, help="edited copies of each source, for the recall")
    add("--views", type=int, default=0, help="queries also looked at twice as large, and in crops")
    add("--draw-from", nargs="*", default=[], help="sources to calibrate on at random")
    add("--model", help="name or folder; the shipped one by default")
    add("--backend", default="torch", choices=["torch", "openvino", "onnx"])
    add("--cache", type=Path, default=CACHE / "thresholds", help="folder for descriptors")
    add("--name", help="write benchmarks/results/NAME.json and NAME.svg")
    return parser


if __name__ == "__main__":
    main()
