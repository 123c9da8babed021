"""The network: trunk, GeM pooling, projection, unit length.

z = W·GeM_p(f(x)) + b,   descriptor = z / ‖z‖,   GeM_p(f) = (mean_hw max(f, ε)^p)^(1/p)
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.trunks import build_trunk
from sscd_vec.encoder.vit import ViTTrunk
from sscd_vec.kernels import gem_pool


class SSCDModel(nn.Module):
    """Normalized NCHW images in, unit descriptors out.

    Attributes:
        trunk: Images ``(n, 3, h, w)`` to a feature map ``(n, c, h', w')``.
        head: Pooled features to the projected descriptor.
        config: What was built.
        dim: Size of the descriptor ``forward`` returns: ``config.dim``, or the width of the pooled
            trunk features where ``config.features`` is ``trunk``.
    """

    def __init__(self, trunk: nn.Module, head: nn.Module, config: EncoderConfig) -> None:
        """Put the parts together; ``build_model`` makes them."""
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.config = config
        self.dim: int = config.dim if config.features == "projected" else pooled_dim(trunk)

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the trunk's activation map before pooling, ``(n, c, h, w)``."""
        return cast(Tensor, self.trunk(images))

    def pooled(self, images: Tensor) -> Tensor:
        """Return the GeM-pooled trunk features, ``(n, c)``; of a ViT, CLS ⊕ pooled patches."""
        if isinstance(self.trunk, ViTTrunk):
            cls, patches = self.trunk.tokens(images)
            return torch.cat((cls, gem_pool(patches, self.config.gem_p)), dim=1)
        return gem_pool(self.feature_map(images), self.config.gem_p)

    def training_descriptors(self, images: Tensor) -> Tensor:
        """Return unit descriptors through the head, whatever is used at inference, ``(n, dim)``."""
        return F.normalize(self.head(self.pooled(images)), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the unit descriptors of ``images``, ``(n, dim)``."""
        if self.config.features == "projected":
            return self.training_descriptors(images)
        return F.normalize(self.pooled(images), dim=1)


def build_model(config: EncoderConfig, *, zero_init_residual: bool = False) -> SSCDModel:
    """Build an untrained model.

    Args:
        config: What to build.
        zero_init_residual: Start every residual branch at zero. Training needs it: a large KoLeo
            weight is unstable without.

    Raises:
        ValueError: The trunk is unknown or has no feature map to pool.
    """
    trunk = build_trunk(config.trunk, zero_init_residual=zero_init_residual)
    return SSCDModel(trunk, build_head(pooled_dim(trunk), config), config)


def pooled_dim(trunk: nn.Module) -> int:
    """Width of the pooled features of ``trunk``: its channels, and a CLS token beside them."""
    return trunk.pooled_dim if isinstance(trunk, ViTTrunk) else cast(int, trunk.out_channels)


def build_head(width: int, config: EncoderConfig) -> nn.Module:
    """One linear layer (the paper) or two and a ReLU (SimCLR): Xavier-uniform, zero bias."""
    head: nn.Module
    if config.head == "linear":
        head = nn.Linear(width, config.dim)
    else:
        head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, config.dim))
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return head
