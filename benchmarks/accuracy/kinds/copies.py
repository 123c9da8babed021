"""What becomes of images passed on: resaved, resized, cropped, captioned, photographed."""

import io
import random
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageDraw

from accuracy.kinds.frame import face_at

Maker = Callable[[Image.Image, random.Random], Image.Image]


def resaved(image: Image.Image, dice: random.Random) -> Image.Image:
    """A JPEG of quality 35 to 90, once or twice."""
    for _ in range(dice.choice([1, 1, 2])):
        image = compressed(image, dice.randint(35, 90))
    return image


def resized(image: Image.Image, dice: random.Random) -> Image.Image:
    """40 to 150 % of its size by one filter or another, then a JPEG."""
    scale = dice.uniform(0.4, 1.5)
    way = dice.choice(
        [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS]
    )
    width, height = (max(16, round(side * scale)) for side in image.size)
    return compressed(image.resize((width, height), way), dice.randint(60, 92))


def cropped(image: Image.Image, dice: random.Random) -> Image.Image:
    """Up to 6 % of each side cut off."""
    width, height = image.size
    left, right = (dice.uniform(0, 0.06) * width for _ in range(2))
    top, bottom = (dice.uniform(0, 0.06) * height for _ in range(2))
    box = (round(left), round(top), round(width - right), round(height - bottom))
    return compressed(image.crop(box), dice.randint(70, 92))


def captioned(image: Image.Image, dice: random.Random) -> Image.Image:
    """A band with words below or above it."""
    band = round(image.height * dice.uniform(0.08, 0.18))
    above = dice.random() < 0.5
    taller = Image.new("RGB", (image.width, image.height + band), dice.choice(["white", "black"]))
    taller.paste(image, (0, band if above else 0))
    ink = (
        "black"
        if taller.getpixel((0, 1 if above else taller.height - 1)) == (255, 255, 255)
        else "white"
    )
    at = (image.width / 2, band / 2 if above else image.height + band / 2)
    words = " ".join(
        dice.choices(["look", "at", "this", "again", "please", "sent", "today", "why"], k=4)
    )
    ImageDraw.Draw(taller).text(
        at, words, ink, face_at("NotoSans-Regular", max(8, band // 2)), "mm"
    )
    return compressed(taller, dice.randint(70, 92))


def photographed(image: Image.Image, dice: random.Random) -> Image.Image:
    """Seen from a slant on a table, in uneven light."""
    width, height = image.size
    ground = tuple(dice.randint(60, 200) for _ in range(3))
    margins = [dice.uniform(0.02, 0.12) * side for _ in range(4) for side in image.size]
    frame = (0, 0, 0, height, width, height, width, 0)
    # Corners of the source that land on the corners of the frame: all outside, so that it shrinks.
    signs = (-1, -1, -1, 1, 1, 1, 1, -1)
    quad = tuple(at + sign * m for at, sign, m in zip(frame, signs, margins, strict=True))
    slanted = image.transform(
        image.size, Image.Transform.PERSPECTIVE, perspective(frame, quad),
        Image.Resampling.BICUBIC, fillcolor=ground,
    )  # fmt: skip
    light = Image.linear_gradient("L").rotate(dice.choice([0, 90, 180, 270])).resize(image.size)
    dim = Image.eval(slanted, lambda value: round(value * 0.8))
    return compressed(Image.composite(slanted, dim, light), dice.randint(60, 90))


def perspective(frame: Sequence[float], quad: Sequence[float]) -> tuple[float, ...]:
    """Pillow's eight coefficients of the map that takes four corners to four others."""
    rows, ends = [], []
    for x, y, u, v in zip(frame[::2], frame[1::2], quad[::2], quad[1::2], strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        ends += [u, v]
    return tuple(np.linalg.solve(np.array(rows), np.array(ends)).tolist())


def compressed(image: Image.Image, quality: int) -> Image.Image:
    """The image after a JPEG of this quality."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality)
    with Image.open(buffer) as again:
        return again.convert("RGB")


COPIES: dict[str, Maker] = {
    "resaved": resaved,
    "resized": resized,
    "cropped": cropped,
    "captioned": captioned,
    "photographed": photographed,
}
