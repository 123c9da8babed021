"""Decoded images, in memory or streamed, and the memory a run keeps from step to step.

By default an image is stored as ``side x side`` pixels, squeezed if it is not square, beside its
true aspect ratio; the augmentation's resample undoes the squeeze. One shape for all makes a batch
one tensor. Images may keep their own shape and pixels instead: sharper crops for more memory.
"""

import contextlib
import ctypes
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.encoder.backends.native import return_freed_memory
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.images import ImageError, Pixels, load_pixels
from sscd_vec.encoder.preprocess import resize, target_size
from sscd_vec.files import ImageFile
from sscd_vec.progress import progress_bar
from sscd_vec.trainer.config import TrainConfig

log = logging.getLogger(__name__)

DECODE_BLOCK = 256
SAMPLE = 16  # images decoded to estimate the memory of all

# Names and defaults of mallopt(3).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
DEFAULTS = {M_TRIM_THRESHOLD: 128 << 10, M_TOP_PAD: 0, M_MMAP_MAX: 65536}
KEEPING = {M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 256 << 20, M_MMAP_MAX: 0}

Progress: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class Storage:
    """How decoded images are stored.

    Attributes:
        side: Side of the square; with ``own``, the longest short side, and 0 for no limit.
        own: Keep each image's own shape.
    """

    side: int
    own: bool = False

    def decode(self, image: ImageFile) -> tuple[Pixels, float] | str:
        """Pixels ``(h, w, 3)`` and the image's width / height, or why it cannot be read."""
        try:
            pixels = load_pixels(image, reduce_to=self._stored_size)
        except ImageError as error:
            return error.reason
        height, width = pixels.shape[:2]
        if (height, width) != self._stored_size(height, width):
            pixels = resize(pixels, self._target).numpy()
        return np.require(pixels, requirements="W"), width / height

    @property
    def _target(self) -> EncoderConfig:
        """The encoder's own resize."""
        return EncoderConfig(size=self.side, size_mode="short" if self.own else "square")

    def _stored_size(self, height: int, width: int) -> tuple[int, int]:
        if self.own and not 0 < self.side < min(height, width):
            return height, width
        return target_size(height, width, self._target)


@dataclass(frozen=True)
class Decoded:
    """Some decoded images.

    Attributes:
        pixels: uint8 ``(n, side, side, 3)``, or n arrays ``(h, w, 3)``.
        aspects: (n,) width / height.
        sources: (n,) their numbers.
    """

    pixels: Pixels | list[Pixels]
    aspects: npt.NDArray[np.float32]
    sources: npt.NDArray[np.int64]

    def tensors(self, device: str = "cpu") -> Tensor | list[Tensor]:
        """The pixels as one tensor, or as a list where each image has its own shape."""
        if isinstance(self.pixels, np.ndarray):
            return torch.from_numpy(self.pixels).to(device)
        return [torch.from_numpy(pixels).to(device) for pixels in self.pixels]


class PixelSource(Protocol):
    """Numbered images that can be had decoded."""

    def __len__(self) -> int:
        """Number of images."""
        ...

    def take(self, numbers: npt.NDArray[np.int64]) -> Decoded:
        """The decoded images of these numbers."""
        ...

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable images found so far: name to reason."""
        ...


class MemoryPixels:
    """Every image decoded once and kept; unreadable ones are left out before training."""

    def __init__(
        self,
        images: Sequence[ImageFile],
        storage: Storage,
        workers: int = 4,
        progress: Progress | None = None,
    ) -> None:
        """Decode ``images``; ``progress`` is called with the number done since the last call."""
        self._skipped: dict[str, str] = {}
        aspects: list[float] = []
        side = storage.side
        square: Pixels = np.empty((0 if storage.own else len(images), side, side, 3), np.uint8)
        own: list[Pixels] = []
        with ThreadPoolExecutor(workers) as pool:
            for start in range(0, len(images), DECODE_BLOCK):
                block = images[start : start + DECODE_BLOCK]
                for image, result in zip(block, pool.map(storage.decode, block), strict=True):
                    if isinstance(result, str):
                        self._skipped[image.id] = result
                        continue
                    if storage.own:
                        own.append(result[0])
                    else:
                        square[len(aspects)] = result[0]
                    aspects.append(result[1])
                if progress is not None:
                    progress(len(block))
        self._pixels: Pixels | list[Pixels] = own if storage.own else square[: len(aspects)]
        self._aspects = np.array(aspects, dtype=np.float32)

    def __len__(self) -> int:
        """Number of images that could be read."""
        return len(self._pixels)

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable images: name to reason."""
        return self._skipped

    def take(self, numbers: npt.NDArray[np.int64]) -> Decoded:
        """The decoded images of these numbers."""
        stored = self._pixels
        taken = stored[numbers] if isinstance(stored, np.ndarray) else [stored[n] for n in numbers]
        return Decoded(taken, self._aspects[numbers], numbers.astype(np.int64))


class StreamedPixels:
    """Images decoded when needed, several at once.

    An unreadable image is listed and replaced by the next readable one, whose number is its source,
    so that the loss never learns a false negative.
    """

    def __init__(self, images: Sequence[ImageFile], storage: Storage, workers: int = 4) -> None:
        """Prepare to decode ``images``."""
        self._images, self._storage = images, storage
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._skipped: dict[str, str] = {}

    def __len__(self) -> int:
        """Number of images listed, readable or not."""
        return len(self._images)

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable images met so far: name to reason."""
        return self._skipped

    def take(self, numbers: npt.NDArray[np.int64]) -> Decoded:
        """The decoded images of these numbers."""
        found = list(self._pool.map(self._readable, numbers.tolist()))
        pixels = [pixels for pixels, _, _ in found]
        return Decoded(
            pixels if self._storage.own else np.stack(pixels),
            np.array([aspect for _, aspect, _ in found], dtype=np.float32),
            np.array([number for _, _, number in found], dtype=np.int64),
        )

    def _readable(self, number: int) -> tuple[Pixels, float, int]:
        """This image, or the next one that can be read."""
        for candidate in range(number, number + len(self._images)):
            image = self._images[candidate % len(self._images)]
            if image.id in self._skipped:
                continue
            result = self._storage.decode(image)
            if isinstance(result, str):
                self._skipped[image.id] = result
                log.warning("skipped %s: %s", image.id, result)
                continue
            return *result, candidate % len(self._images)
        raise ValueError(f"none of the {len(self._images)} images can be read")


def decode(
    images: Sequence[ImageFile], config: TrainConfig, show: bool | None = False
) -> PixelSource:
    """Decode images into memory, with a bar if ``show``, or stream them, as the settings say."""
    own = config.crops == "own"
    storage = Storage(config.stored_size if own else config.pixels, own)
    in_memory = config.decoded == "memory"
    if config.decoded == "auto":
        needed = bytes_in_memory(images, storage) / 1e9
        in_memory = needed <= config.memory_gb
        how = "kept in memory" if in_memory else "streamed"
        log.info("%d images are %.1f GB decoded: %s", len(images), needed, how)
    if not in_memory:
        return StreamedPixels(images, storage)
    with progress_bar("decoding", len(images), show) as bar:
        return MemoryPixels(images, storage, progress=bar.advance)


def bytes_in_memory(images: Sequence[ImageFile], storage: Storage) -> int:
    """Memory that ``MemoryPixels`` needs; estimated from a few images that keep their own shape."""
    if not storage.own:
        return len(images) * 3 * storage.side**2
    sample = np.linspace(0, len(images) - 1, min(len(images), SAMPLE)).astype(int)
    results = [storage.decode(images[i]) for i in sample]
    decoded = [result for result in results if not isinstance(result, str)]
    return len(images) * sum(pixels.nbytes for pixels, _ in decoded) // max(len(decoded), 1)


def as_squares(
    pixels: Tensor | Sequence[Tensor], size: int, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """Images as ``(n, 3, size, size)``: uint8, or float32 in [0, 1]."""
    if not isinstance(pixels, Tensor):
        return torch.cat([as_squares(one[None], size, dtype) for one in pixels])
    images = pixels.permute(0, 3, 1, 2)
    images = images if dtype == torch.uint8 else images.float().div_(255)
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


@contextlib.contextmanager
def freed_memory_kept(wanted: bool = True) -> Iterator[None]:
    """Keep freed memory for the next step; give it back at the end. Without glibc, do nothing.

    Every step on a CPU asks for the same gigabytes of activations and frees them. glibc returns
    large blocks to the kernel, which clears every page when it hands them out again: a third of a
    step. Call ``return_freed_memory`` every few steps anyway: what threads decode meanwhile
    lies between the blocks of a step and leaves holes that later steps cannot fill.

    Afterwards glibc's usual limits apply again, but it no longer adapts them by itself.
    """
    if not wanted or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    for parameter, value in KEEPING.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in DEFAULTS.items():
            libc.mallopt(parameter, value)
        return_freed_memory()
