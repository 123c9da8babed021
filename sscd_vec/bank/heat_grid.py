"""Heatmaps as a page carries them: a small grid of bytes, painted over the picture there.

The network's own map is a dozen cells wide; what ``Encoder.heatmap`` returns is that map enlarged
to every pixel. A grid of 20 cells loses nothing and has a few hundred bytes.
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 20  # cells along the long side
IMAGE_SIDE = 480  # pixels along the long side of the images heatmaps are made from


def reduced(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pixels reduced to 480 on the long side: a larger image makes no finer heatmap."""
    if max(pixels.shape[:2]) <= IMAGE_SIDE:
        return pixels
    image = Image.fromarray(pixels)
    image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    return np.array(image)


def coarse(heatmap: NDArray[np.floating]) -> NDArray[np.float32]:
    """A heatmap averaged over the cells of the grid."""
    height, width = heatmap.shape
    scale = min(1.0, SIDE / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = Image.fromarray(heatmap.astype(np.float32))
    return np.asarray(image.resize(size, Image.Resampling.BOX), np.float32)


def grid(heatmap: NDArray[np.floating]) -> dict[str, Any]:
    """The grid as JSON carries it: ``width``, ``height`` and base64 ``values``, row by row.

    Its own range is stretched to 0–255; a map without any range is all 0.
    """
    cells = coarse(heatmap)
    low, high = float(cells.min()), float(cells.max())
    scaled = (cells - low) / (high - low) if high > low else np.zeros_like(cells)
    values = np.rint(255 * scaled).astype(np.uint8)
    return {
        "width": values.shape[1],
        "height": values.shape[0],
        "values": base64.b64encode(values.tobytes()).decode(),
    }
