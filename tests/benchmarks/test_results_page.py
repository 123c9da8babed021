import re
from pathlib import Path

import numpy as np
import pytest

from accuracy import results_page, svg_charts
from accuracy.dataset import DiscSet, read_disc
from sscd_vec.predictions import Predictions, read_predictions, write_predictions


@pytest.fixture
def predictions(disc_like: Path, tmp_path: Path) -> Path:
    """Finds every second true pair; every query also has a wrong reference."""
    disc = read_disc(disc_like)
    rows = []
    for number, (query, reference) in enumerate(sorted(disc.matches)):
        if number % 2 == 0:
            rows.append((query, reference, 0.9))
    for number, query in enumerate(disc.queries.ids):
        wrong = next(r for r in disc.references.ids if (query, r) not in disc.matches)
        rows.append((query, wrong, 0.1 + number / 1000))
    file = tmp_path / "some model.csv"
    write_predictions(file, Predictions(*(list(column) for column in zip(*rows, strict=True))))
    return file


def test_the_page_holds_everything_and_fetches_nothing(
    disc_like: Path, predictions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    results_page.main(
        ["--disc", str(disc_like), "--predictions", str(predictions), "--out", str(out)]
    )
    page = out.read_text()
    titles = (
        "Figures",
        "Precision and recall",
        "Scores",
        "By edit",
        "Worst misses",
        "False matches",
    )
    for title in titles:
        assert title in page
    assert page.count("<svg") == 3
    assert "data:image/jpeg;base64," in page
    assert not re.search(r"(?:src|href)=[\"']?(?!data:)\w+", page)
    assert "http" not in page


def test_misses_are_the_true_pairs_below_the_threshold(disc_like: Path, predictions: Path) -> None:
    disc = read_disc(disc_like)
    read = read_predictions(predictions)
    missed = results_page.misses(read, disc, 0.5, {})
    assert {(m.query, m.expected) for m in missed} == set(sorted(disc.matches)[1::2])
    assert all("not among the candidates" in m.caption and m.found for m in missed)


def test_false_matches_come_highest_first_and_never_right(
    disc_like: Path, predictions: Path
) -> None:
    disc: DiscSet = read_disc(disc_like)
    found = results_page.false_matches(read_predictions(predictions), disc, {})
    assert found[0].query == disc.queries.ids[-1]
    assert all((m.query, m.found) not in disc.matches for m in found)


def test_a_heatmap_is_painted_over_the_query(disc_like: Path, predictions: Path) -> None:
    asked: list[tuple[str, str]] = []

    def heatmap(query: Path, other: Path) -> np.ndarray:
        asked.append((query.stem, other.stem))
        return np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)

    page = results_page.build(disc_like, [predictions], heatmap, mistakes=2)
    assert len(asked) == 4
    assert page.count("heatmap Q") == 4


def test_charts_place_values_where_they_belong() -> None:
    curve = svg_charts.curves({"a": ([0.0, 1.0], [1.0, 0.0])}, "x", "y")
    left, right = svg_charts.LEFT, svg_charts.WIDTH - svg_charts.RIGHT
    top, floor = svg_charts.TOP, svg_charts.HEIGHT - svg_charts.BOTTOM
    assert f'points="{left:.1f},{top:.1f} {right:.1f},{floor:.1f}"' in curve
    bars = svg_charts.bars([("crop", {"recall": 0.5}), ("blur & <noise>", {"recall": 1.0})])
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height', bars)]
    assert widths[1] == pytest.approx(2 * widths[0])
    assert "blur &amp; &lt;noise&gt;" in bars
    assert svg_charts.histograms({"none": [], "one": [0.5]}, "score").count("<polygon") == 2
