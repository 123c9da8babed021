"""Text, emoji and scribbles to paste: fonts and pictures found once, sprites rendered when drawn.

Fonts come from the folder given, else from ``augly``'s assets if that package is installed, else
from matplotlib's DejaVu fonts, else Pillow's built-in one. Emoji come from the folder given, else
augly's Twemoji, else faces, hearts, stars and speech bubbles drawn here. Only augly's files are
used, never its code (``pip install --no-deps augly`` is enough).
"""

import functools
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

FONT_ENDINGS = frozenset({".ttf", ".otf", ".ttc"})
PICTURE_ENDINGS = frozenset({".png", ".webp", ".gif"})
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!?&@#$%.,:-+"
LONGEST_TEXT = 16
NO_CHARACTER = "\U0010fffe"  # never assigned: every font shows its sign for "missing"
FONT_TRIES = 4
SMALLEST_SPRITE = 4
LARGEST_SPRITE = 512

Sprite = npt.NDArray[np.float32]  # (h, w, 4), colours multiplied by alpha, 0 to 1


@dataclass(frozen=True)
class Overlays:
    """What text and emoji are made from.

    Attributes:
        fonts: Font files; empty uses Pillow's built-in font.
        pictures: Emoji files; empty draws stickers.
    """

    fonts: tuple[Path, ...] = ()
    pictures: tuple[Path, ...] = ()

    @classmethod
    def find(cls, fonts: str = "", emoji: str = "") -> "Overlays":
        """Look in the folders given, then in what is installed.

        Raises:
            ValueError: A folder was given and holds no font or no picture.
        """
        font_places = [Path(fonts)] if fonts else _installed("augly", "assets/fonts")
        font_places = font_places or _installed("matplotlib", "mpl-data/fonts/ttf")
        emoji_places = [Path(emoji)] if emoji else _installed("augly", "assets/twemojis")
        found = cls(_files(font_places, FONT_ENDINGS), _files(emoji_places, PICTURE_ENDINGS))
        if fonts and not found.fonts:
            raise ValueError(f"no fonts in {fonts}: expected {', '.join(sorted(FONT_ENDINGS))}")
        if emoji and not found.pictures:
            raise ValueError(f"no emoji in {emoji}: expected {', '.join(sorted(PICTURE_ENDINGS))}")
        return found

    def text(self, seed: int, size: int) -> Sprite:
        """A random string in a random font and colour, ``size`` pixels of font size."""
        random = np.random.default_rng(seed)
        length = int(random.integers(1, LONGEST_TEXT + 1))
        string = "".join(random.choice(list(LETTERS), length))
        colour = random.integers(0, 256, 3)
        # A third of augly's fonts are for other scripts and show these letters as boxes.
        for _ in range(FONT_TRIES):
            font = str(self.fonts[random.integers(len(self.fonts))]) if self.fonts else ""
            mask = _write(font, size, string)
            if mask is not None:
                return _tinted(mask, colour)
        mask = _write("", size, string)
        return _tinted(np.ones((size, size), np.float32) if mask is None else mask, colour)

    def emoji(self, seed: int, size: int) -> Sprite:
        """A random emoji, ``size`` pixels high."""
        random = np.random.default_rng(seed)
        if self.pictures:
            picture = _picture(str(self.pictures[random.integers(len(self.pictures))]))
        else:
            picture = _sticker(random)
        wide = max(1, round(size * picture.width / picture.height))
        return _premultiplied(picture.resize((wide, size), Image.Resampling.BILINEAR))


def scribble(seed: int, size: int) -> Sprite:
    """One to five thick lines, straight or bent, over a square of ``size`` pixels."""
    random = np.random.default_rng(seed)
    picture = Image.new("RGBA", (size, size))
    pen = ImageDraw.Draw(picture)
    for _ in range(int(random.integers(1, 6))):
        colour = tuple(int(c) for c in random.integers(0, 256, 3))
        thick = max(1, round(size * random.uniform(0.01, 0.09)))
        corners = random.uniform(0, size, (int(random.integers(2, 7)), 2))
        pen.line([(x, y) for x, y in corners.tolist()], fill=colour, width=thick, joint="curve")
    return _premultiplied(picture)


def rendered_size(height: float) -> int:
    """Pixels at which to render a sprite that will be shown ``height`` pixels high."""
    return round(min(max(height, SMALLEST_SPRITE), LARGEST_SPRITE))


def _installed(package: str, folder: str) -> list[Path]:
    """A folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    places = [Path(p) / folder for p in (spec.submodule_search_locations or [])] if spec else []
    return [place for place in places if place.is_dir()]


def _files(places: Sequence[Path], endings: frozenset[str]) -> tuple[Path, ...]:
    found = (path for place in places for path in place.rglob("*"))
    return tuple(sorted(path for path in found if path.suffix.lower() in endings))


@functools.lru_cache(maxsize=1024)
def _font(path: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont | None:
    try:
        return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)
    except OSError:
        return None


@functools.lru_cache(maxsize=1024)
def _letters(path: str) -> frozenset[str]:
    """Those of ``LETTERS`` that a font has a picture of, other than its sign for "missing"."""
    font = _font(path, 16)
    if not path or not isinstance(font, ImageFont.FreeTypeFont):
        return frozenset(LETTERS)

    def drawn(letter: str) -> tuple[tuple[int, int], bytes]:
        mask = font.getmask(letter)
        return mask.size, bytes(mask)

    missing = drawn(NO_CHARACTER)
    shown = ((letter, drawn(letter)) for letter in LETTERS)
    return frozenset(letter for letter, look in shown if look != missing and any(look[1]))


def _write(font_path: str, size: int, string: str) -> npt.NDArray[np.float32] | None:
    """The string's coverage (h, w), or None if the font cannot show it."""
    font = _font(font_path, size)
    if font is None or not _letters(font_path).issuperset(string):
        return None
    left, top, right, bottom = (int(edge) for edge in font.getbbox(string))
    width, height = right - left, bottom - top
    if not (0 < width <= 64 * size and 0 < height <= 8 * size):
        return None
    canvas = Image.new("L", (width, height))
    ImageDraw.Draw(canvas).text((-left, -top), string, fill=255, font=font)
    mask: npt.NDArray[np.float32] = np.asarray(canvas, dtype=np.float32) / np.float32(255)
    return mask if mask.any() else None


def _premultiplied(picture: Image.Image) -> Sprite:
    sprite = np.asarray(picture, dtype=np.float32) / np.float32(255)
    sprite[..., :3] *= sprite[..., 3:]
    return sprite


def _tinted(mask: npt.NDArray[np.float32], colour: npt.NDArray[np.int64]) -> Sprite:
    shade = np.append(colour / 255, 1.0).astype(np.float32)
    return mask[..., None] * shade


@functools.lru_cache(maxsize=4096)
def _picture(path: str) -> Image.Image:
    with Image.open(path) as picture:
        return picture.convert("RGBA")


def _sticker(random: np.random.Generator) -> Image.Image:
    """A face, heart, star or speech bubble in random colours, 96 x 96."""
    picture = Image.new("RGBA", (96, 96))
    pen = ImageDraw.Draw(picture)
    fill = tuple(int(c) for c in random.integers(64, 256, 3))
    dark = tuple(c // 4 for c in fill)
    kind = random.integers(4)
    if kind == 0:
        pen.ellipse((2, 2, 93, 93), fill=fill, outline=dark, width=3)
        pen.ellipse((26, 28, 38, 44), fill=dark)
        pen.ellipse((58, 28, 70, 44), fill=dark)
        start = int(random.choice([0, 180]))  # smiling or sad
        pen.arc((26, 44, 70, 78), start, start + 180, fill=dark, width=5)
    elif kind == 1:
        turns = np.linspace(0, 2 * np.pi, 60)
        xs = 48 + 2.7 * 16 * np.sin(turns) ** 3
        ys = 44 - 2.7 * (13 * np.cos(turns) - 5 * np.cos(2 * turns) - 2 * np.cos(3 * turns))
        pen.polygon(list(zip(xs.tolist(), ys.tolist(), strict=True)), fill=fill, outline=dark)
    elif kind == 2:
        points = int(random.integers(5, 9))
        pen.polygon(
            [
                (48 + r * math.sin(a), 50 - r * math.cos(a))
                for i in range(2 * points)
                for r, a in [(46 if i % 2 == 0 else 20, math.pi * i / points)]
            ],
            fill=fill,
            outline=dark,
        )
    else:
        pen.rounded_rectangle((3, 8, 93, 66), radius=18, fill=fill, outline=dark, width=3)
        pen.polygon([(24, 64), (50, 64), (22, 92)], fill=fill)
        for x in (26, 48, 70):
            pen.ellipse((x - 6, 31, x + 6, 43), fill=dark)
    return picture
