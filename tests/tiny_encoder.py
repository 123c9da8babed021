"""A stand-in encoder that needs no network weights, for banks and the server."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.encoder.images import ImageError, load_pixels

SIDE = 8


class TinyEncoder:
    """Descriptors are 8x8 thumbnails without their mean: enough for resaved and resized copies.

    Attributes:
        batches: How many images each call was given.
        scales: At which scale each call was asked to look. Twice as large means the middle half
            here, where a real network would find what lies there.
    """

    dim = SIDE * SIDE * 3
    fingerprint = "tiny-encoder"
    config = SimpleNamespace(size=64)

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.scales: list[float] = []

    def encode(
        self,
        inputs: Sequence[Any],
        *,
        on_error: str = "raise",
        show_progress: bool | None = None,
        scale: float = 1.0,
    ) -> Any:  # noqa: ANN401 - as Encoder.encode: an array, or what was skipped too
        self.batches.append(len(inputs))
        self.scales.append(scale)
        rows, positions, skipped = [], [], []
        for position, image in enumerate(inputs):
            try:
                row = self._grid(image, scale).reshape(-1)
            except ImageError as error:
                if on_error == "raise":
                    raise
                skipped.append(SimpleNamespace(position=position, reason=error.reason))
                continue
            rows.append(row / max(float(np.linalg.norm(row)), 1e-6))
            positions.append(position)
        descriptors = np.stack(rows) if rows else np.empty((0, self.dim), np.float32)
        if on_error == "raise":
            return descriptors
        return SimpleNamespace(
            descriptors=descriptors, positions=np.array(positions, np.int64), skipped=skipped
        )

    def heatmap(self, image: Any, other: Any) -> NDArray[np.float32]:  # noqa: ANN401
        return np.asarray((self._grid(image) * self._grid(other)).sum(2), np.float32)

    def _grid(self, image: Any, scale: float = 1.0) -> NDArray[np.float32]:  # noqa: ANN401
        whole = Image.fromarray(load_pixels(image))
        edges = [(0.5 + 0.5 * sign / scale) for sign in (-1, 1)]
        box = tuple(edge * side for edge in edges for side in whole.size)
        small = whole.resize((SIDE, SIDE), Image.Resampling.BOX, box)  # type: ignore[arg-type]
        grid = np.asarray(small, np.float32)
        return np.asarray(grid - grid.mean((0, 1)), np.float32)
