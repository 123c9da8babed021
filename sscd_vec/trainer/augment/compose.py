"""Compose a view into something larger: a collage, another image, a drawn interface.

The view fills an eighth to two thirds of the result; fillers, images outside the batch, fill the
rest. A composed view therefore keeps one source, and the loss sees no false negative. Everything
random follows from one seed.
"""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.trainer.augment.colour import random_colour

Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels
Cell = tuple[float, float, float, float]  # the same, in fractions of the side
GRIDS = ((1, 2), (2, 1), (2, 2), (2, 2), (2, 2), (2, 2), (2, 3), (3, 2))
FILLERS = 8  # other images in one composition: more than the cells of any page
SMALLEST_CELL = 0.15  # smallest fraction of the area for the view itself
LINE = 0.012  # thickness of drawn strokes, as a fraction of the side


def compose(image: Tensor, fillers: Tensor, seed: int) -> Tensor:
    """Put ``image`` into a composition.

    Args:
        image: (3, s, s) the view.
        fillers: (k, 3, s, s) other images, at least one.
        seed: Decides layout, places, colours and which fillers are used.

    Returns:
        (3, s, s) in which ``image`` is smaller.
    """
    random = np.random.default_rng(seed)
    kind = random.choice(4, p=(0.4, 0.3, 0.25, 0.05))
    make = (collage, backdrop, interface, stack)[kind]
    shown = random.choice(len(fillers), min(FILLERS, len(fillers)), replace=False)
    return make(image, fillers[torch.from_numpy(shown)], random)


def collage(image: Tensor, fillers: Tensor, random: np.random.Generator) -> Tensor:
    """Show the view in one cell of a grid or of a randomly split page, with plain gaps."""
    size = image.shape[-1]
    cells = _grid(random) if random.random() < 0.6 else _splits(random)
    large = [i for i, cell in enumerate(cells) if _area(cell) >= SMALLEST_CELL]
    own = int(random.choice(large or [int(np.argmax([_area(cell) for cell in cells]))]))
    page = _plain(size, random, image)
    gap = random.uniform(0, 0.03) * (random.random() < 0.7)
    squeezed = random.random() < 0.5
    for index, (left, top, right, bottom) in enumerate(cells):
        box = (left + gap / 2, top + gap / 2, right - gap / 2, bottom - gap / 2)
        shown = image if index == own else fillers[index % len(fillers)]
        _place(page, shown, _pixels(box, size), squeezed=squeezed)
    return page


def stack(image: Tensor, fillers: Tensor, random: np.random.Generator) -> Tensor:
    """Stack three overlapping images; the view lies on top."""
    size = image.shape[-1]
    page = _plain(size, random, image)
    for index in range(3):
        shown = image if index == 2 else fillers[index % len(fillers)]
        _place(page, shown, _pixels(_box(random, 0.4, 0.65), size))
    return page


def backdrop(image: Tensor, fillers: Tensor, random: np.random.Generator) -> Tensor:
    """Paste onto another image at 40 to 80 % of its side, sometimes with a rim or translucent."""
    size = image.shape[-1]
    page = fillers[0].clone()
    left, top, right, bottom = _pixels(_box(random, 0.4, 0.8), size)
    if random.random() < 0.25:
        rim = max(1, round(size * random.uniform(0.01, 0.03)))
        around = (slice(max(top - rim, 0), bottom + rim), slice(max(left - rim, 0), right + rim))
        page[:, around[0], around[1]] = random_colour(random, image)[:, None, None]
    opacity = random.uniform(0.65, 1) if random.random() < 0.25 else 1.0
    under = page[:, top:bottom, left:right].clone()
    _place(page, image, (left, top, right, bottom))
    page[:, top:bottom, left:right].lerp_(under, 1 - opacity)
    return page


def interface(image: Tensor, fillers: Tensor, random: np.random.Generator) -> Tensor:
    """Show the view in a drawn phone, web page or program: bars, text, buttons, thumbnails."""
    size = image.shape[-1]
    page, dark = _page(size, random)
    left, top, right, bottom = _pixels(_box(random, 0.35, 0.8), size)
    levels = torch.from_numpy(np.array(page)).permute(2, 0, 1)
    drawn = levels.to(image.device, image.dtype).div_(255)
    if random.random() < 0.3:
        _place(drawn, fillers[0], _pixels(_box(random, 0.1, 0.25), size))
    if random.random() < 0.3:
        drawn[:, max(top - 2, 0) : bottom + 2, max(left - 2, 0) : right + 2] = float(not dark)
    _place(drawn, image, (left, top, right, bottom))
    return drawn


def _page(size: int, random: np.random.Generator) -> tuple[Image.Image, bool]:
    """Draw an empty screen; also returns whether it is dark."""
    dark = bool(random.random() < 0.4)
    paper = tuple(
        int(c) for c in (random.integers(0, 50, 3) if dark else 255 - random.integers(0, 30, 3))
    )
    accent = tuple(int(c) for c in random.integers(0, 256, 3))
    page = Image.new("RGB", (size, size), paper)
    pen = ImageDraw.Draw(page)
    for edge in random.permutation(4)[: int(random.integers(1, 4))]:
        _bar(
            pen, size, int(edge), random, accent if random.random() < 0.5 else _shade(random, dark)
        )
    _lines(pen, size, random, dark)
    for _ in range(int(random.integers(0, 6))):
        x, y = random.uniform(0, size, 2)
        half = size * random.uniform(0.015, 0.06)
        shape = (pen.ellipse, pen.rectangle)[int(random.integers(2))]
        shape(
            (x - half, y - half, x + half, y + half),
            fill=accent if random.random() < 0.5 else _shade(random, dark),
        )
    return page, dark


def _lines(pen: ImageDraw.ImageDraw, size: int, random: np.random.Generator, dark: bool) -> None:
    """Draw lines of words as short strokes, as text looks from a distance."""
    for _ in range(int(random.integers(1, 5))):
        left, top = random.uniform(0, 0.8, 2) * size
        wide = random.uniform(0.15, 1) * size
        step = size * random.uniform(0.03, 0.06)
        ink = _shade(random, not dark)
        for row in range(int(random.integers(1, 12))):
            y, x = top + row * step, left
            while x < min(left + wide, size):
                word = size * random.uniform(0.02, 0.1)
                pen.rectangle((x, y, x + word, y + step * 0.4), fill=ink)
                x += word + size * LINE


def _bar(
    pen: ImageDraw.ImageDraw,
    size: int,
    edge: int,
    random: np.random.Generator,
    fill: tuple[int, ...],
) -> None:
    thick = size * random.uniform(0.04, 0.15)
    low, high = (0.0, thick) if edge % 2 else (size - thick, float(size))
    pen.rectangle((0, low, size, high) if edge < 2 else (low, 0, high, size), fill=fill)


def _shade(random: np.random.Generator, dark: bool) -> tuple[int, ...]:
    level = int(random.integers(10, 110) if dark else random.integers(150, 245))
    return level, level, level


def _grid(random: np.random.Generator) -> list[Cell]:
    rows, columns = GRIDS[int(random.integers(len(GRIDS)))]
    return [
        (x / columns, y / rows, (x + 1) / columns, (y + 1) / rows)
        for y in range(rows)
        for x in range(columns)
    ]


def _splits(random: np.random.Generator) -> list[Cell]:
    """Cut the unit square one to five times, always its largest cell."""
    cells = [(0.0, 0.0, 1.0, 1.0)]
    for _ in range(int(random.integers(1, 6))):
        cells.sort(key=_area)
        left, top, right, bottom = cells.pop()
        part = random.uniform(0.3, 0.7)
        if random.random() < (right - left) / (right - left + bottom - top):
            cut = left + part * (right - left)
            cells += [(left, top, cut, bottom), (cut, top, right, bottom)]
        else:
            cut = top + part * (bottom - top)
            cells += [(left, top, right, cut), (left, cut, right, bottom)]
    return cells


def _area(cell: Cell) -> float:
    return (cell[2] - cell[0]) * (cell[3] - cell[1])


def _box(random: np.random.Generator, low: float, high: float) -> Cell:
    """A random box: sides ``low`` to ``high`` of the page's, both of similar length."""
    side = random.uniform(low, high)
    wide, tall = np.clip(side * np.exp(random.uniform(-0.25, 0.25, 2)), low, high)
    left, top = random.uniform(0, 1, 2) * (1 - np.array([wide, tall]))
    return left, top, left + wide, top + tall


def _pixels(box: Cell, size: int) -> Box:
    left, top, right, bottom = (round(edge * size) for edge in box)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _place(page: Tensor, image: Tensor, box: Box, *, squeezed: bool = True) -> None:
    """Draw ``image`` into a box: squeezed, or cropped to the box's shape."""
    left, top, right, bottom = box
    part = page[:, top:bottom, left:right]
    high, wide = part.shape[1:]
    if not squeezed:
        side = image.shape[-1]
        rows, columns = (round(side * min(1.0, a / b)) for a, b in ((high, wide), (wide, high)))
        up, aside = (side - rows) // 2, (side - columns) // 2
        image = image[:, up : up + max(rows, 1), aside : aside + max(columns, 1)]
    shown = F.interpolate(image[None], (high, wide), mode="bilinear", antialias=True)[0]
    part[:] = shown.clamp_(0, 1)


def _plain(size: int, random: np.random.Generator, like: Tensor) -> Tensor:
    return random_colour(random, like)[:, None, None].repeat(1, size, size)
