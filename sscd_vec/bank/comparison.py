"""What one of two images has lost or gained against the other.

Two images are laid on each other (``registration``) and compared:

- what lies outside the common part: margins of one colour behind a visible edge were added, a scene
  that goes on was cut off from the other one;
- what differs inside it: text and stickers have outlines, what they cover has none there;
- colour, and detail: an enlargement shows no more than what it was made of;
- JPEG generations, where the pixels are the same (``generations``).

A pair takes about 0.1 s of a core, and at most 0.5 s whatever its size: registration sees 128
pixels a side, generations 512, detail 768. Decoding comes on top.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.bank import generations
from sscd_vec.bank.generations import Grid
from sscd_vec.bank.quality import InspectedImage, Pixels, resolution
from sscd_vec.bank.registration import Float32, align, overlap, resampled, turned

Mask = NDArray[np.bool_]

SAME_SCALE = 0.02  # parts by which two scales may differ by rounding
LEAST_STRIP = 0.025  # of the side: less outside the common part is inaccuracy
FLAT, FLAT_LEVELS = 0.4, 5.0  # part of a margin that is of one colour, within this many levels
EDGE, EDGE_LEVELS = 3.0, 4.0  # times the usual change, and more by this many levels: an edge
DIFFERENT = 24.0  # grey levels
LEAST_DIFFERENCE = 0.004  # of the common part
OUTLINED = 1.35  # times the gradient of the other one, along the outline of what differs
LARGER = 1.1  # times the scale from which on one may be an enlargement
REAL, NONE = 2.0, 1.5  # times the fine detail of an enlargement: has more, has no more
ALIKE = 0.5  # correlation of fine detail with that of an enlargement
BLURRED = 0.7  # of the other one's resolution
AS_SHARP = 0.75  # of the other one's fine detail: compression adds little
TILE, WINDOW = 48, 768  # pixels a side: of a tile, and of all that detail is measured on
ENLARGING = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS
MADE_FROM, YOUNGER = 60.0, 60.0  # nats
ONCE = 0.25  # from 0 to 1: saved once, saved with the other steps before


@dataclass(frozen=True)
class Finding:
    """Something that one of two images has lost or gained.

    Attributes:
        against: 0 for the first, 1 for the second.
        text: What it is: "a crop".
        proves: Whether it shows that this image was made from the other one.
    """

    against: int
    text: str
    proves: bool = False


def compare(a: InspectedImage, b: InspectedImage, grey_a: Pixels, grey_b: Pixels) -> list[Finding]:
    """Everything that speaks against one of two images; nothing if they show different things.

    Args:
        a: One image.
        b: The other.
        grey_a: The grey levels of the first at full size, upright.
        grey_b: Likewise of the second.
    """
    return _Pair(a, b, grey_a, grey_b).findings()


class _Pair:
    """Two aligned images; the second is turned the way the first is."""

    def __init__(
        self, a: InspectedImage, b: InspectedImage, grey_a: Pixels, grey_b: Pixels
    ) -> None:
        self.at = align(_grey(a.small), _grey(b.small))
        self.images = a, b
        self.small = a.small, np.asarray(turned(b.small, self.at.turn))
        self.grey = (
            np.asarray(grey_a, np.float32),
            np.asarray(turned(grey_b, self.at.turn), np.float32),
        )
        self.grids = a.grid, b.grid.turned((b.height, b.width), self.at.turn)
        # Pixels at full size per pixel of the small image, down and across.
        self.factor = [
            np.array(full.shape) / small.shape[:2]
            for full, small in zip(self.grey, self.small, strict=True)
        ]
        self.scale = float(np.mean(self.at.scale * self.factor[0] / self.factor[1]))

    def findings(self) -> list[Finding]:
        if not self.at.fits:
            return []
        found = self._generations()
        if found and found[0].proves:
            return [*self._edits(found[0].against), *found]
        inside = self._inside()
        found += [*self._colour(), *self._outside(), *inside]
        return [*found, *self._detail(is_edited=bool(inside))]

    def _edits(self, which: int) -> list[Finding]:
        """What was done to the image that is known to be the copy, besides saving it."""
        found = [Finding(which, "turned or mirrored")] if self.at.turn else []
        found += [*self._colour(), *self._outside(), *self._inside()]
        return [one for one in found if one.against == which]

    def _colour(self) -> list[Finding]:
        a, b = self.images
        if a.has_colour == b.has_colour:
            return []
        return [Finding(int(a.has_colour), "without colour")]

    def _generations(self) -> list[Finding]:
        """Which one is the younger JPEG, if the pixels are the same."""
        if abs(self.scale - 1) > SAME_SCALE:
            return []
        a, b = self.grey
        down, across = (round(float(s)) for s in self.at.shift * self.factor[0])
        place = generations.lay_over(a, b, (down, across))
        patches = None if place is None else generations.common(a, b, place)
        if place is None or patches is None:
            return []
        first, second, (y, x) = patches
        grids = self.grids[0].moved(y, x), self.grids[1].moved(y - place[0], x - place[1])
        histories = (
            generations.made_from(first, grids[0], grids[1]),
            generations.made_from(second, grids[1], grids[0]),
        )
        younger = int(histories[1].evidence > histories[0].evidence)
        made, other = histories[younger], histories[1 - younger]
        if made.evidence - other.evidence < YOUNGER:
            return []
        if made.evidence > MADE_FROM:
            return [Finding(younger, "made from another one and saved again", proves=True)]
        grain = [_grain(patch) for patch in (first, second)]
        if abs(other.place) < ONCE and grain[1 - younger] >= AS_SHARP * grain[younger]:
            return [Finding(younger, "compressed harder")]
        return []

    def _outside(self) -> list[Finding]:
        """What only one of them shows: margins added to it, or what was cut off the other one."""
        found = []
        for which in (0, 1):
            added = [_is_added(rows, count) for rows, count in self._strips(which)]
            if True in added:
                found.append(Finding(which, "a margin or bar was added"))
            if False in added:
                found.append(Finding(1 - which, "a crop"))
        return found

    def _strips(self, which: int) -> list[tuple[Float32, int]]:
        """Each side beyond the common part: the image with that side on top, and how many rows."""
        begins, ends = self._common(which)
        strips = []
        for axis in (0, 1):
            rows = self.small[which].astype(np.float32).swapaxes(0, axis)
            least = max(2.0, LEAST_STRIP * len(rows))
            if begins[axis] >= least:
                strips.append((rows, round(begins[axis])))
            if len(rows) - ends[axis] >= least:
                strips.append((rows[::-1], round(len(rows) - ends[axis])))
        return strips

    def _common(self, which: int) -> tuple[list[float], list[float]]:
        """Where the common part begins and ends in one of the small images, down and across."""
        rows, columns = overlap(self.at, self.small[0].shape, self.images[1].small.shape)
        edges = [rows[0], columns[0]], [rows[1], columns[1]]
        if which == 0:
            return edges
        begins, ends = (
            [(v - s) / k for v, s, k in zip(edge, self.at.shift, self.at.scale, strict=True)]
            for edge in edges
        )
        return begins, ends

    def _inside(self) -> list[Finding]:
        """What was put on one of them: only there it has an outline."""
        first = _grey(self.images[0].small)
        second = resampled(_grey(self.images[1].small), self.at, first.shape)
        valid = _neighbours(_neighbours(np.isfinite(second)) == 9) == 9
        if valid.sum() < 256:
            return []
        seen = np.nan_to_num(second)
        second = _fitted(seen, first, valid)
        # Brightening cuts off highlights: one direction is enough to explain a pixel.
        error = np.minimum(
            np.abs(first - np.clip(second, 0, 255)),
            np.abs(seen - np.clip(_fitted(first, seen, valid), 0, 255)),
        )
        limit = max(DIFFERENT, 9 * float(np.median(error[valid])) + 6)
        mask = valid & (error > limit)
        mask &= _neighbours(mask) >= 3
        if mask.sum() < LEAST_DIFFERENCE * valid.sum():
            return []
        outline = (_neighbours(mask) > 0) & valid
        slopes = [float(_slope(image)[outline].mean()) for image in (first, second)]
        edited = int(slopes[1] > slopes[0])
        if slopes[edited] < OUTLINED * slopes[1 - edited]:
            return []
        return [Finding(edited, "something was put on it")]

    def _detail(self, is_edited: bool) -> list[Finding]:
        """Which one shows more of the same part, at its own scale; text on it is no such detail."""
        large = int(self.scale < 1)
        parts = [self._part(which) for which in (0, 1)]
        if min(*parts[0].shape, *parts[1].shape) < TILE:
            return []
        if max(self.scale, 1 / self.scale) < LARGER:
            parts = [part[_middle(part.shape)] for part in parts]
            sharp = [resolution(part) for part in parts]
            soft = int(sharp[1] < sharp[0])
            if is_edited or sharp[soft] >= BLURRED * sharp[1 - soft]:
                return []
            # The blocks of strong compression look like detail: give them to the soft one too.
            blocky = np.asarray(generations.saved(parts[soft], self.grids[1 - soft]), np.float32)
            is_soft = resolution(blocky) < BLURRED * sharp[1 - soft]
            return [Finding(soft, "blurred")] if is_soft else []
        times, alike = _against_enlargement(parts[large], parts[1 - large], self.grids[large])
        if times > REAL and alike < ALIKE:
            return [Finding(1 - large, "smaller, with less detail")]
        if times < NONE and alike > ALIKE:
            return [Finding(large, "enlarged")]
        return []

    def _part(self, which: int) -> Float32:
        """The common part at full size; to the last pixel where it reaches the edge."""
        image, edges = self.grey[which], self._common(which)
        slices = []
        for axis in (0, 1):
            size = image.shape[axis]
            begin, end = (edge[axis] * self.factor[which][axis] for edge in edges)
            begin, end = 0 if begin < 0.01 * size else begin, min(end, size)
            slices.append(slice(round(begin), size if end > 0.99 * size else round(end)))
        return image[slices[0], slices[1]]


def _is_added(rows: Float32, count: int) -> bool | None:
    """Whether the first rows were added (one colour, behind an edge), or are part of the scene.

    Returns:
        None if they are neither.
    """
    flat = _of_one_colour(rows[: max(1, count - 1)]) >= FLAT
    changes = [_change(rows, place) for place in range(2, min(len(rows) - 2, count + 14))]
    at = count - 2  # position of the edge in ``changes``
    near, beyond = changes[max(0, at - 2) : at + 3], changes[at + 4 :]
    usual = float(np.median(beyond)) if beyond else 0.0
    visible = bool(near) and max(near) > EDGE * usual + EDGE_LEVELS
    if flat and visible:
        return True
    return None if flat or visible else False


def _change(rows: Float32, place: int) -> float:
    """How much changes across a line: the median along it."""
    return float(np.median(np.abs(rows[place + 1] - rows[place - 2]).max(-1)))


def _of_one_colour(pixels: Float32) -> float:
    """The part of pixels near the most common colour."""
    flat = pixels.reshape(-1, 3)
    keys = (flat // 8).astype(np.int64) @ np.array([1, 32, 1024])
    values, counts = np.unique(keys, return_counts=True)
    centre = np.median(flat[keys == values[counts.argmax()]], 0)
    return float((np.abs(flat - centre).max(1) <= FLAT_LEVELS).mean())


def _against_enlargement(large: Float32, small: Float32, grid: Grid) -> tuple[float, float]:
    """How a large image differs from an enlargement of the small one, in what is finer than that.

    Returns:
        The power of its fine detail, times that of the enlargement with most of it; and their
        correlation, with the enlargement most like it. Medians over tiles: what was drawn on it
        later is in few of them.
    """
    scale = large.shape[0] / small.shape[0]
    rows, columns = _middle(large.shape)
    down, across = (s / n for s, n in zip(small.shape, large.shape, strict=True))
    box = columns.start * across, rows.start * down, columns.stop * across, rows.stop * down
    large = large[rows, columns]
    has = _fine_detail(large, scale)
    own = (np.abs(has) ** 2).sum(1)
    times, alike = [], []
    for how in ENLARGING:
        made = np.asarray(Image.fromarray(small).resize(large.shape[::-1], how, box))
        would = _fine_detail(generations.saved(np.clip(made, 0, 255), grid), scale)
        power, product = (np.abs(would) ** 2).sum(1), (has * would.conj()).sum(1).real
        times.append(float(np.median(own / (power + 1e-9))))
        alike.append(float(np.median(product / np.sqrt(own * power + 1e-9))))
    return min(times), max(alike)


def _fine_detail(grey: NDArray[np.floating], scale: float) -> NDArray[np.complexfloating]:
    """What an image ``1/scale`` as large cannot show: ``(tiles, frequencies)``, of its middle."""
    rows, columns = (side // TILE for side in grey.shape)
    top, left = (grey.shape[0] - rows * TILE) // 2, (grey.shape[1] - columns * TILE) // 2
    middle = grey[top : top + rows * TILE, left : left + columns * TILE]
    tiles = middle.reshape(rows, TILE, columns, TILE).swapaxes(1, 2).reshape(-1, TILE, TILE)
    taper = np.outer(np.hanning(TILE), np.hanning(TILE))
    spectra = np.fft.rfft2((tiles - tiles.mean((1, 2), keepdims=True)) * taper)
    cycles = np.hypot(np.fft.fftfreq(TILE)[:, None], np.fft.rfftfreq(TILE)[None])
    limit = 0.5 / scale
    return np.asarray(spectra[:, (cycles > 1.15 * limit) & (cycles < min(0.5, 1.9 * limit))])


def _middle(shape: tuple[int, ...]) -> tuple[slice, slice]:
    """The rows and columns in the middle that detail is measured on."""
    begins = [max(0, side - WINDOW) // 2 for side in shape]
    down, across = (slice(b, min(b + WINDOW, n)) for b, n in zip(begins, shape, strict=True))
    return down, across


def _grain(pixels: Float32) -> float:
    """Change from pixel to pixel, as part of all change."""
    return float(np.diff(pixels, axis=0).std() + np.diff(pixels, axis=1).std()) / (
        float(pixels.std()) + 1e-6
    )


def _grey(pixels: Pixels) -> Float32:
    return np.asarray(pixels @ np.array([0.299, 0.587, 0.114], np.float32), np.float32)


def _fitted(seen: Float32, wanted: Float32, valid: Mask) -> Float32:
    """``seen`` with gain and offset fitted twice, the second time without what differs most."""
    use, made = valid, seen
    for _ in range(2):
        spread = float(seen[use].var()) + 1e-6
        mean, goal = float(seen[use].mean()), float(wanted[use].mean())
        gain = float(((seen[use] - mean) * (wanted[use] - goal)).mean()) / spread
        made = np.asarray(gain * (seen - mean) + goal, np.float32)
        error = np.abs(made - wanted)
        use = valid & (error <= np.percentile(error[valid], 80))
    return made


def _neighbours(mask: Mask) -> NDArray[np.int64]:
    """How many of the nine pixels around each are set."""
    padded = np.pad(mask, 1).astype(np.int64)
    across = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return np.asarray(across[:-2] + across[1:-1] + across[2:])


def _slope(image: Float32) -> Float32:
    """The gradient of the blurred image: both are as sharp then, wherever they come from."""
    for axis in (0, 1):
        around = np.roll(image, 1, axis) + np.roll(image, -1, axis)
        image = np.asarray((2 * image + around) / 4, np.float32)
    return np.asarray(np.hypot(*np.gradient(image)), np.float32)
