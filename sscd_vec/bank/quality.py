"""What an image shows next to its copies, and which one of a group to keep.

A file says how many pixels it has, not how much they show: an enlarged thumbnail has many and shows
little. The *resolution* of a image is the part ρ of its side that carries detail. Photographs
have nearly the same power in every octave; enlarging or blurring leaves nothing above some
frequency. So with the power spectrum P of grey levels in windows of 64×64,

    g(k) = k² P(k) / mean of k² P(k) over 2 ≤ k ≤ 8,      k = 1 … 32 cycles per window,
    ρ = (first k > 8 from which on g(k) < 1/10) / 32,

with the median of g over the half of the windows that have most texture: a caption or a sticker
is in few of them. The true side of an image is ρ √pixels, whatever size it was saved at.

The one to keep (``choose_best``) is the largest that is neither enlarged, blurred nor compressed
much harder than the others; of those the one with a camera's notes, then the oldest file, then the
one with the shortest path. The size of a file says nothing: saving again can only add bytes.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.encoder.images import open_image
from sscd_vec.files import ImageFile

Float32 = NDArray[np.float32]

SIDE = 1024  # pixels of the middle of a image that are looked at, at full size
WINDOW, STRIDE = 64, 32
REFERENCE = slice(1, 8)  # 2 to 8 cycles per window
FAINT = 0.1  # of the reference: no detail
SAME_SIZE = 0.97  # of the pixels
FINE = 17.3  # mean step of a JPEG's table for brightness at quality 85: finer is no better
HARDER = 1.8  # times the steps: compressed much harder
BLURRED = 0.7  # of another's resolution: less than that cannot be chance
# A larger image is an enlarged one if its resolution is below that part of the smaller one's and
# the smaller one has at least that part of its true side. Much enlarged, noise counts as detail.
ENLARGED = {1.4: (0.85, 0.95), 2.0: (0.8, 0.8)}  # from so many times the pixels on
MARGIN = 6.0  # grey levels (standard deviation) by which a margin of one colour may vary
THUMBNAIL_SIDE = 240
THUMBNAIL_QUALITY = 65
ORIENTATION, MAKE, MODEL, EXIF, TAKEN = 0x0112, 0x010F, 0x0110, 0x8769, 0x9003
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class InspectedImage:
    """A file as a person would judge it.

    Attributes:
        file: The file.
        width: Pixels across, upright.
        height: Pixels down, upright.
        thumbnail: A small JPEG.
        resolution: Part of its side that carries detail, up to 1.
        content: Pixels inside a frame of one colour.
        step: Mean step of its JPEG table for brightness; 0 for other kinds of file.
        camera: Whether it carries a camera's notes.
    """

    file: ImageFile
    width: int
    height: int
    thumbnail: bytes
    resolution: float = 1.0
    content: int = 0
    step: float = 0.0
    camera: bool = False

    @property
    def true_side(self) -> float:
        """Side of a square that would show as much, in pixels."""
        return self.resolution * math.sqrt(self.content)


def inspect_image(file: ImageFile) -> InspectedImage:
    """Read an image's size, resolution and thumbnail.

    Raises:
        ImageError: The file cannot be opened.
        OSError: It cannot be decoded.
    """
    with open_image(file) as image:
        orientation, camera = _notes(image)
        step = _step(image)
        flat = flat_rgb(image)
    grey = np.asarray(flat.convert("L"))
    rows, columns = content_box(grey)
    flat.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), reducing_gap=2.0)
    height, width = grey.shape
    if orientation in TURNS:
        flat = flat.transpose(TURNS[orientation])
    if orientation >= 5:  # lies on its side
        width, height = height, width
    return InspectedImage(
        file,
        width,
        height,
        jpeg(np.asarray(flat)),
        resolution(grey[_middle(rows), _middle(columns)].astype(np.float32)),
        (rows.stop - rows.start) * (columns.stop - columns.start),
        step,
        camera,
    )


def choose_best(images: Sequence[InspectedImage]) -> int:
    """Position of the one to keep."""
    left = _unbeaten(images, _compressed_harder)
    left = _unbeaten(left, _enlarged_or_blurred)
    largest = max(image.content for image in left)
    left = [image for image in left if image.content >= SAME_SIZE * largest]
    return images.index(min(left, key=_last_resort))


def _unbeaten(
    images: Sequence[InspectedImage], worse: Callable[[InspectedImage, InspectedImage], bool]
) -> list[InspectedImage]:
    """Those that are worse than no other; some always remain, ``worse`` having no circles."""
    # A thousand equal files are measured alike: each is compared with every kind, not every file.
    kinds = {(p.content, p.resolution, p.step): p for p in images}.values()
    return [a for a in images if not any(worse(a, b) for b in kinds)]


def _last_resort(image: InspectedImage) -> tuple[bool, int, int, str]:
    return not image.camera, image.file.modified, len(image.file.id), image.file.id


def _compressed_harder(image: InspectedImage, other: InspectedImage) -> bool:
    """Whether this may be a strongly compressed copy of that one, of the same size."""
    sizes = sorted((image.content, other.content))
    return (
        sizes[0] >= SAME_SIZE * sizes[1]
        and image.step > HARDER * max(FINE, other.step)
        and other.resolution >= BLURRED * image.resolution
    )


def _enlarged_or_blurred(image: InspectedImage, other: InspectedImage) -> bool:
    """Whether this one shows no more than that one, in more pixels or in softer ones."""
    softness, showing = BLURRED, 0.0
    for times, limits in ENLARGED.items():
        if image.content >= times * other.content:
            softness, showing = limits
    return (
        image.resolution < softness * other.resolution
        and other.true_side >= showing * image.true_side
    )


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
    start = part.start + max(0, part.stop - part.start - SIDE) // 2
    return slice(start, min(start + SIDE, part.stop))


def _notes(image: Image.Image) -> tuple[int, bool]:
    """How the image lies, and whether a camera took it; damaged EXIF says nothing."""
    try:
        exif = image.getexif()
        camera = any(tag in exif for tag in (MAKE, MODEL)) or TAKEN in exif.get_ifd(EXIF)
        orientation = exif.get(ORIENTATION, 1)
    except Exception:  # Pillow raises SyntaxError, struct.error and others
        return 1, False
    return (orientation if orientation in TURNS else 1), camera


def _step(image: Image.Image) -> float:
    tables = getattr(image, "quantization", None)
    return float(np.mean(tables[0])) if tables and 0 in tables else 0.0


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
