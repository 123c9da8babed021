"""Which photos are not strangers: two shots of one scene, or the same photo twice.

A false-match rate is a promise about strangers. Collections of photos hold shoots: of COCO's pairs
that score highest, nine in ten are shots of one scene. Descriptors cannot tell (they are what is
measured), so two other signs do. Photos are *related* if

- local features (SIFT, ratio test) agree with one similarity transform, mirrored or not, in at
  least ``INLIERS`` places, or
- their palettes do: the cosine of the roots of two Lab histograms is at least ``PALETTE``.

Of 300 pairs of strangers (photos of two other sources against COCO, the highest-scoring ones) these
signs took 3 % each for related; of 32 pairs a person called shots of one scene the palette alone
found 26.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from sscd_vec.files import write_whole

INLIERS, PALETTE = 15, 0.8
SIDE = 400  # pixels at which features are found
FEATURES, RATIO = 800, 0.8
APART = 4  # pixels; features closer than this in both photos are one place
LAB_BINS, LAB_RANGES = [8, 12, 12], [0, 256, 80, 176, 80, 176]

Features = tuple[NDArray[np.float32], NDArray[np.float32]]  # places (n, 2), descriptors (n, 128)


class RelatedPairs:
    """Pairs of photos, judged once; judgements are kept in a file if one is given."""

    def __init__(self, path: Path | None = None) -> None:
        """Read what is known."""
        self._path = path
        self._known: dict[str, bool] = {}
        if path is not None and path.exists():
            self._known = json.loads(path.read_text())

    def __call__(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.bool_]:
        """Whether the photos of each pair of files are related."""
        related = np.zeros(len(first), dtype=bool)
        for place, (a, b) in enumerate(zip(first, second, strict=True)):
            name = "|".join(sorted((Path(a).name, Path(b).name)))
            if name not in self._known:
                self._known[name] = are_related(a, b)
                if len(self._known) % 100 == 0:
                    self._keep()
            related[place] = self._known[name]
        self._keep()
        return related

    def _keep(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self._known))


def are_related(first: str, second: str) -> bool:
    """Whether two photos show one scene."""
    if float(palette(first) @ palette(second)) >= PALETTE:
        return True
    return any(inliers(first, second, mirrored) >= INLIERS for mirrored in (False, True))


@lru_cache(4096)
def palette(path: str) -> NDArray[np.float32]:
    """Roots of the shares of a Lab histogram: a unit vector."""
    pixels = cv2.cvtColor(_read(path), cv2.COLOR_BGR2LAB)
    histogram = cv2.calcHist([pixels], [0, 1, 2], None, LAB_BINS, LAB_RANGES).ravel()
    root: NDArray[np.float32] = np.sqrt(histogram / histogram.sum())
    return root


def inliers(first: str, second: str, mirrored: bool = False) -> int:
    """In how many places local features agree with one similarity transform."""
    (places, a), (others, b) = features(first, False), features(second, mirrored)
    if min(len(a), len(b)) < 8:
        return 0
    matches = [m for m in cv2.BFMatcher().knnMatch(a, b, k=2) if len(m) == 2]
    good = [best for best, next_ in matches if best.distance < RATIO * next_.distance]
    if len(good) < 4:
        return 0
    from_, to = places[[m.queryIdx for m in good]], others[[m.trainIdx for m in good]]
    cv2.setRNGSeed(0)
    agree = cv2.estimateAffinePartial2D(from_, to, ransacReprojThreshold=8.0, maxIters=5000)[1]
    if agree is None:
        return 0
    agreeing = np.hstack([from_, to])[agree.ravel() > 0]
    return len(np.unique(np.round(agreeing / APART), axis=0))


@lru_cache(4096)
def features(path: str, mirrored: bool) -> Features:
    """SIFT features of a photo."""
    gray = cv2.cvtColor(_read(path), cv2.COLOR_BGR2GRAY)
    scale = SIDE / max(gray.shape)
    gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    if mirrored:
        gray = np.ascontiguousarray(gray[:, ::-1])
    sift = cv2.SIFT.create(FEATURES, contrastThreshold=0.02)
    points, found = sift.detectAndCompute(gray, None)
    places = np.array([point.pt for point in points], dtype=np.float32).reshape(-1, 2)
    empty = np.zeros((0, 128), dtype=np.float32)
    return places, empty if found is None else np.asarray(found, dtype=np.float32)


def _read(path: str) -> NDArray[np.uint8]:
    pixels = cv2.imread(path, cv2.IMREAD_COLOR)
    if pixels is None:
        raise ValueError(f"{path}: expected a photo that OpenCV reads")
    return np.asarray(pixels, dtype=np.uint8)
