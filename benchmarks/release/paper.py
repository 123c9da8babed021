"""Drawn paper: pages, scans, letters, invoices, receipts, forms, tables, slides, notes, tickets.

Each function draws one image. ``style`` decides the layout, ``rng`` the content: two images of one
style are two invoices of one company.
"""

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageFilter

from release.sheet import GREY, WHITE, Sheet, Style, as_colour, date, mix, money


def page(style: Style, rng: Generator) -> Image.Image:
    """A page of running text with headings, sometimes in columns, with tables or figures."""
    look = style.rng
    width, height = (850, 1100) if look.random() < 0.8 else (1100, 800)
    sheet = Sheet(style, width, height)
    size, margin = look.uniform(11, 22), look.uniform(0.06, 0.14) * width
    columns, role = int(look.choice([1, 1, 1, 2, 3])), str(look.choice(["serif", "sans"]))
    justified, leading = bool(look.random() < 0.5), look.uniform(1.2, 1.7)
    top = margin
    if rng.random() < 0.6:
        sheet.text(margin, top, style.title(rng, int(rng.integers(2, 6))), size * 1.9, "bold")
        top += size * 3.4
    gap = (width - 2 * margin) / columns
    for column in range(columns):
        left = margin + column * gap
        _fill_column(sheet, rng, (left, top, left + gap - size * (columns > 1), height - margin),
                     size, role, leading, justified)  # fmt: skip
    if look.random() < 0.5:
        sheet.text(
            width / 2, height - margin / 2, str(rng.integers(1, 300)), size, role, GREY, "mm"
        )
    return sheet.image


def _fill_column(
    sheet: Sheet, rng: Generator, box: tuple[float, float, float, float],
    size: float, role: str, leading: float, justified: bool,
) -> None:  # fmt: skip
    left, top, right, bottom = box
    y, end = top, bottom if rng.random() < 0.75 else top + (bottom - top) * rng.uniform(0.25, 0.9)
    while y < end - 3 * size:
        kind = rng.random()
        tall = size * leading * rng.integers(2, 12)
        if kind < 0.16:
            sheet.text(left, y, sheet.style.title(rng, 2), size * 1.25, "bold")
            y += size * 2
        elif kind < 0.24 and y + tall < end:
            _table(sheet, rng, (left, y, right, y + tall), int(rng.integers(2, 5)), size * 0.85)
            y += tall + size
        elif kind < 0.30 and y + tall < end:
            shade = mix(sheet.style.accent, sheet.style.ground, rng.uniform(0.2, 0.8))
            sheet.box((left, y, right, y + tall), shade, GREY)
            y += tall + size
        else:
            text = (left, y, right, min(y + tall, end))
            y = sheet.paragraph(rng, text, size, role, leading, None, justified) + size * 0.7


def _table(
    sheet: Sheet, rng: Generator, box: tuple[float, float, float, float], columns: int, size: float
) -> None:
    left, top, right, bottom = box
    look, step = sheet.style.rng, size * 1.9
    edges = np.linspace(left, right, columns + 1)
    ruled = bool(look.random() < 0.6)
    for row, y in enumerate(np.arange(top, bottom - step / 2, step)):
        if row == 0:
            sheet.box((left, y, right, y + step), mix(sheet.style.ground, sheet.style.accent, 0.25))
        for column, x in enumerate(edges[:-1]):
            cell = sheet.style.words(rng, 1) if column == 0 or row == 0 else money(rng)
            sheet.text(x + 4, y + size * 0.3, cell[:14], size, "bold" if row == 0 else "sans")
        if ruled:
            sheet.line([(left, y + step), (right, y + step)], GREY)


def scan(style: Style, rng: Generator) -> Image.Image:
    """A page or a letter as a black-and-white scanner or a fax sees it."""
    plain = page(style, rng) if rng.random() < 0.6 else letter(style, rng)
    look = style.rng
    turned = plain.convert("L").rotate(rng.normal(0, 1.2), Image.Resampling.BICUBIC, fillcolor=245)
    grey = np.asarray(turned.filter(ImageFilter.GaussianBlur(look.uniform(0.3, 1.0))), float)
    height, width = grey.shape
    shadow = np.linspace(0, look.uniform(0, 60), width)[None, :: int(look.choice([1, -1]))]
    grey = grey - shadow + rng.normal(0, look.uniform(2, 14), grey.shape)
    specks = rng.random(grey.shape) < look.uniform(0, 4e-4)
    grey[specks] = 0
    if look.random() < 0.6:
        grey = np.where(grey > look.uniform(120, 190), 255, 0)
    return Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8)).convert("RGB")


def letter(style: Style, rng: Generator) -> Image.Image:
    """A letter: head, address, subject, text, signature."""
    look = style.rng
    sheet = Sheet(style, 850, int(look.integers(1000, 1250)))
    size, margin = look.uniform(13, 18), look.uniform(70, 120)
    logo(sheet, look, (margin if look.random() < 0.5 else 640, 40), look.uniform(40, 90))
    y = 190.0
    for _ in range(4):
        sheet.text(margin, y, style.title(rng, 2), size)
        y += size * 1.4
    sheet.text(850 - margin, y + 20, date(rng), size, anchor="ra")
    sheet.text(margin, y + 60, style.title(rng, 4), size * 1.1, "bold")
    y += 110
    for _ in range(int(rng.integers(1, 5))):
        end = min(y + size * 1.5 * rng.integers(2, 8), sheet.height - 220)
        y = sheet.paragraph(rng, (margin, y, 850 - margin, end), size, "serif", 1.5) + size
    sheet.text(margin, y + 15, style.title(rng, 2), size * 2.2, "hand", (30, 30, 120))
    return sheet.image


def logo(sheet: Sheet, look: Generator, at: tuple[float, float], size: float) -> None:
    """A small mark with a name, the same for all images of a style."""
    x, y = at
    accent = sheet.style.accent
    shape = look.integers(0, 4)
    if shape == 0:
        sheet.dot(x + size / 2, y + size / 2, size / 2, accent)
    elif shape == 1:
        sheet.box((x, y, x + size, y + size), accent, radius=size * look.uniform(0, 0.5))
    elif shape == 2:
        sheet.pen.polygon([(x, y + size), (x + size / 2, y), (x + size, y + size)], fill=accent)
    name = sheet.style.title(look, 1)[:9]
    sheet.text(x + size * 1.2 * (shape < 3), y + size * 0.2, name, size * 0.5, "heavy", accent)


def invoice(style: Style, rng: Generator) -> Image.Image:
    """An invoice: addresses, a table of items, totals."""
    look = style.rng
    width, size = int(look.integers(780, 900)), look.uniform(12, 17)
    sheet, margin = Sheet(style, width, int(width * 1.38)), look.uniform(45, 90)
    logo(
        sheet, look, (margin if look.random() < 0.6 else width * 0.6, margin), look.uniform(40, 80)
    )
    title = style.title(look, 1)
    sheet.text(margin, 230, f"{title} {rng.integers(1000, 99999)}", size * 1.7, "bold")
    for side in (margin, width * 0.6):
        for line in range(4):
            words = style.title(rng, 2) if line < 3 else date(rng)
            sheet.text(side, 290 + line * size * 1.4, words, size)
    y = _items(sheet, rng, margin, 420, size)
    for name in ("Σ", "%", title):
        sheet.text(width * 0.66, y, name, size * 1.1, "bold")
        sheet.text(width - margin, y, money(rng, 9000), size * 1.1, "bold", anchor="ra")
        y += size * 1.8
    sheet.paragraph(rng, (margin, y + 40, width - margin, y + 40 + size * 6), size * 0.85)
    return sheet.image


def _items(sheet: Sheet, rng: Generator, margin: float, top: float, size: float) -> float:
    look, right = sheet.style.rng, sheet.width - margin
    step, striped = size * look.uniform(1.6, 2.6), bool(look.random() < 0.5)
    sheet.box((margin, top, right, top + step), sheet.style.accent)
    for name, x in zip("#ABC", (0, 0.1, 0.68, 0.85), strict=True):
        sheet.text(margin + (right - margin) * x, top + size * 0.3, name, size, "bold", WHITE)
    y = top + step
    for row in range(int(rng.integers(1, 13))):
        if striped and row % 2:
            sheet.box((margin, y, right, y + step), mix(sheet.style.ground, GREY, 0.12))
        cells = (
            str(row + 1),
            sheet.style.words(rng, int(rng.integers(1, 5)))[:34],
            str(rng.integers(1, 40)),
        )
        for cell, x in zip(cells, (0, 0.1, 0.68), strict=True):
            sheet.text(margin + (right - margin) * x, y + size * 0.25, cell, size)
        sheet.text(right, y + size * 0.25, money(rng), size, anchor="ra")
        y += step
    sheet.line([(margin, y), (right, y)], sheet.style.ink)
    return y + size


def receipt(style: Style, rng: Generator) -> Image.Image:
    """A till receipt: narrow, monospaced, of any length."""
    look = style.rng
    width, size, count = (
        int(look.integers(280, 420)),
        look.uniform(13, 18),
        int(rng.integers(3, 25)),
    )
    sheet = Sheet(style, width, int(size * 1.5 * (count + 14)))
    sheet.text(width / 2, 18, style.title(look, 2), size * 1.5, "bold", anchor="ma")
    sheet.text(width / 2, 18 + size * 2, date(rng), size, "mono", anchor="ma")
    y = size * 5
    for _ in range(count):
        sheet.text(
            14, y, style.words(rng, 2)[:16], size, "mono" if style.script == "latin" else "sans"
        )
        sheet.text(width - 14, y, money(rng, 60), size, "mono", anchor="ra")
        y += size * 1.5
    sheet.text(14, y + 6, "-" * 60, size, "mono")
    sheet.text(width - 14, y + size * 2, money(rng, 400), size * 1.4, "bold", anchor="ra")
    bars = np.cumsum(rng.integers(1, 5, 60)) * (width - 60) / 180 + 30
    for left, right in zip(bars[::2], bars[1::2], strict=True):
        sheet.box((left, y + size * 4.5, right, y + size * 7.5), style.ink)
    return sheet.image


def form(style: Style, rng: Generator) -> Image.Image:
    """A form: labelled boxes, some filled in, some ticked."""
    look = style.rng
    sheet, size = Sheet(style, 820, int(look.integers(900, 1150))), look.uniform(11, 15)
    sheet.text(60, 40, style.title(look, 4), size * 2, "bold")
    rows, tall = int(look.integers(9, 18)), look.uniform(40, 62)
    for row in range(rows):
        y, cuts = 110 + row * tall, np.sort(look.uniform(0.2, 0.8, int(look.integers(0, 3))))
        edges = [60, *(60 + 700 * cuts), 760]
        for left, right in zip(edges[:-1], edges[1:], strict=True):
            sheet.box((left, y, right - 6, y + tall - 6), None, GREY)
            sheet.text(
                left + 4,
                y + 2,
                style.words(look, 2)[: int((right - left) / size)],
                size * 0.75,
                fill=GREY,
            )
            if rng.random() < 0.65:
                answer = style.words(rng, 2)[: int((right - left) / size)]
                sheet.text(left + 10, y + tall * 0.4, answer, size * 1.2, "hand", (20, 30, 110))
            elif rng.random() < 0.5:
                sheet.text(right - 30, y + 10, "X", size * 1.5, "bold")
    return sheet.image


def spreadsheet(style: Style, rng: Generator) -> Image.Image:
    """A grid of cells under a tool bar."""
    look = style.rng
    sheet, size = (
        Sheet(style, int(look.integers(700, 1200)), int(look.integers(500, 900))),
        look.uniform(13, 20),
    )
    bar, step = look.uniform(40, 110), size * 1.8
    sheet.box((0, 0, sheet.width, bar), mix(style.ground, style.accent, look.uniform(0.2, 1)))
    edges = np.cumsum([30, *look.integers(60, 190, 30)])
    filled, rows = rng.uniform(0.5, 1), int(rng.integers(5, 60))
    for row, y in enumerate(np.arange(bar, sheet.height, step)):
        sheet.text(4, y + 3, str(row + 1), size * 0.8, fill=GREY)
        sheet.line([(0, y), (sheet.width, y)], mix(style.ground, GREY, 0.4))
        for column, x in enumerate(edges[:-1]):
            if row < rows and rng.random() < filled:
                cell = (
                    style.words(rng, 1)
                    if row == 0 or column == 0
                    else money(rng, 10.0 ** rng.integers(1, 6))
                )
                sheet.text(
                    x + 3,
                    y + 3,
                    cell[: int((edges[column + 1] - x) / size * 1.7)],
                    size,
                    "bold" if row == 0 else "sans",
                )
    for x in edges:
        sheet.line([(x, bar), (x, sheet.height)], mix(style.ground, GREY, 0.4))
    return sheet.image


def slide(style: Style, rng: Generator) -> Image.Image:
    """A presentation slide: a title, points, sometimes a box or a chart of bars."""
    look = style.rng
    sheet = Sheet(style, 1280, int(look.choice([720, 960])))
    size, bar = look.uniform(26, 42), look.random() < 0.5
    if bar:
        sheet.box((0, 0, 1280, 120), style.accent)
    sheet.text(
        70,
        35,
        style.title(rng, int(rng.integers(1, 5)))[:34],
        size * 1.5,
        "bold",
        WHITE if bar else style.accent,
    )
    y, right = 180.0, 1200.0
    if rng.random() < 0.45:
        right = 640
        heights = rng.uniform(0.1, 1, int(rng.integers(3, 8)))
        for spot, tall in enumerate(heights):
            x = 700 + spot * 500 / len(heights)
            sheet.box((x, 620 - 400 * tall, x + 380 / len(heights), 620), style.accent)
    for _ in range(int(rng.integers(1, 7))):
        sheet.dot(85, y + size / 2, size / 6, style.accent)
        y = (
            sheet.paragraph(
                rng, (110, y, right, y + size * 1.3 * rng.integers(1, 3)), size, leading=1.3
            )
            + size * 0.6
        )
    sheet.text(1220, sheet.height - 40, str(rng.integers(1, 60)), size / 2, fill=GREY, anchor="ra")
    return sheet.image


def note(style: Style, rng: Generator) -> Image.Image:
    """Handwriting on plain or ruled paper."""
    look = style.rng
    sheet = Sheet(style, int(look.integers(600, 900)), int(look.integers(600, 1100)))
    size, blue = look.uniform(26, 46), as_colour(look.integers(0, 120, 3))
    if look.random() < 0.6:
        for y in np.arange(80, sheet.height, size * 1.5):
            sheet.line([(0, y + size * 1.1), (sheet.width, y + size * 1.1)], (170, 190, 225))
    end = sheet.height * rng.uniform(0.3, 0.95)
    sheet.paragraph(rng, (60, 80, sheet.width - 50, end), size, "hand", 1.5, blue)
    return sheet.image


def ticket(style: Style, rng: Generator) -> Image.Image:
    """A boarding pass, a ticket or a business card."""
    look = style.rng
    sheet, size = Sheet(style, 900, int(look.integers(330, 520))), look.uniform(15, 22)
    sheet.box((0, 0, 900, look.uniform(50, 110)), style.accent)
    sheet.text(30, 16, style.title(look, 2), size * 1.6, "heavy", WHITE)
    for row in range(3):
        for column in range(4):
            x, y = 30 + column * 160, 130 + row * 80
            sheet.text(x, y, style.words(look, 1)[:9], size * 0.7, fill=GREY)
            value = (
                f"{rng.integers(1, 60)}{'ABCDEF'[rng.integers(6)]}"
                if rng.random() < 0.5
                else style.title(rng, 1)[:9]
            )
            sheet.text(x, y + 22, value, size * 1.3, "bold")
    bars = np.cumsum(rng.integers(2, 9, 44))
    for top, bottom in zip(bars[::2], bars[1::2], strict=True):
        sheet.box((720, 130 + top, 860, 130 + bottom), style.ink)
    return sheet.image
