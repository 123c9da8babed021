"""Whether two images are the same: resaved, resized or lightly cropped, nothing else changed.

The descriptor of a document says little more than "a document". Its pixels say the rest: a copy
aligns with the original and agrees with it everywhere; the next invoice of the same company
differs somewhere. The test needs numpy and Pillow only, and about a tenth of a second:

1. **Align.** ``u' = a_x u + b_x``, ``v' = a_y v + b_y`` maps fractions of one frame to fractions of
   the other. It starts from the full frames and from the best places of a search over scales, by
   correlation; Gauss-Newton steps refine it from coarse to fine, with brightness and contrast.
2. **Compare.** In blocks of 8 pixels of both images, slightly blurred,
   ``disagreement = mean (x - y)^2 / (max(var x, var y) + floor)``: near 0 for a copy, near 1 or 2
   where a digit changed. The worst block decides. Large blocks must agree in colour too.
3. **Contain.** One image must lie within the other, and be most of it: two screenshots of one page,
   scrolled by a little, are not copies.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.encoder.images import ImageError, ImageInput, load_pixels
from sscd_vec.normalize import Proof

Pixels = NDArray[np.uint8]
Float = NDArray[np.float32]
_Window = tuple[slice, slice]

SIDE = 640  # longest side images are compared at: digits of a page stay legible
SMALLEST = 160  # a longest side below which too little of a text is left to tell it by
COARSE, LEVELS = 96, (96, 192, 384, SIDE)
SCALES = np.geomspace(0.72, 1 / 0.72, 15)  # of a crop that leaves 72 % of a side, either way round
ROOM = 240  # COARSE and its largest scale side by side: correlation does not wrap around
STEPS, MORE = 5, 2  # Gauss-Newton steps at the coarsest level, and at each finer one
BLOCK = 8
FLOOR = 10.0**2  # variance, in grey levels squared, that compression alone may leave
WORST = 0.45  # disagreement of a copy's worst block, at most
BLANK = 6.0  # standard deviation below which there is nothing to align
INSIDE, SHARE = 0.97, 0.5  # of the smaller image in the larger, and of the larger covered
CONTRAST = (0.75, 1.33)
STRETCH = (0.5, 2.0)  # of one frame to the other; beyond, neither is most of the other
COLOUR = 40.0  # levels a block may differ in one channel, beyond a change of light
ALIGNED, HOPELESS = 0.6, 1.5  # correlation, and worst block, at which finer levels are tried
EDGE = 3  # pixels at the border of a frame that blurring and interpolation touch


class ExactCopy(NamedTuple):
    """What the comparison found.

    Attributes:
        is_copy: Whether the images agree everywhere.
        disagreement: Of the worst block: 0 is equal; infinite if they could not be aligned.
        overlap: Share of the larger image that both show.
        reason: One line for people.
    """

    is_copy: bool
    disagreement: float
    overlap: float
    reason: str

    @property
    def proof(self) -> Proof:
        """For a verdict: equal pixels prove a copy, other ones prove nothing."""
        return Proof(True if self.is_copy else None, self.reason)


class _Warp(NamedTuple):
    """``u' = ax u + bx``, ``v' = ay v + by`` in fractions of the frames."""

    ax: float
    bx: float
    ay: float
    by: float


def prepare(image: Image.Image | Pixels) -> Pixels:
    """An image as it is compared: RGB, at most ``SIDE`` pixels long.

    Args:
        image: Upright and without transparency, as ``load_pixels`` gives it.
    """
    plain = (image if isinstance(image, Image.Image) else Image.fromarray(image)).convert("RGB")
    scale = SIDE / max(plain.size)
    if scale < 1:
        width, height = (max(2, round(side * scale)) for side in plain.size)
        plain = plain.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return np.asarray(plain, dtype=np.uint8)


def compare(first: Pixels, second: Pixels) -> ExactCopy:
    """Compare two images that ``prepare`` returned; the order does not matter.

    Raises:
        ValueError: If one is not an RGB image.
    """
    for pixels in (first, second):
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
            raise ValueError(
                f"expected uint8 pixels (h, w, 3) from prepare, got {pixels.dtype} {pixels.shape}"
            )
    if min(max(first.shape), max(second.shape)) < SMALLEST:
        return ExactCopy(False, np.inf, 0.0, f"one is smaller than {SMALLEST} pixels")
    # The smaller frame goes first, so that both orders do the same.
    if (second.size, second.tobytes()) < (first.size, first.tobytes()):
        first, second = second, first
    a, b = (Image.fromarray(part).convert("L").convert("F") for part in (first, second))
    if min(np.asarray(a).std(), np.asarray(b).std()) < BLANK:
        return ExactCopy(False, np.inf, 0.0, "one is almost blank: nothing to compare")
    best = ExactCopy(False, np.inf, 0.0, "they do not align")
    for start in _starts(a, b):
        found, warp = _judge(a, b, start)
        if found.is_copy and _colours_differ(first, second, warp):
            found = ExactCopy(False, found.disagreement, found.overlap, "the colours differ")
        if found.is_copy:
            return found
        best = min(best, found, key=lambda one: one.disagreement)
    return best


class SecondLook:
    """Compares the pixels of one image with others; each is decoded when first needed."""

    def __init__(self, image: "ImageInput | None") -> None:
        """Take the image; None if only its descriptor is at hand."""
        self._image = image
        self._pixels: Pixels | None = None

    def __call__(self, other: "ImageInput | None") -> Proof | None:
        """What the pixels say; None if one of the images is not at hand."""
        if self._image is None or other is None:
            return None
        try:
            if self._pixels is None:
                self._pixels = load_prepared(self._image)
            return compare(self._pixels, load_prepared(other)).proof
        except ImageError as error:  # gone, or changed since it was added
            return Proof(None, f"their pixels could not be compared: {error.reason}")


def load_prepared(image: ImageInput) -> Pixels:
    """An image's pixels as they are compared; large ones are reduced where they are decoded."""
    return prepare(load_pixels(image, reduce_to=lambda height, width: (SIDE, SIDE)))


def _colours_differ(first: Pixels, second: Pixels, warp: _Warp) -> bool:
    """Whether any large block has another mean colour, beyond a change of light."""
    parts = []
    for channel in range(3):
        a, b = (Image.fromarray(part[..., channel]).convert("F") for part in (first, second))
        x = _fitted(a, COARSE)
        y, seen = _moved(_scaled(b, warp, x.shape), warp, x.shape)
        parts.append(_block_means(x[seen]) - _block_means(y[seen]))
    apart = np.stack(parts)
    apart -= np.median(apart, axis=(1, 2), keepdims=True)
    return bool(np.abs(apart).max() > COLOUR)


def _starts(a: Image.Image, b: Image.Image) -> Iterator[_Warp]:
    """The full frames, then the two best places of a search over scales."""
    yield _Warp(1.0, 0.0, 1.0, 0.0)
    for warp in _search(a, b):
        if all(STRETCH[0] < scale < STRETCH[1] for scale in (warp.ax, warp.ay)):
            yield warp


def _search(a: Image.Image, b: Image.Image, keep: int = 2) -> list[_Warp]:
    """Where ``b`` lies on ``a``, by correlation of their edges at every scale."""
    target = _edges(_fitted(a, COARSE))
    small = Image.fromarray(_fitted(b, 2 * COARSE * SCALES[-1]))
    spectrum = np.fft.rfft2(target, (ROOM, ROOM))
    found = []
    for scale in SCALES:
        edges = _edges(_fitted(small, COARSE * scale))
        overlap = np.fft.irfft2(spectrum * np.conj(np.fft.rfft2(edges, (ROOM, ROOM))), (ROOM, ROOM))
        y, x = np.unravel_index(int(overlap.argmax()), overlap.shape)
        strength = float(overlap[y, x] / np.linalg.norm(edges) / np.linalg.norm(target))
        dy, dx = (int(step) - ROOM * bool(step > COARSE) for step in (y, x))
        height, width = edges.shape
        warp = _Warp(target.shape[1] / width, -dx / width, target.shape[0] / height, -dy / height)
        found.append((strength, warp))
    return [warp for _, warp in sorted(found, reverse=True)[:keep]]


def _fitted(image: Image.Image, side: float) -> Float:
    scale = side / max(image.size)
    width, height = (max(4, round(length * scale)) for length in image.size)
    small = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(small, dtype=np.float32)


def _edges(pixels: Float) -> Float:
    down, across = np.gradient(pixels)
    strength = np.hypot(down, across)
    centred: Float = strength - strength.mean()
    return centred


def _judge(a: Image.Image, b: Image.Image, warp: _Warp) -> tuple[ExactCopy, _Warp]:
    """Refine one place from coarse to fine, comparing at every level."""
    finest = min(max(a.size), warp.ax * b.width * max(a.size) / a.width, SIDE)
    levels = [*(level for level in LEVELS if level < finest), finest]
    for level in levels:
        aligned = _aligned(a, b, warp, level, STEPS if level == levels[0] else MORE)
        if aligned is None:
            return ExactCopy(False, np.inf, 0.0, "they do not align"), warp
        x, y, warp, gain = aligned
        inside, overlap = _containment(warp)
        worst = _worst_block(x, y)
        if worst > (WORST if level == finest else HOPELESS):
            return ExactCopy(False, worst, overlap, "they differ in places"), warp
    if not CONTRAST[0] < gain < CONTRAST[1]:
        return ExactCopy(False, worst, overlap, "the contrast differs"), warp
    if inside < INSIDE or overlap < SHARE:
        return ExactCopy(False, worst, overlap, "each shows something the other does not"), warp
    return ExactCopy(True, worst, overlap, "the same pixels everywhere"), warp


def _aligned(
    a: Image.Image, b: Image.Image, warp: _Warp, level: float, steps: int
) -> tuple[Float, Float, _Warp, float] | None:
    """What both show at a level, ``b`` in the light of ``a``; None if they do not align."""
    x = _blurred(_fitted(a, level))
    scaled = Image.fromarray(_blurred(np.asarray(_scaled(b, warp, x.shape))))
    gain, offset = 1.0, 0.0
    for step in range(steps + 1):
        y, seen = _moved(scaled, warp, x.shape)
        if min(y[seen].shape) < 2 * BLOCK:
            return None
        if step < steps:
            warp, gain, offset = _step(x, y, seen, warp)
        if not all(STRETCH[0] < scale < STRETCH[1] for scale in (warp.ax, warp.ay)):
            return None
    if _correlation(x[seen], y[seen]) < ALIGNED:
        return None
    return x[seen], gain * y[seen] + offset, warp, gain


def _scaled(b: Image.Image, warp: _Warp, shape: tuple[int, ...]) -> Image.Image:
    """``b`` at the scale of ``a``: what is left to move is a fraction of a pixel."""
    size = max(4, round(shape[1] / warp.ax)), max(4, round(shape[0] / warp.ay))
    return b.resize(size, Image.Resampling.BICUBIC)


def _moved(b: Image.Image, warp: _Warp, shape: tuple[int, ...]) -> tuple[Float, _Window]:
    """``b`` on the pixels of ``a``, and which of those it covers."""
    height, width = shape
    x = warp.ax * b.width / width, warp.bx * b.width
    y = warp.ay * b.height / height, warp.by * b.height
    terms = (x[0], 0, x[1], 0, y[0], y[1])
    moved = b.transform((width, height), Image.Transform.AFFINE, terms, Image.Resampling.BICUBIC)
    seen = _covered(*y, height, b.height), _covered(*x, width, b.width)
    return np.asarray(moved, dtype=np.float32), seen


def _covered(scale: float, shift: float, length: int, other: int) -> slice:
    """Pixels of a side of ``length`` that lie well within both images."""
    first, last = (EDGE - shift) / scale - 0.5, (other - EDGE - shift) / scale - 0.5
    begin, end = max(EDGE, int(np.ceil(first))), min(length - EDGE, int(np.floor(last)) + 1)
    return slice(min(begin, length), max(begin, end))


def _step(x: Float, y: Float, seen: _Window, warp: _Warp) -> tuple[_Warp, float, float]:
    """One Gauss-Newton step on ``x = gain * y(warp) + offset``."""
    height, width = x.shape
    down, across = np.gradient(y[seen])
    v = ((np.arange(height, dtype=np.float32)[seen[0]] + 0.5) / height)[:, None]
    u = ((np.arange(width, dtype=np.float32)[seen[1]] + 0.5) / width)[None]
    across *= width / warp.ax
    down *= height / warp.ay
    # How y changes with ax, bx, ay, by, gain and offset.
    columns = across * u, across, down * v, down, y[seen], np.ones_like(across)
    rows = np.stack([column.ravel() for column in columns])
    normal = (rows @ rows.T).astype(np.float64)
    normal[np.diag_indices(6)] += 1.0  # level lines say nothing about one axis: it stays
    solved = np.linalg.solve(normal, (rows @ x[seen].ravel()).astype(np.float64))
    gain = float(solved[4]) if abs(solved[4]) > 1e-3 else 1.0
    moves = np.clip(solved[:4] / gain, -0.05, 0.05)
    changed = _Warp(*(float(old + move) for old, move in zip(warp, moves, strict=True)))
    return changed, gain, float(solved[5])


def _correlation(x: Float, y: Float) -> float:
    """Pearson's; 0 if one is constant."""
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / max(np.linalg.norm(x) * np.linalg.norm(y), 1e-6))


def _containment(warp: _Warp) -> tuple[float, float]:
    """How much of an image lies in the other: the larger share, and the smaller."""
    shared = whole = 1.0
    for scale, shift in ((warp.ax, warp.bx), (warp.ay, warp.by)):
        shared *= max(0.0, min(1.0, shift + scale) - max(0.0, shift))
        whole *= scale
    shares = shared, shared / whole
    return max(shares), min(shares)


def _worst_block(x: Float, y: Float) -> float:
    """The largest disagreement of any block; blocks overlap by half."""
    error, mean_x, square_x, mean_y, square_y = (
        _block_means(part) for part in ((x - y) ** 2, x, x**2, y, y**2)
    )
    variance = np.maximum(square_x - mean_x**2, square_y - mean_y**2)
    return float((error / (np.maximum(variance, 0) + FLOOR)).max())


def _block_means(pixels: Float) -> Float:
    half = BLOCK // 2
    rows, columns = (length // half for length in pixels.shape)
    cut = pixels[: rows * half, : columns * half].reshape(rows, half, columns, half)
    cells = cut.mean(axis=(1, 3))
    means: Float = (cells[:-1, :-1] + cells[1:, :-1] + cells[:-1, 1:] + cells[1:, 1:]) / 4
    return means


def _blurred(pixels: Float) -> Float:
    """Two passes of (1, 2, 1)/4 each way: detail that depends on the filter of a resize goes."""
    for _ in range(2):
        padded = np.pad(pixels, 1, mode="edge")
        level = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
        pixels = (level[:-2] + 2 * level[1:-1] + level[2:]) / 16
    return pixels
