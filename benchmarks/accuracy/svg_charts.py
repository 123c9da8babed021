"""Charts as inline SVG: curves, histograms and bars, coloured by the page's style sheet."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import ArrayLike

WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 44
# Classes of the style sheet, in the order series are drawn.
SERIES = ("one", "two", "three", "four", "five", "six")


def curves(lines: Mapping[str, tuple[ArrayLike, ArrayLike]], x_label: str, y_label: str) -> str:
    """Lines over the unit square, such as precision over recall."""
    parts = [_axes((0, 1), (0, 1), x_label, y_label, percent=True)]
    for series, (name, (x, y)) in zip(SERIES, lines.items(), strict=False):
        points = _thinned(np.asarray(x, float), np.asarray(y, float))
        path = " ".join(f"{_x(a, 0, 1):.1f},{_y(b, 0, 1):.1f}" for a, b in points)
        parts.append(
            f'<polyline class="line {series}" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return _legend(list(lines)) + _svg("".join(parts), HEIGHT, f"{y_label} over {x_label}")


def histograms(samples: Mapping[str, ArrayLike], x_label: str, bins: int = 60) -> str:
    """Overlaid histograms, each as a share of its own sample."""
    values = {name: np.asarray(sample, float) for name, sample in samples.items()}
    everything = np.concatenate([v for v in values.values() if len(v)] or [np.zeros(1)])
    low, high = float(everything.min()), float(everything.max())
    high = high if high > low else low + 1
    edges = np.linspace(low, high, bins + 1)
    shares = {n: np.histogram(v, edges)[0] / max(len(v), 1) for n, v in values.items()}
    top = max(float(share.max()) for share in shares.values()) or 1.0
    parts = [_axes((low, high), (0, top), x_label, "share", percent=False)]
    floor = _y(0, 0, top)
    for series, (name, share) in zip(SERIES, shares.items(), strict=False):
        steps = [f"{_x(edges[0], low, high):.1f},{floor:.1f}"]
        for left, right, value in zip(edges[:-1], edges[1:], share, strict=True):
            y = _y(float(value), 0, top)
            steps.append(f"{_x(left, low, high):.1f},{y:.1f} {_x(right, low, high):.1f},{y:.1f}")
        steps.append(f"{_x(edges[-1], low, high):.1f},{floor:.1f}")
        parts.append(
            f'<polygon class="area {series}" points="{" ".join(steps)}">'
            f"<title>{escape(name)}</title></polygon>"
        )
    return _legend(list(samples)) + _svg("".join(parts), HEIGHT, f"histogram of {x_label}")


def bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Horizontal bars from 0 to 100 %, one group per row, labelled with their value."""
    names = list(rows[0][1]) if rows else []
    thick, gap = 11, 12
    height = 10 + len(rows) * (thick * len(names) + gap)
    parts = []
    left, scale = 150, WIDTH - 150 - 60
    for place, (label, values) in enumerate(rows):
        y = 8 + place * (thick * len(names) + gap)
        middle = y + thick * len(names) / 2 + 4
        parts.append(
            f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>'
        )
        for offset, (series, name) in enumerate(zip(SERIES, names, strict=False)):
            wide = max(0.0, values[name]) * scale
            at = y + thick * offset
            parts.append(
                f'<rect class="bar {series}" x="{left}" y="{at}" width="{wide:.1f}" '
                f'height="{thick - 2}" rx="2">'
                f"<title>{escape(label)}, {escape(name)}: {100 * values[name]:.1f} %</title></rect>"
                f'<text class="small" x="{left + wide + 5:.1f}" y="{at + 8}">'
                f"{100 * values[name]:.0f}</text>"
            )
    return _legend(names) + _svg("".join(parts), height, "bars by edit")


def _thinned(x: np.ndarray, y: np.ndarray, most: int = 600) -> list[tuple[float, float]]:
    step = max(1, len(x) // most)
    rows = sorted({*range(0, len(x), step), len(x) - 1} if len(x) else set())
    return [(float(x[row]), float(y[row])) for row in rows]


def _axes(
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_label: str,
    y_label: str,
    percent: bool,
) -> str:
    parts = []
    for part in np.linspace(0, 1, 6):
        x_value = x_range[0] + part * (x_range[1] - x_range[0])
        y_value = y_range[0] + part * (y_range[1] - y_range[0])
        x, y = _x(x_value, *x_range), _y(y_value, *y_range)
        x_text = f"{100 * x_value:.0f}" if percent else f"{x_value:.2f}"
        y_text = f"{100 * y_value:.0f}" if percent else f"{100 * y_value:.1f}"
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{y_text}</text>'
        )
        parts.append(
            f'<text class="small" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{x_text}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    unit = ", %" if percent else ""
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}{unit}</text>'
    )
    parts.append(
        f'<text transform="translate(12 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}, %</text>"
    )
    return "".join(parts)


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _legend(names: Sequence[str]) -> str:
    entries = "".join(
        f'<span><i class="{series}"></i>{escape(name)}</span>'
        for series, name in zip(SERIES, names, strict=False)
    )
    return f'<div class="legend">{entries}</div>'


def _svg(content: str, height: float, label: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg {box} role="img" aria-label="{escape(label)}">{content}</svg>'
