"""Edits of the families that training never sees (``families.py``): keep them out of it."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from accuracy.families import UNSEEN
from accuracy.wild_seen import Edit, Other, as_image, colour

Floats = NDArray[np.float64]


def contour(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Edges as dark lines on white, alone or over the image."""
    lines = image.filter(ImageFilter.CONTOUR)
    return Image.blend(image, lines, float(rng.choice([1.0, rng.uniform(0.5, 0.9)])))


def halftone(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Dots on a turned screen, black or in each colour."""
    pixels = np.asarray(image if rng.random() < 0.5 else image.convert("L").convert("RGB"), float)
    y, x = _grid(image)
    period, angle = rng.uniform(3.5, 7), rng.uniform(0, np.pi / 2)
    screens = []
    for channel in range(3):
        turned = angle + (channel * 0.5 if rng.random() < 0.7 else 0)
        u = (x * np.cos(turned) + y * np.sin(turned)) * 2 * np.pi / period
        v = (y * np.cos(turned) - x * np.sin(turned)) * 2 * np.pi / period
        screens.append(127.5 + 63.7 * (np.cos(u) + np.cos(v)))
    return as_image(np.clip((pixels - np.stack(screens, axis=2)) * 3 + 127.5, 0, 255))


def moire(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Coloured bands of two gratings, as on a photographed screen."""
    y, x = _grid(image)
    bands = []
    for _ in range(3):
        fields = []
        for _ in range(2):
            angle, period = rng.uniform(0, np.pi), rng.uniform(2.2, 4)
            bend = rng.uniform(-2e-4, 2e-4) * (
                (x - image.width / 2) ** 2 + (y - image.height / 2) ** 2
            )
            fields.append(
                np.sin((x * np.cos(angle) + y * np.sin(angle) + bend) * 2 * np.pi / period)
            )
        slow = np.sin((x * rng.uniform(-1, 1) + y * rng.uniform(-1, 1)) / rng.uniform(4, 12))
        bands.append(fields[0] * fields[1] + slow * rng.uniform(0.3, 0.8))
    return as_image(np.asarray(image, float) + rng.uniform(25, 60) * np.stack(bands, axis=2))


def wave(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Rows and columns displaced by a sine."""
    y, x = _grid(image)
    far, period = (
        rng.uniform(0.015, 0.05) * min(image.size),
        rng.uniform(0.15, 0.5) * min(image.size),
    )
    phase = rng.uniform(0, 2 * np.pi, 2)
    both = rng.random() < 0.5
    moved_x = x + far * np.sin(2 * np.pi * y / period + phase[0])
    moved_y = y + (far * np.sin(2 * np.pi * x / period + phase[1]) if both else 0)
    return _looked_up(image, moved_y, moved_x)


def swirl(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Turned more the nearer to a point."""
    y, x = _grid(image)
    cx, cy = (0.5 + rng.uniform(-0.12, 0.12, 2)) * image.size
    radius = np.hypot(x - cx, y - cy)
    angle = rng.choice([-1, 1]) * rng.uniform(0.8, 2.5) * np.exp(-radius / (0.3 * min(image.size)))
    cos, sin = np.cos(angle), np.sin(angle)
    return _looked_up(
        image, cy + sin * (x - cx) + cos * (y - cy), cx + cos * (x - cx) - sin * (y - cy)
    )


def motion_blur(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Along a line of 5 to 12 % of the side."""
    angle, length = rng.uniform(0, np.pi), rng.uniform(0.05, 0.12) * min(image.size)
    y, x = _grid(image)
    steps = np.linspace(-0.5, 0.5, 15) * length
    shifted = [_sampled(image, y + s * np.sin(angle), x + s * np.cos(angle)) for s in steps]
    return as_image(np.mean(shifted, axis=0))


def zoom_blur(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Along rays from a point near the centre."""
    y, x = _grid(image)
    cx, cy = (0.5 + rng.uniform(-0.15, 0.15, 2)) * image.size
    scales = np.linspace(1, 1 - rng.uniform(0.12, 0.3), 15)
    shifted = [_sampled(image, cy + s * (y - cy), cx + s * (x - cx)) for s in scales]
    return as_image(np.mean(shifted, axis=0))


def frosted(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Pixels shuffled within 2 to 6 pixels."""
    y, x = _grid(image)
    far = rng.uniform(2, 6)
    away = rng.uniform(-far, far, (2, image.height, image.width))
    return _looked_up(image, np.rint(y + away[0]), np.rint(x + away[1]))


def duotone(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Brightness mapped to a gradient of two or three colours."""
    dark, light = (tuple(int(c) for c in rng.integers(*ends, 3)) for ends in ((0, 120), (140, 256)))
    middle = tuple(int(c) for c in rng.integers(30, 226, 3)) if rng.random() < 0.4 else None
    return ImageOps.colorize(ImageOps.autocontrast(image.convert("L")), dark, light, middle)


def shifted_strips(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Strips of rows moved sideways, some in one colour only."""
    pixels = np.asarray(image).copy()
    edges = np.sort(rng.integers(0, image.height, int(rng.integers(6, 20))))
    for top, bottom in zip(edges[:-1], edges[1:], strict=True):
        far = int(rng.normal(0, 0.1) * image.width)
        channels = slice(None) if rng.random() < 0.6 else slice(int(rng.integers(3)), None)
        pixels[top:bottom, :, channels] = np.roll(pixels[top:bottom, :, channels], far, axis=1)
    return Image.fromarray(pixels)


def painting(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """The most frequent colour of a neighbourhood of a few colours."""
    flat = image.quantize(int(rng.integers(8, 33))).convert("RGB")
    return flat.filter(ImageFilter.ModeFilter(int(rng.choice([5, 7, 9]))))


def cut_out(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """A circle, rounded box, diamond or heart of it on a plain ground."""
    mask = Image.new("L", image.size)
    pen, (w, h) = ImageDraw.Draw(mask), image.size
    kind = int(rng.integers(4))
    if kind == 0:
        pen.ellipse((0, 0, w, h), 255)
    elif kind == 1:
        pen.rounded_rectangle((0, 0, w, h), round(min(w, h) * rng.uniform(0.2, 0.4)), 255)
    elif kind == 2:
        pen.polygon([(w / 2, 0), (w, h / 2), (w / 2, h), (0, h / 2)], 255)
    else:
        turns = np.linspace(0, 2 * np.pi, 80)
        xs = w / 2 + w / 34 * 16 * np.sin(turns) ** 3
        ys = h * 0.45 - h / 34 * (
            13 * np.cos(turns) - 5 * np.cos(2 * turns) - 2 * np.cos(3 * turns) - np.cos(4 * turns)
        )
        pen.polygon(list(zip(xs.tolist(), ys.tolist(), strict=True)), 255)
    room = rng.uniform(1.0, 1.4)
    page = Image.new("RGB", (round(w * room), round(h * room)), colour(rng))
    page.paste(image, ((page.width - w) // 2, (page.height - h) // 2), mask)
    return page


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        *(contour, halftone, moire, wave, swirl, motion_blur, zoom_blur, frosted),
        *(duotone, shifted_strips, painting, cut_out),
    )
}


def _grid(image: Image.Image) -> tuple[Floats, Floats]:
    y, x = np.mgrid[0 : image.height, 0 : image.width].astype(float)
    return y, x


def _sampled(image: Image.Image, y: Floats, x: Floats) -> Floats:
    """Pixels nearest to the places given; beyond the edge the edge continues."""
    rows = np.clip(np.rint(y), 0, image.height - 1).astype(int)
    columns = np.clip(np.rint(x), 0, image.width - 1).astype(int)
    seen: Floats = np.asarray(image, float)[rows, columns]
    return seen


def _looked_up(image: Image.Image, y: Floats, x: Floats) -> Image.Image:
    return as_image(_sampled(image, y, x))


if tuple(EDITS) != UNSEEN:
    raise RuntimeError(f"expected the edits of {UNSEEN}, got {tuple(EDITS)}")
