"""Local features of one image: RootSIFT keypoints and a small grey copy, in some tens of kilobytes.

Everything is rounded to what is kept (an eighth of a pixel, a sixteenth of an octave, 1.4 degrees,
eight bits), so features read back from a file give the very same evidence as fresh ones.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Pixels = NDArray[np.uint8]

DESCRIPTOR = 128
KEYPOINT = np.dtype(
    [("x", "<u2"), ("y", "<u2"), ("scale", "u1"), ("angle", "u1"), ("descriptor", "u1", DESCRIPTOR)]
)
HEADER = struct.Struct("<4sHHBBH")  # mark, width, height, thumbnail's width and height, keypoints
MARK = b"SVL1"

SUBPIXEL, OCTAVE, TURN = 8, 16, 256
LARGEST_SIDE = 65535 // SUBPIXEL
MOST_KEYPOINTS = 4096
THUMBNAIL = 64  # pixels of the longer side

# SIFT. Low limits: blurred and pale copies have faint keypoints, and geometry sorts out the rest.
CONTRAST, EDGE = 0.01, 15.0
# The best few keypoints of every cell go first, the coarse ones in larger cells of their own: fine
# ones are stronger in noise and along the edges of squares, and then say nothing.
COARSE = 8.0  # pixels across
GRID, PER_CELL = (8, 4), (6, 12)  # fine and coarse
ENLARGE = 2.0  # a small image is enlarged up to this factor
NEGATIVES = 300  # keypoints that are looked for in a negative too
SPECK, SPECKS = 48, 0.02  # grey levels, and the share of such pixels from which noise is removed

# A left-right mirrored SIFT descriptor is the same numbers in another order: the four rows across
# the keypoint's own direction swap, and its eight gradient directions run backwards.
_BINS = np.arange(DESCRIPTOR).reshape(4, 4, 8)
MIRRORED = _BINS[::-1, :, -np.arange(8) % 8].reshape(-1)
# In a negative every gradient turns round: so does the keypoint, and its 4 x 4 grid with it.
NEGATIVE = _BINS[::-1, ::-1].reshape(-1)


class FeaturesError(ValueError):
    """Bytes that are not the features of an image."""


@dataclass(frozen=True, eq=False)
class Features:
    """Local features of one image; made by ``extract`` or ``from_bytes``.

    Attributes:
        size: Width and height of the image they were measured in (the working size).
        keypoints: ``(n,)`` of ``KEYPOINT``, the most useful first.
        thumbnail: ``(h, w)`` grey pixels, the longer side ``THUMBNAIL``.
    """

    size: tuple[int, int]
    keypoints: NDArray[Any]
    thumbnail: Pixels

    def __len__(self) -> int:
        """Number of keypoints."""
        return len(self.keypoints)

    @cached_property
    def points(self) -> Float32:
        """``(n, 2)`` x and y in working pixels."""
        pairs = np.stack([self.keypoints["x"], self.keypoints["y"]], axis=1)
        return np.asarray(pairs / SUBPIXEL, np.float32)

    @cached_property
    def octaves(self) -> Float32:
        """``(n,)`` log2 of the keypoints' diameters."""
        return np.asarray(self.keypoints["scale"] / OCTAVE, np.float32)

    @cached_property
    def angles(self) -> Float32:
        """``(n,)`` directions in radians."""
        return np.asarray(self.keypoints["angle"] * (2 * np.pi / TURN), np.float32)

    @cached_property
    def descriptors(self) -> Float32:
        """``(n, 128)`` RootSIFT of unit length."""
        rows = self.keypoints["descriptor"].astype(np.float32)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / np.maximum(lengths, 1e-6), np.float32)

    @cached_property
    def mirrored(self) -> "Features":
        """Features of the image flipped left to right, computed from these."""
        flipped = self.keypoints.copy()
        right = (self.size[0] - 1) * SUBPIXEL  # the last pixel's centre
        flipped["x"] = right - np.minimum(self.keypoints["x"], right)
        flipped["angle"] = (TURN // 2 - self.keypoints["angle"].astype(np.int64)) % TURN
        flipped["descriptor"] = self.keypoints["descriptor"][:, MIRRORED]
        return Features(self.size, flipped, np.ascontiguousarray(self.thumbnail[:, ::-1]))

    @cached_property
    def with_negatives(self) -> "Features":
        """The same, followed by the best keypoints as they look in a negative of the image."""
        turned = self.keypoints[:NEGATIVES].copy()
        turned["angle"] += TURN // 2
        turned["descriptor"] = turned["descriptor"][:, NEGATIVE]
        return Features(self.size, np.concatenate([self.keypoints, turned]), self.thumbnail)

    def best(self, count: int) -> "Features":
        """The same with the ``count`` most useful keypoints only."""
        if count >= len(self):
            return self
        return Features(self.size, self.keypoints[:count], self.thumbnail)

    def to_bytes(self) -> bytes:
        """All of it as bytes: 134 per keypoint and at most 4 108 more."""
        height, width = self.thumbnail.shape
        header = HEADER.pack(MARK, *self.size, width, height, len(self))
        return header + self.thumbnail.tobytes() + self.keypoints.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview | NDArray[np.uint8]) -> "Features":
        """Read what ``to_bytes`` wrote; keeps a view of ``data``, copies nothing.

        Raises:
            FeaturesError: The bytes are something else, or not all there.
        """
        raw = np.frombuffer(data, np.uint8)
        if len(raw) < HEADER.size:
            raise FeaturesError(f"features: expected at least {HEADER.size} bytes, got {len(raw)}")
        mark, *size, width, height, count = HEADER.unpack(raw[: HEADER.size].tobytes())
        if mark != MARK:
            raise FeaturesError(
                f"features: expected bytes that begin with {MARK!r}, got {mark!r}; extract them "
                "again with this version"
            )
        start = HEADER.size + width * height
        expected = start + count * KEYPOINT.itemsize
        if len(raw) != expected or not (all(size) and width and height):
            raise FeaturesError(
                f"features: expected {expected} bytes for {count} keypoints, got {len(raw)}; "
                "extract them again"
            )
        thumbnail = raw[HEADER.size : start].reshape(height, width)
        return cls((size[0], size[1]), raw[start:].view(KEYPOINT), thumbnail)


def extract(pixels: Pixels, *, side: int, keypoints: int) -> Features:
    """Find the local features of an image.

    Args:
        pixels: ``(h, w, 3)`` RGB.
        side: The longer side becomes this many pixels (small images at most double).
        keypoints: Keep at most this many.
    """
    grey = _working_image(pixels, side)
    height, width = grey.shape
    sift = _sift()
    found = sift.detect(grey, None)
    chosen = [found[place] for place in _most_useful(found, (width, height), keypoints)]
    packed = np.zeros(len(chosen), KEYPOINT)
    if chosen:
        points, descriptors = sift.compute(grey, chosen)
        _pack(packed, points, descriptors)
    return Features((width, height), packed, _shrunk(grey, THUMBNAIL))


def load_cv2() -> ModuleType:
    """OpenCV, imported when it is first needed.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import cv2
    except ImportError as error:
        raise ImportError(
            "verifying copies needs OpenCV: pip install 'sscd-vec[verify]'"
        ) from error
    return cv2


def _sift() -> Any:  # noqa: ANN401 - cv2 has no type for it before it is imported
    cv2 = load_cv2()
    return cv2.SIFT_create(nfeatures=0, contrastThreshold=CONTRAST, edgeThreshold=EDGE)


def _working_image(pixels: Pixels, side: int) -> Pixels:
    cv2 = load_cv2()
    grey = np.asarray(cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY), np.uint8)
    if min(grey.shape) >= 3:
        smooth = np.asarray(cv2.medianBlur(grey, 3), np.uint8)
        if (cv2.absdiff(grey, smooth) > SPECK).mean() > SPECKS:
            grey = smooth
    return _shrunk(grey, min(side, round(ENLARGE * max(grey.shape))))


def _shrunk(grey: Pixels, side: int) -> Pixels:
    """The image with a longer side of ``side``; no side is below one pixel."""
    cv2 = load_cv2()
    height, width = grey.shape
    scale = side / max(height, width)
    if scale == 1:
        return grey
    size = max(1, round(width * scale)), max(1, round(height * scale))
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(grey, size, interpolation=how), np.uint8)


def _most_useful(found: Any, size: tuple[int, int], count: int) -> NDArray[np.int64]:  # noqa: ANN401
    """Places of the keypoints to keep: the strongest of every cell, then the strongest overall."""
    if not found:
        return np.zeros(0, np.int64)
    table = np.array([(*point.pt, point.response, point.size) for point in found])
    coarse = (table[:, 3] > COARSE).astype(np.int64)
    grid = np.array(GRID)[coarse][:, None]
    places = np.clip((table[:, :2] * grid / size).astype(np.int64), 0, grid - 1)
    cells = places @ (1, max(GRID)) + coarse * max(GRID) ** 2
    by_cell = np.lexsort((-table[:, 2], cells))
    rank = np.empty(len(table), np.int64)
    rank[by_cell] = np.arange(len(table)) - np.searchsorted(cells[by_cell], cells[by_cell])
    return np.lexsort((-table[:, 2], rank >= np.array(PER_CELL)[coarse]))[:count]


def _pack(packed: NDArray[Any], points: Any, descriptors: Float32) -> None:  # noqa: ANN401
    """Round keypoints to what is kept."""
    table = np.array([(*point.pt, np.log2(point.size), point.angle) for point in points])
    packed["x"] = _rounded(table[:, 0] * SUBPIXEL, 65535)
    packed["y"] = _rounded(table[:, 1] * SUBPIXEL, 65535)
    packed["scale"] = _rounded(table[:, 2] * OCTAVE, 255)
    packed["angle"] = np.rint(table[:, 3] * (TURN / 360)).astype(np.int64) % TURN
    # RootSIFT: the root of each bin's share, whose dot product is Hellinger's kernel.
    shares = descriptors / np.maximum(descriptors.sum(axis=1, keepdims=True), 1e-6)
    packed["descriptor"] = _rounded(512 * np.sqrt(shares), 255)


def _rounded(values: NDArray[Any], largest: int) -> NDArray[np.int64]:
    return np.asarray(np.clip(np.rint(values), 0, largest), np.int64)
