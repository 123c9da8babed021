"""Whether two aligned images look the same where they overlap, in their small grey copies.

A few matched keypoints may be chance, or a logo that both images carry. Under a wrong transform, or
around a shared logo, the rest of the overlap disagrees.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.verify.features import Features, load_cv2

Grey = NDArray[np.float32]

SURROUNDINGS = 13  # pixels: brightness is compared with its mean over such a square
CELL = 8  # pixels
FEWEST_PIXELS, FEWEST_CELLS = 40, 4
FLAT = 3.0  # grey levels: a cell that varies less says nothing
AGREES = 0.5  # correlation of a cell that looks the same


@dataclass(frozen=True)
class Agreement:
    """How alike two aligned images are.

    Attributes:
        correlation: Of the detail in the overlap, 0 to 1; a negative correlates like its original.
        agreeing: Share of the overlap's textured cells that look the same, 0 to 1.
        textured: How many such cells there are.
        query_coverage: Share of the query that the reference covers.
        reference_coverage: Share of the reference that is seen in the query.
    """

    correlation: float
    agreeing: float
    textured: int
    query_coverage: float
    reference_coverage: float


def compare_thumbnails(
    query: Features, reference: Features, matrix: NDArray[np.float64]
) -> Agreement:
    """Lay the reference's thumbnail onto the query's and compare them.

    Args:
        query: Of the query.
        reference: Of the reference.
        matrix: ``(3, 3)`` from the query's to the reference's working pixels.
    """
    cv2 = load_cv2()
    height, width = query.thumbnail.shape
    moved = np.linalg.inv(_to_working(reference)) @ matrix @ _to_working(query)
    overlap = cv2.warpPerspective(
        np.ones(reference.thumbnail.shape, np.float32),
        moved,
        (width, height),
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
    )
    laid = cv2.warpPerspective(
        reference.thumbnail.astype(np.float32),
        moved,
        (width, height),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    first, second = _detail(query.thumbnail, overlap), _detail(laid, overlap)
    products = np.stack([first * second, first * first, second * second], axis=2)
    correlation = 0.0
    if overlap.sum() >= FEWEST_PIXELS:
        correlation = abs(float(_correlate(products.sum(axis=(0, 1)))))
    agreeing, textured = _agreeing_cells(products, overlap)
    share = float(overlap.mean())
    area = abs(float(np.linalg.det(moved[:2, :2])))
    seen = min(1.0, share * height * width * area / reference.thumbnail.size)
    return Agreement(correlation, agreeing, textured, share, seen)


def _to_working(features: Features) -> NDArray[np.float64]:
    """From pixel centres of the thumbnail to those of the working image."""
    height, width = features.thumbnail.shape
    x, y = features.size[0] / width, features.size[1] / height
    return np.array([[x, 0, 0.5 * x - 0.5], [0, y, 0.5 * y - 0.5], [0, 0, 1.0]])


def _detail(grey: NDArray[np.uint8] | Grey, overlap: Grey) -> Grey:
    """Brightness less its mean over the surroundings, within the overlap."""
    cv2 = load_cv2()
    square = (SURROUNDINGS, SURROUNDINGS)
    weight = np.maximum(cv2.blur(overlap, square), 1e-6)
    mean = cv2.blur(grey * overlap, square) / weight
    return np.asarray((grey - mean) * overlap, np.float32)


def _agreeing_cells(products: Grey, overlap: Grey) -> tuple[float, int]:
    cv2 = load_cv2()
    step = CELL // 2
    square = (CELL, CELL)
    sums = cv2.boxFilter(products, -1, square, normalize=False)[step::step, step::step]
    pixels = cv2.boxFilter(overlap, -1, square, normalize=False)[step::step, step::step]
    varied = sums[:, :, 1:].min(axis=2) > FLAT**2 * np.maximum(pixels, 1)
    textured = sums[(pixels > 0.5 * CELL**2) & varied]
    if len(textured) < FEWEST_CELLS:
        return 0.0, len(textured)
    likeness = _correlate(textured.T)
    return float(max((likeness > AGREES).mean(), (likeness < -AGREES).mean())), len(textured)


def _correlate(products: NDArray[np.float32]) -> NDArray[np.float32]:
    """Correlation from the sums of products ``(ab, aa, bb)``."""
    return np.asarray(products[0] / np.sqrt(products[1] * products[2] + 1e-6))
