"""A page to look at results: curves, histograms, bars per edit, and the worst mistakes as pictures.

    python benchmarks accuracy/results_page --disc SET --predictions A.csv B.csv --out page.html

One HTML file made from files, with its pictures inside; nothing is fetched when it is opened. It
holds the set's photos, so keep it where those may be.
"""

import argparse
import base64
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accuracy import svg_charts
from accuracy.dataset import AT_A_TIME, DiscSet, edits_of_queries, read_disc, with_counts
from sscd_vec.metrics import by_edit, evaluate, precision_recall_curve
from sscd_vec.predictions import GroundTruth, Predictions, read_predictions

Heatmap = Callable[[Path, Path], NDArray[np.floating]]
THUMBNAIL = 200
STYLE = Path(__file__).with_suffix(".css")


@dataclass(frozen=True)
class Mistake:
    """A query, the reference it should have found and the one it found, either perhaps absent."""

    query: str
    expected: str | None
    found: str | None
    caption: str


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make a results page from predictions files.")
    parser.add_argument("--disc", type=Path, required=True, help="the set that was searched")
    parser.add_argument("--predictions", type=Path, nargs="+", required=True, help="CSV files")
    parser.add_argument("--out", type=Path, required=True, help="the HTML file to write")
    parser.add_argument("--model", help="encoder for heatmaps on the mistakes of the first file")
    parser.add_argument("--mistakes", type=int, default=12, help="pictures of each kind")
    options = parser.parse_args(arguments)
    heatmap = encoder_heatmap(options.model) if options.model else None
    page = build(options.disc, options.predictions, heatmap, options.mistakes)
    partial = options.out.with_name(options.out.name + ".tmp")
    partial.write_text(page)
    os.replace(partial, options.out)
    print(options.out)


def build(
    folder: Path, files: Sequence[Path], heatmap: Heatmap | None = None, mistakes: int = 12
) -> str:
    """The page as text; the first predictions file is the one whose mistakes are shown."""
    disc = read_disc(folder)
    truth = disc.truth
    named = {file.stem: read_predictions(file) for file in files}
    main_name, main_predictions = next(iter(named.items()))
    edits = edits_of_queries(folder)
    curves = {name: precision_recall_curve(p, truth) for name, p in named.items()}
    sections = [
        _section("Figures", _summary_table(named, truth)),
        _section(
            "Precision and recall",
            svg_charts.curves(
                {name: (c.recall, c.precision) for name, c in curves.items()}, "recall", "precision"
            ),
        ),
        _section(
            f"Scores, {main_name}",
            "<p>True pairs, and the best wrong reference of every query.</p>"
            + svg_charts.histograms(_score_samples(main_predictions, disc), "score"),
        ),
    ]
    if edits:
        sections.append(_section("By edit", _edit_bars(named, truth, edits)))
    summary = evaluate(main_predictions, truth)
    pictures = _Pictures(folder, disc, heatmap)
    for title, found in (
        ("Worst misses", misses(main_predictions, disc, summary.threshold_at_p90, edits)),
        ("False matches", false_matches(main_predictions, disc, edits)),
    ):
        shown = "".join(pictures.card(mistake) for mistake in found[:mistakes])
        sections.append(_section(f"{title}, {main_name}", f'<div class="cards">{shown}</div>'))
    counts = (
        f"{len(disc.references):,} references, {len(disc.queries):,} queries, "
        f"{len(disc.matches):,} true pairs"
    )
    style = STYLE.read_text()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Copy detection on {escape(folder.name)}</title><style>{style}</style></head><body>"
        f"<header><h1>Copy detection on {escape(folder.name)}</h1><p>{counts}</p></header>"
        f"<main>{''.join(sections)}</main></body></html>\n"
    )


def misses(
    predictions: Predictions, disc: DiscSet, threshold: float, edits: dict[str, list[str]]
) -> list[Mistake]:
    """True pairs below the threshold, those not found at all first, then the lowest scores."""
    scores = {
        (query, reference): score
        for query, reference, score in _triples(predictions)
        if (query, reference) in disc.matches
    }
    first = _best_wrong(predictions, disc)
    missed = sorted(
        (scores.get(pair, float("-inf")), pair)
        for pair in disc.matches
        if scores.get(pair, float("-inf")) < threshold
    )
    result = []
    for score, (query, reference) in missed:
        said = "not among the candidates" if score == float("-inf") else f"score {score:.3f}"
        caption = f"{query}: {', '.join(edits.get(query, []))}; {said}"
        result.append(Mistake(query, reference, first.get(query, (0.0, None))[1], caption))
    return result


def false_matches(
    predictions: Predictions, disc: DiscSet, edits: dict[str, list[str]]
) -> list[Mistake]:
    """The best wrong reference of each query, highest scores first."""
    expected = dict(sorted(disc.matches))
    best = _best_wrong(predictions, disc)
    ranked = sorted(((*best[query], query) for query in best), reverse=True)
    return [
        Mistake(
            query,
            expected.get(query),
            reference,
            f"{query}: {', '.join(edits.get(query, []))}; wrong at {score:.3f}",
        )
        for score, reference, query in ranked
    ]


def encoder_heatmap(name: str) -> Heatmap:
    """Heatmaps of an encoder: which part of the first picture matches the second."""
    from sscd_vec.encoder.encoder import Encoder

    encoder = Encoder.from_pretrained(name)
    return lambda first, second: np.asarray(encoder.heatmap(first, second), np.float32)


class _Pictures:
    """Thumbnails of a set as data, with a heatmap over the query where there is one."""

    def __init__(self, folder: Path, disc: DiscSet, heatmap: Heatmap | None) -> None:
        self.paths = {
            **dict(zip(disc.queries.ids, map(Path, disc.queries.paths), strict=True)),
            **dict(zip(disc.references.ids, map(Path, disc.references.paths), strict=True)),
        }
        self.heatmap = heatmap

    def card(self, mistake: Mistake) -> str:
        """The query, then what it should have found and what it found."""
        parts = [self._figure(mistake.query, "query")]
        if self.heatmap is not None:
            other = mistake.expected or mistake.found
            if other is not None:
                parts.append(self._heat(mistake.query, other))
        parts.append(self._figure(mistake.expected, "copy of"))
        parts.append(self._figure(mistake.found, "best wrong"))
        caption = escape(mistake.caption)
        return f'<div class="card"><div class="row">{"".join(parts)}</div><p>{caption}</p></div>'

    def _figure(self, name: str | None, label: str) -> str:
        if name is None:
            return f'<figure><div class="none">none</div><figcaption>{label}</figcaption></figure>'
        with Image.open(self.paths[name]) as image:
            return _image(image.convert("RGB"), f"{label} {name}", label)

    def _heat(self, query: str, other: str) -> str:
        if self.heatmap is None:
            return ""
        values = self.heatmap(self.paths[query], self.paths[other])
        low, high = float(values.min()), float(values.max())
        strength = (values - low) / (high - low if high > low else 1.0)
        with Image.open(self.paths[query]) as image:
            picture = image.convert("RGB")
        mask = Image.fromarray((255 * strength).astype(np.uint8)).resize(
            picture.size, Image.Resampling.BICUBIC
        )
        warm = Image.composite(
            Image.new("RGB", picture.size, (255, 214, 0)),
            Image.new("RGB", picture.size, (20, 30, 120)),
            mask,
        )
        return _image(Image.blend(picture, warm, 0.5), f"heatmap {query} {other}", "heatmap")


def _image(image: Image.Image, alt: str, caption: str) -> str:
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<figure><img src="data:image/jpeg;base64,{data}" alt="{escape(alt)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _triples(predictions: Predictions) -> list[tuple[str, str, float]]:
    columns = (predictions.query_ids, predictions.reference_ids, predictions.scores)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _best_wrong(predictions: Predictions, disc: DiscSet) -> dict[str, tuple[float, str]]:
    best: dict[str, tuple[float, str]] = {}
    for query, reference, score in _triples(predictions):
        wrong = (query, reference) not in disc.matches
        if wrong and score > best.get(query, (float("-inf"), ""))[0]:
            best[query] = (score, reference)
    return best


def _score_samples(predictions: Predictions, disc: DiscSet) -> dict[str, list[float]]:
    true = [score for query, ref, score in _triples(predictions) if (query, ref) in disc.matches]
    wrong = [score for score, _ in _best_wrong(predictions, disc).values()]
    return {"true pairs": true, "best wrong reference": wrong}


def _summary_table(named: dict[str, Predictions], truth: GroundTruth) -> str:
    heads = ("", "µAP", "recall@P90", "threshold", "accuracy@1", "MRR")
    rows = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for name, predictions in named.items():
        s = evaluate(predictions, truth)
        cells = [
            escape(name),
            f"{100 * s.micro_ap:.1f}",
            f"{100 * s.recall_at_p90:.1f}",
            f"{s.threshold_at_p90:.3f}",
            f"{100 * s.accuracy_at_1:.1f}",
            f"{100 * s.mrr:.1f}",
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<div class=scroll><table>{''.join(rows)}</table></div>"


def _edit_bars(
    named: dict[str, Predictions], truth: GroundTruth, edits: dict[str, list[str]]
) -> str:
    counted = with_counts(edits)
    tables = {name: by_edit(predictions, truth, counted) for name, predictions in named.items()}
    main = next(iter(tables.values()))
    order = sorted(main, key=lambda edit: (edit.endswith(AT_A_TIME), -main[edit].recall_at_p90))
    rows = []
    for edit in order:
        values = {name: table[edit].recall_at_p90 for name, table in tables.items()}
        rows.append((f"{edit} · {main[edit].pairs}", values))
    return (
        "<p>Share of the true pairs of each edit found at 90 % precision over all queries; the "
        "number is how many pairs have it. Most queries have several edits.</p>"
        + svg_charts.bars(rows)
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


if __name__ == "__main__":
    main()
