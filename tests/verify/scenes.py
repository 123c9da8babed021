"""Drawn images with as much detail as a photo, and things people do to them."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Pixels = NDArray[np.uint8]


def scene(seed: int, size: tuple[int, int] = (320, 240)) -> Pixels:
    """Hundreds of shapes of all sizes over a shaded ground."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", size, _colour(rng))
    pen = ImageDraw.Draw(image)
    for _ in range(260):
        x, y = rng.uniform(0, size[0]), rng.uniform(0, size[1])
        reach = float(rng.uniform(3, 40))
        shape = int(rng.integers(3))
        if shape == 0:
            pen.ellipse((x - reach, y - reach / 2, x + reach, y + reach / 2), _colour(rng))
        elif shape == 1:
            corners = [(x + reach * c, y + reach * s) for c, s in rng.uniform(-1, 1, (4, 2))]
            pen.polygon(corners, _colour(rng))
        else:
            pen.line((x, y, x + reach, y - reach), _colour(rng), int(rng.integers(1, 5)))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(0.7)), np.uint8).copy()


def crop(pixels: Pixels, left: float, top: float, right: float, bottom: float) -> Pixels:
    """A part of an image, given in parts of its sides."""
    height, width = pixels.shape[:2]
    return np.ascontiguousarray(
        pixels[
            round(top * height) : round(bottom * height), round(left * width) : round(right * width)
        ]
    )


def paste(pixels: Pixels, ground: Pixels, box: tuple[int, int, int, int]) -> Pixels:
    """An image scaled into a box (left, top, right, bottom) of another."""
    page = Image.fromarray(ground)
    inner = Image.fromarray(pixels).resize(
        (box[2] - box[0], box[3] - box[1]), Image.Resampling.LANCZOS
    )
    page.paste(inner, box[:2])
    return np.asarray(page, np.uint8).copy()


def turn(pixels: Pixels, degrees: float) -> Pixels:
    """Rotate, enlarging the frame."""
    return np.asarray(
        Image.fromarray(pixels).rotate(degrees, Image.Resampling.BICUBIC, expand=True)
    )


def window(pixels: Pixels) -> Pixels:
    """An image in the window of one application: bars, buttons and lines of text around it."""
    page = Image.new("RGB", (480, 640), (250, 250, 252))
    pen = ImageDraw.Draw(page)
    rng = np.random.default_rng(99)
    for top in (0, 560):
        pen.rectangle((0, top, 480, top + 80), _colour(rng))
        for left in range(20, 460, 90):
            pen.ellipse((left, top + 14, left + 30, top + 44), _colour(rng), _colour(rng), 3)
            pen.text((left, top + 50), f"menu {rng.integers(1000)}", (255, 255, 255))
    for line in range(10):
        words = " ".join(str(word) for word in rng.integers(100, 9999, 6))
        pen.text((20, 430 + 12 * line), words, (40, 42, 48))
    page.paste(Image.fromarray(pixels).resize((400, 300)), (20, 100))
    return np.asarray(page, np.uint8).copy()


def wall(pixels: Pixels, shift: int) -> Pixels:
    """An image on a wall of equal tiles, of which the first is cut by ``shift``."""
    tile = scene(98, (40, 40))
    page = np.roll(np.tile(tile, (12, 12, 1)), (shift, shift), (0, 1))
    return paste(pixels, page, (60 + shift, 40, 260 + shift, 190))


def _colour(rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = rng.integers(0, 256, 3)
    return int(red), int(green), int(blue)
