"""The network: trunk, GeM pooling, projection, unit length; and which descriptors it gives.

z = W·GeM_p(f(x)) + b,   descriptor = z / ‖z‖,   GeM_p(f) = (mean_hw max(f, ε)^p)^(1/p)
"""

import hashlib
import json
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.torchvision_trunks import ViTTrunk
from sscd_vec.encoder.trunks import build_trunk
from sscd_vec.kernels import gem_pool

_FLOOR = 1e-6  # ε


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

    def forward(self, images: Tensor) -> Tensor:
        """Return the unit descriptors of ``images``, ``(n, dim)``.

        The trunk may compute in bfloat16; what follows the pooling is float32.
        """
        return self._descriptors(self.pooled(images).float())

    def training_descriptors(self, images: Tensor) -> Tensor:
        """Return unit descriptors through the head, whatever is used at inference, ``(n, dim)``."""
        return F.normalize(self.head(self.pooled(images)), dim=1)

    def descriptor_map(self, images: Tensor) -> Tensor:
        """Return a unit descriptor of every place of the activation map, ``(n, h, w, dim)``.

        Pooling is left out: GeM over a single place is the clamp.
        """
        token, features = self._activations(images)
        places = features.clamp(min=_FLOOR).permute(0, 2, 3, 1)
        if token is not None:
            places = torch.cat((token[:, None, None].expand(*places.shape[:3], -1), places), dim=3)
        return self._descriptors(places)

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the trunk's activation map before pooling, ``(n, c, h, w)``."""
        return cast(Tensor, self.trunk(images))

    def pooled(self, images: Tensor) -> Tensor:
        """Return the GeM-pooled trunk features, ``(n, c)``; of a ViT, CLS ⊕ pooled patches."""
        token, features = self._activations(images)
        pooled = gem_pool(features, self.config.gem_p, _FLOOR)
        return pooled if token is None else torch.cat((token, pooled), dim=1)

    def _activations(self, images: Tensor) -> tuple[Tensor | None, Tensor]:
        """A ViT's CLS token, if it is one, and the activation map."""
        if isinstance(self.trunk, ViTTrunk):
            return self.trunk.tokens(images)
        return None, self.feature_map(images)

    def _descriptors(self, features: Tensor) -> Tensor:
        """``(…, c)`` features to ``(…, dim)`` unit descriptors."""
        projected = self.head(features) if self.config.features == "projected" else features
        return F.normalize(projected, dim=-1)


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


def fingerprint(config: EncoderConfig, state: Mapping[str, Tensor], precision: str) -> str:
    """Identify the descriptors a model gives, in 32 hex digits.

    It changes with weights, architecture, preprocessing and precision, and with nothing else: not
    with the file they came from, the type they are stored in, their order, counters of training
    batches, or a head that trunk features leave out.

    Args:
        config: What the model is.
        state: Its tensors, named as ``SSCDModel.state_dict()`` names them.
        precision: What it computes in, such as ``float32``.
    """
    described = config.to_dict()
    trunk_only = config.features == "trunk"
    if trunk_only:
        del described["dim"], described["head"]
    digest = hashlib.sha256(json.dumps([1, described, precision], sort_keys=True).encode())
    for name in sorted(state):
        if name.endswith("num_batches_tracked") or (trunk_only and name.startswith("head.")):
            continue
        # Adding zero makes -0 and 0 one, as they are to every layer.
        values = state[name].detach().to("cpu", torch.float32).contiguous() + 0.0
        digest.update(json.dumps([name, list(values.shape)]).encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()[:32]
