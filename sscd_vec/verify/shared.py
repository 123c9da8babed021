"""What different images share: the frame of an interface, a pattern that repeats.

Geometry aligns two screenshots of one application by its bars and labels, whatever photo they show,
and two photos in front of one tiled wall by its tiles. Neither is a copy:

- **A pattern that repeats.** A keypoint of a tile looks like those of all other tiles, so hardly
  one stands out by itself; they match only where the alignment tells where to look.
- **A frame.** Within the overlap one connected region shows something else, detailed in both images
  and without correlation. What agrees around it is plain ground to a large part, as interfaces
  have and photos do not; or to a smaller one, and fewer keypoints stand out than in a photo, since
  letters look like other letters.

Both are measured on the small grey copies that features keep.
"""

import numpy as np
from numpy.typing import NDArray

from sscd_vec.verify.evidence import Support
from sscd_vec.verify.features import Features, Float32, load_cv2
from sscd_vec.verify.geometry import Matrix

Mask = NDArray[np.bool_]

FRAME = "a frame that both share aligns; what it shows differs"
PATTERN = "a pattern that repeats aligns"

# Of the matched cells, those whose keypoints stand out by themselves: fewer than these in a pattern
# that repeats, and among letters.
PATTERNED, LETTERED = 0.25, 0.75
WINDOW = 9  # pixels of the small copies
DETAILED = 3.0  # standard deviation in grey levels: a window that varies less says nothing
UNLIKE = 0.4  # correlation of a window that shows something else, at most
REGION = 0.08  # of the overlap: the least connected region that counts
PLAIN = 2  # grey levels around a pixel of plain ground, at most
MUCH, SOME = 0.25, 0.1  # such ground as a share of what agrees
EQUAL, WHOLE = 0.02, 0.93  # unlike and covered shares of images that are simply the same


def shared_only(query: Features, reference: Features, unit: Matrix, support: Support) -> str:
    """Why an alignment makes no copy: what the two share, in words; '' if nothing says so.

    Args:
        query: Of the query.
        reference: Of the reference.
        unit: ``(3, 3)`` from the query to the reference, in unit coordinates.
        support: What speaks for the alignment.
    """
    first, second, seen = _laid(query.thumbnail, reference.thumbnail, unit)
    unlike = _unlike(first, second, seen)
    overlap = max(int(seen.sum()), 1)
    if support.sure_cells < PATTERNED * support.cells:
        covered = min(support.query_coverage, support.reference_coverage)
        is_same = covered >= WHOLE and unlike.sum() <= EQUAL * overlap
        return "" if is_same else PATTERN
    if _largest(unlike) < REGION * overlap:
        return ""
    around = seen & ~unlike
    plain = around & (np.maximum(_range(first), _range(second)) <= PLAIN)
    is_lettered = support.sure_cells <= LETTERED * support.cells
    return FRAME if plain.sum() >= (SOME if is_lettered else MUCH) * around.sum() else ""


def _laid(
    query: NDArray[np.uint8], reference: NDArray[np.uint8], unit: Matrix
) -> tuple[Float32, Float32, Mask]:
    """The query, the reference on the query's frame, and where both are seen."""
    cv2 = load_cv2()
    size = query.shape[1], query.shape[0]
    moved = _from_unit(reference.shape) @ unit @ np.linalg.inv(_from_unit(query.shape))
    laid = cv2.warpPerspective(
        reference.astype(np.float32), moved, size, flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )  # fmt: skip
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    seen = cv2.warpPerspective(np.ones(reference.shape, np.uint8), moved, size, flags=flags)
    return query.astype(np.float32), np.asarray(laid, np.float32), np.asarray(seen > 0)


def _unlike(first: Float32, second: Float32, seen: Mask) -> Mask:
    """Where windows of both have detail and do not correlate; a negative does."""
    cv2 = load_cv2()
    weight = seen.astype(np.float32)

    def mean(values: Float32) -> Float32:
        summed = cv2.blur(values * weight, (WINDOW, WINDOW))
        return np.asarray(summed / np.maximum(covered, 1e-6), np.float32)

    covered = cv2.blur(weight, (WINDOW, WINDOW))
    a, b = mean(first), mean(second)
    variances = mean(first**2) - a**2, mean(second**2) - b**2
    detailed = seen & (np.minimum(*variances) > DETAILED**2)
    spread = np.sqrt(np.maximum(variances[0] * variances[1], 1e-6))
    likeness = (mean(first * second) - a * b) / spread
    if detailed.any() and np.median(likeness[detailed]) < 0:
        likeness = -likeness
    return np.asarray(detailed & (likeness < UNLIKE))


def _largest(mask: Mask) -> int:
    """Pixels of the largest connected region."""
    cv2 = load_cv2()
    count, _, facts, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=4)
    return int(facts[1:, cv2.CC_STAT_AREA].max()) if count > 1 else 0


def _range(grey: Float32) -> Float32:
    """Largest less smallest value around each pixel."""
    cv2 = load_cv2()
    square = np.ones((3, 3), np.uint8)
    return np.asarray(cv2.dilate(grey, square) - cv2.erode(grey, square), np.float32)


def _from_unit(shape: tuple[int, ...]) -> Matrix:
    return np.array([[shape[1], 0, -0.5], [0, shape[0], -0.5], [0, 0, 1.0]])
