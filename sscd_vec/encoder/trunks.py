"""Trunks by name, networks from images to a feature map: ResNets, EfficientNet-Lite and others.

EfficientNet-Lite 0–4 (Tan & Le 2019 without squeeze-excitation, with ReLU6): stem and last stage
keep their depth, the rest scales in width and depth. Padding is TensorFlow's SAME as it is for even
sides, written as fixed layers: a stride-2 convolution pads ``(k - 2) // 2`` before and the rest of
``k - 2`` after. So a graph exported for one image size is right for all, and sides that are
multiples of 32 give TensorFlow's own map.
"""

import difflib
import math
from collections import OrderedDict
from typing import Any, cast

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from sscd_vec.encoder.torchvision_trunks import (
    VITS,
    TorchvisionTrunk,
    ViTTrunk,
    torchvision_names,
)

# name -> (block, blocks per layer, groups, width of one group); narrow ResNet-18s keep their stem
RESNETS: dict[str, tuple[Any, tuple[int, int, int, int], int, int]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2), 1, 64),
    "resnet18_w16": (BasicBlock, (2, 2, 2, 2), 1, 16),
    "resnet18_w32": (BasicBlock, (2, 2, 2, 2), 1, 32),
    "resnet34": (BasicBlock, (3, 4, 6, 3), 1, 64),
    "resnet50": (Bottleneck, (3, 4, 6, 3), 1, 64),
    "resnet101": (Bottleneck, (3, 4, 23, 3), 1, 64),
    "resnet152": (Bottleneck, (3, 8, 36, 3), 1, 64),
    "wide_resnet50_2": (Bottleneck, (3, 4, 6, 3), 1, 128),
    "resnext50_32x4d": (Bottleneck, (3, 4, 6, 3), 32, 4),
    "resnext101_32x4d": (Bottleneck, (3, 4, 23, 3), 32, 4),  # the paper's; torchvision has 32x8d
    "resnext101_32x8d": (Bottleneck, (3, 4, 23, 3), 32, 8),
}

# TensorFlow's batch norm: epsilon 1e-3 and decay 0.99, which torch calls a momentum of 0.01.
BN_EPS = 1e-3
BN_MOMENTUM = 0.01
STEM_CHANNELS = 32
OUT_CHANNELS = 1280

# (repeats, kernel, stride, expansion, channels) before scaling
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
# name -> (width, depth) coefficients
LITES = {
    "efficientnet_lite0": (1.0, 1.0),
    "efficientnet_lite1": (1.0, 1.1),
    "efficientnet_lite2": (1.1, 1.2),
    "efficientnet_lite3": (1.2, 1.4),
    "efficientnet_lite4": (1.4, 1.8),
}


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
    if name in LITES:
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
    return sorted({*RESNETS, *LITES, *VITS, *torchvision_names()})


class ResNetTrunk(nn.Sequential):
    """A ResNet without its pooling and classifier, layers named as torchvision names them."""

    def __init__(self, name: str, *, zero_init_residual: bool = False) -> None:
        """Build one of ``RESNETS``."""
        block, layers, groups, width = RESNETS[name]
        narrow = block is BasicBlock  # torchvision widens bottlenecks only
        net = (_narrowed(width) if narrow else ResNet)(
            block,
            list(layers),
            groups=groups,
            width_per_group=64 if narrow else width,
            zero_init_residual=zero_init_residual,
            num_classes=1,
        )
        names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        super().__init__(OrderedDict((name, getattr(net, name)) for name in names))
        self.out_channels: int = 512 * width // 64 if narrow else 512 * block.expansion


def _narrowed(width: int) -> type[nn.Module]:
    """A torchvision ResNet whose stages start at ``width`` channels instead of 64."""

    def make_layer(net: Any, block: Any, planes: int, *rest: Any, **options: Any) -> Any:  # noqa: ANN401
        return ResNet._make_layer(net, block, planes * width // 64, *rest, **options)

    return type("NarrowResNet", (ResNet,), {"_make_layer": make_layer})


class EfficientNetLite(nn.Module):
    """The convolutional trunk: ``stem``, seven ``stages``, ``last`` (1×1 to 1280 channels).

    Attributes:
        out_channels: Channels of the feature map, 1280 in every variant.
    """

    def __init__(
        self, name: str = "efficientnet_lite0", *, zero_init_residual: bool = False
    ) -> None:
        """Build one of ``LITES`` with He-initialized convolutions."""
        super().__init__()
        self.out_channels = OUT_CHANNELS
        self.stem = _conv(3, STEM_CHANNELS, kernel=3, stride=2)
        channels, stages = STEM_CHANNELS, []
        for (_, kernel, stride, expansion, _), (repeats, out) in zip(
            _STAGES, scaled_stages(name), strict=True
        ):
            blocks = [InvertedResidual(channels, out, kernel, stride, expansion)]
            blocks += [InvertedResidual(out, out, kernel, 1, expansion) for _ in range(repeats - 1)]
            stages.append(nn.Sequential(*blocks))
            channels = out
        self.stages = nn.Sequential(*stages)
        self.last = _conv(channels, OUT_CHANNELS, kernel=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif zero_init_residual and isinstance(module, InvertedResidual) and module.skip:
                nn.init.zeros_(cast(nn.BatchNorm2d, module.project.bn).weight)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(n, 3, h, w)`` to the feature map ``(n, 1280, ~h/32, ~w/32)``."""
        features: Tensor = self.last(self.stages(self.stem(images)))
        return features


class InvertedResidual(nn.Module):
    """Expand 1×1, depthwise k×k, project 1×1; with a skip where shapes allow it."""

    def __init__(
        self, channels: int, out_channels: int, kernel: int, stride: int, expansion: int
    ) -> None:
        """Build the three convolutions; no expansion layer where ``expansion`` is 1."""
        super().__init__()
        hidden = channels * expansion
        self.expand = _conv(channels, hidden, kernel=1) if expansion != 1 else nn.Identity()
        self.depthwise = _conv(hidden, hidden, kernel=kernel, stride=stride, groups=hidden)
        self.project = _conv(hidden, out_channels, kernel=1, activation=False)
        self.skip = stride == 1 and channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.skip else y


def scaled_stages(name: str) -> tuple[tuple[int, int], ...]:
    """Blocks and output channels of each stage of one of ``LITES``."""
    width, depth = LITES[name]
    ends = (0, len(_STAGES) - 1)  # Lite never deepens its first and last stage
    return tuple(
        (repeats if number in ends else math.ceil(depth * repeats), _scaled(channels, width))
        for number, (repeats, *_, channels) in enumerate(_STAGES)
    )


def _scaled(channels: int, width: float, divisor: int = 8) -> int:
    """Scale a channel count and round it to a multiple of 8, never losing more than a tenth."""
    wanted = channels * width
    rounded = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * wanted else rounded


def _conv(
    channels: int,
    out_channels: int,
    *,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: bool = True,
) -> nn.Sequential:
    """Convolution, batch norm and ReLU6, with SAME padding."""
    layers: dict[str, nn.Module] = {}
    padding = (kernel - 1) // 2
    if stride == 2:  # asymmetric: one more row and column after than before
        before = (kernel - 2) // 2
        after = kernel - 2 - before
        layers["pad"] = nn.ZeroPad2d((before, after, before, after))
        padding = 0
    layers["conv"] = nn.Conv2d(
        channels, out_channels, kernel, stride, padding, groups=groups, bias=False
    )
    layers["bn"] = nn.BatchNorm2d(out_channels, eps=BN_EPS, momentum=BN_MOMENTUM)
    if activation:
        layers["act"] = nn.ReLU6(inplace=True)
    named = nn.Sequential()
    for name, layer in layers.items():
        named.add_module(name, layer)
    return named
