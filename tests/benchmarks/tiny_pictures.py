"""A describer that needs no network; apart, so that another process loads it quickly."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from PIL import Image

from accuracy.dataset import Descriptors


class TinyPictures:
    """Describes an image by its colours in a 3 × 2 grid."""

    fingerprint = "tiny pictures"
    described: ClassVar[list[str]] = []

    def __call__(self, paths: Sequence[str]) -> Descriptors:
        rows = []
        for path in paths:
            self.described.append(path)
            with Image.open(path) as image:
                rows.append(np.asarray(image.convert("RGB").resize((3, 2)), np.float32).ravel())
        z = np.stack(rows) - 120
        unit: Descriptors = z / np.linalg.norm(z, axis=1, keepdims=True)
        return unit


class TinyRecipe:
    def build(self) -> TinyPictures:
        return TinyPictures()
