"""Trunks made of torchvision's networks: any CNN, cut where its feature map ends, and the ViTs.

The cut is found, not listed: the network is traced and run on two image sizes, on meta tensors,
which cost neither memory nor arithmetic. The feature map is the last value ``(n, c, h, w)`` whose
height and width follow the image while its channels do not, before any class score. That leaves out
pooling (its size is fixed), the classifier and maps of class scores, and keeps the functions after
the last layer. A ViT's feature map is its patch tokens, with the CLS token beside it.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names
from torchvision.models.vision_transformer import VisionTransformer

# Two sizes every stride divides, and a number of classes no layer is as wide as.
_SIZES = (256, 320)
_CLASSES = 1009
_MAP = "map"

_VIT_SIZE = 224

# name -> (patch, layers, heads, width); s and b/8 are DINO's, the rest torchvision's
VITS = {
    "vit_s_8": (8, 12, 6, 384),
    "vit_s_16": (16, 12, 6, 384),
    "vit_b_8": (8, 12, 12, 768),
    "vit_b_16": (16, 12, 12, 768),
    "vit_b_32": (32, 12, 12, 768),
    "vit_l_16": (16, 24, 16, 1024),
    "vit_l_32": (32, 24, 16, 1024),
    "vit_h_14": (14, 32, 16, 1280),
}


class TorchvisionTrunk(nn.Module):
    """A torchvision network up to its feature map.

    Attributes:
        net: The network's graph up to the map, its layers named as torchvision names them.
        out_channels: Channels of the feature map.
    """

    def __init__(self, name: str) -> None:
        """Build torchvision's ``name``, untrained, and cut it.

        Raises:
            ValueError: The network cannot be traced, runs on one image size only, or has no
                feature map.
        """
        super().__init__()
        with torch.device("meta"):
            node, self.out_channels = _find_map(name, _network(name))
        self.net = create_feature_extractor(
            _network(name), return_nodes={node: _MAP}, suppress_diff_warning=True
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(n, 3, h, w)`` to the feature map ``(n, out_channels, h', w')``."""
        return cast(Tensor, self.net(images)[_MAP])


class ViTTrunk(nn.Module):
    """A ViT without its classifier, parts named as torchvision names them.

    Attributes:
        out_channels: Width of a token.
        pooled_dim: Width of CLS ⊕ pooled patches, twice that.
    """

    def __init__(self, name: str) -> None:
        """Build one of ``VITS``."""
        super().__init__()
        patch, layers, heads, width = VITS[name]
        net = VisionTransformer(
            _VIT_SIZE, patch, layers, heads, hidden_dim=width, mlp_dim=4 * width, num_classes=1
        )
        self.conv_proj = net.conv_proj
        self.class_token = net.class_token
        self.encoder = net.encoder
        self.out_channels = width
        self.pooled_dim = 2 * width

    def forward(self, images: Tensor) -> Tensor:
        """Return the patch tokens as a feature map ``(n, width, h / patch, w / patch)``."""
        return self.tokens(images)[1]

    def tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the CLS token ``(n, width)`` and the map of the patch tokens.

        Position embeddings are interpolated where the image is not 224×224; pixels beyond the last
        whole patch are left out.
        """
        patches: Tensor = self.conv_proj(images)
        n, width, rows, columns = patches.shape
        x = torch.cat((self.class_token.expand(n, -1, -1), patches.flatten(2).mT), dim=1)
        x = self.encoder.dropout(x + self._positions(rows, columns))
        x = self.encoder.ln(self.encoder.layers(x))
        return x[:, 0], x[:, 1:].mT.reshape(n, width, rows, columns)

    def _positions(self, rows: int, columns: int) -> Tensor:
        positions: Tensor = self.encoder.pos_embedding  # (1, 1 + side², width)
        side = round((positions.shape[1] - 1) ** 0.5)
        if (rows, columns) == (side, side):
            return positions
        grid = positions[:, 1:].mT.reshape(1, -1, side, side)
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((positions[:, :1], grid.flatten(2).mT), dim=1)


def torchvision_names() -> list[str]:
    """Names of torchvision's classification networks, transformers included."""
    return cast(list[str], models.list_models(module=models))


def _network(name: str) -> nn.Module:
    # GoogLeNet and Inception ask for their slow truncated-normal start by warning about it.
    asked = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    try:
        network = models.get_model(name, weights=None, num_classes=_CLASSES, **asked)
    except NotImplementedError:  # RegNet computes its widths with tensors: never on a meta device
        device = torch.get_default_device()
        with torch.device("cpu"):
            network = models.get_model(name, weights=None, num_classes=_CLASSES, **asked)
        network = network.to(device)
    return cast(nn.Module, network)


def _find_map(name: str, network: nn.Module) -> tuple[str, int]:
    """Return the name of the node that is the feature map, and its channels."""
    try:
        small, large = _values(network)
    except Exception as error:  # fx and the networks raise all kinds
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"torchvision's {name} cannot be a trunk: it does not run on images of any size "
            f"({type(error).__name__}: {reason}). Choose a convolutional network, a ViT or a Swin."
        ) from error
    found, modules = None, dict(network.named_modules())
    for node, value in small.items():
        other = large[node]
        if not (isinstance(value, Tensor) and isinstance(other, Tensor) and value.ndim == 4):
            continue
        if isinstance(modules.get(node), nn.Dropout):  # SqueezeNet's, the first of its classifier
            continue
        (_, channels, *sides), (_, other_channels, *other_sides) = value.shape, other.shape
        follows = all(side < larger for side, larger in zip(sides, other_sides, strict=True))
        if follows and max(sides) < _SIZES[0] and channels == other_channels != _CLASSES:
            found = node, channels
    if found is None:
        raise ValueError(f"torchvision's {name} cannot be a trunk: it has no feature map to pool")
    return found


def _values(network: nn.Module) -> list[dict[str, Any]]:
    """Every intermediate value of ``network`` on a small and on a large image, in order."""
    _, nodes = get_graph_node_names(network, suppress_diff_warning=True)
    every = create_feature_extractor(
        network,
        train_return_nodes=nodes[:1],
        eval_return_nodes=nodes,
        suppress_diff_warning=True,
    ).eval()
    return [every(torch.empty(1, 3, size, size, device="meta")) for size in _SIZES]
