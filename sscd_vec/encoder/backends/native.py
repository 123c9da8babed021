"""torch itself: folded, channels_last, and fused by oneDNN on a CPU."""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sscd_vec.encoder.backends import Precision
from sscd_vec.encoder.backends.fold import fastest_copy
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.pipeline import Workers
from sscd_vec.encoder.preprocess import normalize

# Pixels a thread of a CPU takes through the network at a time. More are no faster: activations
# (64 bytes per pixel for the largest of a ResNet) then leave the cache, and above 32 MB malloc maps
# and faults in fresh pages for every layer.
_PIXELS_PER_THREAD = 288 * 384


class TorchBackend:
    """A folded copy of a model on a device; see ``Backend``.

    On a CPU every core takes images of its own through the whole network. Sharing each convolution
    between the cores instead makes them wait for one another after every layer, longest where a
    core also decodes images.

    Attributes:
        model: That copy; its trunk takes and returns the backend's precision.
    """

    def __init__(self, model: SSCDModel, device: torch.device, precision: Precision) -> None:
        """Copy, fold and move ``model``."""
        self._device = device
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.model = fastest_copy(model, device, self._dtype)
        self._shape: torch.Size | None = None  # of the last image
        self._cores: Workers | None = None
        self._end_cores: Callable[[], object] = lambda: None
        self._handing_out = threading.Lock()  # work must not follow the order to end
        return_freed_memory()

    def __call__(self, images: Tensor) -> NDArray[np.float32]:
        """Return the descriptors of ``images``."""
        if self._device.type != "cpu":
            return self._descriptors(images).cpu().numpy()
        parts = _split(images, torch.get_num_threads())
        if len(parts) == 1:
            descriptors = self._descriptors(images)
        else:
            descriptors = torch.cat(self._side_by_side(parts))
        if images.shape[1:] != self._shape:
            # All weights and activations were of other sizes before, and left holes.
            self._shape = images.shape[1:]
            return_freed_memory()
        return descriptors.numpy()

    @torch.inference_mode()
    def _descriptors(self, images: Tensor) -> Tensor:
        # A caller's autocast must not change what the fingerprint promises.
        with torch.autocast(self._device.type, enabled=False):
            pixels = images.to(self._device, non_blocking=True)
            descriptors: Tensor = self.model(normalize(pixels, self.model.config).to(self._dtype))
            return descriptors

    def _side_by_side(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Descriptors of each part; an error or Ctrl-C leaves nothing running.

        Several threads may call at once: each gets its own answers, from the same cores.
        """
        wanted = True

        def describe(part: Tensor) -> Tensor:
            return self._descriptors(part) if wanted else part

        try:
            with self._handing_out:
                submit = self._workers().submit
                waiting = [submit(functools.partial(describe, part)) for part in parts]
            return [result() for result in waiting]
        except BaseException:
            wanted = False
            with self._handing_out:
                cores, self._cores = self._cores, None
                self._end_cores()
            if cores is not None:
                cores.join()
            raise

    def _workers(self) -> Workers:
        """One thread per core torch may use; within each, torch computes with one."""
        number = torch.get_num_threads()
        if self._cores is None or len(self._cores) != number:
            self._end_cores()
            try:
                one_thread = functools.partial(torch.set_num_threads, 1)
                self._cores = Workers(number, "forward", one_thread)
            finally:
                torch.set_num_threads(number)  # what threads that are yet to come begin with
            self._end_cores = weakref.finalize(self, self._cores.stop)
        return self._cores


def return_freed_memory() -> None:
    """Give what was freed back to the system, where the C library keeps it (glibc).

    It keeps freed blocks in case their sizes are asked for again. Where they are not, or other
    blocks lie between them, that is soon more memory than is used.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return None
    return trim


def _split(images: Tensor, threads: int) -> tuple[Tensor, ...]:
    """Cut a batch into even parts, one per thread or more; each a thread's share, or one image."""
    pixels = images[:1].numel() // 3
    parts = min(len(images), max(threads, -(-len(images) * pixels // _PIXELS_PER_THREAD)))
    return torch.chunk(images, max(1, parts))
