"""Edits that move or degrade the pixels of one picture: crops, rotations, noise, compression.

Every edit takes ``(image, rng, other)`` and returns the edited RGB image with its strengths. These
edits measure copy detection; they share no code and no parameter with the trainer's augmentations.
"""

import io
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps

Strengths = dict[str, float | int | str]
Other = Callable[[], Image.Image]
Edit = Callable[[Image.Image, np.random.Generator, Other], tuple[Image.Image, Strengths]]
Colour = tuple[int, int, int]


def colour(rng: np.random.Generator) -> Colour:
    """A colour as people choose them: often black or white, else anything."""
    draw = rng.random()
    if draw < 0.3:
        return (255, 255, 255)
    if draw < 0.55:
        return (0, 0, 0)
    red, green, blue = rng.integers(0, 256, 3)
    return (int(red), int(green), int(blue))


def either_way(rng: np.random.Generator, weakest: float, strongest: float) -> float:
    """A factor whose logarithm is uniform in ±[log weakest, log strongest]."""
    factor = math.exp(rng.uniform(math.log(weakest), math.log(strongest)))
    return factor if rng.random() < 0.5 else 1 / factor


def from_floats(pixels: NDArray[np.floating]) -> Image.Image:
    """Rounded and clipped to 8 bits."""
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def crop(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Keep 15 to 70 % of the area, in an aspect ratio of its own."""
    kept = rng.uniform(0.15, 0.7)
    stretch = either_way(rng, 1.0, 1.8)
    width, height = image.size
    cut_w = min(width, max(32, round(width * math.sqrt(kept * stretch))))
    cut_h = min(height, max(32, round(height * math.sqrt(kept / stretch))))
    left = int(rng.integers(0, width - cut_w + 1))
    top = int(rng.integers(0, height - cut_h + 1))
    area = cut_w * cut_h / (width * height)
    return image.crop((left, top, left + cut_w, top + cut_h)), {"kept": round(area, 3)}


def aspect(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Stretch one side by a factor of 1.3 to 2.4, or squeeze it by as much."""
    factor = either_way(rng, 1.3, 2.4)
    width, height = image.size
    side = math.sqrt(factor)
    size = (max(24, round(width * side)), max(24, round(height / side)))
    return image.resize(size, Image.Resampling.BICUBIC), {"stretch": round(factor, 3)}


def flip(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Mirror left to right, seldom top to bottom."""
    if rng.random() < 0.8:
        return ImageOps.mirror(image), {"axis": "horizontal"}
    return ImageOps.flip(image), {"axis": "vertical"}


def rotate(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Turn by a right angle, or by 4 to 50 degrees either way, corners filled or cut away."""
    if rng.random() < 0.4:
        angle = int(rng.choice([90, 180, 270]))
        return image.rotate(angle, expand=True), {"degrees": angle}
    tilt = rng.uniform(4, 50) * (1 if rng.random() < 0.5 else -1)
    turned = image.rotate(tilt, Image.Resampling.BICUBIC, expand=True, fillcolor=colour(rng))
    corners = "filled"
    if abs(tilt) < 25 and rng.random() < 0.5:
        turned, corners = _inner_rectangle(turned, image.size, tilt), "cut"
    return turned, {"degrees": round(tilt, 1), "corners": corners}


def perspective(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """See the picture from the side: its corners move by 8 to 25 % of the sides."""
    width, height = image.size
    strength = rng.uniform(0.08, 0.25)
    moved = rng.uniform(0, strength, (4, 2)) * (width, height)
    directions = np.array([(1, 1), (1, -1), (-1, -1), (-1, 1)])
    corners = np.array([(0, 0), (0, height), (width, height), (width, 0)], np.float64)
    outline = corners + moved * directions
    coefficients = _homography(outline, corners)
    warped = image.transform(
        image.size,
        Image.Transform.PERSPECTIVE,
        coefficients,
        Image.Resampling.BICUBIC,
        fillcolor=colour(rng),
    )
    return warped, {"corner_shift": round(strength, 3)}


def shrink(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """A thumbnail: 20 to 45 % of each side, the shorter at least 64 pixels."""
    scale = max(rng.uniform(0.2, 0.45), min(1.0, 64 / min(image.size)))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BILINEAR), {"scale": round(scale, 3)}


def brightness(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Multiply the light by 0.35 to 0.7 or 1.4 to 2.2."""
    factor = rng.uniform(0.35, 0.7) if rng.random() < 0.5 else rng.uniform(1.4, 2.2)
    return ImageEnhance.Brightness(image).enhance(factor), {"factor": round(factor, 3)}


def contrast(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Flatten the contrast to 0.25 to 0.65 or raise it to 1.5 to 2.8."""
    factor = rng.uniform(0.25, 0.65) if rng.random() < 0.5 else rng.uniform(1.5, 2.8)
    return ImageEnhance.Contrast(image).enhance(factor), {"factor": round(factor, 3)}


def blur(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Gaussian, box or motion blur over 0.6 to 2 % of the short side."""
    radius = rng.uniform(0.006, 0.02) * min(image.size)
    kind = str(rng.choice(["gaussian", "box", "motion"]))
    if kind == "gaussian":
        blurred = image.filter(ImageFilter.GaussianBlur(radius))
    elif kind == "box":
        blurred = image.filter(ImageFilter.BoxBlur(radius * 1.3))
    else:
        blurred = _motion_blur(image, round(radius * 3) + 1, rng.uniform(0, math.pi))
    return blurred, {"kind": kind, "radius": round(radius, 2)}


def pixelize(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Blocks: 26 to 70 of them along the short side."""
    blocks = int(rng.integers(26, 71))
    scale = blocks / min(image.size)
    small = image.resize(
        (max(1, round(image.width * scale)), max(1, round(image.height * scale))),
        Image.Resampling.BOX,
    )
    return small.resize(image.size, Image.Resampling.NEAREST), {"blocks": blocks}


def noise(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """Gaussian noise, salt and pepper, or shuffled pixels."""
    pixels: NDArray[np.floating] = np.asarray(image, np.float32)
    kind = str(rng.choice(["gaussian", "salt_pepper", "shuffled"]))
    if kind == "gaussian":
        strength = rng.uniform(18, 60)
        pixels = pixels + rng.normal(0, strength, pixels.shape)
    elif kind == "salt_pepper":
        strength = rng.uniform(0.03, 0.18)
        hit = rng.random(pixels.shape[:2]) < strength
        pixels = np.where(hit[..., None], 255.0 * (rng.random(hit.shape) < 0.5)[..., None], pixels)
    else:
        strength = rng.uniform(0.05, 0.3)
        flat = pixels.reshape(-1, 3).copy()
        moved = np.flatnonzero(rng.random(len(flat)) < strength)
        flat[moved] = flat[rng.permutation(moved)]
        pixels = flat.reshape(pixels.shape)
    return from_floats(pixels), {"kind": kind, "strength": round(strength, 3)}


def compress(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, Strengths]:
    """JPEG at quality 4 to 20, or WebP at 0 to 12."""
    kind = str(rng.choice(["JPEG", "JPEG", "WEBP"]))
    quality = int(rng.integers(4, 21)) if kind == "JPEG" else int(rng.integers(0, 13))
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=quality)
    with Image.open(buffer) as compressed:
        return compressed.convert("RGB"), {"kind": kind.lower(), "quality": quality}


def _inner_rectangle(turned: Image.Image, size: tuple[int, int], degrees: float) -> Image.Image:
    """The largest rectangle of the original aspect ratio inside the turned picture."""
    width, height = size
    angle = math.radians(abs(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    scale = min(width / (width * cosine + height * sine), height / (width * sine + height * cosine))
    half_w, half_h = width * scale / 2, height * scale / 2
    x, y = turned.width / 2, turned.height / 2
    return turned.crop((round(x - half_w), round(y - half_h), round(x + half_w), round(y + half_h)))


def _homography(source: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[float, ...]:
    """The eight coefficients that take ``source`` to ``target`` points, in Pillow's order."""
    rows = []
    for (x, y), (u, v) in zip(source, target, strict=True):
        rows.append([x, y, 1, 0, 0, 0, -u * x, -u * y])
        rows.append([0, 0, 0, x, y, 1, -v * x, -v * y])
    solution = np.linalg.solve(np.array(rows), target.reshape(-1))
    return tuple(float(value) for value in solution)


def _motion_blur(image: Image.Image, length: int, angle: float) -> Image.Image:
    """The mean of ``length`` copies shifted along a line."""
    total = np.zeros((image.height, image.width, 3), np.float32)
    for step in range(length):
        distance = step - (length - 1) / 2
        shift = (round(distance * math.cos(angle)), round(distance * math.sin(angle)))
        total += np.asarray(ImageChops.offset(image, *shift), np.float32)
    return from_floats(total / length)
