"""Pictures of scores: the only file that imports matplotlib, and only when a picture is drawn.

Every function takes plain arrays and returns a matplotlib ``Figure``; ``save`` writes one. No
global state of matplotlib is touched, so drawing is safe in threads and servers.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NONMATCH, MATCH, THRESHOLD = "#7f8c9b", "#2b6cb0", "#c53030"
TITLE_WIDTH = 80  # characters that fit above a picture


def score_histogram(
    nonmatch_scores: ArrayLike,
    match_scores: ArrayLike = (),
    threshold: float | None = None,
    interval: tuple[float, float] | None = None,
    title: str = "",
) -> "Figure":
    """The scores of non-matches and matches, each as a density, with the threshold between.

    Args:
        nonmatch_scores: Scores of pairs that are no copies.
        match_scores: Scores of copies; may be empty.
        threshold: Drawn as a line.
        interval: The threshold's interval, drawn as a band.
        title: Above the picture.

    Raises:
        ValueError: If there are no scores at all.
    """
    groups = (
        ("non-matches", np.asarray(nonmatch_scores, dtype=np.float64), NONMATCH),
        ("matches", np.asarray(match_scores, dtype=np.float64), MATCH),
    )
    everything = np.concatenate([scores for _, scores, _ in groups])
    if len(everything) == 0:
        raise ValueError("score_histogram: expected at least one score, got none")
    figure = new_figure()
    axes = figure.add_subplot()
    low, high = float(everything.min()), float(everything.max())
    edges = np.linspace(low, high if high > low else low + 1e-6, 81).tolist()
    for name, scores, colour in groups:
        if len(scores):
            label = f"{name} ({len(scores):,})"
            axes.hist(scores, edges, density=True, color=colour, alpha=0.65, label=label)
    if threshold is not None:
        axes.axvline(threshold, color=THRESHOLD, label=f"threshold {threshold:.3f}")
    if interval is not None:
        axes.axvspan(*interval, color=THRESHOLD, alpha=0.15, linewidth=0, label="its interval")
    axes.set_yscale("log")  # the tail is what a threshold is about
    axes.set_xlabel("score")
    axes.set_ylabel("density")
    if title:
        axes.set_title(textwrap.fill(title, TITLE_WIDTH), fontsize="medium")
    # Below the picture: inside, the threshold's line would run through it.
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=4,
        columnspacing=1,
        handlelength=1.2,
        fontsize="small",
        frameon=False,
    )
    return figure


def new_figure(width: float = 7.0, height: float = 4.2) -> "Figure":
    """An empty figure, apart from pyplot.

    Raises:
        ImportError: If matplotlib is missing, naming the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib; install it with: pip install 'sscd-vec[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: str | Path) -> None:
    """Write a figure as PNG, SVG or PDF (by its ending), whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(partial, dpi=150, format=path.suffix.lstrip(".") or "png")
    os.replace(partial, path)


def training_report(
    metrics: Sequence[Mapping[str, Any]],
    validation: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
) -> "Figure":
    """A training run on one page: losses, similarities, µAP, and the last validation's shape.

    Args:
        metrics: Lines of ``metrics.jsonl``.
        validation: Cosines of true pairs, cosines of each query's nearest wrong reference, and the
            principal values of the descriptors: the paper's two diagnostic figures.
    """
    figure = new_figure(12, 6.5)
    panels = figure.subplots(2, 3)
    _curves(panels[0, 0], metrics, {"info_nce": "InfoNCE", "koleo": "KoLeo"}, "losses")
    near = {"positive_similarity": "copies", "negative_similarity": "nearest other"}
    _curves(panels[0, 1], metrics, near, "cosine in the batch")
    _curves(panels[0, 2], metrics, {"learning_rate": "learning rate"}, "learning rate")
    scores = {"micro_ap": "normalized", "micro_ap_raw": "raw cosine"}
    _curves(panels[1, 0], metrics, scores, "µAP on held-out copies")
    if validation is None:
        panels[1, 1].set_axis_off()
        panels[1, 2].set_axis_off()
        return figure
    copies, others, values = (np.asarray(part, dtype=np.float64) for part in validation)
    edges = np.linspace(-0.5, 1, 61)
    # What lies outside counts at the edge: rounding makes equal descriptors' cosine exceed 1.
    copies, others = copies.clip(edges[0], edges[-1]), others.clip(edges[0], edges[-1])
    panels[1, 1].hist(
        others, edges, density=True, color=NONMATCH, alpha=0.65, label="nearest other"
    )
    panels[1, 1].hist(copies, edges, density=True, color=MATCH, alpha=0.65, label="copies")
    panels[1, 1].set(title="cosines at the last validation", xlabel="cosine")
    panels[1, 1].legend(frameon=False)
    # Unit vectors spread evenly over d dimensions have variance 1 / d in each of them.
    even = 1 / np.sqrt(len(values))
    panels[1, 2].plot(np.arange(1, len(values) + 1), values, color=MATCH, label="this model")
    panels[1, 2].axhline(even, color=NONMATCH, linestyle=":", label="uniform on the sphere")
    panels[1, 2].set(title="principal values", xlabel="dimension", yscale="log")
    panels[1, 2].set_ylim(bottom=even / 1e3)
    panels[1, 2].legend(frameon=False)
    return figure


def _curves(
    axes: "Axes", metrics: Sequence[Mapping[str, Any]], names: Mapping[str, str], title: str
) -> None:
    """Draw some figures of ``metrics.jsonl`` over the step, the first solid, the second dashed."""
    for (name, label), style in zip(names.items(), ("-", "--"), strict=False):
        points = [(line["step"] + 1, line[name]) for line in metrics if name in line]
        if points:
            steps, values = zip(*points, strict=True)
            marker = "o" if len(points) < 20 else ""
            axes.plot(steps, values, style, marker=marker, markersize=3, label=label)
    axes.set(title=title, xlabel="step")
    if axes.lines:
        axes.legend(frameon=False)
