"""The trunk as a row of stages, so that the first of them can be frozen and run only once."""

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.encoder.backends.fold import can_fuse, fold_batch_norms, fuse_convolutions
from sscd_vec.encoder.model import SSCDModel, pooled_dim
from sscd_vec.encoder.trunks import EfficientNetLite, ResNetTrunk

RESNET_STEM = 4  # conv1, bn1, relu, maxpool
FUSED_IMAGES = 16  # frozen stages on a CPU: few enough for the caches


def stages_of(trunk: nn.Module) -> list[nn.Module]:
    """The stem and the stages of a trunk, in the order images pass through them.

    ResNets have a stem and four stages, EfficientNet-Lite a stem, seven stages and the last
    convolution. A trunk whose inside is not known is one stage.
    """
    if isinstance(trunk, EfficientNetLite):
        return [trunk.stem, *trunk.stages, trunk.last]
    if isinstance(trunk, ResNetTrunk):
        layers = list(trunk)
        return [nn.Sequential(*layers[:RESNET_STEM]), *layers[RESNET_STEM:]]
    return [trunk]


class _Rest(nn.Sequential):
    """The stages after the frozen ones, as a trunk."""

    def __init__(self, stages: list[nn.Module], out_channels: int) -> None:
        super().__init__(*stages)
        self.out_channels = out_channels


class SplitModel(nn.Module):
    """A model cut after its frozen stages; both parts share the model's own parameters.

    ``z = trained(frozen(x))``: ``frozen`` runs in eval mode without a graph, once per image even
    when cached gradients run ``trained`` twice.
    """

    def __init__(self, model: SSCDModel, frozen_stages: int = 0) -> None:
        """Freeze the stem and the first ``frozen_stages`` stages; 0 freezes nothing.

        Raises:
            ValueError: The trunk has fewer stages.
        """
        super().__init__()
        stages = stages_of(model.trunk)
        cut = frozen_stages + 1 if frozen_stages > 0 else 0
        if cut > len(stages) - 1 and cut > 0:
            raise ValueError(
                f"frozen_stages={frozen_stages}: {model.config.trunk} has {len(stages) - 1} "
                f"stages after its stem, and at least the last must train: use 0 to "
                f"{max(len(stages) - 2, 0)}"
            )
        self.frozen = nn.Sequential(*stages[:cut]).requires_grad_(False)
        rest = _Rest(stages[cut:], pooled_dim(model.trunk)) if cut > 0 else model.trunk
        self.trained = SSCDModel(rest, model.head, model.config)
        self._fused: list[nn.Module] = []  # not a submodule: it holds copies of weights

    def training_mode(self, frozen_batch_norm: bool = False) -> None:
        """Train mode, except for frozen stages and, if asked, every BatchNorm."""
        self.train()
        self.frozen.eval()
        if frozen_batch_norm:
            for norm in batch_norms(self):
                norm.eval()

    @torch.no_grad()
    def frozen_features(self, images: Tensor) -> Tensor:
        """What the frozen stages make of images, without a graph.

        On a CPU in float32 they run as the encoder runs them, batch norms folded and convolutions
        fused: their weights never change.
        """
        plain = images.device.type != "cpu" or torch.is_autocast_enabled("cpu")
        if len(self.frozen) == 0 or plain or not can_fuse():
            return cast(Tensor, self.frozen(images))
        if not self._fused:
            self._fused = [fuse_convolutions(fold_batch_norms(copy.deepcopy(self.frozen).eval()))]
        return torch.cat([self._fused[0](part) for part in torch.split(images, FUSED_IMAGES)])

    def describe(self, features: Tensor, precision: torch.dtype = torch.float32) -> Tensor:
        """Unit descriptors, as the loss sees them, of what ``frozen`` returned.

        Only the trunk runs in a lower ``precision``: 1 / tau multiplies the rounding of a
        descriptor by twenty.
        """
        with torch.autocast(features.device.type, precision, enabled=precision != torch.float32):
            pooled = self.trained.pooled(features)
        return F.normalize(self.trained.head(pooled.float()), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Unit descriptors of images, in float32."""
        return self.describe(self.frozen_features(images))


def batch_norms(module: nn.Module) -> Iterator[nn.modules.batchnorm._BatchNorm]:
    """Every BatchNorm below ``module``."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            yield child


def parameter_groups(
    model: SSCDModel, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Optimizer groups: weights apart from biases and norms, and stages by distance to the head.

    A stage k steps before the head learns at ``layer_decay ** k`` of the rate (``scale``).
    """
    parts: list[nn.Module] = [model.head, *reversed(stages_of(model.trunk))]
    groups: list[dict[str, Any]] = []
    seen: set[int] = set()
    for distance, part in enumerate(parts):
        trainable = [p for p in part.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, trainable))
        scale = layer_decay**distance
        for adapt in (True, False):
            chosen = [p for p in trainable if (p.ndim > 1) == adapt]
            if chosen:
                groups.append(
                    {
                        "params": chosen,
                        "weight_decay": weight_decay if adapt else 0.0,
                        "adapt": adapt,
                        "scale": scale,
                    }
                )
    return groups
