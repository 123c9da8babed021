"""Drawn charts: bars, lines, scatter plots, histograms, pies.

``style`` decides the layout, ``rng`` the content, as in ``paper``.
"""

import numpy as np
from numpy.random import Generator
from PIL import Image

from release.sheet import GREY, Box, Sheet, Style, mix, vivid

Points = list[tuple[float, float]]


def axes(style: Style, rng: Generator) -> tuple[Sheet, Box]:
    """An empty chart with title, axes, ticks and sometimes a grid; and where to plot."""
    look = style.rng
    width, height = int(look.integers(500, 1100)), int(look.integers(400, 800))
    sheet, size = Sheet(style, width, height), look.uniform(12, 22)
    left, top, right, bottom = 3.6 * size, 3 * size, width - 1.5 * size, height - 3.4 * size
    if look.random() < 0.7:
        sheet.text(width / 2, size * 0.6, style.title(rng, 3)[:40], size * 1.3, "bold", anchor="ma")
    grid, ticks = look.random() < 0.6, int(look.integers(4, 9))
    most = 10 ** rng.integers(0, 5)
    for tick in np.linspace(0, 1, ticks):
        x, y = left + tick * (right - left), bottom - tick * (bottom - top)
        if grid:
            sheet.line([(left, y), (right, y)], mix(style.ground, GREY, 0.4))
        sheet.text(left - 6, y, f"{tick * most:.3g}", size * 0.8, anchor="rm")
        sheet.text(x, bottom + 6, f"{tick * ticks:.2g}", size * 0.8, anchor="ma")
    sheet.line([(left, top), (left, bottom), (right, bottom)], style.ink, look.uniform(1, 3))
    sheet.text(width / 2, bottom + 1.8 * size, style.words(look, 2), size, anchor="ma")
    return sheet, (left, top, right, bottom)


def bars(style: Style, rng: Generator) -> Image.Image:
    """A bar chart of one to three series."""
    look = style.rng
    sheet, (left, top, right, bottom) = axes(style, rng)
    series, count = int(look.integers(1, 4)), int(rng.integers(3, 13))
    colours = [style.accent, *(vivid(look) for _ in range(2))]
    step, lying = (right - left) / count, look.random() < 0.2
    for spot in range(count):
        for part in range(series):
            share, wide = rng.uniform(0.05, 1), step * 0.8 / series
            x = left + spot * step + part * wide + step * 0.1
            box = (x, bottom - share * (bottom - top), x + wide, bottom)
            if lying:
                y = (
                    top
                    + (spot + 0.1) * (bottom - top) / count
                    + part * (bottom - top) * 0.8 / count / series
                )
                box = (
                    left,
                    y,
                    left + share * (right - left),
                    y + (bottom - top) * 0.8 / count / series,
                )
            sheet.box(box, colours[part])
    return sheet.image


def lines(style: Style, rng: Generator) -> Image.Image:
    """A line chart of one to five series."""
    sheet, (left, top, right, bottom) = axes(style, rng)
    count, rough = int(rng.integers(5, 200)), style.rng.uniform(0.2, 2)
    for series in range(int(rng.integers(1, 6))):
        walk = np.cumsum(rng.normal(0, 1, count)) + rough * rng.normal(0, 1, count)
        y = bottom - (walk - walk.min()) / max(np.ptp(walk), 1e-6) * (bottom - top) * rng.uniform(
            0.4, 1
        )
        points: Points = [*zip(np.linspace(left, right, count).tolist(), y.tolist(), strict=True)]
        colour = style.accent if series == 0 else vivid(style.rng)
        sheet.line(points, colour, style.rng.uniform(1, 5))
        if style.rng.random() < 0.3 and count < 40:
            for x, height in points:
                sheet.dot(x, height, 5, colour)
    return sheet.image


def scatter(style: Style, rng: Generator) -> Image.Image:
    """A scatter plot of some clouds."""
    look = style.rng
    sheet, (left, top, right, bottom) = axes(style, rng)
    radius, hollow = look.uniform(1.5, 8), look.random() < 0.3
    for cloud in range(int(rng.integers(1, 5))):
        colour, centre = style.accent if cloud == 0 else vivid(look), rng.uniform(0.2, 0.8, 2)
        cloudy = (
            rng.normal(0, 1, (int(rng.integers(15, 250)), 2)) @ rng.normal(0, 0.09, (2, 2)) + centre
        )
        for x, y in np.clip(cloudy, 0, 1):
            at = left + x * (right - left), bottom - y * (bottom - top)
            sheet.dot(*at, radius, None if hollow else colour, colour)
    return sheet.image


def histogram(style: Style, rng: Generator) -> Image.Image:
    """A histogram of one or two samples."""
    sheet, (left, top, right, bottom) = axes(style, rng)
    count = int(style.rng.integers(8, 60))
    for sample in range(1 + int(style.rng.random() < 0.3)):
        values = np.concatenate(
            [
                rng.normal(rng.uniform(0.2, 0.8), rng.uniform(0.03, 0.2), 400)
                for _ in range(rng.integers(1, 4))
            ]
        )
        heights, _ = np.histogram(values, count, (0, 1))
        step, colour = (right - left) / count, style.accent if sample == 0 else vivid(style.rng)
        for spot, share in enumerate(heights / max(heights.max(), 1)):
            sheet.box(
                (
                    left + spot * step,
                    bottom - share * (bottom - top),
                    left + (spot + 1) * step,
                    bottom,
                ),
                colour,
                style.ground,
            )
    return sheet.image


def pie(style: Style, rng: Generator) -> Image.Image:
    """A pie or a ring, with a key."""
    look = style.rng
    sheet = Sheet(style, int(look.integers(500, 900)), int(look.integers(450, 700)))
    radius, hole = (
        sheet.height * look.uniform(0.25, 0.4),
        look.uniform(0.3, 0.7) * (look.random() < 0.4),
    )
    x, y = sheet.width * 0.4, sheet.height * 0.53
    ends = np.cumsum(rng.dirichlet(np.full(int(rng.integers(2, 9)), 1.2))) * 360
    colours = [vivid(look) for _ in range(8)]
    begin = look.uniform(0, 360)
    for spot, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        box = (x - radius, y - radius, x + radius, y + radius)
        sheet.pen.pieslice(box, begin + first, begin + last, colours[spot], style.ground)
        key = sheet.height * 0.2 + spot * 34
        sheet.box((sheet.width * 0.78, key, sheet.width * 0.78 + 20, key + 20), colours[spot])
        sheet.text(sheet.width * 0.78 + 28, key, style.words(rng, 1)[:10], 18)
    if hole:
        sheet.dot(x, y, radius * hole, style.ground)
    sheet.text(sheet.width / 2, 20, style.title(rng, 3)[:30], 26, "bold", anchor="ma")
    return sheet.image
