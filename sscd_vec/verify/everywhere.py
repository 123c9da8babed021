"""Whether two aligned images are the same everywhere, not only where they have keypoints.

Another page of the same form has the same lines and boxes, and aligns as a copy does. What tells
them apart is the rest: laid on each other, copies agree in every block, and pages differ where they
were filled in. The alignment may be a perspective, as of a page on a table, and the light uneven.

1. The alignment of the keypoints is refined on the pixels (``cv2.findTransformECC``).
2. One image is brought into the light of the other, ``x = g(u, v) y + o`` where the
   gain is quadratic.
3. In blocks of ``BLOCK`` pixels, ``disagreement = mean (x - y)^2 / (max(var x, var y) + floor)``;
   the worst block decides.
4. One image must be seen as a whole in the other, and be much of it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.verify.features import Pixels, load_cv2
from sscd_vec.verify.geometry import Matrix, linear_part

Float32 = NDArray[np.float32]
Mask = NDArray[np.bool_]

SIDE = 640  # longest side images are compared at: digits of a page stay legible
SMALLEST = 240  # longest side of what both show, below which too little of a text is left
LEVELS = (160, 0), (320, 10), (SIDE, 6)  # longest side, and steps of the refinement at most
SOFT = 1.2  # pixels: resampling in perspective costs sharpness, so both lose some
WIDE = 8.0  # pixels: what is larger than that is light
BLOCK = 10
FLOOR = 10.0**2  # variance, in grey levels squared, that compression alone may leave
WORST = 0.5  # disagreement of a copy's worst block, at most
DIFFERENT, MANY = 1.0, 0.02  # disagreement of a block that differs, and the share of another page
CLEARLY = 0.08  # the same share before the alignment is precise
INSIDE, SHARE = 0.96, 0.4  # of the smaller image in the larger, and of the larger covered
GAIN = 0.4, 1.8  # of the light, anywhere
COLOUR, COARSE = 40.0, 96  # levels a block may differ in one channel, at a side of so many pixels
EDGE = 3  # pixels at the border of the overlap that resampling touches


@dataclass(frozen=True)
class Agreeing:
    """How two aligned images agree over all of their overlap.

    Attributes:
        is_copy: Whether they are the same everywhere; False if they differ in many places; None if
            this cannot say: they differ in few, or one does not contain the other.
        disagreement: Of the worst block: 0 is equal; infinite if they could not be compared.
        differing: Share of the blocks that differ.
        reason: One line for people.
    """

    is_copy: bool | None
    disagreement: float
    differing: float
    reason: str


def agree_everywhere(query: Pixels, reference: Pixels, transform: Matrix) -> Agreeing:
    """Lay a query on a reference and compare them block by block.

    Args:
        query: ``(h, w, 3)`` uint8 RGB.
        reference: Likewise.
        transform: ``(3, 3)`` from the query to the reference, in unit coordinates.
    """
    laid = _Laid(query, reference, transform)
    # As many pixels as the coarser of the two has: the finer one's detail has nothing to meet.
    side = min(SIDE, max(reference.shape) * min(1.0, laid.scale(reference.shape)))
    if side < SMALLEST:
        return Agreeing(None, np.inf, 0.0, f"one shows the other below {SMALLEST} pixels")
    blocks = np.zeros(0, np.float32)
    for level, steps in LEVELS:
        if steps and not laid.refine(min(side, level), steps):
            return Agreeing(None, np.inf, 0.0, "they do not align")
        found = laid.blocks(min(side, level))
        if found is None:
            return Agreeing(None, np.inf, 0.0, "the light differs, or they share too little")
        blocks, differing = found, float((found > DIFFERENT).mean())
        # Most strangers are told from the smallest images; what differs little is looked at again.
        if differing > (MANY if level == SIDE else CLEARLY):
            reason = "aligned, they differ in many places"
            return Agreeing(False, float(blocks.max()), differing, reason)
    shown, covered = laid.coverage()
    worst = float(blocks.max())
    if worst > WORST:
        return Agreeing(None, worst, differing, "aligned, they differ in places")
    if max(shown, covered) < INSIDE or min(shown, covered) < SHARE:
        return Agreeing(None, worst, differing, "each shows something the other does not")
    if laid.colours_differ():
        return Agreeing(None, worst, differing, "the colours differ")
    return Agreeing(True, worst, differing, "aligned, they are the same everywhere")


class _Laid:
    """A query on a reference's frame, at any resolution."""

    def __init__(self, query: Pixels, reference: Pixels, transform: Matrix) -> None:
        self.query, self.reference = query, reference
        self.transform = np.asarray(transform, np.float64)

    def refine(self, side: float, steps: int) -> bool:
        """Improve the transform on grey pixels; False if that fails."""
        cv2 = load_cv2()
        x, y, warp = self._at(side)
        how = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, steps, 1e-5)
        # Without the light: otherwise its slope is taken for a shift.
        ours, theirs = _detail(_grey(x)), _detail(_grey(y))
        try:
            _, found = cv2.findTransformECC(
                ours, theirs, warp.astype(np.float32), cv2.MOTION_HOMOGRAPHY, how, None, 5
            )
        except cv2.error:  # it diverged: nothing to hold on to
            return False
        self.transform = np.linalg.inv(
            np.linalg.inv(_from_unit(y.shape)) @ found @ _from_unit(x.shape)
        )
        self.transform /= self.transform[2, 2]
        return bool(np.isfinite(self.transform).all())

    def scale(self, shape: tuple[int, ...]) -> float:
        """Pixels of the query per pixel of a reference of this shape, in its middle."""
        warp = _to_query(self.transform, self.query.shape, shape)
        size = shape[1], shape[0]
        return float(abs(np.linalg.det(linear_part(warp, size))) ** 0.5)

    def blocks(self, side: float) -> Float32 | None:
        """Disagreement of every block in the overlap; None if it cannot be measured."""
        x, y, seen = self._grey(side)
        made = _in_the_light(x, y, seen)
        if made is None:
            return None
        found = _disagreement(x, made, seen)
        return found if found.size else None

    def _grey(self, side: float) -> tuple[Float32, Float32, Mask]:
        """Reference and query, grey and softened, and where both are seen."""
        cv2 = load_cv2()
        x, y, warp = self._at(side)
        laid, seen = _warped(_soft(_grey(y)), warp, x.shape)
        border = np.ones((2 * EDGE + 1, 2 * EDGE + 1), np.uint8)
        inner = cv2.erode(seen, border, borderType=cv2.BORDER_CONSTANT, borderValue=0)
        return _soft(_grey(x)), laid, inner > 0

    def coverage(self) -> tuple[float, float]:
        """Share of the reference that the query shows, and of the query that the reference covers.

        Measured on small masks.
        """
        x, y, warp = self._at(COARSE)
        shown = _warped(np.ones(y.shape[:2], np.float32), warp, x.shape)[1].mean()
        back = np.asarray(np.linalg.inv(warp), np.float64)
        covered = _warped(np.ones(x.shape[:2], np.float32), back, y.shape)[1].mean()
        return float(shown), float(covered)

    def colours_differ(self) -> bool:
        """Whether any large block has another colour, beyond a change of light."""
        x, y, warp = self._at(COARSE)
        for channel in range(3):
            ours = np.ascontiguousarray(x[..., channel], np.float32)
            laid, seen = _warped(np.ascontiguousarray(y[..., channel], np.float32), warp, x.shape)
            made = _in_the_light(ours, laid, seen > 0)
            if made is None:
                return True
            apart = _block_means(np.where(seen > 0, ours - made, 0))
            if np.abs(apart - np.median(apart)).max() > COLOUR:
                return True
        return False

    def _at(self, side: float) -> tuple[Pixels, Pixels, Matrix]:
        """Both images with the reference at ``side``, the query at the same scale, and the map."""
        reference = _shrunk(self.reference, side / max(self.reference.shape))
        query = _shrunk(self.query, 1 / max(self.scale(reference.shape), 1e-3))
        return reference, query, _to_query(self.transform, query.shape, reference.shape)


def _in_the_light(x: Float32, y: Float32, seen: Mask) -> Float32 | None:
    """``y`` with the slowly varying gain and offset of ``x``; None if no light explains them."""
    height, width = x.shape
    v, u = np.mgrid[0:height, 0:width].astype(np.float32)
    u, v = u / width - 0.5, v / height - 0.5
    one = np.ones_like(u)
    gains = np.stack([one, u, v, u * u, u * v, v * v])
    columns = np.concatenate([gains * y, [one]])
    rows = columns[:, seen][:, ::7].astype(np.float64)
    if rows.shape[1] < 10 * len(rows):
        return None
    normal = rows @ rows.T
    normal[np.diag_indices(len(rows))] += 1e-6 * np.trace(normal) / len(rows)
    found = np.linalg.solve(normal, rows @ x[seen][::7])
    gain = np.tensordot(found[:6], gains, 1)[seen]
    if gain.min() < GAIN[0] or gain.max() > GAIN[1]:
        return None
    return np.asarray(np.tensordot(found, columns, 1), np.float32)


def _disagreement(x: Float32, y: Float32, seen: Mask) -> Float32:
    """Of every block that is seen as a whole; blocks overlap by half."""
    x, y = np.where(seen, x, 0), np.where(seen, y, 0)
    error, mean_x, square_x, mean_y, square_y, whole = (
        _block_means(part) for part in ((x - y) ** 2, x, x**2, y, y**2, seen.astype(np.float32))
    )
    variance = np.maximum(square_x - mean_x**2, square_y - mean_y**2)
    return np.asarray((error / (np.maximum(variance, 0) + FLOOR))[whole > 0.999], np.float32)


def _block_means(pixels: Float32) -> Float32:
    cv2 = load_cv2()
    half = BLOCK // 2
    means = cv2.blur(np.asarray(pixels, np.float32), (BLOCK, BLOCK), borderType=cv2.BORDER_REFLECT)
    return np.asarray(means[half : 1 - half : half, half : 1 - half : half])


def _warped(image: Float32, warp: Matrix, shape: tuple[int, ...]) -> tuple[Float32, Pixels]:
    """An image on the frame of another, and where it is."""
    cv2 = load_cv2()
    size = shape[1], shape[0]
    laid = cv2.warpPerspective(
        image, warp, size, flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )  # fmt: skip
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    seen = cv2.warpPerspective(np.ones(image.shape[:2], np.uint8), warp, size, flags=flags)
    return np.asarray(laid, np.float32), np.asarray(seen, np.uint8)


def _to_query(transform: Matrix, query: tuple[int, ...], reference: tuple[int, ...]) -> Matrix:
    """From pixels of the reference to those of the query."""
    there = _from_unit(query) @ np.linalg.inv(transform) @ np.linalg.inv(_from_unit(reference))
    return np.asarray(there / there[2, 2])


def _from_unit(shape: tuple[int, ...]) -> Matrix:
    return np.array([[shape[1], 0, -0.5], [0, shape[0], -0.5], [0, 0, 1.0]])


def _shrunk(pixels: Pixels, scale: float) -> Pixels:
    cv2 = load_cv2()
    if scale >= 1:
        return pixels
    size = max(8, round(pixels.shape[1] * scale)), max(8, round(pixels.shape[0] * scale))
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)


def _grey(pixels: Pixels) -> Float32:
    cv2 = load_cv2()
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), np.float32)


def _detail(grey: Float32) -> Float32:
    cv2 = load_cv2()
    return np.asarray(grey - cv2.GaussianBlur(grey, (0, 0), WIDE), np.float32)


def _soft(grey: Float32) -> Float32:
    cv2 = load_cv2()
    return np.asarray(cv2.GaussianBlur(grey, (0, 0), SOFT), np.float32)
