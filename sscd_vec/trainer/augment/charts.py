"""A page being drawn, and the charts on it: bars, curves, points, pies, boxes, panels."""

import functools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Colour: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyzeeeeaaaaooiinnttrrss      "))
SIGNS = np.array(list("0123456789.,-+()=:;{}[]<>/*_ "))
SMALLEST_LETTERS = 5


class Sheet:
    """A page being drawn: its pen, its theme and the generator that decides everything.

    Attributes:
        random: Decides everything.
        image: The page.
        pen: Draws on it.
        width: Its width in pixels.
        height: Its height in pixels.
        dark: Whether the paper is dark.
        ink: Colour of letters and lines.
        accents: Four colours for everything else.
    """

    def __init__(self, random: np.random.Generator, area: int, fonts: tuple[str, ...]) -> None:
        """Begin a page of about ``area`` pixels, 9:16 to 16:9."""
        ratio = float(np.exp(random.uniform(-0.58, 0.58)))
        self.random = random
        self.width, self.height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        self.dark = bool(random.random() < 0.3)
        shade = random.integers(0, 45, 3) if self.dark else 255 - random.integers(0, 40, 3)
        self.paper = rgb(shade if random.random() < 0.6 else np.full(3, 0 if self.dark else 255))
        self.ink = rgb(random.integers(180, 256, 3) if self.dark else random.integers(0, 90, 3))
        self.accents = [rgb(random.integers(20, 236, 3)) for _ in range(4)]
        self.image = Image.new("RGB", (self.width, self.height), self.paper)
        self.pen = ImageDraw.Draw(self.image)
        self._fonts = fonts
        self._path = fonts[int(random.integers(len(fonts)))] if fonts else ""

    def words(self, length: int, signs: float = 0.1) -> str:
        """Random letters and spaces, some of them digits and signs."""
        letters = self.random.choice(LETTERS, length)
        others = self.random.random(length) < signs
        letters[others] = self.random.choice(SIGNS, int(others.sum()))
        return "".join(letters)

    def write(self, x: float, y: float, text: str, size: float, fill: Colour | None = None) -> None:
        """Write one line with its top left corner at ``(x, y)``."""
        font = _font(self._path, max(SMALLEST_LETTERS, round(size)))
        self.pen.text((x, y), text, fill=fill or self.ink, font=font)

    def paragraph(self, box: Box, size: float, fill: Colour | None = None) -> None:
        """Fill a box with lines of words, the last of each paragraph short."""
        left, top, right, bottom = box
        step = size * self.random.uniform(1.25, 1.7)
        most = max(2, int((right - left) / (size * 0.5)))
        y = top
        while y + size < bottom:
            short = self.random.random() < 0.2
            length = int(
                most * (self.random.uniform(0.2, 0.9) if short else self.random.uniform(0.9, 1))
            )
            self.write(left, y, self.words(max(1, length)), size, fill)
            y += step * (1.6 if short else 1)

    def accent(self) -> Colour:
        """Pick one of the four accents."""
        return self.accents[int(self.random.integers(4))]

    def between(self, low: float, high: float) -> float:
        """Draw a number from a range."""
        return float(self.random.uniform(low, high))


def bars(page: Sheet, box: Box | None = None) -> None:
    """Draw a bar chart or histogram, vertical or horizontal."""
    left, top, right, bottom = box or _chart_frame(page)
    count, lying = int(page.random.integers(3, 25)), page.random.random() < 0.3
    levels = (
        page.random.random(count)
        if page.random.random() < 0.6
        else np.exp(-(np.linspace(-2, 2, count) ** 2)) * page.random.uniform(0.7, 1, count)
    )
    gap, same, fill = page.between(0, 0.5), page.random.random() < 0.6, page.accent()
    for i, level in enumerate(levels):
        low, high = (i + gap / 2) / count, (i + 1 - gap / 2) / count
        level = max(level, 0.02)
        across = (
            left,
            top + low * (bottom - top),
            left + level * (right - left),
            top + high * (bottom - top),
        )
        up = (
            left + low * (right - left),
            bottom - level * (bottom - top),
            left + high * (right - left),
            bottom,
        )
        page.pen.rectangle(across if lying else up, fill=fill if same else page.accent())


def lines(page: Sheet, box: Box | None = None) -> None:
    """Draw one to five curves."""
    left, top, right, bottom = box or _chart_frame(page)
    for _ in range(int(page.random.integers(1, 6))):
        count = int(page.random.integers(4, 60))
        walk = np.cumsum(page.random.standard_normal(count))
        walk = (walk - walk.min()) / (np.ptp(walk) + 1e-6)
        xs = np.linspace(left, right, count)
        ys = bottom - (bottom - top) * (walk * page.between(0.2, 0.7) + page.between(0, 0.3))
        page.pen.line(
            list(zip(xs.tolist(), ys.tolist(), strict=True)),
            fill=page.accent(),
            width=int(page.random.integers(1, 4)),
        )


def scatter(page: Sheet, box: Box | None = None) -> None:
    """Draw clouds of points."""
    left, top, right, bottom = box or _chart_frame(page)
    for _ in range(int(page.random.integers(1, 5))):
        spread = page.random.normal(0, 0.15, (2, 2))
        cloud = page.random.standard_normal((int(page.random.integers(8, 120)), 2)) @ spread
        cloud = np.clip(cloud + page.random.uniform(0.15, 0.85, 2), 0, 1)
        fill, half = page.accent(), page.between(1, 4)
        for u, v in cloud:
            x, y = left + u * (right - left), top + v * (bottom - top)
            page.pen.ellipse((x - half, y - half, x + half, y + half), fill=fill)


def pie(page: Sheet, box: Box | None = None) -> None:
    """Draw a pie or a ring."""
    left, top, right, bottom = box or _chart_frame(page)
    half = min(right - left, bottom - top) / 2 * page.between(0.6, 1)
    x, y = (
        page.between(left + half, max(right - half, left + half)),
        page.between(top + half, max(bottom - half, top + half)),
    )
    ends = (
        np.concatenate(
            [[0], np.cumsum(page.random.dirichlet(np.ones(int(page.random.integers(2, 9)))))]
        )
        * 360
    )
    turn = page.between(0, 360)
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        fill = rgb(page.random.integers(20, 236, 3))
        page.pen.pieslice(
            (x - half, y - half, x + half, y + half),
            turn + start,
            turn + end,
            fill=fill,
            outline=page.paper,
        )
    if page.random.random() < 0.4:
        hole = half * page.between(0.3, 0.7)
        page.pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=page.paper)


def flow(page: Sheet, box: Box | None = None) -> None:
    """Draw boxes joined by lines."""
    left, top, right, bottom = box or (0, 0, page.width, page.height)
    count = int(page.random.integers(3, 9))
    xs, ys = page.random.uniform(left, right, count), page.random.uniform(top, bottom, count)
    page.pen.line(list(zip(xs.tolist(), ys.tolist(), strict=True)), fill=page.ink, width=2)
    for x, y in zip(xs, ys, strict=True):
        half = np.array(
            [page.between(0.06, 0.16) * (right - left), page.between(0.04, 0.09) * (bottom - top)]
        )
        shape = (page.pen.rectangle, page.pen.ellipse)[int(page.random.integers(2))]
        shape(
            (x - half[0], y - half[1], x + half[0], y + half[1]),
            fill=page.accent(),
            outline=page.ink,
        )
        page.write(x - half[0] * 0.8, y - half[1] * 0.5, page.words(5), half[1])


def dashboard(page: Sheet) -> None:
    """Draw panels with charts and numbers."""
    rows, columns = int(page.random.integers(2, 4)), int(page.random.integers(2, 4))
    wide, tall = page.width / columns, page.height / rows
    rim = min(wide, tall) * 0.04
    for cell in range(rows * columns):
        left, top = cell % columns * wide, cell // columns * tall
        right, bottom = left + wide, top + tall
        edge = blend(page.paper, page.ink)
        page.pen.rectangle((left + rim, top + rim, right - rim, bottom - rim), outline=edge)
        page.write(left + 2 * rim, top + rim, page.words(10), tall * 0.1)
        inner = (left + 2 * rim, top + 2 * rim + tall * 0.12, right - 2 * rim, bottom - 2 * rim)
        kind = int(page.random.integers(6))
        if kind < 4:
            (bars, lines, scatter, pie)[kind](page, inner)
        else:
            page.write(inner[0], inner[1], page.words(4, 1.0), tall * 0.4, page.accent())


def _chart_frame(page: Sheet) -> Box:
    """Draw axes, grid, title and labels; returns the box left for the chart."""
    w, h = page.width, page.height
    left, top = w * page.between(0.04, 0.18), h * page.between(0.03, 0.18)
    right, bottom = w * page.between(0.75, 0.98), h * page.between(0.8, 0.96)
    if page.random.random() < 0.6:
        for y in np.linspace(top, bottom, int(page.random.integers(3, 8))):
            page.pen.line((left, y, right, y), fill=blend(page.paper, page.ink))
            page.write(2, y, page.words(3, 1.0), h * 0.03)
    if page.random.random() < 0.7:
        page.pen.line((left, top, left, bottom, right, bottom), fill=page.ink)
    if page.random.random() < 0.7:
        page.write(
            w * page.between(0.1, 0.5),
            2,
            page.words(int(page.between(6, 24))),
            h * page.between(0.03, 0.06),
        )
    return left, top, right, bottom


def circle(count: int, turn: float = 0.0) -> npt.NDArray[np.float64]:
    """Points (count, 2) on the unit circle."""
    angles = turn + np.arange(count) * (2 * np.pi / count)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def rgb(levels: npt.NDArray[np.integer]) -> Colour:
    """Levels as a Pillow colour."""
    return tuple(int(level) for level in levels)


def blend(one: Colour, other: Colour) -> Colour:
    """Three parts of one colour and one of the other."""
    return tuple((3 * a + b) // 4 for a, b in zip(one, other, strict=True))


@functools.lru_cache(maxsize=512)
def _font(path: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    try:
        return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)
    except OSError:
        return ImageFont.load_default(size)
