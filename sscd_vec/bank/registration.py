"""Where one image lies in another: turned, scaled, shifted.

Both are looked at with 128 pixels a side at most, so the cost does not grow with their size: about
50 ms for a pair that is not turned, 200 ms otherwise. First every scale between 0.38 and 2.6 and
every shift are tried at 40 pixels, and all eight turns and mirrors unless the first fits: gradients
``g / (|g| + m)`` (``m`` their median) are correlated over the overlap by FFT,

    r(shift) = Re Σ g_a conj(g_b) / sqrt(Σ |g_a|² Σ |g_b|²),

which neither brightness nor flat margins change. Then the best is refined by least squares on grey
levels (Lucas and Kanade 1981), with weights that forget what was added.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Float32 = NDArray[np.float32]
Complex = NDArray[np.complexfloating]

SIDE = 128  # pixels of the longer side, for everything but the first search
COARSE = 40
SCALES = sorted((2.0 ** (step / 8) for step in range(-11, 12)), key=lambda s: max(s, 1 / s))
LEAST_OVERLAP = 0.25  # of the smaller one
LEAST_SIDE = 6  # pixels: a narrower strip cannot be laid on anything
LEAST_PIXELS = 64  # of the overlap, to compare or to fit anything
FITS, CERTAIN = 0.5, 0.8  # correlation of gradients: no other turn is tried; no other scale
SAME = 0.55  # correlation of grey levels below which two images do not lie in each other
SAME_DETAIL = 0.3  # the same of gradients
MOST_STRETCH = 1.1  # times as much in one direction as in the other


@dataclass(frozen=True)
class Alignment:
    """Row i of the turned second image is row ``scale[0] · i + shift[0]`` of the first.

    Attributes:
        turn: How the second is turned first: 4 swaps its axes, 2 its rows, 1 its columns.
        scale: Pixels of the first per pixel of the second, down and across.
        shift: Where the second begins in the first, down and across, in pixels of the first.
        correlation: Of the grey levels in the overlap.
        detail: Correlation of their gradients there.
        part: How much of the smaller one overlaps.
    """

    turn: int
    scale: tuple[float, float]
    shift: tuple[float, float]
    correlation: float
    detail: float = 1.0
    part: float = 1.0

    @property
    def fits(self) -> bool:
        """Whether the two show the same thing."""
        stretch = max(self.scale) / min(self.scale)
        return (
            self.correlation >= SAME
            and self.detail >= SAME_DETAIL
            and self.part >= LEAST_OVERLAP
            and stretch <= MOST_STRETCH
        )


def turned(pixels: NDArray[np.generic], turn: int) -> NDArray[np.generic]:
    """An image ``(h, w, …)`` with its axes swapped (4), rows reversed (2), columns reversed (1)."""
    if turn & 4:
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if turn & 2 else 1, :: -1 if turn & 1 else 1]


def align(first: Float32, second: Float32) -> Alignment:
    """Find the second image in the first.

    Args:
        first: ``(h, w)`` grey levels, at most 128 a side.
        second: Likewise.
    """
    if min(*first.shape, *second.shape) < LEAST_SIDE:
        return Alignment(0, (1.0, 1.0), (0.0, 0.0), correlation=0.0, detail=0.0)
    best = _search(first, second, (0,))
    if best[0] < FITS:
        best = max(best, _search(first, second, range(1, 8)))
    _, turn, scale, shift = best
    return _refine(first, np.asarray(turned(second, turn), np.float32), turn, scale, shift)


def overlap(
    alignment: Alignment, first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Rows and columns ``(begin, end)`` of the first image that the second covers."""
    shape = second[1::-1] if alignment.turn & 4 else second[:2]
    sides = zip(alignment.shift, alignment.scale, shape, first[:2], strict=True)
    rows, columns = [
        (max(0.0, begin), min(float(end), begin + scale * size))
        for begin, scale, size, end in sides
    ]
    return rows, columns


def resampled(
    second: NDArray[np.floating], alignment: Alignment, shape: tuple[int, ...]
) -> Float32:
    """The second image as it lies in the first, ``shape`` of it; NaN where it does not reach.

    Args:
        second: ``(h, w)`` or ``(h, w, channels)``.
        alignment: Of ``align``.
        shape: Of the first.
    """
    return _warp(
        np.asarray(turned(second, alignment.turn), np.float32),
        alignment.scale,
        alignment.shift,
        shape[:2],
    )


def _search(first: Float32, second: Float32, turns: "tuple[int, ...] | range") -> "_Found":
    """The best of all scales, shifts and these turns: correlation, turn, scale, shift."""
    best: _Found = (-1.0, 0, 1.0, (0.0, 0.0))
    a0, b0 = _shrunk(first, COARSE), _shrunk(second, COARSE)
    to_a, to_b = first.shape[0] / a0.shape[0], second.shape[0] / b0.shape[0]
    size = (2 * COARSE, 2 * COARSE)
    for relative in SCALES:
        a = _shrunk(a0, COARSE / max(1.0, relative)) if relative > 1 else a0
        b = _shrunk(b0, COARSE * relative) if relative < 1 else b0
        if min(*a.shape, *b.shape) < LEAST_SIDE:
            continue
        grown = a0.shape[0] / a.shape[0] * to_a  # pixels of the first per pixel of ``a``
        fa = _spectra(_gradients(a)[None], size)
        stack = [_gradients(np.asarray(turned(b, turn), np.float32)) for turn in turns]
        for turn, g in zip(turns, stack, strict=True):
            value, (y, x) = _peak(fa, _spectra(g[None], size), a.shape, g.shape, size)
            if value > best[0]:
                ratio = grown / (b0.shape[0] / b.shape[0] * to_b)
                best = value, turn, ratio, (y * grown, x * grown)
        if best[0] > CERTAIN:
            break
    return best


_Found = tuple[float, int, float, tuple[float, float]]


def _shrunk(grey: Float32, side: float) -> Float32:
    factor = side / max(grey.shape)
    if factor >= 1:
        return grey
    height, width = (max(1, round(s * factor)) for s in grey.shape)
    return np.asarray(Image.fromarray(grey).resize((width, height), Image.Resampling.BILINEAR))


def _gradients(grey: Float32) -> Complex:
    dy, dx = np.gradient(grey)
    g = dx + 1j * dy
    strength = np.abs(g)
    return np.asarray(g / (strength + np.median(strength) + 1.0), np.complex64)


def _spectra(g: Complex, size: tuple[int, int]) -> tuple[Complex, Complex, Complex]:
    return (
        np.fft.fft2(g, size),
        np.fft.fft2(np.abs(g) ** 2, size),
        np.fft.fft2(np.ones(g.shape, np.float32), size),
    )


def _peak(
    a: tuple[Complex, Complex, Complex],
    b: tuple[Complex, Complex, Complex],
    shape_a: tuple[int, ...],
    shape_b: tuple[int, ...],
    size: tuple[int, int],
) -> tuple[float, tuple[int, int]]:
    both = np.fft.ifft2(a[0] * b[0].conj())[0].real
    energy_a = np.fft.ifft2(a[1] * b[2].conj())[0].real
    energy_b = np.fft.ifft2(a[2] * b[1].conj())[0].real
    pixels = np.fft.ifft2(a[2] * b[2].conj())[0].real
    part = np.clip(pixels / min(np.prod(shape_a), np.prod(shape_b)), 0, 1)
    value = both / np.sqrt(np.maximum(energy_a, 1e-3) * np.maximum(energy_b, 1e-3))
    whole = np.clip(pixels, 0, None) / COARSE**2  # little overlap correlates by chance
    value = np.where(part >= LEAST_OVERLAP, value * part**0.5 * whole**0.25, -1)
    y, x = np.unravel_index(int(value.argmax()), value.shape)
    return float(value[y, x]), (_signed(int(y), size[0]), _signed(int(x), size[1]))


def _signed(place: int, size: int) -> int:
    return place - size if place >= size // 2 else place


def _refine(
    first: Float32, second: Float32, turn: int, scale: float, shift: tuple[float, float]
) -> Alignment:
    """Least squares on grey levels, coarse to fine; ``second`` is turned already."""
    scales, shifts = np.array([scale, scale]), np.array(shift)
    for side, rounds in ((COARSE, 8), (SIDE // 2, 8), (SIDE, 8)):
        a, b = _shrunk(first, side), _shrunk(second, side)
        to_a = np.array(first.shape) / a.shape
        to_b = np.array(second.shape) / b.shape
        scales, shifts = _descend(a, b, scales * to_b / to_a, shifts / to_a, rounds)
        scales, shifts = scales * to_a / to_b, shifts * to_a
    seen = _warp(second, tuple(scales), tuple(shifts), first.shape)
    valid = np.isfinite(seen)
    scale_found, shift_found = scales.tolist(), shifts.tolist()
    correlation = detail = 0.0
    if valid.sum() > LEAST_PIXELS:
        correlation = _correlation(first[valid], seen[valid])
        filled = np.where(valid, seen, seen[valid].mean())
        detail = _gradient_correlation(_gradients(first), _gradients(filled), valid)
    smaller = min(first.size, second.size * float(np.prod(scales)))
    return Alignment(
        turn,
        (scale_found[0], scale_found[1]),
        (shift_found[0], shift_found[1]),
        correlation,
        detail,
        float(valid.sum()) / smaller,
    )


def _gradient_correlation(a: Complex, b: Complex, valid: NDArray[np.bool_]) -> float:
    """Inside of ``valid``, without its border: what lies outside is made up."""
    inside = valid.copy()
    for axis in (0, 1):
        inside &= np.roll(valid, 1, axis) & np.roll(valid, -1, axis)
    power = float((np.abs(a[inside]) ** 2).sum() * (np.abs(b[inside]) ** 2).sum()) ** 0.5
    return float((a[inside] * b[inside].conj()).sum().real) / power if power > 1e-3 else 0.0


def _descend(
    a: Float32, b: Float32, scale: NDArray[np.float64], shift: NDArray[np.float64], rounds: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gauss-Newton on scales, shifts, gain and offset; errors e weigh ``1 / (1 + (e/s)²)``."""
    rows, columns = np.mgrid[: a.shape[0], : a.shape[1]] + 0.5
    for _ in range(rounds):
        seen = _warp(b, (scale[0], scale[1]), (shift[0], shift[1]), a.shape)
        valid = np.isfinite(seen)
        valid[[0, -1]] = valid[:, [0, -1]] = False
        inside = valid & np.roll(valid, 1, 0) & np.roll(valid, -1, 0)
        inside &= np.roll(valid, 1, 1) & np.roll(valid, -1, 1)
        if inside.sum() < LEAST_PIXELS:  # a sliver of overlap has no gradients
            break
        dy, dx = np.gradient(np.nan_to_num(seen, nan=float(np.nanmean(seen))))
        # What is at row y of ``seen`` comes from (y - shift) / scale.
        moves = [
            -dy,
            -dx,
            -dy * (rows - shift[0]) / scale[0],
            -dx * (columns - shift[1]) / scale[1],
        ]
        system = np.stack([m[inside] for m in [*moves, seen, np.ones_like(seen)]], 1)
        error = a[inside] - _gained(seen[inside], a[inside])
        spread = 1.5 * float(np.median(np.abs(error))) + 1.0
        weight = 1 / (1 + (error / spread) ** 2)
        weighted = system * weight[:, None]
        damp = 1e-3 * np.eye(6) * np.trace(weighted.T @ system) / 6 * 1e-3
        step = np.linalg.solve(weighted.T @ system + damp, weighted.T @ a[inside])
        gain = step[4] if abs(step[4]) > 0.2 else 0.2
        change = np.clip(step[:4] / gain, -3, 3)
        shift = shift + change[:2]
        scale = np.clip(scale + np.clip(change[2:], -0.1, 0.1) * scale, 0.1, 10)
        if np.abs(change[:2]).max() < 0.01:
            break
    return scale, shift


def _gained(seen: Float32, wanted: Float32) -> Float32:
    """``seen`` with the gain and offset that bring it nearest to ``wanted``."""
    spread = float(seen.var()) + 1e-6
    gain = float(((seen - seen.mean()) * (wanted - wanted.mean())).mean()) / spread
    return np.asarray(gain * (seen - seen.mean()) + wanted.mean(), np.float32)


def _correlation(a: Float32, b: Float32) -> float:
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean()) / spread if spread > 1e-3 else 0.0


def _warp(
    image: Float32,
    scale: tuple[float, ...],
    shift: tuple[float, ...],
    shape: tuple[int, ...],
) -> Float32:
    """Scale and shift, linear in between, axis by axis."""
    down, bad_rows = _weights(image.shape[0], shape[0], scale[0], shift[0])
    across, bad_columns = _weights(image.shape[1], shape[1], scale[1], shift[1])
    made = np.tensordot(down, image, (1, 0))
    made = np.moveaxis(np.tensordot(across, made, (1, 1)), 0, 1)
    made[bad_rows] = np.nan
    made[:, bad_columns] = np.nan
    return np.ascontiguousarray(made, np.float32)


def _weights(
    size: int, wanted: int, scale: float, shift: float
) -> tuple[Float32, NDArray[np.bool_]]:
    """``(wanted, size)`` weights; a wide tent where the image is made smaller."""
    centres = (np.arange(wanted) + 0.5 - shift) / scale - 0.5
    width = max(1.0, 1 / scale)
    tent = 1 - np.abs(centres[:, None] - np.arange(size)) / width
    weights = np.maximum(tent, 0)
    outside = (centres < -0.5) | (centres > size - 0.5)
    total = weights.sum(1, keepdims=True)
    return np.asarray(weights / np.maximum(total, 1e-6), np.float32), outside
