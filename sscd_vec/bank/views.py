"""Views of an image: crops and larger looks, for copies that are only a part of an image.

A global descriptor sees a small paste as background.

**Tiles.** ``crops`` cuts an image into itself and a
grid of overlapping squares-of-its-shape; each is encoded on its own and the pair of images scores
the best of its crops,

    ŝ_tiled(q, r) = max over crops c of q (and, in a tiled bank, of r) of ŝ(c, r).

A maximum over many comparisons is larger than one comparison, also between unrelated images, so
this score has its own threshold (kind ``tiled``). ``n`` per side with half a crop of overlap gives
``1 + (2n - 1)²`` crops: 10 for n = 2, and ten times the encoding.

**Scales.** A copy inside a collage or on another image's ground is small; seen at twice the size it
is as large as its reference, which keeps its one vector. With ``q_s`` the descriptor of the query
at ``s`` times the model's size (``Encoder.encode(..., scale=s)``),

    ŝ(q, r) = max(ŝ(q_1, r), ŝ(q_2, r) − penalty).

Each descriptor has its own bias. A larger look scores strangers a little higher; the penalty makes
up for it, so that the combined score keeps the threshold of a search at one scale. A second look
costs four encodings: take it only if the first score does not decide (``needs_larger_look``).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (height, width, 3)
MARK = "#tile="  # between an image's id and the number of its crop, in an index
MOST_TILES = 4  # per side
SMALLEST = 32  # pixels: crops below this side are not cut
SCALES = (1.0, 2.0)
PENALTY = 0.04  # of every scale but the first; the threshold at 90 % precision stays within 0.002


def crop_count(n: int) -> int:
    """How many crops ``crops`` makes at most."""
    return 1 + (2 * n - 1) ** 2 if n > 1 else 1


def crops(pixels: Pixels, n: int) -> list[Pixels]:
    """The whole image and its overlapping crops of 1/n of each side; only the whole for n = 1.

    Args:
        pixels: ``(height, width, 3)``.
        n: Crops per side before overlap.

    Raises:
        ValueError: ``n`` is below 1.
    """
    if n < 1:
        raise ValueError(f"tiles: expected at least 1 per side, got {n}")
    views = [pixels]
    height, width = pixels.shape[:2]
    high, wide = round(height / n), round(width / n)
    if n == 1 or min(high, wide) < SMALLEST:
        return views
    for top in np.linspace(0, height - high, 2 * n - 1).round().astype(int):
        for left in np.linspace(0, width - wide, 2 * n - 1).round().astype(int):
            views.append(np.ascontiguousarray(pixels[top : top + high, left : left + wide]))
    return views


def tile_id(image: str, crop: int) -> str:
    """Id of a crop in an index; the whole image keeps its own."""
    return image if crop == 0 else f"{image}{MARK}{crop}"


def image_of(vector: str) -> str:
    """The image a crop's id belongs to."""
    image, mark, crop = vector.rpartition(MARK)
    return image if mark and crop.isdecimal() else vector


class Hit(NamedTuple):
    """The best match of any view of a query with any view of an image."""

    id: str
    score: float
    view: int


def best_hits(hits: Sequence[Iterable[tuple[str, float]]]) -> list[Hit]:
    """Best hit of each image among those of all views of a query, best first.

    Args:
        hits: For each view of the query, ids of vectors and scores.
    """
    best: dict[str, Hit] = {}
    for view, found in enumerate(hits):
        for vector, score in found:
            image = image_of(vector)
            if image not in best or score > best[image].score:
                best[image] = Hit(image, score, view)
    return sorted(best.values(), key=lambda hit: (-hit.score, hit.id))


def needs_larger_look(best_score: float, threshold: float) -> bool:
    """Whether the best score at the model's own size leaves open if there is a copy."""
    return best_score < threshold


def best_over_scales(
    scores: Sequence[NDArray[np.float32]], penalty: float = PENALTY
) -> NDArray[np.float32]:
    """Best score of every pair.

    Args:
        scores: One array per scale, all of one shape, the model's own size first.
        penalty: What a score at another scale loses.

    Raises:
        ValueError: There is no scale.
    """
    if not scores:
        raise ValueError("expected the scores of at least one scale, got none")
    best = np.array(scores[0], np.float32)
    for larger in scores[1:]:
        np.maximum(best, larger - np.float32(penalty), out=best)
    return best
