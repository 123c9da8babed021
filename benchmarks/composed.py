"""Overlays and collages of the DISC-like set's generator whose pasted region is known.

The generator draws where a picture goes without looking at its pixels. So the same draw made with a
black and with a white picture differs exactly where the picture is seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edits_composed import collage, overlay_on
from edits_pixels import Edit
from photos import Photo

Kind = Literal["overlay", "collage"]
KINDS: tuple[Kind, ...] = ("overlay", "collage")
EDITS: dict[Kind, Edit] = {"overlay": overlay_on, "collage": collage}


@dataclass(frozen=True)
class Composed:
    """A picture made of several photos.

    Attributes:
        kind: How it was made.
        image: The picture.
        region: ``(height, width)``, where the source is seen in it.
        source: Number of the source photo.
    """

    kind: Kind
    image: Image.Image
    region: NDArray[np.bool_]
    source: int

    @property
    def share(self) -> float:
        """Part of the picture that is the source."""
        return float(self.region.mean())


def compose(
    sources: Sequence[Photo], others: Sequence[Photo], kind: Kind, seed: int = 0
) -> Iterator[Composed]:
    """One picture per source: pasted onto another photo (20–65 % of it), or a cell of a collage."""
    for number, source in enumerate(sources):
        photo = source.image()
        black, white, image = (
            _draw(picture, others, kind, (seed, number))
            for picture in (
                Image.new("RGB", photo.size, (0, 0, 0)),
                Image.new("RGB", photo.size, (255, 255, 255)),
                photo,
            )
        )
        region = (np.asarray(black) != np.asarray(white)).any(axis=2)
        yield Composed(kind, image, region, number)


def _draw(
    picture: Image.Image, others: Sequence[Photo], kind: Kind, seed: tuple[int, int]
) -> Image.Image:
    rng = np.random.default_rng(seed)
    made, _ = EDITS[kind](picture, rng, lambda: others[int(rng.integers(len(others)))].image())
    return made
