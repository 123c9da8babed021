"""The edit mix of a DISC-like set: which edits, how often, how many at a time, in which order.

A query is one photo after one to four edits, all drawn from a generator of its own. Two rules keep
it recognisable to a person: at most one edit of a kind (``Kind.family``), and a picture is composed
into something larger after it was cropped, never before. The mix is frozen: changing a weight or a
strength makes another test, under another ``MIX``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps

from accuracy.edits import composed, drawn, pixels
from accuracy.edits.pixels import Edit, Other, Strengths, either_way, from_floats

Filter = Callable[[Image.Image, np.random.Generator], Image.Image]


def colour_filter(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """One of the filters photo programs offer: see ``FILTERS``."""
    kind = str(rng.choice(sorted(FILTERS)))
    return FILTERS[kind](image, rng), {"kind": kind}


def _grayscale(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return image.convert("L").convert("RGB")


def _sepia(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageOps.colorize(image.convert("L"), (38, 22, 8), (255, 240, 205))


def _duotone(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    dark = rng.integers(0, 110, 3)
    light = rng.integers(150, 256, 3)
    first, last = (tuple(map(int, ends)) for ends in (dark, light))
    return ImageOps.colorize(ImageOps.autocontrast(image.convert("L")), first, last)


def _posterize(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageOps.posterize(image, int(rng.integers(1, 4)))


def _palette(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return image.quantize(int(rng.integers(4, 17)), dither=Image.Dither.FLOYDSTEINBERG).convert(
        "RGB"
    )


def _solarize(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageOps.solarize(image, int(rng.integers(100, 200)))


def _negative(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageOps.invert(image)


def _swapped_channels(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    red, green, blue = image.split()
    bands = [(blue, green, red), (green, red, blue), (green, blue, red)][int(rng.integers(3))]
    return Image.merge("RGB", bands)


def _tint(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    wash = Image.new("RGB", image.size, tuple(int(c) for c in rng.integers(0, 256, 3)))
    return Image.blend(image, wash, float(rng.uniform(0.2, 0.5)))


def _saturation(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Color(image).enhance(float(rng.uniform(2.0, 4.5)))


def _gamma(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    gamma = either_way(rng, 1.6, 2.8)
    return image.point([round(255 * (level / 255) ** gamma) for level in range(256)] * 3)


def _vignette(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    width, height = image.size
    x = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    shade = np.clip(1 - rng.uniform(0.45, 0.8) * (x * x + y * y), 0, 1)
    return from_floats(np.asarray(image, np.float32) * shade[..., None])


def _sharpen(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return image.filter(ImageFilter.UnsharpMask(3, int(rng.integers(250, 600)), 0))


def _emboss(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return Image.blend(image, image.filter(ImageFilter.EMBOSS), float(rng.uniform(0.5, 0.85)))


def _edges(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    lines = ImageOps.invert(image.convert("L").filter(ImageFilter.FIND_EDGES)).convert("RGB")
    return Image.blend(image, lines, float(rng.uniform(0.35, 0.7)))


def _painting(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return image.filter(ImageFilter.ModeFilter(int(rng.choice([5, 7]))))


def _glitch(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    red, green, blue = image.split()
    shift = max(2, round(image.width * rng.uniform(0.015, 0.05)))
    return Image.merge(
        "RGB", (ImageChops.offset(red, shift, 0), green, ImageChops.offset(blue, -shift, 0))
    )


FILTERS: Mapping[str, Filter] = {
    "duotone": _duotone,
    "edges": _edges,
    "emboss": _emboss,
    "gamma": _gamma,
    "glitch": _glitch,
    "grayscale": _grayscale,
    "negative": _negative,
    "painting": _painting,
    "palette": _palette,
    "posterize": _posterize,
    "saturation": _saturation,
    "sepia": _sepia,
    "sharpen": _sharpen,
    "solarize": _solarize,
    "swapped_channels": _swapped_channels,
    "tint": _tint,
    "vignette": _vignette,
}


MIX = "disc-like-1"
COUNT_WEIGHTS = {1: 0.15, 2: 0.3, 3: 0.3, 4: 0.25}

# When an edit may happen: on the source, composing, on the composed picture, at the very end.
BEFORE, COMPOSE, AFTER, LAST = range(4)


@dataclass(frozen=True)
class Kind:
    """One edit of the mix.

    Attributes:
        edit: The function.
        weight: How often it is drawn, relative to the others.
        family: At most one edit of a family is applied to a query.
        stages: When it may happen; one stage is drawn.
    """

    edit: Edit
    weight: float
    family: str
    stages: tuple[int, ...]


MIXTURE: dict[str, Kind] = {
    "crop": Kind(pixels.crop, 1.6, "crop", (BEFORE,)),
    "aspect": Kind(pixels.aspect, 0.8, "aspect", (BEFORE, AFTER)),
    "flip": Kind(pixels.flip, 0.8, "flip", (BEFORE, AFTER)),
    "rotate": Kind(pixels.rotate, 1.0, "turn", (BEFORE, AFTER)),
    "perspective": Kind(pixels.perspective, 0.5, "turn", (BEFORE, AFTER)),
    "brightness": Kind(pixels.brightness, 0.6, "light", (BEFORE, AFTER)),
    "contrast": Kind(pixels.contrast, 0.6, "light", (BEFORE, AFTER)),
    "filter": Kind(colour_filter, 1.4, "filter", (BEFORE, AFTER)),
    "blur": Kind(pixels.blur, 0.6, "detail", (BEFORE,)),
    "pixelize": Kind(pixels.pixelize, 0.6, "detail", (BEFORE,)),
    "shrink": Kind(pixels.shrink, 0.4, "detail", (AFTER,)),
    "noise": Kind(pixels.noise, 0.8, "noise", (BEFORE, AFTER)),
    "text": Kind(drawn.text, 1.0, "text", (BEFORE, AFTER)),
    "watermark": Kind(drawn.watermark, 0.4, "text", (BEFORE, AFTER)),
    "stickers": Kind(drawn.stickers, 1.0, "stickers", (BEFORE, AFTER)),
    "scribble": Kind(drawn.scribble, 0.5, "scribble", (BEFORE, AFTER)),
    "border": Kind(drawn.border, 0.8, "border", (BEFORE, AFTER)),
    "overlay_on": Kind(composed.overlay_on, 1.4, "composed", (COMPOSE,)),
    "overlay_under": Kind(composed.overlay_under, 0.8, "composed", (COMPOSE,)),
    "collage": Kind(composed.collage, 0.7, "composed", (COMPOSE,)),
    "screenshot": Kind(composed.screenshot, 0.9, "composed", (COMPOSE,)),
    "compress": Kind(pixels.compress, 0.8, "compress", (LAST,)),
}


@dataclass(frozen=True)
class Applied:
    """An edit that was made, and how strongly."""

    name: str
    strengths: Strengths


def draw(rng: np.random.Generator, count: int | None = None) -> list[str]:
    """Draw edits of the mix, at most one of a family, in the order they are made.

    Args:
        rng: Decides which.
        count: How many; one to four at random by default.
    """
    if count is None:
        counts = list(COUNT_WEIGHTS)
        count = int(rng.choice(counts, p=np.array(list(COUNT_WEIGHTS.values()))))
    names = list(MIXTURE)
    weights = np.array([MIXTURE[name].weight for name in names])
    drawn: dict[str, int] = {}
    while len(drawn) < count:
        taken = {MIXTURE[name].family for name in drawn}
        free = np.array([MIXTURE[name].family not in taken for name in names])
        name = names[int(rng.choice(len(names), p=weights * free / (weights * free).sum()))]
        drawn[name] = int(rng.choice(MIXTURE[name].stages))
    return sorted(drawn, key=drawn.__getitem__)


def edit(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, list[Applied]]:
    """Edit a picture.

    Args:
        image: The source, RGB.
        rng: Decides everything that is random.
        other: Gives another photo each time it is called, for overlays and collages.

    Returns:
        The edited picture, and what was done to it in order.
    """
    applied = []
    for name in draw(rng):
        image, strengths = MIXTURE[name].edit(image, rng, other)
        applied.append(Applied(name, strengths))
    return image, applied
