"""Colour and texture filters, as photo programs offer them."""

from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps

from edits_pixels import Other, Strengths, either_way, from_floats

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
