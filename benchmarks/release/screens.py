"""Drawn screens: chats, code, terminals, dashboards, websites, lists, home screens, mails, posts.

``style`` decides the layout, ``rng`` the content, as in ``paper``.
"""

import argparse
import ast
import heapq
import inspect
import textwrap
import zipfile
from functools import cache

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageFilter

from release.sheet import (
    BLACK,
    GREY,
    WHITE,
    Box,
    Colour,
    Sheet,
    Style,
    as_colour,
    mix,
    money,
    vivid,
)

KEYWORDS = frozenset(
    "def class return if else for while import from in not and or with try".split()
)
SOURCES = (argparse, heapq, textwrap, zipfile, ast, inspect)


@cache
def source_lines() -> tuple[str, ...]:
    """Lines of real code: modules of the standard library."""
    return tuple(line for module in SOURCES for line in inspect.getsource(module).splitlines())


def phone(style: Style, ground: Colour | None = None) -> Sheet:
    """An empty phone screen with a status bar."""
    look = style.rng
    width = int(look.choice([540, 600, 720]))
    sheet = Sheet(style, width, int(width * look.uniform(1.7, 2.2)), ground)
    sheet.text(24, 10, f"{look.integers(0, 24):02d}:{look.integers(0, 60):02d}", 22, "bold")
    sheet.box((width - 70, 14, width - 28, 32), None, style.ink, 4)
    return sheet


def picture(rng: Generator, width: int, height: int) -> Image.Image:
    """A blurred field of colours: what stands where a screen shows a photo."""
    grey = rng.integers(20, 236, (int(rng.integers(2, 12)), int(rng.integers(2, 12)), 1))
    small = np.clip(grey + rng.normal(0, rng.uniform(5, 50), (*grey.shape[:2], 3)), 0, 255).astype(
        np.uint8
    )
    large = Image.fromarray(small).resize((max(width, 8), max(height, 8)), Image.Resampling.BICUBIC)
    noise = rng.normal(0, rng.uniform(2, 18), (max(height, 8), max(width, 8), 1))
    return Image.fromarray(np.clip(np.asarray(large, float) + noise, 0, 255).astype(np.uint8))


def chat(style: Style, rng: Generator) -> Image.Image:
    """A chat: bubbles left and right, sometimes with a picture."""
    look = style.rng
    sheet = phone(style, mix(style.ground, style.accent, look.uniform(0, 0.2)))
    size, radius = look.uniform(19, 28), look.uniform(6, 26)
    own, other = (
        mix(style.accent, WHITE, look.uniform(0, 0.7)),
        mix(style.ground, GREY, look.uniform(0.05, 0.3)),
    )
    sheet.box((0, 44, sheet.width, 120), style.accent if look.random() < 0.4 else style.ground)
    sheet.dot(60, 82, 26, vivid(rng))
    sheet.text(100, 68, style.title(rng, 2)[:18], size * 1.1, "bold")
    y = 140.0
    while y < sheet.height - 130:
        mine, lines = rng.random() < 0.5, int(rng.integers(1, 6))
        wide, tall = sheet.width * rng.uniform(0.25, 0.72), size * 1.4 * lines + 24
        left = sheet.width - wide - 20 if mine else 20
        sheet.box((left, y, left + wide, y + tall), own if mine else other, radius=radius)
        if rng.random() < 0.06:
            sheet.image.paste(
                picture(rng, int(wide - 20), int(tall - 16)), (int(left + 10), int(y + 8))
            )
        else:
            sheet.paragraph(rng, (left + 14, y + 10, left + wide - 12, y + tall - 8), size)
        y += tall + look.uniform(8, 20)
    sheet.box((16, sheet.height - 76, sheet.width - 90, sheet.height - 20), other, radius=28)
    return sheet.image


def code(style: Style, rng: Generator) -> Image.Image:
    """An editor with real code, coloured by word."""
    look = style.rng
    sheet = Sheet(style, int(look.integers(700, 1400)), int(look.integers(500, 1000)))
    size, numbers = look.uniform(13, 22), look.random() < 0.7
    palette = [vivid(look) for _ in range(3)]
    lines, start = source_lines(), int(rng.integers(0, len(source_lines()) - 80))
    left = 14 + 60 * numbers + (180 if look.random() < 0.4 else 0)
    sheet.box((0, 0, left - 70 * numbers, sheet.height), mix(style.ground, GREY, 0.15))
    for row, y in enumerate(np.arange(12, sheet.height - size, size * 1.35)):
        if numbers:
            sheet.text(left - 14, y, str(start + row), size, "mono", GREY, "ra")
        x = float(left)
        for word in lines[start + row % 80].replace("    ", "\t").split(" "):
            fill = palette[0] if word.strip() in KEYWORDS else style.ink
            fill = palette[1] if word.startswith(('"', "'", "#")) else fill
            x += 4 * size * 0.6 * word.count("\t")
            x += sheet.text(x, y, word.strip() + " ", size, "mono", fill)
    return sheet.image


def terminal(style: Style, rng: Generator) -> Image.Image:
    """A terminal: prompts, listings, numbers."""
    look = style.rng
    ground = as_colour(look.integers(0, 45, 3)) if look.random() < 0.8 else style.ground
    sheet = Sheet(style, int(look.integers(700, 1300)), int(look.integers(450, 900)), ground)
    ink = mix(vivid(look), WHITE, look.uniform(0.3, 0.9)) if ground != style.ground else BLACK
    size = look.uniform(13, 20)
    for y in np.arange(10, sheet.height * rng.uniform(0.4, 1), size * 1.35):
        if rng.random() < 0.15:
            x = sheet.text(10, y, "user@host:~$ ", size, "mono", vivid(look))
            sheet.text(
                10 + x, y, " ".join(rng.choice(source_lines(), 1))[:60].strip(), size, "mono", ink
            )
        else:
            cells = [
                f"{rng.integers(0, 10 ** rng.integers(1, 8)):>9}" for _ in range(rng.integers(1, 7))
            ]
            sheet.text(
                10,
                y,
                " ".join(cells) + "  " + "/".join(style.words(rng, 2).split()),
                size,
                "mono",
                ink,
            )
    return sheet.image


def dashboard(style: Style, rng: Generator) -> Image.Image:
    """Cards with figures, lines and bars."""
    look = style.rng
    sheet = Sheet(
        style, 1280, int(look.integers(720, 960)), mix(style.ground, GREY, look.uniform(0, 0.15))
    )
    side = look.uniform(0, 220) * (look.random() < 0.6)
    sheet.box((0, 0, side, sheet.height), mix(style.ink, style.accent, look.uniform(0, 0.6)))
    for row in range(8 * (side > 100)):
        sheet.text(20, 90 + row * 46, style.words(look, 1)[:12], 20, fill=GREY)
    columns, rows = int(look.integers(2, 5)), int(look.integers(2, 5))
    wide, tall = (1270 - side) / columns, (sheet.height - 70) / rows
    sheet.text(side + 24, 16, style.title(rng, 2), 30, "bold")
    kinds = look.integers(0, 4, (rows, columns))
    for row in range(rows):
        for column in range(columns):
            left, top = side + 10 + column * wide, 64 + row * tall
            box = (left, top, left + wide - 12, top + tall - 12)
            sheet.box(box, style.ground, mix(style.ground, GREY, 0.3), look.uniform(0, 16))
            card(sheet, rng, box, int(kinds[row, column]))
    return sheet.image


def card(sheet: Sheet, rng: Generator, box: Box, kind: int) -> None:
    """One card of a dashboard: a figure, a line, bars or a list."""
    left, top, right, bottom = box
    style = sheet.style
    sheet.text(left + 12, top + 8, style.words(rng, 2)[:20], 17, fill=GREY)
    inner = (left + 16, top + 40, right - 16, bottom - 14)
    if kind == 0:
        sheet.text(
            left + 14,
            top + 44,
            money(rng, 10.0 ** rng.integers(2, 6)),
            (bottom - top) * 0.25,
            "bold",
        )
    elif kind == 1:
        points = np.cumsum(rng.normal(0, 1, 40))
        points = (points - points.min()) / max(np.ptp(points), 1e-6)
        x = np.linspace(inner[0], inner[2], 40)
        y = inner[3] - points * (inner[3] - inner[1])
        sheet.line([*zip(x.tolist(), y.tolist(), strict=True)], style.accent, 3)
    elif kind == 2:
        heights, wide = rng.uniform(0.05, 1, int(rng.integers(4, 14))), inner[2] - inner[0]
        for spot, tall in enumerate(heights):
            x0 = inner[0] + spot * wide / len(heights)
            sheet.box(
                (
                    x0,
                    inner[3] - tall * (inner[3] - inner[1]),
                    x0 + wide / len(heights) * 0.7,
                    inner[3],
                ),
                style.accent,
            )
    else:
        sheet.paragraph(rng, inner, 17, leading=1.7)


def website(style: Style, rng: Generator) -> Image.Image:
    """A web page: a bar, a large heading, pictures, columns of text."""
    look = style.rng
    sheet = Sheet(style, int(look.integers(900, 1400)), int(look.integers(700, 1100)))
    size, wide = look.uniform(14, 19), sheet.width
    sheet.box(
        (0, 0, wide, 70), style.accent if look.random() < 0.5 else mix(style.ground, GREY, 0.1)
    )
    for spot in range(6):
        sheet.text(wide * 0.4 + spot * 110, 26, style.words(look, 1)[:8], size)
    y = 100.0
    if look.random() < 0.6:
        tall = int(look.integers(160, 380))
        sheet.image.paste(picture(rng, wide - 80, tall), (40, 100))
        y += tall + 30
    sheet.text(40, y, style.title(rng, int(rng.integers(2, 6)))[:40], size * 2.4, "bold")
    columns = int(look.integers(1, 5))
    for column in range(columns):
        left, right = 40 + column * (wide - 80) / columns, 20 + (column + 1) * (wide - 80) / columns
        top = y + size * 4
        if look.random() < 0.5:
            sheet.image.paste(picture(rng, int(right - left), 140), (int(left), int(top)))
            top += 160
        sheet.paragraph(
            rng, (left, top, right, sheet.height - rng.uniform(10, 250)), size, leading=1.5
        )
    return sheet.image


def listing(style: Style, rng: Generator) -> Image.Image:
    """A phone's list: settings, mails, contacts, songs."""
    look = style.rng
    sheet, size = phone(style), look.uniform(20, 27)
    tall, kind, radius = look.uniform(70, 120), int(look.integers(0, 4)), look.uniform(4, 30)
    sheet.text(26, 60, style.title(rng, 2)[:18], size * 1.7, "bold")
    for y in np.arange(140, sheet.height - 40, tall):
        if kind != 1:
            sheet.box((24, y + 10, 24 + tall - 24, y + tall - 14), vivid(rng), radius=radius)
        left = tall + 20 if kind != 1 else 26
        sheet.text(left, y + 10, style.title(rng, 2)[:20], size, "bold" if kind > 1 else "sans")
        if kind > 1:
            sheet.text(left, y + 14 + size * 1.2, style.words(rng, 4)[:30], size * 0.75, fill=GREY)
        elif rng.random() < 0.4:
            on = rng.random() < 0.5
            x = sheet.width - 90
            sheet.box((x, y + 14, x + 62, y + 46), style.accent if on else GREY, radius=16)
            sheet.dot(x + 16 + 30 * on, y + 30, 13, WHITE)
        sheet.line(
            [(left, y + tall - 4), (sheet.width, y + tall - 4)], mix(style.ground, GREY, 0.3)
        )
    return sheet.image


def home(style: Style, rng: Generator) -> Image.Image:
    """A phone's home screen: icons on a wallpaper."""
    look = style.rng
    sheet = phone(style)
    sheet.image.paste(picture(look, sheet.width, sheet.height).filter(ImageFilter.GaussianBlur(4)))
    columns = int(look.integers(4, 6))
    step, radius = sheet.width / columns, look.uniform(8, 40)
    for row in range(int(rng.integers(3, 7))):
        for column in range(columns if rng.random() < 0.8 else int(rng.integers(1, columns))):
            x, y = (column + 0.2) * step, 90 + row * step * 1.3
            sheet.box((x, y, x + step * 0.6, y + step * 0.6), vivid(rng), radius=radius)
            sheet.text(
                x + step * 0.3,
                y + step * 0.3,
                style.title(rng, 1)[:1],
                step * 0.4,
                "heavy",
                WHITE,
                "mm",
            )
            sheet.text(
                x + step * 0.3,
                y + step * 0.72,
                style.title(rng, 1)[:8],
                step * 0.13,
                "sans",
                WHITE,
                "mm",
            )
    return sheet.image


def post(style: Style, rng: Generator) -> Image.Image:
    """A short message of a social network, with its author and counts."""
    look = style.rng
    width, size = int(look.integers(560, 900)), look.uniform(22, 34)
    lines, shown = int(rng.integers(1, 9)), rng.random() < 0.3
    text_height = lines * size * 1.4
    sheet = Sheet(style, width, int(150 + text_height + 70 + 300 * shown))
    sheet.dot(64, 64, 38, vivid(rng))
    sheet.text(120, 36, style.title(rng, 2)[:20], size, "bold")
    sheet.text(120, 40 + size, "@" + style.words(rng, 1), size * 0.8, fill=GREY)
    sheet.paragraph(rng, (30, 124, width - 30, 126 + text_height), size)
    if shown:
        sheet.image.paste(picture(rng, width - 60, 280), (30, int(140 + text_height)))
    for spot in range(4):
        sheet.text(
            40 + spot * width / 4,
            sheet.height - 44,
            str(rng.integers(0, 9000)),
            size * 0.7,
            fill=GREY,
        )
    return sheet.image
