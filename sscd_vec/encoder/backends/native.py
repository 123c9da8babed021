"""torch itself: folded, channels_last, and fused by oneDNN on a CPU."""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.nn import functional as F  # noqa: N812

from sscd_vec.encoder.backends.fold import can_fuse, fuse_convolutions, inference_copy
from sscd_vec.encoder.memory import return_freed_memory
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.precision import Precision
from sscd_vec.encoder.preprocess import split_pixels
from sscd_vec.encoder.workers import Workers

# Pixels a thread of a CPU takes through the network at a time. More are no faster: activations
# (64 bytes per pixel for the largest of a ResNet) then leave the cache, and above 32 MB malloc maps
# and faults in fresh pages for every layer.
_PIXELS_PER_THREAD = 288 * 384


class TorchBackend:
    """A folded copy of a model on a device; see ``Backend``.

    On a CPU every core takes images of its own through the whole network. Sharing each convolution
    between the cores instead makes them wait for one another after every layer, longest where a
    core also decodes photos.

    Attributes:
        model: That copy; its trunk takes and returns the backend's precision.
    """

    def __init__(self, model: SSCDModel, device: torch.device, precision: Precision) -> None:
        """Copy, fold and move ``model``."""
        self._device = device
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        folded = inference_copy(model).to(device)
        fusable = device.type == "cpu" and self._dtype is torch.float32 and can_fuse()
        if fusable and isinstance(folded.trunk, fx.GraphModule):
            folded.trunk = fuse_convolutions(folded.trunk)
        else:
            folded.trunk = folded.trunk.to(self._dtype).to(memory_format=torch.channels_last)
        self.model = folded
        self._shape: torch.Size | None = None  # of the last image
        self._cores: Workers | None = None
        self._end_cores: Callable[[], object] = lambda: None
        self._handing_out = threading.Lock()  # work must not follow the order to end
        return_freed_memory()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the descriptors of ``images``, on the backend's device."""
        if self._device.type != "cpu":
            return self._descriptors(images)
        parts = split_pixels(images, _PIXELS_PER_THREAD, torch.get_num_threads())
        if len(parts) == 1:
            descriptors = self._descriptors(images)
        else:
            descriptors = torch.cat(self._side_by_side(parts))
        if images.shape[1:] != self._shape:
            # All weights and activations were of other sizes before, and left holes.
            self._shape = images.shape[1:]
            return_freed_memory()
        return descriptors

    @torch.inference_mode()
    def _descriptors(self, images: Tensor) -> Tensor:
        model = self.model
        images = images.to(
            self._device, self._dtype, memory_format=torch.channels_last, non_blocking=True
        )
        # The trunk may run in bfloat16; pooling, projection and length are float32 always. Nor does
        # a caller's autocast change what the fingerprint promises.
        with torch.autocast(self._device.type, enabled=False):
            pooled = model.pooled(images).float()
            features = model.head(pooled) if model.config.features == "projected" else pooled
            return F.normalize(features, dim=1)

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
                self._cores = Workers(number, "forward", lambda: torch.set_num_threads(1))
            finally:
                torch.set_num_threads(number)  # what threads that are yet to come begin with
            self._end_cores = weakref.finalize(self, self._cores.stop)
        return self._cores
