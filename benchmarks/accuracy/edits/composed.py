"""Edits that put a picture into something larger: other photos, collages, screenshots.

``compose`` also says where the picture went: an edit draws the place without looking at the pixels,
so the same draw made with a black and with a white picture differs exactly where it is seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageOps

from accuracy.edits.drawn import phrase
from accuracy.edits.pixels import Colour, Edit, Other, Strengths, colour
from photos import Photo

# Cells of a collage as (left, top, right, bottom) parts of the page.
Cell = tuple[float, float, float, float]
COLLAGES: dict[str, tuple[Cell, ...]] = {
    "side_by_side": ((0, 0, 0.5, 1), (0.5, 0, 1, 1)),
    "stacked": ((0, 0, 1, 0.5), (0, 0.5, 1, 1)),
    "one_and_two": ((0, 0, 0.6, 1), (0.6, 0, 1, 0.5), (0.6, 0.5, 1, 1)),
    "three": ((0, 0, 1 / 3, 1), (1 / 3, 0, 2 / 3, 1), (2 / 3, 0, 1, 1)),
    "four": ((0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1)),
}


def overlay_on(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Paste the picture onto another photo, where it covers 20 to 65 % of the area."""
    backdrop = _backdrop(other(), image.size, rng)
    share = rng.uniform(0.2, 0.65)
    scale = (share * backdrop.width * backdrop.height / (image.width * image.height)) ** 0.5
    fit = min(scale, backdrop.width / image.width, backdrop.height / image.height)
    pasted = image.resize(
        (max(1, round(image.width * fit)), max(1, round(image.height * fit))),
        Image.Resampling.LANCZOS,
    )
    opacity = float(rng.uniform(0.75, 1.0)) if rng.random() < 0.4 else 1.0
    x = int(rng.integers(0, backdrop.width - pasted.width + 1))
    y = int(rng.integers(0, backdrop.height - pasted.height + 1))
    shape = "rectangle"
    mask = Image.new("L", pasted.size, round(255 * opacity))
    if rng.random() < 0.15:
        shape, hole = "ellipse", Image.new("L", pasted.size)
        ImageDraw.Draw(hole).ellipse((0, 0, pasted.width, pasted.height), 255)
        mask = ImageChops.multiply(mask, hole)
    backdrop.paste(pasted, (x, y), mask)
    covered = pasted.width * pasted.height / (backdrop.width * backdrop.height)
    return backdrop, {"share": round(covered, 3), "opacity": round(opacity, 2), "shape": shape}


def overlay_under(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Cover 10 to 45 % of the picture by another photo, or blend the two over each other."""
    if rng.random() < 0.4:
        opacity = rng.uniform(0.2, 0.4)
        veil = ImageOps.fit(other(), image.size)
        return Image.blend(image, veil, opacity), {"kind": "blend", "opacity": round(opacity, 2)}
    covered = rng.uniform(0.1, 0.45)
    scale = covered**0.5
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    top = ImageOps.fit(other(), size)
    x = int(rng.integers(0, image.width - size[0] + 1))
    y = int(rng.integers(0, image.height - size[1] + 1))
    result = image.copy()
    result.paste(top, (x, y))
    return result, {"kind": "inset", "covered": round(covered, 3)}


def collage(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """One cell of a page of two to four photos; each is cut to its cell."""
    layout = str(rng.choice(sorted(COLLAGES)))
    cells = COLLAGES[layout]
    side = max(image.size)
    ratio = {"side_by_side": (2.0, 1.2), "stacked": (1.2, 2.0), "three": (2.4, 1.2)}
    wide, high = ratio.get(layout, (1.8, 1.8))
    page = Image.new("RGB", (round(side * wide), round(side * high)), colour(rng))
    gap = rng.uniform(0, 0.02) * side
    mine = int(rng.integers(len(cells))) if layout != "one_and_two" or rng.random() < 0.3 else 0
    for index, (left, top, right, bottom) in enumerate(cells):
        x, y = round(left * page.width + gap), round(top * page.height + gap)
        size = (
            max(1, round((right - left) * page.width - 2 * gap)),
            max(1, round((bottom - top) * page.height - 2 * gap)),
        )
        page.paste(ImageOps.fit(image if index == mine else other(), size), (x, y))
    left, top, right, bottom = cells[mine]
    return page, {"layout": layout, "share": round((right - left) * (bottom - top), 3)}


def screenshot(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """The picture inside a phone's post, a chat, a browser or a photo viewer, drawn here."""
    kind = str(rng.choice(["post", "chat", "browser", "viewer"]))
    dark = bool(rng.random() < 0.4)
    paper: Colour = (24, 26, 30) if dark else (250, 250, 252)
    ink: Colour = (225, 225, 230) if dark else (40, 42, 48)
    faint: Colour = (70, 74, 82) if dark else (205, 208, 214)
    if kind == "browser":
        page, share = _browser(image, rng, other, paper, ink, faint)
    elif kind == "viewer":
        page, share = _viewer(image, rng)
    else:
        page, share = _phone(image, rng, other, paper, ink, faint, chat=kind == "chat")
    return page, {"kind": kind, "dark": int(dark), "share": round(share, 3)}


def _phone(
    image: Image.Image,
    rng: np.random.Generator,
    other: Other,
    paper: Colour,
    ink: Colour,
    faint: Colour,
    *,
    chat: bool,
) -> tuple[Image.Image, float]:
    width = 360
    height = round(width * rng.uniform(1.5, 2.1))
    page = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(page)
    shown_w = round(width * (rng.uniform(0.6, 0.78) if chat else 1.0))
    shown = ImageOps.contain(image, (shown_w, round(height * 0.62)), Image.Resampling.LANCZOS)
    x = (width - shown.width) // 2 if not chat else width - shown.width - 14
    y = round(height * rng.uniform(0.16, 0.3))
    if chat:
        for row in range(4):
            top = y - 44 + row * 4 if row == 0 else y + shown.height + 16 + (row - 1) * 42
            left = 12 if row % 2 == 0 else width - 190
            pen.rounded_rectangle((left, top, left + 178, top + 32), 14, faint)
            pen.text((left + 10, top + 8), phrase(rng), ink, ImageFont.load_default(14))
    else:
        face = ImageOps.fit(other(), (34, 34))
        page.paste(face, (12, y - 44))
        pen.text((56, y - 44), phrase(rng), ink, ImageFont.load_default(16))
        pen.text((56, y - 24), "2 h", faint, ImageFont.load_default(12))
        below = y + shown.height + 10
        for place in range(3):
            pen.ellipse((14 + 44 * place, below, 38 + 44 * place, below + 24), None, ink, 3)
        for row in range(2):
            pen.text((14, below + 34 + 20 * row), phrase(rng), ink, ImageFont.load_default(14))
    page.paste(shown, (x, y))
    pen.text(
        (14, 8),
        f"{int(rng.integers(0, 24)):02}:{int(rng.integers(0, 60)):02}",
        ink,
        ImageFont.load_default(14),
    )
    pen.rectangle((width - 40, 10, width - 16, 22), None, ink)
    pen.rectangle((width - 40, 10, width - 40 + int(rng.integers(4, 24)), 22), ink)
    pen.rounded_rectangle((width // 2 - 60, height - 12, width // 2 + 60, height - 7), 3, ink)
    return page, shown.width * shown.height / (width * height)


def _browser(
    image: Image.Image,
    rng: np.random.Generator,
    other: Other,
    paper: Colour,
    ink: Colour,
    faint: Colour,
) -> tuple[Image.Image, float]:
    width, height = 640, 420
    page = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(page)
    pen.rectangle((0, 0, width, 52), faint)
    for place, dot in enumerate(((236, 95, 87), (246, 190, 79), (97, 197, 84))):
        pen.ellipse((12 + 20 * place, 8, 24 + 20 * place, 20), dot)
    pen.rounded_rectangle((80, 26, width - 40, 46), 9, paper)
    pen.text(
        (92, 29),
        "www.example.org/" + phrase(rng).replace(" ", "-"),
        ink,
        ImageFont.load_default(13),
    )
    box = (round(width * rng.uniform(0.5, 0.7)), height - 100)
    shown = ImageOps.contain(image, box, Image.Resampling.LANCZOS)
    page.paste(shown, (24, 88))
    pen.text((24, 60), phrase(rng), ink, ImageFont.load_default(22))
    left = 24 + shown.width + 20
    for row in range(14):
        if row == 7:
            continue
        end = min(width - 16, left + int(rng.integers(80, 220)))
        pen.rectangle((left, 92 + row * 14, max(left + 10, end), 98 + row * 14), faint)
    if rng.random() < 0.6 and width - left > 110:
        page.paste(ImageOps.fit(other(), (100, 74)), (left, height - 96))
    return page, shown.width * shown.height / (width * height)


def _viewer(image: Image.Image, rng: np.random.Generator) -> tuple[Image.Image, float]:
    width, height = (360, round(360 * rng.uniform(1.4, 2.0))) if rng.random() < 0.6 else (560, 340)
    page = Image.new("RGB", (width, height), (0, 0, 0))
    pen = ImageDraw.Draw(page)
    shown = ImageOps.contain(image, (width, height), Image.Resampling.LANCZOS)
    page.paste(shown, ((width - shown.width) // 2, (height - shown.height) // 2))
    grey = (200, 200, 200)
    pen.line((18, 24, 10, 32, 18, 40), grey, 3)
    for place in range(3):
        x = width - 24 - 10 * place
        pen.ellipse((x, 28, x + 4, 32), grey)
    for place in range(4):
        x = round(width * (place + 0.5) / 4)
        pen.rounded_rectangle((x - 9, height - 34, x + 9, height - 16), 5, None, grey, 2)
    return page, shown.width * shown.height / (width * height)


def _backdrop(photo: Image.Image, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """The other photo at the picture's scale, in one of three common shapes."""
    side = max(size)
    wide, high = ((1.0, 1.0), (1.33, 1.0), (1.0, 1.33))[int(rng.integers(3))]
    return ImageOps.fit(photo, (round(side * wide), round(side * high)))


Kind = Literal["overlay", "collage"]
KINDS: tuple[Kind, ...] = ("overlay", "collage")
EDITS: dict[Kind, Edit] = {"overlay": overlay_on, "collage": collage}


@dataclass(frozen=True)
class Composed:
    """A picture made of several photos.

    Attributes:
        kind: How it was made.
        image: The picture.
        region: ``(height, width)``, where the source is seen in it.
        source: Number of the source photo.
    """

    kind: Kind
    image: Image.Image
    region: NDArray[np.bool_]
    source: int

    @property
    def share(self) -> float:
        """Part of the picture that is the source."""
        return float(self.region.mean())


def compose(
    sources: Sequence[Photo], others: Sequence[Photo], kind: Kind, seed: int = 0
) -> Iterator[Composed]:
    """One picture per source: pasted onto another photo (20–65 % of it), or a cell of a collage."""
    for number, source in enumerate(sources):
        photo = source.image()
        black, white, image = (
            _draw(picture, others, kind, (seed, number))
            for picture in (
                Image.new("RGB", photo.size, (0, 0, 0)),
                Image.new("RGB", photo.size, (255, 255, 255)),
                photo,
            )
        )
        region = (np.asarray(black) != np.asarray(white)).any(axis=2)
        yield Composed(kind, image, region, number)


def _draw(
    picture: Image.Image, others: Sequence[Photo], kind: Kind, seed: tuple[int, int]
) -> Image.Image:
    rng = np.random.default_rng(seed)
    made, _ = EDITS[kind](picture, rng, lambda: others[int(rng.integers(len(others)))].image())
    return made
