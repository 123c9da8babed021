"""torch itself: folded, channels_last, and fused by oneDNN on a CPU."""

import torch
from torch import Tensor, fx
from torch.nn import functional as F  # noqa: N812

from sscd_vec.encoder.backends.fold import can_fuse, fuse_convolutions, inference_copy
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.precision import Precision
from sscd_vec.encoder.preprocess import split_pixels

# Pixels a CPU takes through the network at a time. A ResNet's largest activation has 64 bytes per
# pixel; below 32 MB, malloc reuses its memory instead of mapping, and faulting in, fresh pages for
# every layer. More images at once are slower, and cost memory.
_CPU_PIXELS = 4 * 288 * 384


class TorchBackend:
    """A folded copy of a model on a device; see ``Backend``."""

    def __init__(self, model: SSCDModel, device: torch.device, precision: Precision) -> None:
        """Copy, fold and move ``model``."""
        self._device = device
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        folded = inference_copy(model).to(memory_format=torch.channels_last).to(device)
        if device.type == "cpu" and self._dtype is torch.float32 and can_fuse():
            if isinstance(folded.trunk, fx.GraphModule):
                out_channels = folded.trunk.out_channels
                folded.trunk = fuse_convolutions(folded.trunk)
                folded.trunk.out_channels = out_channels
        folded.trunk = folded.trunk.to(self._dtype)
        self._model = folded

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the descriptors of ``images``, on the backend's device."""
        if self._device.type != "cpu":
            return self._descriptors(images)
        return torch.cat([self._descriptors(part) for part in split_pixels(images, _CPU_PIXELS)])

    def _descriptors(self, images: Tensor) -> Tensor:
        model = self._model
        images = images.to(
            self._device, self._dtype, memory_format=torch.channels_last, non_blocking=True
        )
        # The trunk may run in bfloat16; pooling, projection and length are float32 always.
        pooled = model.pooled(images).float()
        features = model.head(pooled) if model.config.features == "projected" else pooled
        return F.normalize(features, dim=1)
