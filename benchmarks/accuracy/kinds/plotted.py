"""Test images of graphics: five kinds of charts, words, QR codes, maps, drawings, logos."""

import math
import random

import numpy as np
from PIL import Image

from accuracy.kinds.frame import Frame, Look, Region, blend, inset, split

Point = tuple[float, float]


def plot(look: Look, dice: random.Random) -> tuple[Frame, Region]:
    """A chart without its data: title, ticks and labels; and the region for the data."""
    frame = Frame(look, look.dice.choice([560, 640, 800]), look.dice.choice([420, 480, 600]))
    if look.dice.random() < 0.3:
        frame.fill(inset(frame.whole, 8), look.tint(0.92))
    head, middle, foot = split(inset(frame.whole, 14), [1, 8, 1.2])
    scale, area = split(middle, [1, 9], down=False)
    frame.label(
        head,
        look.phrase(dice, dice.randint(1, 4)),
        0.6,
        face=look.head,
        align=look.dice.choice(["left", "middle"]),
    )
    ticks, top = look.dice.randint(3, 7), dice.choice([1, 5, 20, 100, 2500])
    for number, band in enumerate(split(scale, [1] * ticks)):
        frame.label(band, f"{top * (ticks - number) / ticks:g}"[:6], 0.22, align="right")
        if look.dice.random() < 0.8:
            frame.draw.line((area[0], band[1], area[2], band[1]), blend(look.paper, look.pen, 0.15))
    if look.dice.random() < 0.5:
        frame.draw.rectangle(area, None, look.pen)
    for cell in split(
        (area[0], foot[1], area[2], foot[3]), [1] * look.dice.randint(3, 7), down=False
    ):
        frame.label(inset(cell, 4, 0), look.word(dice), 0.3, align="middle")
    return frame, area


def bar_chart(look: Look, dice: random.Random) -> Image.Image:
    """Columns, plain or stacked."""
    frame, (x0, y0, x1, y1) = plot(look, dice)
    stacked = look.dice.random() < 0.4
    for cell in split((x0, y0, x1, y1), [1] * dice.randint(3, 14), down=False):
        base = y1
        for part in range(3 if stacked else 1):
            tall = (y1 - y0) * dice.uniform(0.03, 0.33 if stacked else 0.97)
            gap = (cell[2] - cell[0]) * 0.15
            frame.fill((cell[0] + gap, base - tall, cell[2] - gap, base), look.tints[part])
            base -= tall
    return frame.image


def line_chart(look: Look, dice: random.Random) -> Image.Image:
    """Curves of smooth or rough kind, sometimes with points."""
    frame, (x0, y0, x1, y1) = plot(look, dice)
    for which in range(dice.randint(1, 4)):
        count = dice.choice([8, 15, 60])
        turns, shift, slope = dice.uniform(0.3, 4), dice.uniform(0, 6), dice.uniform(-0.5, 0.5)
        points = []
        for spot in np.linspace(0, 1, count):
            height = (
                0.5
                + 0.25 * math.sin(turns * 6.28 * spot + shift)
                + slope * (spot - 0.5)
                + dice.gauss(0, 0.05)
            )
            points.append((x0 + (x1 - x0) * spot, y1 - (y1 - y0) * min(max(height, 0), 1)))
        frame.draw.line(points, look.tints[which], look.dice.randint(1, 4))
        if count < 20:
            for x, y in points:
                frame.draw.rectangle((x - 4, y - 4, x + 4, y + 4), look.tints[which])
    return frame.image


def scatter_plot(look: Look, dice: random.Random) -> Image.Image:
    """Points around a line or a ring."""
    frame, (x0, y0, x1, y1) = plot(look, dice)
    reach = look.dice.uniform(2, 6)
    for which in range(dice.randint(1, 3)):
        slope, noise, ring = dice.uniform(-1, 1), dice.uniform(0.02, 0.2), dice.random() < 0.3
        for _ in range(dice.randint(30, 220)):
            u = dice.random()
            x, y = (
                (u, 0.5 + slope * (u - 0.5))
                if not ring
                else (0.5 + 0.3 * math.cos(6.28 * u), 0.5 + 0.3 * math.sin(6.28 * u))
            )
            at = (
                x0 + (x1 - x0) * min(max(x + dice.gauss(0, noise), 0), 1),
                y1 - (y1 - y0) * min(max(y + dice.gauss(0, noise), 0), 1),
            )
            frame.draw.ellipse(
                (at[0] - reach, at[1] - reach, at[0] + reach, at[1] + reach), look.tints[which]
            )
    return frame.image


def pie_chart(look: Look, dice: random.Random) -> Image.Image:
    """A pie with names around it."""
    frame = Frame(look, 640, 480)
    head, body = split(inset(frame.whole, 12), [1, 8])
    frame.label(head, look.phrase(dice, 3), 0.6, face=look.head, align="middle")
    reach = (body[3] - body[1]) * look.dice.uniform(0.3, 0.42)
    x, y = (body[0] + body[2]) / 2, (body[1] + body[3]) / 2
    shares = [dice.uniform(0.2, 2) for _ in range(dice.randint(2, 8))]
    angle = -90.0
    for which, share in enumerate(shares):
        turn = 360 * share / sum(shares)
        frame.draw.pieslice(
            (x - reach, y - reach, x + reach, y + reach),
            angle,
            angle + turn,
            look.tints[which],
            look.paper,
            2,
        )
        middle = math.radians(angle + turn / 2)
        at = x + 1.25 * reach * math.cos(middle), y + 1.15 * reach * math.sin(middle)
        frame.label(
            (at[0] - 50, at[1] - 12, at[0] + 50, at[1] + 12),
            f"{look.word(dice)} {100 * share / sum(shares):.0f}%",
            0.7,
            align="middle",
        )
        angle += turn
    return frame.image


def histogram(look: Look, dice: random.Random) -> Image.Image:
    """Touching columns of a sample."""
    frame, area = plot(look, dice)
    seeded = np.random.default_rng(dice.getrandbits(32))
    values = (
        seeded.gamma(dice.uniform(1, 9), 1, 500)
        if dice.random() < 0.5
        else seeded.normal(0, 1, 500)
    )
    if dice.random() < 0.3:
        values = np.concatenate([values, seeded.normal(dice.uniform(3, 8), 1, 300)])
    counts, _ = np.histogram(values, look.dice.choice([12, 20, 35, 50]))
    for cell, share in zip(
        split(area, [1] * len(counts), down=False), counts / counts.max(), strict=True
    ):
        frame.fill(
            (cell[0], area[3] - (area[3] - area[1]) * float(share), cell[2], area[3]),
            look.tint(0.2),
            look.pen,
        )
    return frame.image


def word(look: Look, dice: random.Random) -> Image.Image:
    """One word on one colour."""
    coloured = look.dice.random() < 0.4
    frame = Frame(
        look,
        look.dice.randint(320, 800),
        look.dice.randint(200, 500),
        look.tint(0.2) if coloured else None,
    )
    string = look.phrase(dice, 1)
    region = inset(frame.whole, 24, frame.image.height * 0.2)
    frame.label(
        region,
        string,
        0.9,
        (255, 255, 255) if coloured else None,
        look.dice.choice([look.head, look.body]),
        "middle",
    )
    return frame.image


def qr_code(look: Look, dice: random.Random) -> Image.Image:
    """A QR code with finders and alignment, larger or smaller, sometimes on a card."""
    side = look.dice.choice([21, 25, 29, 33, 37, 45])
    bits = np.array([[dice.random() < 0.48 for _ in range(side)] for _ in range(side)])
    ring = np.maximum(*np.abs(np.mgrid[-4:5, -4:5]))
    finder = np.isin(ring, (0, 1, 3))
    canvas = np.zeros((side + 2, side + 2), bool)
    canvas[1:-1, 1:-1] = bits
    for row, column in ((0, 0), (0, side - 7), (side - 7, 0)):
        canvas[row : row + 9, column : column + 9] = finder
    if side > 21:
        canvas[side - 8 : side - 3, side - 8 : side - 3] = np.isin(ring[2:7, 2:7], (0, 2))
    cell = look.dice.randint(5, 11)
    quiet = np.pad(canvas, look.dice.randint(1, 4))
    code = Image.fromarray(np.where(quiet, 0, 255).astype(np.uint8)).resize(
        (quiet.shape[0] * cell,) * 2, Image.Resampling.NEAREST
    )
    frame = Frame(look, code.width, code.height + look.dice.choice([0, 0, 90]), (255, 255, 255))
    frame.image.paste(code)
    frame.label(
        (10, code.height, code.width - 10, frame.image.height),
        look.phrase(dice, 2),
        0.4,
        (0, 0, 0),
        align="middle",
    )
    return frame.image


def street_map(look: Look, dice: random.Random) -> Image.Image:
    """A grid of bent streets, coloured blocks, a river, names."""
    land = blend((240, 236, 226), look.tints[0], 0.06)
    frame = Frame(look, 720, look.dice.choice([540, 720]), land)
    width, height = frame.image.size
    seeded = np.random.default_rng(dice.getrandbits(32))
    phase, amount = seeded.uniform(0, 6.28, 4), seeded.uniform(10, 60, 4)

    def bend(x: float, y: float) -> Point:
        return (
            x
            + amount[0] * math.sin(y / 170 + phase[0])
            + amount[1] * math.sin(x / 260 + phase[1]) * 0.5,
            y
            + amount[2] * math.sin(x / 190 + phase[2])
            + amount[3] * math.sin(y / 240 + phase[3]) * 0.5,
        )

    xs = np.cumsum(seeded.uniform(24, 90, 40)) - 120
    ys = np.cumsum(seeded.uniform(24, 90, 40)) - 120
    for x0, x1 in zip(xs[:-1], xs[1:], strict=True):
        for y0, y1 in zip(ys[:-1], ys[1:], strict=True):
            kind = dice.random()
            ink = (205, 228, 190) if kind < 0.08 else (226, 218, 208) if kind < 0.5 else None
            if ink is not None and x0 < width and y0 < height:
                frame.draw.polygon([bend(x0, y0), bend(x1, y0), bend(x1, y1), bend(x0, y1)], ink)
    if dice.random() < 0.7:
        at, slope = dice.uniform(0.1, 0.9) * height, dice.uniform(-0.5, 0.5)
        frame.draw.line(
            [bend(x, at + slope * x) for x in range(-100, width + 100, 20)],
            (160, 205, 232),
            dice.randint(18, 60),
            "curve",
        )
    for lines, flipped in ((xs, False), (ys, True)):
        for number, line in enumerate(lines):
            course = [bend(*((s, line) if flipped else (line, s))) for s in range(-100, 900, 25)]
            frame.draw.line(
                course,
                (250, 215, 130) if number % 7 == 3 else (255, 255, 255),
                9 if number % 7 == 3 else 4,
                "curve",
            )
    for _ in range(dice.randint(4, 16)):
        x, y = dice.uniform(0, width - 120), dice.uniform(0, height - 20)
        frame.label(
            (x, y, x + 130, y + 22), look.phrase(dice, 2), dice.uniform(0.5, 0.8), (90, 90, 90)
        )
    return frame.image


def drawing(look: Look, dice: random.Random) -> Image.Image:
    """A child's drawing: house, sun, trees, people, in pencil or filled."""
    frame = Frame(look, 720, 560)
    filled, wide = look.dice.random() < 0.5, look.dice.randint(2, 6)
    ground = dice.uniform(360, 480)
    frame.draw.line(
        [(x, ground + 8 * math.sin(x / 40 + wide)) for x in range(0, 730, 10)], look.tints[0], wide
    )
    if dice.random() < 0.7:
        x, y, r = dice.uniform(60, 660), dice.uniform(50, 120), dice.uniform(20, 50)
        frame.draw.ellipse(
            (x - r, y - r, x + r, y + r), (250, 210, 60) if filled else None, look.pen, wide
        )
    for _ in range(dice.randint(1, 6)):
        x, size = dice.uniform(60, 640), dice.uniform(50, 170)
        dice.choice([_house, _tree, _person])(
            frame, x, ground, size, look.tints[dice.randrange(8)] if filled else None, wide
        )
    return frame.image


def _house(
    frame: Frame, x: float, y: float, size: float, ink: tuple[int, int, int] | None, wide: int
) -> None:
    pen = frame.look.pen
    frame.draw.rectangle((x - size / 2, y - size, x + size / 2, y), ink, pen, wide)
    frame.draw.polygon(
        [(x - size * 0.6, y - size), (x, y - size * 1.6), (x + size * 0.6, y - size)],
        None,
        pen,
        wide,
    )
    frame.draw.rectangle((x - size * 0.1, y - size * 0.45, x + size * 0.1, y), None, pen, wide)


def _tree(
    frame: Frame, x: float, y: float, size: float, ink: tuple[int, int, int] | None, wide: int
) -> None:
    frame.draw.line((x, y, x, y - size), frame.look.pen, wide * 2)
    frame.draw.ellipse(
        (x - size / 2, y - size * 1.8, x + size / 2, y - size * 0.8), ink, frame.look.pen, wide
    )


def _person(
    frame: Frame, x: float, y: float, size: float, ink: tuple[int, int, int] | None, wide: int
) -> None:
    pen = frame.look.pen
    frame.draw.ellipse((x - size * 0.15, y - size, x + size * 0.15, y - size * 0.7), ink, pen, wide)
    for a, b in (
        ((0, -0.7), (0, -0.3)),
        ((0, -0.3), (-0.2, 0)),
        ((0, -0.3), (0.2, 0)),
        ((-0.25, -0.55), (0.25, -0.5)),
    ):
        frame.draw.line(
            (x + a[0] * size, y + a[1] * size, x + b[0] * size, y + b[1] * size), pen, wide
        )


def logo(look: Look, dice: random.Random) -> Image.Image:
    """A mark of a few turned copies of one shape, with or without a name."""
    frame = Frame(look, look.dice.randint(360, 640), look.dice.randint(300, 480))
    width, height = frame.image.size
    x, y, reach = width / 2, height * 0.42, min(width, height) * 0.28
    copies, corners, turn = dice.randint(1, 6), dice.choice([3, 4, 5, 6, 24]), dice.uniform(0, 6.28)
    inks = dice.sample(look.tints, 2)
    for copy in range(copies):
        away = turn + 6.28 * copy / copies
        centre = (
            x + reach * 0.45 * math.cos(away) * (copies > 1),
            y + reach * 0.45 * math.sin(away) * (copies > 1),
        )
        size = reach * (0.5 if copies > 1 else 0.9)
        around = [away + 6.28 * corner / corners for corner in range(corners)]
        frame.draw.polygon(
            [(centre[0] + size * math.cos(a), centre[1] + size * math.sin(a)) for a in around],
            inks[copy % 2],
        )
    if dice.random() < 0.7:
        frame.label(
            (20, height * 0.76, width - 20, height * 0.94),
            look.word(dice).capitalize(),
            0.8,
            face=look.head,
            align="middle",
        )
    return frame.image
