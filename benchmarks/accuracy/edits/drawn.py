"""Edits that draw on a picture: captions, watermarks, stickers, scribbles, borders.

The stickers are drawn here from circles, arcs and polygons, so that no emoji font is needed; the
letters are the font Pillow ships.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from accuracy.edits.pixels import Colour, Other, Strengths, colour

WORDS = (
    "when you see it,wait for it,me on monday,nobody:,LOL,no way!,this is fine,sale today,for "
    "rent,breaking news,live,sponsored,best day ever,follow us,good morning,fake,not for "
    "sale,draft,sample,limited offer,see you soon,love this,top 10,part two,the end,before / "
    "after,how it started,do not copy,photo by a friend,share if you agree"
).split(",")
YELLOW, INK, RED, BLUE = (
    (255, 205, 50, 255),
    (60, 40, 20, 255),
    (225, 40, 60, 255),
    (70, 160, 245, 255),
)
SUPERSAMPLE = 2


def text(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """One to four lines of text anywhere, tilted or not, 6 to 20 % of the short side high."""
    lines = int(rng.integers(1, 5))
    height = rng.uniform(0.06, 0.2 if lines < 3 else 0.12)
    size = max(9, round(height * min(image.size)))
    layer = Image.new("RGBA", image.size)
    pen = ImageDraw.Draw(layer)
    opacity = rng.uniform(0.55, 1.0)
    ink = (*colour(rng), round(255 * opacity))
    font = ImageFont.load_default(size)
    top = rng.uniform(0, max(1.0, image.height - lines * size * 1.2))
    for line in range(lines):
        left = rng.uniform(-0.05, 0.35) * image.width
        words = phrase(rng)
        outline = max(1, size // 12) if rng.random() < 0.5 else 0
        pen.text(
            (left, top + line * size * 1.2),
            words,
            ink,
            font,
            stroke_width=outline,
            stroke_fill=(*_contrary(ink), ink[3]),
        )
    tilt = float(rng.uniform(-35, 35)) if rng.random() < 0.4 else 0.0
    layer = layer.rotate(tilt, Image.Resampling.BICUBIC)
    return _over(image, layer), {
        "lines": lines,
        "height": round(height, 3),
        "opacity": round(opacity, 2),
        "degrees": round(tilt, 1),
    }


def watermark(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """The same faint words all over the picture."""
    words = phrase(rng)
    size = max(9, round(rng.uniform(0.05, 0.1) * min(image.size)))
    opacity = rng.uniform(0.25, 0.6)
    diagonal = math.ceil(math.hypot(*image.size))
    layer = Image.new("RGBA", (diagonal, diagonal))
    pen = ImageDraw.Draw(layer)
    font = ImageFont.load_default(size)
    step = max(20, round(font.getlength(words) * 1.25))
    ink = (*colour(rng), round(255 * opacity))
    for row, y in enumerate(range(0, diagonal, size * 3)):
        for x in range(-step // 2 * (row % 2), diagonal, step):
            pen.text((x, y), words, ink, font)
    layer = layer.rotate(float(rng.choice([0, 30, 45, -30])), Image.Resampling.BICUBIC)
    left, top = (diagonal - image.width) // 2, (diagonal - image.height) // 2
    layer = layer.crop((left, top, left + image.width, top + image.height))
    return _over(image, layer), {"opacity": round(opacity, 2)}


def stickers(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """One to six emoji-like stickers of 14 to 45 % of the short side."""
    count = int(rng.integers(1, 7))
    largest = rng.uniform(0.2, 0.45)
    names = []
    for _ in range(count):
        name = str(rng.choice(sorted(STICKERS)))
        names.append(name)
        side = max(12, round(rng.uniform(0.14, largest) * min(image.size)))
        sticker = draw_sticker(name, side, float(rng.uniform(-30, 30)))
        x = int(rng.integers(-side // 4, max(1, image.width - 3 * side // 4)))
        y = int(rng.integers(-side // 4, max(1, image.height - 3 * side // 4)))
        layer = Image.new("RGBA", image.size)
        layer.paste(sticker, (x, y))
        image = _over(image, layer)
    return image, {"count": count, "largest": round(largest, 2), "kinds": " ".join(names)}


def scribble(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Thick strokes of a finger on the screen, or bars over parts of the picture."""
    drawn = image.copy()
    pen = ImageDraw.Draw(drawn)
    count = int(rng.integers(1, 6))
    kind = str(rng.choice(["strokes", "bars"]))
    short = min(image.size)
    for _ in range(count):
        if kind == "bars":
            width, height = rng.uniform(0.2, 0.7) * image.width, rng.uniform(0.04, 0.12) * short
            x, y = rng.uniform(0, image.width - width), rng.uniform(0, image.height - height)
            pen.rectangle((x, y, x + width, y + height), colour(rng))
            continue
        points = rng.uniform(0, 1, (int(rng.integers(3, 8)), 2)) * image.size
        path = [(float(x), float(y)) for x, y in _smooth(points)]
        pen.line(path, colour(rng), max(2, round(rng.uniform(0.015, 0.05) * short)), "curve")
    return drawn, {"kind": kind, "count": count}


def border(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Plain, blurred or captioned margins: 15 to 60 % more on the sides they take."""
    kind = str(rng.choice(["frame", "bands", "blurred", "meme"]))
    amount = rng.uniform(0.15, 0.6)
    width, height = image.size
    extra_w = round(amount * width) if kind != "meme" else 0
    extra_h = round(amount * height)
    if kind in ("bands", "blurred"):
        extra_w, extra_h = (extra_w, 0) if rng.random() < 0.5 else (0, extra_h)
    paint = colour(rng) if kind != "meme" else (255, 255, 255)
    canvas = Image.new("RGB", (width + extra_w, height + extra_h), paint)
    if kind == "blurred":
        canvas = image.resize(canvas.size).filter(ImageFilter.GaussianBlur(min(image.size) / 12))
    place = (extra_w // 2, extra_h if kind == "meme" else extra_h // 2)
    canvas.paste(image, place)
    if kind == "meme":
        size = max(9, round(min(extra_h * 0.3, width * 0.09)))
        font = ImageFont.load_default(size)
        pen = ImageDraw.Draw(canvas)
        pen.text((size // 2, extra_h * 0.12), phrase(rng), (0, 0, 0), font)
        pen.text((size // 2, extra_h * 0.12 + size * 1.25), phrase(rng), (0, 0, 0), font)
    return canvas, {"kind": kind, "margin": round(amount, 2)}


def phrase(rng: np.random.Generator) -> str:
    """Some words: a stock phrase, or letters and digits at random."""
    if rng.random() < 0.7:
        words = str(rng.choice(WORDS))
        return words.upper() if rng.random() < 0.4 else words
    letters = rng.choice(
        list("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 #@!?"), 12
    )
    return "".join(map(str, letters))


def draw_sticker(name: str, side: int, degrees: float) -> Image.Image:
    """The named sticker as an RGBA square."""
    large = side * SUPERSAMPLE
    sticker = Image.new("RGBA", (large, large))
    STICKERS[name](ImageDraw.Draw(sticker), large)
    turned = sticker.rotate(degrees, Image.Resampling.BICUBIC)
    return turned.resize((side, side), Image.Resampling.LANCZOS)


def _face(pen: ImageDraw.ImageDraw, side: float) -> None:
    pen.ellipse(
        (0.05 * side, 0.05 * side, 0.95 * side, 0.95 * side), YELLOW, INK, round(side * 0.02)
    )


def _smile(pen: ImageDraw.ImageDraw, side: float) -> None:
    _face(pen, side)
    for x in (0.32, 0.62):
        pen.ellipse((x * side, 0.3 * side, (x + 0.1) * side, 0.46 * side), INK)
    pen.chord((0.22 * side, 0.35 * side, 0.78 * side, 0.82 * side), 0, 180, (150, 30, 40, 255))


def _tears(pen: ImageDraw.ImageDraw, side: float) -> None:
    _face(pen, side)
    for x in (0.2, 0.55):
        pen.arc(
            (x * side, 0.32 * side, (x + 0.22) * side, 0.5 * side),
            180,
            360,
            INK,
            round(side * 0.05),
        )
        pen.ellipse((x * side, 0.45 * side, (x + 0.12) * side, 0.7 * side), BLUE)
    pen.chord((0.25 * side, 0.4 * side, 0.75 * side, 0.85 * side), 0, 180, INK)


def _shades(pen: ImageDraw.ImageDraw, side: float) -> None:
    _face(pen, side)
    pen.rectangle((0.12 * side, 0.32 * side, 0.46 * side, 0.5 * side), (20, 20, 20, 255))
    pen.rectangle((0.54 * side, 0.32 * side, 0.88 * side, 0.5 * side), (20, 20, 20, 255))
    pen.line(
        (0.1 * side, 0.34 * side, 0.9 * side, 0.34 * side), (20, 20, 20, 255), round(side * 0.04)
    )
    pen.arc((0.3 * side, 0.5 * side, 0.75 * side, 0.78 * side), 10, 150, INK, round(side * 0.04))


def _angry(pen: ImageDraw.ImageDraw, side: float) -> None:
    pen.ellipse((0.05 * side, 0.05 * side, 0.95 * side, 0.95 * side), (230, 80, 40, 255), INK)
    for x, lean in ((0.3, 0.08), (0.6, -0.08)):
        pen.ellipse((x * side, 0.42 * side, (x + 0.1) * side, 0.54 * side), INK)
        pen.line(
            (x * side, (0.38 - lean) * side, (x + 0.12) * side, (0.38 + lean) * side),
            INK,
            round(side * 0.04),
        )
    pen.arc((0.3 * side, 0.62 * side, 0.7 * side, 0.9 * side), 200, 340, INK, round(side * 0.05))


def _heart(pen: ImageDraw.ImageDraw, side: float) -> None:
    turn = np.linspace(0, 2 * math.pi, 60)
    x = 16 * np.sin(turn) ** 3
    y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
    scale = side / 36
    pen.polygon(
        [(side / 2 + scale * a, side / 2 - scale * b) for a, b in zip(x, y, strict=True)], RED
    )


def _star(pen: ImageDraw.ImageDraw, side: float) -> None:
    points = []
    for corner in range(10):
        radius = (0.48 if corner % 2 == 0 else 0.2) * side
        angle = math.pi * corner / 5 - math.pi / 2
        points.append((side / 2 + radius * math.cos(angle), side / 2 + radius * math.sin(angle)))
    pen.polygon(points, YELLOW, INK, round(side * 0.02))


def _bubble(pen: ImageDraw.ImageDraw, side: float) -> None:
    pen.rounded_rectangle(
        (0, 0.1 * side, side, 0.7 * side), side * 0.2, (255, 255, 255, 255), INK, 2
    )
    pen.polygon(
        [(0.25 * side, 0.68 * side), (0.5 * side, 0.68 * side), (0.25 * side, 0.95 * side)], "white"
    )
    for x in (0.25, 0.45, 0.65):
        pen.ellipse((x * side, 0.34 * side, (x + 0.1) * side, 0.46 * side), (90, 90, 100, 255))


def _arrow(pen: ImageDraw.ImageDraw, side: float) -> None:
    corners = [
        (0, 0.38),
        (0.55, 0.38),
        (0.55, 0.15),
        (1, 0.5),
        (0.55, 0.85),
        (0.55, 0.62),
        (0, 0.62),
    ]
    pen.polygon([(x * side, y * side) for x, y in corners], RED)


def _ring(pen: ImageDraw.ImageDraw, side: float) -> None:
    pen.ellipse((0.05 * side, 0.15 * side, 0.95 * side, 0.85 * side), None, RED, round(side * 0.07))


STICKERS: Mapping[str, Callable[[ImageDraw.ImageDraw, float], None]] = {
    "angry": _angry,
    "arrow": _arrow,
    "bubble": _bubble,
    "heart": _heart,
    "ring": _ring,
    "shades": _shades,
    "smile": _smile,
    "star": _star,
    "tears": _tears,
}


def _over(image: Image.Image, layer: Image.Image) -> Image.Image:
    return Image.alpha_composite(image.convert("RGBA"), layer).convert("RGB")


def _contrary(ink: tuple[int, int, int, int]) -> Colour:
    return (0, 0, 0) if sum(ink[:3]) > 380 else (255, 255, 255)


def _smooth(points: np.ndarray) -> np.ndarray:
    """Cut the corners of a polyline twice (Chaikin)."""
    for _ in range(2):
        first, second = points[:-1], points[1:]
        cut = np.stack([0.75 * first + 0.25 * second, 0.25 * first + 0.75 * second], 1)
        points = cut.reshape(-1, 2)
    return points
