"""What may be given to ``encode``: one image, many, or a folder."""

import os
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from torch import Tensor

from sscd_vec.encoder.images import ImageInput, is_image_input, walk_images

Inputs: TypeAlias = ImageInput | Iterable[ImageInput]


def images_of(inputs: Inputs) -> Iterable[ImageInput]:
    """Return the images ``inputs`` stands for, still unpulled.

    Raises:
        TypeError: It is neither an image nor an iterable.
        ValueError: It is an array or tensor of neither one image nor a batch.
    """
    if isinstance(inputs, str | os.PathLike) and Path(inputs).is_dir():
        return walk_images(inputs)
    if is_image_input(inputs):
        return (cast(ImageInput, inputs),)
    if isinstance(inputs, np.ndarray | Tensor) and inputs.ndim not in (1, 4):
        raise ValueError(
            "expected one image (h, w[, c]) or a batch of four axes, got shape "
            f"{tuple(inputs.shape)}"
        )
    if not isinstance(inputs, Iterable):
        raise TypeError(
            "expected a path, bytes, a binary file, a PIL image, an array, a tensor or an iterable "
            f"of them, got {type(inputs).__name__}"
        )
    return cast(Iterable[ImageInput], inputs)


def count_images(inputs: Inputs) -> int | None:
    """Return how many images there are, where that is known without looking."""
    if is_image_input(inputs):
        folder = isinstance(inputs, str | os.PathLike) and Path(inputs).is_dir()
        return None if folder else 1
    return len(inputs) if isinstance(inputs, Sized) else None
