"""Text, emoji and scribbles: fonts and emoji files are found once, sprites rendered when needed.

Fonts come from the given folder, or from the package ``augly`` if it is installed, or from
matplotlib (DejaVu), or from Pillow. Emoji come from the given folder, or from augly (Twemoji), or
are drawn here: faces, hearts, stars and speech bubbles. augly's code never runs, only its files are
read, so ``pip install --no-deps augly`` is enough.
"""

import functools
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.trainer.augment.choices import Choices
from sscd_vec.trainer.augment.geometry import Views, as_tensor, pixel_centres

FONT_ENDINGS = frozenset({".ttf", ".otf", ".ttc"})
EMOJI_ENDINGS = frozenset({".png", ".webp", ".gif"})
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!?&@#$%.,:-+"
LONGEST_TEXT = 16
NO_CHARACTER = "\U0010fffe"  # never assigned: fonts show their sign for "missing"
FONT_TRIES = 4
SMALLEST_SPRITE = 4
LARGEST_SPRITE = 512

Sprite = npt.NDArray[np.float32]  # (h, w, 4), colours multiplied by alpha, 0 to 1


@dataclass(frozen=True)
class Overlays:
    """Font and emoji files.

    Attributes:
        fonts: Font files; empty uses Pillow's built-in font.
        emojis: Emoji files; empty draws stickers.
    """

    fonts: tuple[Path, ...] = ()
    emojis: tuple[Path, ...] = ()

    @classmethod
    def find(cls, fonts: str = "", emoji: str = "") -> "Overlays":
        """Look in the given folders, or in installed packages where none is given.

        Raises:
            ValueError: A given folder holds no font, or no emoji image.
        """
        font_places = [Path(fonts)] if fonts else _installed("augly", "assets/fonts")
        font_places = font_places or _installed("matplotlib", "mpl-data/fonts/ttf")
        emoji_places = [Path(emoji)] if emoji else _installed("augly", "assets/twemojis")
        found = cls(_files(font_places, FONT_ENDINGS), _files(emoji_places, EMOJI_ENDINGS))
        if fonts and not found.fonts:
            raise ValueError(f"no fonts in {fonts}: expected {', '.join(sorted(FONT_ENDINGS))}")
        if emoji and not found.emojis:
            raise ValueError(f"no emoji in {emoji}: expected {', '.join(sorted(EMOJI_ENDINGS))}")
        return found

    @functools.cached_property
    def complete_fonts(self) -> tuple[str, ...]:
        """The fonts that have all of ``LETTERS``."""
        paths = [str(path) for path in self.fonts]
        return tuple(p for p in paths if _font(p, 16) and _letters(p).issuperset(LETTERS))

    def text(self, seed: int, size: int) -> Sprite:
        """Render a random string in a random font and colour, at a font size of ``size`` pixels."""
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
        """Render a random emoji, ``size`` pixels high."""
        random = np.random.default_rng(seed)
        if self.emojis:
            drawing = _open_emoji(str(self.emojis[random.integers(len(self.emojis))]))
        else:
            drawing = _sticker(random)
        wide = max(1, round(size * drawing.width / drawing.height))
        return _premultiplied(drawing.resize((wide, size), Image.Resampling.BILINEAR))


def scribble(seed: int, size: int) -> Sprite:
    """Draw one to five thick lines, straight or bent, on a square of ``size`` pixels."""
    random = np.random.default_rng(seed)
    drawing = Image.new("RGBA", (size, size))
    pen = ImageDraw.Draw(drawing)
    for _ in range(int(random.integers(1, 6))):
        colour = tuple(int(c) for c in random.integers(0, 256, 3))
        thick = max(1, round(size * random.uniform(0.01, 0.09)))
        corners = random.uniform(0, size, (int(random.integers(2, 7)), 2))
        pen.line([(x, y) for x, y in corners.tolist()], fill=colour, width=thick, joint="curve")
    return _premultiplied(drawing)


def paste_overlays(images: Tensor, looks: Views, choices: Choices, overlays: Overlays) -> None:
    """Paste the chosen text, then emoji, into views; both lie in the frame before the rotation."""
    makers = (overlays.text, overlays.emoji)
    for layer, seeds in enumerate((choices.text, choices.emoji)):
        for row in np.flatnonzero(seeds >= 0):
            part, opacity, *place = choices.overlay[row, layer].tolist()
            frame, to_frame = looks.frame[row], looks.to_frame[row].copy()
            height = part * frame.min()
            # Output pixels per unit of the frame, so that the sprite is made at its final size.
            scale = images.shape[-1] / 2 / np.linalg.norm(to_frame[:, 1])
            pixels = rendered_size(height * scale)
            sprite = makers[layer](int(seeds[row]), pixels)
            half = np.array([sprite.shape[1], sprite.shape[0]]) * (height / pixels / 2)
            space = np.maximum(frame - 2 * half, 0)
            to_frame[:, 2] -= (np.array(place) - 0.5) * space
            paste(images[row], sprite, to_frame / half[:, None], opacity)


def paste(
    image: Tensor, sprite: Sprite, to_sprite: npt.NDArray[np.float64], opacity: float
) -> None:
    """Blend a sprite into ``image`` in place: ``x (1 - o a) + o c``.

    Args:
        image: (3, s, s).
        sprite: (h, w, 4), colours multiplied by alpha.
        to_sprite: (2, 3) from the image's [-1, 1]^2 to the sprite's.
        opacity: o.
    """
    size = image.shape[-1]
    top, bottom, left, right = _covered(to_sprite, size)
    if top >= bottom or left >= right:
        return
    points = pixel_centres(size, image.device)[top:bottom, left:right]
    grid = points @ as_tensor(to_sprite, image).T
    layer = torch.from_numpy(sprite).to(image.device).permute(2, 0, 1)[None]
    layer = F.grid_sample(
        layer, grid[None], mode="bilinear", padding_mode="zeros", align_corners=False
    )[0].mul_(opacity)
    image[:, top:bottom, left:right].mul_(1 - layer[3]).add_(layer[:3])


def rendered_size(height: float) -> int:
    """Height in pixels at which to render a sprite that appears ``height`` pixels high."""
    return round(min(max(height, SMALLEST_SPRITE), LARGEST_SPRITE))


def _covered(to_sprite: npt.NDArray[np.float64], size: int) -> tuple[int, int, int, int]:
    """Bounds of the pixels that a sprite touches: top, bottom, left, right."""
    corners = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]])
    back = np.linalg.solve(to_sprite[:, :2], (corners - to_sprite[:, 2]).T)  # (2, 4) in [-1, 1]
    pixels = (back + 1) * size / 2
    low = np.clip(np.floor(pixels.min(axis=1)) - 1, 0, size).astype(int)
    high = np.clip(np.ceil(pixels.max(axis=1)) + 1, 0, size).astype(int)
    return low[1], high[1], low[0], high[0]


def _installed(package: str, folder: str) -> list[Path]:
    """Find a folder of an installed package without importing the package."""
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
    """Those of ``LETTERS`` that a font has a glyph for, other than its sign for "missing"."""
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
    """Render a string as coverage (h, w); None if the font cannot show it."""
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


def _premultiplied(drawing: Image.Image) -> Sprite:
    sprite = np.asarray(drawing, dtype=np.float32) / np.float32(255)
    sprite[..., :3] *= sprite[..., 3:]
    return sprite


def _tinted(mask: npt.NDArray[np.float32], colour: npt.NDArray[np.int64]) -> Sprite:
    shade = np.append(colour / 255, 1.0).astype(np.float32)
    return mask[..., None] * shade


@functools.lru_cache(maxsize=4096)
def _open_emoji(path: str) -> Image.Image:
    with Image.open(path) as drawing:
        return drawing.convert("RGBA")


def _sticker(random: np.random.Generator) -> Image.Image:
    """Draw a face, heart, star or speech bubble in random colours, 96 x 96."""
    drawing = Image.new("RGBA", (96, 96))
    pen = ImageDraw.Draw(drawing)
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
    return drawing
