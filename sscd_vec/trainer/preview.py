"""A contact sheet of what the model will see: look at it before training."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sscd_vec.trainer.checkpoint import write_atomically
from sscd_vec.trainer.data import PathLike, find_photos
from sscd_vec.trainer.trainer import Trainer

PHOTOS = 24
COLUMNS = 4
GAP = 6


def write_preview(trainer: Trainer, photos: PathLike | Iterable[PathLike], path: PathLike) -> None:
    """Write a sheet of the first step's pairs: each photo's two views side by side.

    Args:
        trainer: Its settings are shown.
        photos: Folder, tar shard, list file, or several.
        path: Image file to write.

    Raises:
        ValueError: Fewer than two of the photos looked at can be read.
    """
    chosen = find_photos(photos)
    spread = np.linspace(0, len(chosen) - 1, min(len(chosen), PHOTOS)).astype(int)
    pixels = trainer.decode([chosen[i] for i in spread])
    count = len(pixels)
    if count < 2:
        raise ValueError(f"a preview needs 2 photos: {count} of {len(chosen)} could be read")
    shown = Trainer(trainer.config.with_changes(batch=count), device="cpu")
    views = shown.batches(pixels)(0).images
    pairs = torch.cat([views[:count], views[count:]], dim=3)  # (n, 3, s, 2 s)
    sheet = _tiled((pairs * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())
    target = Path(path)
    kind = Image.registered_extensions().get(target.suffix.lower(), "PNG")
    write_atomically(target, lambda partial: Image.fromarray(sheet).save(partial, format=kind))


def _tiled(
    images: np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Lay images out in rows, white gaps between."""
    count, height, width, _ = images.shape
    rows = -(-count // COLUMNS)
    sheet = np.full(
        (rows * (height + GAP) - GAP, COLUMNS * (width + GAP) - GAP, 3), 255, dtype=np.uint8
    )
    for i, image in enumerate(images):
        top, left = i // COLUMNS * (height + GAP), i % COLUMNS * (width + GAP)
        sheet[top : top + height, left : left + width] = image
    return sheet
