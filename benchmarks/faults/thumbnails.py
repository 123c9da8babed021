"""An encoder without a network, and images it tells apart: for campaigns of many processes."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.bank import Bank
from sscd_vec.encoder.images import ImageError, load_pixels
from sscd_vec.normalize import Normalizer

SIDE = 8
COPY = 0.95


class ThumbnailEncoder:
    """Descriptors are thumbnails of 8×8 pixels, less their mean."""

    dim = SIDE * SIDE * 3
    fingerprint = "thumbnails"
    config = SimpleNamespace(size=64)

    def encode(self, inputs: Sequence[Any], *, on_error: str = "raise", **_: object) -> Any:  # noqa: ANN401
        """As ``Encoder.encode`` does."""
        rows, positions, skipped = [], [], []
        for position, image in enumerate(inputs):
            try:
                rows.append(self._descriptor(image))
                positions.append(position)
            except ImageError as error:
                if on_error == "raise":
                    raise
                skipped.append(SimpleNamespace(position=position, reason=error.reason))
        descriptors = np.stack(rows) if rows else np.empty((0, self.dim), np.float32)
        if on_error == "raise":
            return descriptors
        return SimpleNamespace(
            descriptors=descriptors, positions=np.array(positions, np.int64), skipped=skipped
        )

    def heatmap(self, image: Any, other: Any) -> NDArray[np.float32]:  # noqa: ANN401
        """Where two thumbnails agree."""
        product = self._descriptor(image) * self._descriptor(other)
        return np.asarray(product.reshape(SIDE, SIDE, 3).sum(2), np.float32)

    def _descriptor(self, image: Any) -> NDArray[np.float32]:  # noqa: ANN401
        small = Image.fromarray(load_pixels(image)).resize((SIDE, SIDE), Image.Resampling.BOX)
        row = np.asarray(small, np.float32).reshape(-1)
        row = row - row.mean()
        if not row.any():  # one colour: an image like others of one colour
            row = np.ones_like(row)
        return np.asarray(row / np.linalg.norm(row), np.float32)


def open_bank(place: str | Path, **options: Any) -> Bank:  # noqa: ANN401
    """A bank described by thumbnails."""
    normalizer = Normalizer.identity(ThumbnailEncoder.dim).with_threshold(COPY)
    options.setdefault("normalizer", normalizer)
    return Bank(place, model=ThumbnailEncoder(), **options)


def write_images(folder: Path, count: int, seed: int) -> list[Path]:
    """Images of coloured squares, no two alike."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths = [folder / f"{number:04}.png" for number in range(count)]
    for path in paths:
        squares = Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
        squares.resize((64, 64), Image.Resampling.NEAREST).save(path)
    return paths
