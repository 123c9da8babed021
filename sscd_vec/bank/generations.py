"""Which of two images was made from the other: one file's JPEG steps in the other one's pixels.

A JPEG keeps every DCT coefficient of an 8×8 block as a multiple of a step of its table. Saved
again, the coefficients still cluster at multiples of the first file's steps, on the first file's
grid, also after cropping, turning, captions and margins, as long as no pixel is interpolated. Both
histories are played through: pixels on a moved grid stand for the image before it was saved; saved
with the own steps alone they give the histogram p₁ of each coefficient, saved with the other
file's steps first the histogram p₂. With the counts n observed,

    made_from = Σ n log (p₂ / p₁)        over coefficients and values, in nats.

It is computed in both directions; the difference says which file is the younger one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank.registration import Float32

Float64 = NDArray[np.float64]

WINDOW = 512  # pixels a side that are looked at: about 150 ms for both directions
SEARCH = 256  # pixels a side by which two images are laid on each other, to the pixel
SAME_PIXELS = 0.6  # correlation of detail
LEAST_BLOCKS = 24
SIMULATED = 6000  # blocks
LARGEST = 100  # coefficients beyond are not counted
SMOOTHING = 3.0  # added to every count of the two histograms
MOVED = ((4, 4), (4, 0), (0, 4), (3, 5), (5, 2), (2, 3))
_ROW, _COLUMN = np.mgrid[:8, :8]
DCT = np.where(_ROW == 0, 0.5 / np.sqrt(2), 0.5) * np.cos((2 * _COLUMN + 1) * _ROW * np.pi / 16)
COUNTED = [(row, column) for row, column in np.ndindex(8, 8) if 0 < row + column <= 6]


@dataclass(frozen=True)
class Grid:
    """Where the blocks of a JPEG begin, and the steps of its table for brightness.

    Attributes:
        down: Row at which a block begins, 0 to 7.
        across: Likewise for columns.
        steps: ``(8, 8)``, vertical frequency first; None if the image is not a JPEG.
    """

    down: int = 0
    across: int = 0
    steps: Float64 | None = None

    def turned(self, shape: tuple[int, ...], turn: int) -> "Grid":
        """The grid of the turned image; ``shape`` is that before turning."""
        down, across, steps = self.down, self.across, self.steps
        height, width = shape[:2]
        if turn & 4:
            down, across, height, width = across, down, width, height
            steps = None if steps is None else steps.T
        if turn & 2:
            down = (height - down) % 8
        if turn & 1:
            across = (width - across) % 8
        return Grid(down, across, steps)

    def moved(self, down: int, across: int) -> "Grid":
        """The grid as seen from a part of the image that begins there."""
        return Grid((self.down - down) % 8, (self.across - across) % 8, self.steps)


@dataclass(frozen=True)
class History:
    """Whether pixels were saved with another file's steps before.

    Attributes:
        evidence: That they were, in nats; negative if they were not, 0 if nothing can be said.
        once: The evidence to expect if they were saved with their own steps only.
        twice: The evidence to expect if they were saved with the other steps before.
    """

    evidence: float = 0.0
    once: float = 0.0
    twice: float = 0.0

    @property
    def place(self) -> float:
        """0 for what was saved once, 1 for what was saved with the other steps before."""
        return (self.evidence - self.once) / max(self.twice - self.once, 1e-9)


def made_from(pixels: Float32, own: Grid, other: Grid) -> History:
    """Evidence that ``pixels`` were saved with the steps of ``other`` before their own; see above.

    Args:
        pixels: ``(h, w)`` grey levels.
        own: The grid of the file they come from.
        other: The grid of the file they may have been made from, in the same place.
    """
    found = _coefficients(pixels, other)
    if other.steps is None or len(found) < LEAST_BLOCKS:
        return History()
    once, twice = _histories(pixels, own, other, len(found))
    sums = np.zeros(3)
    for row, column in COUNTED:
        if other.steps[row, column] >= 2:
            seen, p, q = (_counts(c[:, row, column]) for c in (found, once, twice))
            p, q = (p + SMOOTHING) / (p + SMOOTHING).sum(), (q + SMOOTHING) / (q + SMOOTHING).sum()
            ratio = np.log(q / p)
            sums += [
                (seen * ratio).sum(),
                seen.sum() * (p * ratio).sum(),
                seen.sum() * (q * ratio).sum(),
            ]
    return History(*sums.tolist())


def saved(pixels: NDArray[np.floating], grid: Grid) -> Float64:
    """Pixels after being saved as a JPEG with that grid."""
    if grid.steps is None:
        return np.asarray(pixels, np.float64)
    before = [(8 - place) % 8 for place in (grid.down, grid.across)]
    pad = [(b, -(b + s) % 8) for b, s in zip(before, pixels.shape, strict=True)]
    whole = np.pad(pixels, pad, "edge")
    coefficients = _transformed(whole)
    blocks = DCT.T @ (np.rint(coefficients / grid.steps) * grid.steps) @ DCT
    made = blocks.swapaxes(1, 2).reshape(whole.shape) + 128
    (top, _), (left, _) = pad
    made = made[top : top + pixels.shape[0], left : left + pixels.shape[1]]
    return np.asarray(np.clip(np.rint(made), 0, 255), np.float64)


def lay_over(a: Float32, b: Float32, shift: tuple[int, int]) -> tuple[int, int] | None:
    """The exact place of ``b`` in ``a``, or None if their pixels are not the same.

    Args:
        a: ``(h, w)`` grey levels.
        b: Likewise, turned as ``a`` is and of the same scale.
        shift: Where ``b`` begins in ``a``, about.
    """
    patches = common(a, b, shift, SEARCH)
    if patches is None:
        return None
    first, second = (_detail(patch) for patch in patches[:2])
    taper = np.outer(np.hanning(first.shape[0]), np.hanning(first.shape[1]))
    cross = np.fft.rfft2(first * taper) * np.fft.rfft2(second * taper).conj()
    surface = np.fft.irfft2(cross, first.shape)
    y, x = np.unravel_index(int(surface.argmax()), surface.shape)
    move = [int(p) - s if p > s // 2 else int(p) for p, s in zip((y, x), first.shape, strict=True)]
    place = shift[0] + move[0], shift[1] + move[1]
    exact = common(a, b, place, SEARCH)
    if exact is None:
        return None
    first, second = (_detail(patch) for patch in exact[:2])
    power = float((first**2).sum() * (second**2).sum()) ** 0.5
    return place if float((first * second).sum()) >= SAME_PIXELS * power > 0 else None


def common(
    a: Float32, b: Float32, shift: tuple[int, int], most: int = WINDOW
) -> tuple[Float32, Float32, tuple[int, int]] | None:
    """The middle of what two images share, from both, and where it begins in ``a``."""
    begins, ends = [], []
    for axis in (0, 1):
        low = max(0, shift[axis])
        high = min(a.shape[axis], shift[axis] + b.shape[axis])
        if high - low < 32:
            return None
        spare = max(0, high - low - most) // 2
        begins.append(low + spare)
        ends.append(min(high, low + spare + most))
    (y, x), (bottom, right) = begins, ends
    moved = b[y - shift[0] : bottom - shift[0], x - shift[1] : right - shift[1]]
    return a[y:bottom, x:right], moved, (y, x)


def _histories(pixels: Float32, own: Grid, other: Grid, blocks: int) -> tuple[Float64, Float64]:
    """Coefficients on the other one's grid of what was saved once, and of what was saved twice."""
    once: list[Float64] = []
    twice: list[Float64] = []
    for down, across in MOVED[: max(2, -(-SIMULATED // blocks))]:
        unsaved = pixels[down:, across:]
        once.append(_coefficients(saved(unsaved, own), other))
        twice.append(_coefficients(saved(saved(unsaved, other), own), other))
    return np.concatenate(once), np.concatenate(twice)


def _coefficients(pixels: NDArray[np.floating], grid: Grid) -> Float64:
    """``(blocks, 8, 8)`` DCT coefficients on a grid."""
    part = pixels[grid.down :, grid.across :]
    height, width = part.shape[0] // 8, part.shape[1] // 8
    return _transformed(part[: 8 * height, : 8 * width]).reshape(-1, 8, 8)


def _transformed(pixels: NDArray[np.floating]) -> Float64:
    """``(rows, columns, 8, 8)`` coefficients of an image of whole blocks."""
    height, width = pixels.shape[0] // 8, pixels.shape[1] // 8
    blocks = pixels.reshape(height, 8, width, 8).swapaxes(1, 2) - 128.0
    return np.asarray(DCT @ blocks @ DCT.T)


def _counts(coefficients: Float64) -> Float64:
    values = np.abs(np.rint(coefficients)).astype(np.int64)
    return np.bincount(values[values <= LARGEST], minlength=LARGEST + 1).astype(np.float64)


def _detail(pixels: Float32) -> Float32:
    """Without what is smooth, and without the finest grain, which compression takes away."""
    fine = _smoothed(pixels, 1)
    return np.asarray(fine - _smoothed(fine, 6), np.float32)[8:-8, 8:-8]


def _smoothed(pixels: Float32, times: int) -> Float32:
    for _ in range(times):
        for axis in (0, 1):
            around = np.roll(pixels, 1, axis) + np.roll(pixels, -1, axis)
            pixels = np.asarray((2 * pixels + around) / 4, np.float32)
    return pixels
