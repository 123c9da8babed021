"""Test images of screens and slides: slides, code, chats, dashboards; and memes on one template."""

import random

import numpy as np
from PIL import Image, ImageFilter

from accuracy.kinds.frame import Frame, Look, Region, blend, face_at, inset, split

NAMES = (
    "buf idx node ptr count next head size left right key value row item cfg path out src".split()
)
CASED = ("roman", "nordic", "slavic", "russian")
SHAPES = (
    "for (int {0} = 0; {0} < {1}; {0}++) {{",
    "if ({0} == {1}) {{",
    "{0}->{1} = {2};",
    "return {0};",
    "const auto {0} = {1}({2});",
    "}}",
    "}} else {{",
    "// {0} {1} {2}",
    "",
    "{0}.push({1}, {2});",
    "static void {0}_{1}(struct {2} *{0})",
    "switch ({0}) {{",
    "while ({0} && !{1}) {{",
)


def slide(look: Look, dice: random.Random) -> Image.Image:
    """A slide: title, and two parts that are points, columns, a large figure or an image."""
    frame = Frame(look, 1024, look.dice.choice([576, 768]))
    head, body, foot = split(inset(frame.whole, 40), [1, 4, 0.4])
    if look.dice.random() < 0.4:
        frame.fill((0, head[3], 1024, head[3] + 6), look.tints[0])
    frame.label(
        head,
        look.phrase(dice, dice.randint(1, 5)),
        0.55,
        look.tint(0.1),
        look.head,
        look.dice.choice(["left", "middle"]),
    )
    parts = list(split(body, [1] * look.dice.choice([1, 1, 2]), down=False))
    for part in parts:
        kind = dice.random()
        if kind < 0.6 or len(parts) == 1:
            _points(frame, inset(part, 16, 24), dice)
        elif kind < 0.8:
            frame.label(part, f"{dice.randint(1, 999)}%", 0.4, look.tints[1], look.head, "middle")
        else:
            region = inset(part, 20, 30)
            frame.image.paste(
                scene(dice, int(region[2] - region[0]), int(region[3] - region[1])),
                (int(region[0]), int(region[1])),
            )
    frame.label(
        foot,
        f"{look.phrase(look.dice, 2)}  |  {dice.randint(1, 80)}",
        0.6,
        (150, 150, 150),
        align="right",
    )
    return frame.image


def _points(frame: Frame, region: Region, dice: random.Random) -> None:
    for line in split(region, [1] * dice.randint(2, 7)):
        x0, y0, x1, y1 = line
        tall = min(y1 - y0, 70)
        frame.fill(
            (x0, y0 + tall * 0.4, x0 + 12, y0 + tall * 0.4 + 12),
            frame.look.tints[2],
            round_by=frame.look.dice.random(),
        )
        frame.label((x0 + 28, y0, x1, y0 + tall), frame.look.phrase(dice, dice.randint(2, 8)), 0.45)


def scene(dice: random.Random, width: int, height: int) -> Image.Image:
    """A made-up landscape: sky, hills, a sun, grain. Stands for a photo in a screenshot."""
    rng = np.random.default_rng(dice.getrandbits(32))
    rows = np.linspace(0, 1, max(height, 8))[:, None, None]
    top, low = rng.integers(60, 256, (2, 3))
    pixels = np.repeat(top * (1 - rows) + low * rows, max(width, 8), axis=1)
    across = np.arange(max(width, 8))
    for depth in range(int(rng.integers(2, 6))):
        wave = sum(
            rng.uniform(4, 30) * np.sin(across * rng.uniform(0.005, 0.05) + rng.uniform(0, 6))
            for _ in range(4)
        )
        ridge = height * (0.35 + 0.12 * depth) + wave
        pixels[np.arange(max(height, 8))[:, None] > ridge] = rng.integers(10, 190, 3)
    pixels += rng.normal(0, rng.uniform(3, 16), pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).filter(
        ImageFilter.GaussianBlur(0.8)
    )


def code(look: Look, dice: random.Random) -> Image.Image:
    """An editor window with code in braces."""
    frame = Frame(look, look.dice.randint(640, 1100), look.dice.randint(420, 900))
    pitch, depth = look.dice.uniform(17, 28), 0
    tabs, body = split(frame.whole, [pitch * 1.6, frame.image.height - pitch * 1.6])
    frame.fill(tabs, blend(look.paper, (128, 128, 128), 0.25))
    frame.label(
        (12, 0, 260, pitch * 1.6),
        f"{dice.choice(NAMES)}_{dice.choice(NAMES)}.cc",
        0.5,
        face=look.fixed,
    )
    font = face_at(look.fixed, round(pitch * 0.66))
    for row in range(int((body[3] - body[1]) / pitch)):
        y = body[1] + (row + 0.5) * pitch
        line = dice.choice(SHAPES).format(*dice.sample(NAMES, 3))
        depth = max(0, depth - line.startswith("}"))
        ink = (
            look.tints[0]
            if line.startswith(("for", "if", "while", "switch", "return"))
            else look.pen
        )
        ink = look.tints[3] if line.startswith("//") else ink
        frame.draw.text((8, y), f"{row + 1:>3}", (130, 130, 130), font, "lm")
        frame.draw.text((56 + depth * pitch * 1.6, y), line, ink, font, "lm")
        depth = min(depth + line.endswith("{"), 6)
    return frame.image


def chat(look: Look, dice: random.Random) -> Image.Image:
    """A phone with a conversation; times under the bubbles."""
    width = look.dice.choice([480, 540, 640])
    paper = look.tint(look.dice.uniform(0.85, 1)) if look.dice.random() < 0.5 else None
    frame = Frame(look, width, int(width * look.dice.choice([1.78, 2.0, 2.16])), paper)
    frame.fill((0, 0, width, 96), look.tint(look.dice.choice([0, 0.9])))
    frame.label(
        (20, 4, 120, 34), f"{dice.randint(0, 23)}:{dice.randint(0, 59):02d}", 0.6, face=look.head
    )
    frame.label((80, 40, width - 60, 88), look.phrase(dice, 2), 0.6, face=look.head)
    y, pitch = 112.0, look.dice.uniform(26, 38)
    while y < frame.image.height - 150:
        own, lines, wide = (
            dice.random() < 0.5,
            dice.choice([1, 1, 2, 3, 4]),
            width * dice.uniform(0.3, 0.78),
        )
        x0 = width - wide - 14 if own else 14.0
        tall = lines * pitch + 14
        frame.fill(
            (x0, y, x0 + wide, y + tall),
            look.tint(0.3 if own else 0.85, 1 if own else 2),
            round_by=look.dice.uniform(0.1, 1) if lines == 1 else 0.3,
        )
        frame.prose((x0 + 14, y + 7, x0 + wide - 10, y + tall), dice, pitch, count=lines)
        frame.label(
            (x0, y + tall, x0 + wide, y + tall + 18),
            f"{dice.randint(0, 23)}:{dice.randint(0, 59):02d}",
            0.7,
            (140, 140, 140),
            align="right" if own else "left",
        )
        y += tall + 24
    frame.fill(
        (10, frame.image.height - 66, width - 70, frame.image.height - 14),
        look.paper,
        (150, 150, 150),
        1,
    )
    return frame.image


def dashboard(look: Look, dice: random.Random) -> Image.Image:
    """Panels split at random, each with a gauge, a curve, a table or columns."""
    frame = Frame(look, 1120, look.dice.randint(620, 800), look.tint(0.93))
    bar, body = split(frame.whole, [1, 12])
    frame.fill(bar, look.paper)
    frame.label(inset(bar, 16, 0), look.phrase(dice, 3), 0.45, face=look.head)
    for row in split(body, [look.dice.uniform(0.6, 1.6) for _ in range(look.dice.randint(2, 4))]):
        for panel in split(
            row, [look.dice.uniform(0.6, 2) for _ in range(look.dice.randint(2, 4))], down=False
        ):
            frame.fill(inset(panel, 6), look.paper, round_by=0.05)
            title, rest = split(inset(panel, 18), [1, 5])
            frame.label(title, look.phrase(dice, 2), 0.6, (140, 140, 140))
            _panel(frame, rest, dice, look.dice.randrange(4))
    return frame.image


def _panel(frame: Frame, region: Region, dice: random.Random, kind: int) -> None:
    look = frame.look
    x0, y0, x1, y1 = region
    if kind == 0:
        reach, value = min(x1 - x0, y1 - y0) * 0.4, dice.random()
        box = (
            (x0 + x1) / 2 - reach,
            (y0 + y1) / 2 - reach,
            (x0 + x1) / 2 + reach,
            (y0 + y1) / 2 + reach,
        )
        frame.draw.arc(box, 140, 400, (200, 200, 200), round(reach * 0.25))
        frame.draw.arc(box, 140, 140 + 260 * value, look.tints[0], round(reach * 0.25))
        frame.label(
            inset(region, 0, (y1 - y0) * 0.35),
            f"{100 * value:.0f}",
            0.7,
            face=look.head,
            align="middle",
        )
    elif kind == 1:
        series = [dice.random() ** 2 for _ in range(24)]
        points = [(x0 + (x1 - x0) * i / 23, y1 - (y1 - y0) * v) for i, v in enumerate(series)]
        frame.draw.polygon([(x0, y1), *points, (x1, y1)], look.tint(0.6, 1), look.tints[1])
    elif kind == 2:
        for line in split(region, [1] * max(2, int((y1 - y0) / 30))):
            frame.label(line, look.phrase(dice, 2), 0.55)
            frame.label(line, str(dice.randint(0, 99999)), 0.55, align="right", face=look.fixed)
    else:
        for cell in split(region, [1] * dice.randint(5, 16), down=False):
            frame.fill(
                (cell[0] + 2, y1 - (y1 - y0) * dice.random(), cell[2] - 2, y1),
                look.tints[dice.randrange(3)],
            )


def meme(look: Look, dice: random.Random) -> Image.Image:
    """One landscape or figure per look, captioned anew each time."""
    width, height = look.dice.randint(440, 700), look.dice.randint(360, 620)
    base = scene(look.dice, width, height)
    frame = Frame(look, width, height)
    frame.image.paste(base)
    for _ in range(look.dice.randint(1, 4)):
        x, y, reach = (
            look.dice.uniform(0.2, 0.8) * width,
            look.dice.uniform(0.4, 0.8) * height,
            look.dice.uniform(40, 110),
        )
        frame.draw.ellipse(
            (x - reach, y - reach, x + reach, y + reach),
            look.tints[look.dice.randrange(8)],
            (0, 0, 0),
            4,
        )
    font = face_at("LeagueSpartan-Bold" if look.tongue == "roman" else look.body, 42)
    for at in (40, height - 40) if look.dice.random() < 0.6 else (height - 60,):
        string = look.phrase(dice, dice.randint(2, 5))
        string = string.upper() if look.tongue in CASED else string
        while font.getlength(string) > width - 16:
            string = string[:-1]
        frame.draw.text(
            (width / 2, at),
            string,
            (255, 255, 255),
            font,
            "mm",
            stroke_width=3,
            stroke_fill=(0, 0, 0),
        )
    return frame.image
