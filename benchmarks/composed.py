"""Overlays and collages whose pasted region is known, for the heatmap and the tile benchmarks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from edits_composed import COLLAGES
from photos import Photo
from PIL import Image, ImageOps

Kind = Literal["overlay", "collage"]
KINDS: tuple[Kind, ...] = ("overlay", "collage")
SIDE = 480


@dataclass(frozen=True)
class Composed:
    """A picture made of several photos.

    Attributes:
        kind: How it was made.
        image: The picture.
        box: Where the source is in it: left, top, right, bottom.
        source: Number of the source photo.
    """

    kind: Kind
    image: Image.Image
    box: tuple[int, int, int, int]
    source: int

    @property
    def share(self) -> float:
        """Part of the picture that is the source."""
        left, top, right, bottom = self.box
        return (right - left) * (bottom - top) / (self.image.width * self.image.height)


def compose(
    sources: Sequence[Photo], others: Sequence[Photo], kind: Kind, seed: int = 0
) -> Iterator[Composed]:
    """One picture per source: pasted onto another photo (10–40 % of it), or a cell of a collage."""
    rng = np.random.default_rng(seed)
    for number, source in enumerate(sources):
        image = source.image()
        if kind == "overlay":
            page = ImageOps.fit(_other(others, rng), (SIDE, round(SIDE * 0.75)))
            share = rng.uniform(0.1, 0.4)
            scale = (share * page.width * page.height / (image.width * image.height)) ** 0.5
            scale = min(scale, page.width / image.width, page.height / image.height)
            size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
            x = int(rng.integers(0, page.width - size[0] + 1))
            y = int(rng.integers(0, page.height - size[1] + 1))
            page.paste(image.resize(size, Image.Resampling.LANCZOS), (x, y))
            box = (x, y, x + size[0], y + size[1])
        else:
            cells = COLLAGES[str(rng.choice(["one_and_two", "three", "four"]))]
            page = Image.new("RGB", (SIDE, SIDE))
            mine = int(rng.integers(len(cells)))
            for place, cell in enumerate(cells):
                left, top, right, bottom = (round(part * SIDE) for part in cell)
                photo = image if place == mine else _other(others, rng)
                page.paste(ImageOps.fit(photo, (right - left, bottom - top)), (left, top))
            left, top, right, bottom = (round(part * SIDE) for part in cells[mine])
            box = (left, top, right, bottom)
        yield Composed(kind, page, box, number)


def _other(others: Sequence[Photo], rng: np.random.Generator) -> Image.Image:
    return others[int(rng.integers(len(others)))].image()
