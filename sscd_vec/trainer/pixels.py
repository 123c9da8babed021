"""Pixels: photos decoded to one square uint8 array, in memory or streamed.

Every photo is kept as ``side x side`` pixels, squeezed if it was not square, beside its true
aspect ratio; the augmentation's resample undoes the squeeze. One shape for all makes a whole
batch one tensor.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.images import ImageError, Pixels, load_pixels
from sscd_vec.encoder.preprocess import resize, target_size
from sscd_vec.trainer.data import Photo

log = logging.getLogger(__name__)

DECODE_BLOCK = 256

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class Decoded:
    """Some photos' pixels: uint8 ``(n, side, side, 3)``, aspect ratios ``(n,)``, source ids."""

    pixels: Pixels
    aspects: npt.NDArray[np.float32]
    sources: npt.NDArray[np.int64]


class PixelSource(Protocol):
    """Numbered images that can be had decoded."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def take(self, numbers: npt.NDArray[np.int64]) -> Decoded:
        """The decoded images of these numbers."""
        ...

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable photos found so far: name to reason."""
        ...


class MemoryPixels:
    """Every photo decoded once and kept; unreadable ones are left out before training."""

    def __init__(
        self, photos: Sequence[Photo], side: int, workers: int = 4, progress: Progress | None = None
    ) -> None:
        """Decode ``photos`` to ``side x side``; memory is ``3 * side**2`` bytes each."""
        self._skipped: dict[str, str] = {}
        self._pixels: Pixels = np.empty((len(photos), side, side, 3), dtype=np.uint8)
        self._aspects = np.ones(len(photos), dtype=np.float32)
        square = _square(side)
        kept = 0
        with ThreadPoolExecutor(workers) as pool:
            for start in range(0, len(photos), DECODE_BLOCK):
                block = photos[start : start + DECODE_BLOCK]
                for photo, result in zip(
                    block, pool.map(lambda p: _decode(p, square), block), strict=True
                ):
                    if isinstance(result, str):
                        self._skipped[photo.name] = result
                        continue
                    self._pixels[kept], self._aspects[kept] = result
                    kept += 1
                if progress is not None:
                    progress(start + len(block), len(photos))
        self._pixels = self._pixels[:kept]
        self._aspects = self._aspects[:kept]

    def __len__(self) -> int:
        """How many photos could be read."""
        return len(self._pixels)

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable photos: name to reason."""
        return self._skipped

    def take(self, numbers: npt.NDArray[np.int64]) -> Decoded:
        """The decoded images of these numbers."""
        return Decoded(self._pixels[numbers], self._aspects[numbers], numbers.astype(np.int64))


class StreamedPixels:
    """Photos decoded when asked for, several at once.

    An unreadable photo is replaced by the next readable one and listed; its source id is that of
    the replacement, so that the loss never learns a false negative.
    """

    def __init__(self, photos: Sequence[Photo], side: int, workers: int = 4) -> None:
        """Prepare to decode ``photos`` to ``side x side``."""
        self._photos = photos
        self._square = _square(side)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._skipped: dict[str, str] = {}

    def __len__(self) -> int:
        """How many photos are listed, readable or not."""
        return len(self._photos)

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable photos met so far: name to reason."""
        return self._skipped

    def take(self, numbers: npt.NDArray[np.int64]) -> Decoded:
        """The decoded images of these numbers."""
        found = list(self._pool.map(self._readable, numbers.tolist()))
        return Decoded(
            np.stack([pixels for pixels, _, _ in found]),
            np.array([aspect for _, aspect, _ in found], dtype=np.float32),
            np.array([number for _, _, number in found], dtype=np.int64),
        )

    def _readable(self, number: int) -> tuple[Pixels, float, int]:
        """This photo, or the next one that can be read."""
        for candidate in range(number, number + len(self._photos)):
            photo = self._photos[candidate % len(self._photos)]
            if photo.name in self._skipped:
                continue
            result = _decode(photo, self._square)
            if isinstance(result, str):
                self._skipped[photo.name] = result
                log.warning("skipped %s: %s", photo.name, result)
                continue
            return *result, candidate % len(self._photos)
        raise ValueError(f"none of the {len(self._photos)} photos can be read")


def bytes_in_memory(count: int, side: int) -> int:
    """Memory that ``MemoryPixels`` needs for ``count`` photos."""
    return count * side * side * 3


def _square(side: int) -> EncoderConfig:
    """The encoder's own resize, to a skewed square."""
    return EncoderConfig(size=side, size_mode="square")


def _decode(photo: Photo, square: EncoderConfig) -> tuple[Pixels, float] | str:
    """Pixels ``(side, side, 3)`` and width / height, or why the photo cannot be read."""
    try:
        pixels = load_pixels(
            photo.read(),
            name=photo.name,
            reduce_to=lambda height, width: target_size(height, width, square),
        )
    except ImageError as error:
        return error.reason
    except OSError as error:  # gone, or not permitted, since it was listed
        return str(error)
    return resize(pixels, square).numpy(), pixels.shape[1] / pixels.shape[0]
