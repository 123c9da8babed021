"""What a copy looks like next to its siblings, and which one of a group to keep.

The one to keep is the largest file of the sharpest of the largest pictures: among those with at
least 75 % of the pixels of the biggest one, those with at least 75 % of the best sharpness,

    sharpness = median over blocks of 16×16 of Var(∇²g),   g = grey levels, long side ≤ 1024,

so that an enlarged thumbnail or a blurred resave does not win by its size alone. The median keeps
a caption, a sticker or a frame, whose hard edges are in few blocks, from looking like detail; the
margin keeps the block edges of strong compression from doing so. Files of equal size: the shorter
path.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SHARPNESS_SIDE = 1024
BLOCK = 16
THUMBNAIL_SIDE = 240
THUMBNAIL_QUALITY = 65
NEARLY_AS_LARGE = 0.75
NEARLY_AS_SHARP = 0.75


@dataclass(frozen=True)
class Picture:
    """A file as a person would judge it.

    Attributes:
        path: The file.
        file_size: Bytes on disk.
        width: Pixels across, upright.
        height: Pixels down, upright.
        sharpness: Median variance of the Laplacian.
        thumbnail: A small JPEG.
    """

    path: Path
    file_size: int
    width: int
    height: int
    sharpness: float
    thumbnail: bytes


def look(path: Path) -> Picture:
    """Read a picture's size, sharpness and thumbnail.

    Raises:
        OSError: The file cannot be read or decoded.
    """
    with Image.open(path) as image:
        width, height = image.size
        if image.getexif().get(0x0112, 1) >= 5:  # orientations 5–8 lie on their side
            width, height = height, width
        image.draft("RGB", (SHARPNESS_SIDE, SHARPNESS_SIDE))
        upright = flat_rgb(ImageOps.exif_transpose(image))
    upright.thumbnail((SHARPNESS_SIDE, SHARPNESS_SIDE), Image.Resampling.BOX)
    return Picture(path, path.stat().st_size, width, height, sharpness(upright), thumbnail(upright))


def keep(pictures: Sequence[Picture]) -> int:
    """Position of the one to keep."""
    pixels = [picture.width * picture.height for picture in pictures]
    large = [n for n in range(len(pictures)) if pixels[n] >= NEARLY_AS_LARGE * max(pixels)]
    sharpest = max(pictures[n].sharpness for n in large)
    sharp = [n for n in large if pictures[n].sharpness >= NEARLY_AS_SHARP * sharpest]
    return max(sharp, key=lambda n: (pictures[n].file_size, -len(str(pictures[n].path))))


def sharpness(image: Image.Image) -> float:
    """Median over 16×16 blocks of the variance of the four-neighbour Laplacian."""
    grey = np.asarray(image.convert("L"), np.float32)
    if min(grey.shape) < 3:
        return 0.0
    laplacian = (
        grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * grey[1:-1, 1:-1]
    )
    height, width = (side // BLOCK * BLOCK for side in laplacian.shape)
    if not height or not width:
        return float(laplacian.var())
    blocks = laplacian[:height, :width].reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    return float(np.median(blocks.var((1, 3))))


def thumbnail(image: Image.Image, side: int = THUMBNAIL_SIDE) -> bytes:
    """A small JPEG of an RGB image."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY, optimize=True)
    return buffer.getvalue()


def flat_rgb(image: Image.Image) -> Image.Image:
    """RGB, with what was transparent shown on white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layered = image.convert("RGBA")
        flat = Image.new("RGB", layered.size, (255, 255, 255))
        flat.paste(layered, mask=layered.getchannel("A"))
        return flat
    return image.convert("RGB")
