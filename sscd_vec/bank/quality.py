"""What one image file shows: its size, how much detail its pixels carry, its JPEG table, its notes.

A file says how many pixels it has, not how much they show: an enlarged thumbnail has many and shows
little. The *resolution* of an image is the part ρ of its side that carries detail. Photographs
have nearly the same power in every octave; enlarging or blurring leaves nothing above some
frequency. So with the power spectrum P of grey levels in windows of 64×64,

    g(k) = k² P(k) / mean of k² P(k) over 2 ≤ k ≤ 8,      k = 1 … 32 cycles per window,
    ρ = (first k > 8 from which on g(k) < 1/10) / 32,

with the median of g over the half of the windows that have most texture: a caption or a sticker
is in few of them.
"""

import io
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.bank.generations import Grid
from sscd_vec.bank.registration import SIDE, turned
from sscd_vec.encoder.images import open_image
from sscd_vec.files import ImageFile

Float32 = NDArray[np.float32]
Pixels = NDArray[np.uint8]

MIDDLE = 1024  # pixels a side of the middle of an image that its resolution is measured on
WINDOW, STRIDE = 64, 32
REFERENCE = slice(1, 8)  # 2 to 8 cycles per window
FAINT = 0.1  # of the reference: no detail
MARGIN = 6.0  # grey levels (standard deviation) by which a margin of one colour may vary
COLOURLESS = 6.0  # levels between the channels that rounding and JPEG leave in a grey image
THUMBNAIL_SIDE = 320
THUMBNAIL_QUALITY = 65
ORIENTATION, MAKE, MODEL, EXIF, TAKEN = 0x0112, 0x010F, 0x0110, 0x8769, 0x9003
# What ``turned`` does to the image of an EXIF orientation.
UPRIGHT = {1: 0, 2: 1, 3: 3, 4: 2, 5: 4, 6: 5, 7: 7, 8: 6}


@dataclass(frozen=True)
class InspectedImage:
    """What an image file shows.

    Attributes:
        file: The file.
        width: Pixels across, upright.
        height: Pixels down, upright.
        thumbnail: A small JPEG.
        resolution: Part of its side that carries detail, up to 1.
        has_camera_notes: Whether it carries a camera's EXIF.
        has_colour: Whether any part of it is not grey.
        format: What kind of file it is, as Pillow calls it: "JPEG".
        grid: Blocks and steps of a JPEG, upright.
        small: ``(h, w, 3)``, 128 pixels a side at most, upright.
    """

    file: ImageFile
    width: int
    height: int
    thumbnail: bytes
    resolution: float = 1.0
    has_camera_notes: bool = False
    has_colour: bool = True
    format: str = ""
    grid: Grid = field(default=Grid(), repr=False, compare=False)
    small: Pixels = field(
        default_factory=lambda: np.zeros((1, 1, 3), np.uint8), repr=False, compare=False
    )


def inspect_image(file: ImageFile) -> InspectedImage:
    """Read everything there is to know about one image.

    Raises:
        ImageError: The file cannot be opened.
        OSError: It cannot be decoded.
    """
    with open_image(file) as image:
        turn, camera = _notes(image)
        kind, steps = image.format or "", _steps(image)
        flat = flat_rgb(image)
    shape = flat.height, flat.width
    grey = np.asarray(flat.convert("L"))
    rows, columns = content_box(grey)
    small = np.asarray(turned(_small(flat), turn))
    flat.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), reducing_gap=2.0)
    height, width = shape[::-1] if turn & 4 else shape
    return InspectedImage(
        file,
        width,
        height,
        jpeg(np.ascontiguousarray(turned(np.asarray(flat), turn))),
        resolution(grey[_middle(rows), _middle(columns)].astype(np.float32)),
        camera,
        _has_colour(small),
        kind,
        Grid(0, 0, steps).turned(shape, turn),
        small,
    )


def load_grey(file: ImageFile) -> Pixels:
    """Grey levels at full size, upright; of a JPEG as they are stored.

    Raises:
        ImageError: The file cannot be opened.
        OSError: It cannot be decoded.
    """
    with open_image(file) as image:
        turn, _ = _notes(image)
        image.draft("L", image.size)
        grey = image if image.mode == "L" else flat_rgb(image).convert("L")
        return np.asarray(turned(np.asarray(grey), turn))


def _small(image: Image.Image) -> Pixels:
    factor = min(1.0, SIDE / max(image.size))
    width, height = (max(1, round(side * factor)) for side in image.size)
    return np.asarray(image.resize((width, height), Image.Resampling.BOX, reducing_gap=2.0))


def _has_colour(pixels: Pixels) -> bool:
    channels = pixels.astype(np.int16)
    return float(np.percentile(np.ptp(channels, axis=2), 98)) > COLOURLESS


def resolution(grey: Float32) -> float:
    """Part of the side that carries detail, up to 1; of images too small or flat to say, 1.

    Args:
        grey: ``(height, width)`` grey levels.
    """
    if min(grey.shape) < WINDOW:
        return 1.0
    every = np.lib.stride_tricks.sliding_window_view(grey, (WINDOW, WINDOW))
    windows = every[::STRIDE, ::STRIDE].reshape(-1, WINDOW, WINDOW)
    rings = _octave_power(windows - windows.mean((1, 2), keepdims=True))
    reference = rings[:, REFERENCE].mean(1)
    textured = (reference >= np.median(reference)) & (reference > 0)
    if not textured.any():
        return 1.0
    g = np.median(rings[textured] / reference[textured, None], 0)
    faint = g < FAINT
    faint[: REFERENCE.stop] = False
    ends = faint & np.append(faint[1:], True)  # one faint ring alone is a gap, not the end
    if not ends.any():
        return 1.0
    first = int(ends.argmax())
    drop = math.log(g[first - 1] / FAINT), math.log(max(g[first], 1e-9) / FAINT)
    past = min(1.0, max(0.0, drop[0] / (drop[0] - drop[1])))  # where between the two rings
    return (first + past) / (WINDOW // 2)


def _octave_power(windows: Float32) -> NDArray[np.float64]:
    """``k² P(k)`` of each window, for k = 1 … 32 cycles."""
    taper = np.hanning(WINDOW)
    power = np.abs(np.fft.rfft2(windows * np.outer(taper, taper))) ** 2
    cycles = np.hypot(*np.meshgrid(np.fft.fftfreq(WINDOW), np.fft.rfftfreq(WINDOW), indexing="ij"))
    ring = np.rint(cycles * WINDOW).astype(int)
    return np.stack([k**2 * power[:, ring == k].mean(1) for k in range(1, WINDOW // 2 + 1)], 1)


def content_box(grey: NDArray[np.uint8]) -> tuple[slice, slice]:
    """Rows and columns inside margins of one colour; everything, if all is one colour."""
    rows, columns = _varied(grey[:, ::4].std(1)), _varied(grey[::4].std(0))
    whole = slice(0, grey.shape[0]), slice(0, grey.shape[1])
    return (rows, columns) if rows and columns else whole


def _varied(deviation: NDArray[np.floating]) -> slice | None:
    inside = np.flatnonzero(deviation > MARGIN)
    return slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else None


def _middle(part: slice) -> slice:
    start = part.start + max(0, part.stop - part.start - MIDDLE) // 2
    return slice(start, min(start + MIDDLE, part.stop))


def _notes(image: Image.Image) -> tuple[int, bool]:
    """How to turn the image upright, and whether a camera took it; damaged EXIF says nothing."""
    try:
        exif = image.getexif()
        camera = any(tag in exif for tag in (MAKE, MODEL)) or TAKEN in exif.get_ifd(EXIF)
        orientation = exif.get(ORIENTATION, 1)
        return UPRIGHT.get(orientation, 0), camera
    except Exception:  # Pillow raises SyntaxError, struct.error and others
        return 0, False


def _steps(image: Image.Image) -> NDArray[np.float64] | None:
    tables = getattr(image, "quantization", None)
    if not tables or 0 not in tables or len(tables[0]) != 64:
        return None
    return np.maximum(np.asarray(tables[0], np.float64).reshape(8, 8), 1)


def jpeg(
    pixels: NDArray[np.uint8], side: int = THUMBNAIL_SIDE, quality: int = THUMBNAIL_QUALITY
) -> bytes:
    """A JPEG of at most ``side`` pixels, without metadata."""
    small = Image.fromarray(pixels)
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=quality, optimize=True)
    return buffer.getvalue()


def flat_rgb(image: Image.Image) -> Image.Image:
    """RGB, with what was transparent shown on white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layered = image.convert("RGBA")
        flat = Image.new("RGB", layered.size, (255, 255, 255))
        flat.paste(layered, mask=layered.getchannel("A"))
        return flat
    return image.convert("RGB")
