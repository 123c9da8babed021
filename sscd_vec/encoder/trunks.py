"""A trunk by name: any network that turns images into a feature map."""

import difflib
from collections import OrderedDict
from typing import Any

from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from sscd_vec.encoder.efficientnet_lite import VARIANTS, EfficientNetLite
from sscd_vec.encoder.torchvision_trunk import TorchvisionTrunk, torchvision_names
from sscd_vec.encoder.vit import VITS, ViTTrunk

# name -> (block, blocks per layer, groups, width of one group)
RESNETS: dict[str, tuple[Any, tuple[int, int, int, int], int, int]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2), 1, 64),
    "resnet34": (BasicBlock, (3, 4, 6, 3), 1, 64),
    "resnet50": (Bottleneck, (3, 4, 6, 3), 1, 64),
    "resnet101": (Bottleneck, (3, 4, 23, 3), 1, 64),
    "resnet152": (Bottleneck, (3, 8, 36, 3), 1, 64),
    "wide_resnet50_2": (Bottleneck, (3, 4, 6, 3), 1, 128),
    "resnext50_32x4d": (Bottleneck, (3, 4, 6, 3), 32, 4),
    "resnext101_32x4d": (Bottleneck, (3, 4, 23, 3), 32, 4),  # the paper's; torchvision has 32x8d
    "resnext101_32x8d": (Bottleneck, (3, 4, 23, 3), 32, 8),
}


class ResNetTrunk(nn.Sequential):
    """A ResNet without its pooling and classifier, layers named as torchvision names them."""

    def __init__(self, name: str, *, zero_init_residual: bool = False) -> None:
        """Build one of ``RESNETS``."""
        block, layers, groups, width = RESNETS[name]
        net = ResNet(
            block,
            list(layers),
            groups=groups,
            width_per_group=width,
            zero_init_residual=zero_init_residual,
            num_classes=1,
        )
        names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        super().__init__(OrderedDict((name, getattr(net, name)) for name in names))
        self.out_channels: int = 512 * block.expansion


def build_trunk(name: str, *, zero_init_residual: bool = False) -> nn.Module:
    """Build an untrained trunk: a module from images ``(n, 3, h, w)`` to a feature map.

    Args:
        name: One of ``trunk_names()``.
        zero_init_residual: Start every residual branch at zero (ResNets and EfficientNet-Lite,
            whose branches end in a batch norm; others start as torchvision starts them).

    Returns:
        The trunk. Its ``out_channels`` is the width of the feature map.

    Raises:
        ValueError: The name is unknown, or names a network without a feature map.
    """
    if name in RESNETS:
        return ResNetTrunk(name, zero_init_residual=zero_init_residual)
    if name in VARIANTS:
        return EfficientNetLite(name, zero_init_residual=zero_init_residual)
    if name in VITS:
        return ViTTrunk(name)
    if name in torchvision_names():
        return TorchvisionTrunk(name)
    near = difflib.get_close_matches(name, trunk_names(), n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"unknown trunk {name!r}.{hint} Known: {', '.join(trunk_names())}.")


def trunk_names() -> list[str]:
    """Every name ``build_trunk`` knows."""
    return sorted({*RESNETS, *VARIANTS, *VITS, *torchvision_names()})
