import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sscd_vec import plots
from sscd_vec.normalize import Threshold


def test_two_distributions_and_the_threshold(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    figure = plots.score_histogram(
        random.normal(0, 0.1, 5000), random.normal(0.6, 0.1, 500), 0.35, (0.3, 0.4), "calibration"
    )
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == [
        "non-matches (5,000)",
        "matches (500)",
        "threshold 0.350",
        "its interval",
    ]
    assert axes.get_title() == "calibration"
    (line,) = axes.get_lines()
    assert set(np.asarray(line.get_xdata()).tolist()) == {0.35}
    plots.save(figure, tmp_path / "folder" / "scores.png")
    with Image.open(tmp_path / "folder" / "scores.png") as image:
        pixels = np.asarray(image.convert("RGB"), dtype=int)
    red = (pixels[..., 0] > 150) & (pixels[..., 1] < 100)
    assert red.any() and pixels.std() > 10
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["scores.png"]


def test_a_long_title_and_the_legend_stay_on_the_picture_and_off_the_line() -> None:
    threshold = Threshold(
        0.1767,
        target="false_match_rate_per_query",
        wanted=0.001,
        interval=(0.12, 0.3266),
        confidence=0.95,
        bank_size=1_000_000,
        extrapolated=True,
    )
    scores = np.linspace(-0.9, 0.9, 20_000)
    figure = plots.score_histogram(scores, scores, 0.1767, (0.12, 0.3266), str(threshold))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    for part in (axes.title, legend):
        box = part.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= figure.bbox.width
        assert 0 <= box.y0 and box.y1 <= figure.bbox.height
    assert legend.get_window_extent().y1 < axes.bbox.y0


def test_one_distribution_is_enough_and_none_is_not() -> None:
    (axes,) = plots.score_histogram([0.5, 0.5]).axes
    assert axes.get_yscale() == "log"
    with pytest.raises(ValueError, match="at least one score"):
        plots.score_histogram([])


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"sscd-vec\[plot\]"):
        plots.score_histogram([0.5])
