"""Drawn graphics: words, codes, maps, drawings, logos, memes, diagrams, calendars, patterns.

``style`` decides the layout, ``rng`` the content, as in ``paper``.
"""

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageFilter

from release.screens import picture
from release.sheet import BLACK, GREY, WHITE, Colour, Sheet, Style, mix, vivid

Points = list[tuple[float, float]]


def words(style: Style, rng: Generator) -> Image.Image:
    """A word or a sentence on a plain ground."""
    look = style.rng
    ground = style.ground if look.random() < 0.6 else vivid(look)
    sheet = Sheet(style, int(look.integers(300, 900)), int(look.integers(200, 700)), ground)
    role, count = (
        str(look.choice(["heavy", "serif", "hand", "bold", "sans"])),
        int(rng.choice([1, 1, 1, 2, 3])),
    )
    for row in range(count):
        word = style.title(rng, 1)
        size = min(sheet.width * 1.4 / max(len(word), 3), sheet.height / count * 0.7)
        sheet.text(
            sheet.width / 2, sheet.height * (row + 0.5) / count, word, size, role, anchor="mm"
        )
    return sheet.image


def qr(style: Style, rng: Generator) -> Image.Image:
    """A QR code: three finders, timing, random modules; or a bar code."""
    look = style.rng
    if look.random() < 0.2:
        return barcode(style, rng)
    side = 17 + 4 * int(look.integers(1, 11))
    modules = rng.random((side, side)) < 0.5
    modules[6, ::2], modules[6, 1::2], modules[::2, 6], modules[1::2, 6] = True, False, True, False
    for row, column in ((0, 0), (0, side - 7), (side - 7, 0)):
        modules[max(row - 1, 0) : row + 8, max(column - 1, 0) : column + 8] = False
        modules[row : row + 7, column : column + 7] = True
        modules[row + 1 : row + 6, column + 1 : column + 6] = False
        modules[row + 2 : row + 5, column + 2 : column + 5] = True
    scale, quiet = int(look.integers(4, 14)), int(look.integers(1, 6))
    ink = BLACK if look.random() < 0.7 else style.accent
    pixels = np.where(np.pad(modules, quiet)[..., None], ink, WHITE).astype(np.uint8)
    code = Image.fromarray(pixels.repeat(scale, 0).repeat(scale, 1))
    if look.random() < 0.6:
        return code
    sheet = Sheet(style, code.width + 80, code.height + 140)
    sheet.image.paste(code, (40, 40))
    sheet.text(sheet.width / 2, code.height + 70, style.words(rng, 2), 28, "bold", anchor="ma")
    return sheet.image


def barcode(style: Style, rng: Generator) -> Image.Image:
    """A bar code with its digits."""
    sheet = Sheet(style, 520, int(style.rng.integers(200, 400)), WHITE)
    edges = np.cumsum(rng.integers(1, 5, 80)) * 2.2 + 40
    for left, right in zip(edges[::2], edges[1::2], strict=True):
        sheet.box((left, 30, right, sheet.height - 60), BLACK)
    digits = "".join(map(str, rng.integers(0, 10, 13)))
    sheet.text(260, sheet.height - 50, digits, 30, "mono", BLACK, "ma")
    return sheet.image


def map_(style: Style, rng: Generator) -> Image.Image:
    """A street map: blocks, roads, water, parks, names."""
    look = style.rng
    land = mix(style.ground, (230, 225, 210), 0.5)
    sheet = Sheet(style, int(look.integers(600, 1100)), int(look.integers(500, 1000)), land)
    width, height = sheet.width, sheet.height
    water, park, road = (
        mix((150, 200, 230), style.accent, 0.15),
        mix((190, 225, 170), land, 0.2),
        WHITE,
    )
    for fill, count in ((water, int(rng.integers(0, 3))), (park, int(rng.integers(1, 6)))):
        for _ in range(count):
            sheet.pen.polygon(_blob(rng, width, height), fill=fill)
    if rng.random() < 0.6:
        sheet.line(_street(rng, width, height), water, rng.uniform(20, 80))
    for wide, count in (
        (look.uniform(2, 6), int(rng.integers(20, 60))),
        (look.uniform(8, 18), int(rng.integers(2, 8))),
    ):
        streets = [_street(rng, width, height, 0.4 if wide > 7 else 0.05) for _ in range(count)]
        for street in streets:
            sheet.line(street, mix(land, GREY, 0.6), wide + 2)
        for street in streets:
            sheet.line(street, mix(road, (255, 210, 120), 0.8 * (wide > 7)), wide)
    for _ in range(int(rng.integers(3, 20))):
        sheet.text(
            rng.uniform(0, width),
            rng.uniform(0, height),
            style.title(rng, 2)[:16],
            rng.uniform(11, 26),
            fill=mix(style.ink, GREY, 0.4),
        )
    if rng.random() < 0.4:
        sheet.dot(
            rng.uniform(0.2, 0.8) * width, rng.uniform(0.2, 0.8) * height, 14, (220, 50, 40), WHITE
        )
    return sheet.image


def _blob(rng: Generator, width: float, height: float) -> Points:
    angle, reach = (
        np.linspace(0, 2 * np.pi, 14),
        rng.uniform(0.05, 0.3) * width * rng.uniform(0.6, 1.4, 14),
    )
    x, y = rng.uniform(0, width), rng.uniform(0, height)
    return [
        *zip(
            (x + reach * np.cos(angle)).tolist(), (y + reach * np.sin(angle)).tolist(), strict=True
        )
    ]


def _street(rng: Generator, width: float, height: float, bend: float = 0.3) -> Points:
    along = np.linspace(-0.1, 1.1, 12)
    turn = (
        np.cumsum(rng.normal(0, bend * 0.05, 12))
        + rng.uniform(0, 1)
        + rng.choice([0.0, 0.3, -0.3]) * along
    )
    x, y = (along, turn) if rng.random() < 0.5 else (turn, along)
    return [*zip((x * width).tolist(), (y * height).tolist(), strict=True)]


def drawing(style: Style, rng: Generator) -> Image.Image:
    """A simple drawing: shapes with outlines, strokes, sometimes a face."""
    look = style.rng
    sheet = Sheet(style, int(look.integers(400, 900)), int(look.integers(400, 900)))
    wide, filled = look.uniform(2, 9), look.random() < 0.6
    for _ in range(int(rng.integers(3, 16))):
        shape, fill = rng.integers(0, 4), vivid(rng) if filled else None
        x, y, reach = (
            rng.uniform(0.1, 0.9) * sheet.width,
            rng.uniform(0.1, 0.9) * sheet.height,
            rng.uniform(20, 190),
        )
        if shape == 0:
            sheet.pen.ellipse(
                (x - reach, y - reach * 0.7, x + reach, y + reach * 0.7),
                fill,
                style.ink,
                round(wide),
            )
        elif shape == 1:
            sheet.pen.polygon(
                _blob(rng, sheet.width * 0.6, sheet.height),
                fill=fill,
                outline=style.ink,
                width=round(wide),
            )
        elif shape == 2:
            sheet.line(_scribble(rng, x, y, reach), fill or style.ink, wide)
        else:
            _face(sheet, x, y, reach * 0.7, fill, wide)
    return sheet.image


def _scribble(rng: Generator, x: float, y: float, reach: float) -> Points:
    walk = np.cumsum(rng.normal(0, reach / 6, (25, 2)), axis=0) + (x, y)
    return [(float(a), float(b)) for a, b in walk]


def _face(sheet: Sheet, x: float, y: float, reach: float, fill: Colour | None, wide: float) -> None:
    sheet.pen.ellipse(
        (x - reach, y - reach, x + reach, y + reach), fill, sheet.style.ink, round(wide)
    )
    for side in (-1, 1):
        sheet.dot(x + side * reach * 0.35, y - reach * 0.2, reach * 0.1, sheet.style.ink)
    box = (x - reach * 0.5, y - reach * 0.3, x + reach * 0.5, y + reach * 0.6)
    sheet.pen.arc(box, 20, 160, sheet.style.ink, round(wide))


def emblem(style: Style, rng: Generator) -> Image.Image:
    """A logo: some simple shapes in few colours with a name."""
    look = style.rng
    sheet = Sheet(
        style,
        int(look.integers(300, 700)),
        int(look.integers(300, 700)),
        WHITE if look.random() < 0.5 else None,
    )
    x, y, reach = sheet.width / 2, sheet.height * 0.42, min(sheet.width, sheet.height) * 0.3
    colours = [vivid(rng), vivid(rng), style.ink]
    for _ in range(int(rng.integers(1, 5))):
        colour, shape, size = (
            colours[rng.integers(3)],
            rng.integers(0, 4),
            reach * rng.uniform(0.3, 1),
        )
        dx, dy = rng.uniform(-0.4, 0.4, 2) * reach
        box = (x + dx - size, y + dy - size, x + dx + size, y + dy + size)
        if shape == 0:
            sheet.dot(x + dx, y + dy, size, colour)
        elif shape == 1:
            sheet.box(box, colour, radius=size * rng.uniform(0, 0.6))
        elif shape == 2:
            sheet.pen.regular_polygon(
                (x + dx, y + dy, size),
                int(rng.integers(3, 9)),
                float(rng.uniform(0, 90)),
                fill=colour,
            )
        else:
            sheet.pen.arc(
                box,
                float(rng.uniform(0, 180)),
                float(rng.uniform(200, 360)),
                colour,
                round(size * 0.3),
            )
    if rng.random() < 0.7:
        name = style.title(rng, 1)[:10]
        sheet.text(
            x,
            sheet.height * 0.85,
            name,
            min(60, 1.2 * sheet.width / max(len(name), 1)),
            "heavy",
            anchor="mm",
        )
    return sheet.image


def meme(style: Style, rng: Generator) -> Image.Image:
    """One template per style, drawn or blurred, with other words on it each time."""
    look = style.rng
    width = int(look.integers(450, 800))
    base = drawing(style, look) if look.random() < 0.5 else picture(look, 500, 400)
    base = base.resize((width, int(width * look.uniform(0.6, 1.1)))).filter(
        ImageFilter.GaussianBlur(0.5)
    )
    band = int(look.choice([0, 90, 130]))
    sheet = Sheet(style, width, base.height + band, WHITE)
    sheet.image.paste(base, (0, band))
    if band:
        sheet.paragraph(rng, (14, 12, width - 14, band), 30, "bold", 1.25, BLACK)
        return sheet.image
    for y in (20, sheet.height - 70):
        text = style.words(rng, int(rng.integers(2, 5))).upper()[: width // 26]
        font = style.font("heavy", 44, text)
        sheet.pen.text((width / 2, y), text, WHITE, font, "ma", stroke_width=3, stroke_fill=BLACK)
    return sheet.image


def diagram(style: Style, rng: Generator) -> Image.Image:
    """Boxes with words, joined by arrows."""
    look = style.rng
    sheet, size = (
        Sheet(style, int(look.integers(700, 1200)), int(look.integers(500, 900))),
        look.uniform(14, 20),
    )
    rows, columns = int(look.integers(2, 6)), int(look.integers(2, 6))
    step_x, step_y, radius = sheet.width / columns, sheet.height / rows, look.uniform(0, 30)
    spots = [(c, r) for r in range(rows) for c in range(columns) if rng.random() < 0.75]
    for (a, b), (c, d) in zip(spots, [*spots[1:], *spots[:1]], strict=True):
        sheet.line(
            [((a + 0.5) * step_x, (b + 0.5) * step_y), ((c + 0.5) * step_x, (d + 0.5) * step_y)],
            style.ink,
            2,
        )
    for column, row in spots:
        x, y = (column + 0.15) * step_x, (row + 0.25) * step_y
        box = (x, y, x + step_x * 0.7, y + step_y * 0.5)
        sheet.box(box, mix(style.ground, style.accent, look.uniform(0, 0.5)), style.ink, radius, 2)
        sheet.text(
            x + step_x * 0.35,
            y + step_y * 0.25,
            style.words(rng, 2)[: int(step_x / size)],
            size,
            anchor="mm",
        )
    return sheet.image


def calendar(style: Style, rng: Generator) -> Image.Image:
    """A month with entries."""
    look = style.rng
    sheet = Sheet(style, int(look.integers(700, 1200)), int(look.integers(600, 900)))
    sheet.text(30, 20, f"{style.title(rng, 1)} {rng.integers(1990, 2030)}", 40, "bold")
    first, wide, tall = int(rng.integers(0, 7)), (sheet.width - 40) / 7, (sheet.height - 110) / 6
    for day in range(1, 31):
        row, column = divmod(day + first - 1, 7)
        x, y = 20 + column * wide, 90 + row * tall
        sheet.box((x, y, x + wide, y + tall), None, GREY)
        sheet.text(x + 6, y + 4, str(day), 18)
        if rng.random() < 0.25:
            sheet.box((x + 3, y + 30, x + wide - 3, y + 54), vivid(rng), radius=4)
            sheet.text(x + 8, y + 32, style.words(rng, 1)[:9], 15, fill=WHITE)
    return sheet.image


def pattern(style: Style, rng: Generator) -> Image.Image:
    """A plain ground, a gradient, stripes, checks or a few large shapes: almost nothing to see."""
    look = style.rng
    width, height = int(look.integers(300, 900)), int(look.integers(300, 900))
    sheet, kind = Sheet(style, width, height, vivid(rng)), rng.integers(0, 4)
    if kind == 0:
        ends = np.array([[vivid(rng), vivid(rng)], [vivid(rng), vivid(rng)]], np.uint8)
        return Image.fromarray(ends).resize((width, height), Image.Resampling.BICUBIC)
    step, colour = rng.uniform(10, 120), vivid(rng)
    if kind < 3:
        for x in np.arange(0, width, 2 * step):
            for y in np.arange(0, height, 2 * step) if kind == 2 else [0]:
                sheet.box((x, y, x + step, y + step if kind == 2 else height), colour)
    else:
        for _ in range(int(rng.integers(1, 4))):
            sheet.pen.polygon(_blob(rng, width, height), fill=vivid(rng))
    return sheet.image
