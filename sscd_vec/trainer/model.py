"""The model being trained: where it starts, how its images are encoded, which stages train.

A trunk is a row of stages, so that the first of them can be frozen and run only once per image.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.encoder.backends.fold import can_fuse, fold_batch_norms, fuse_convolutions
from sscd_vec.encoder.checkpoint import read_checkpoint, validate_release
from sscd_vec.encoder.imagenet import imagenet_model
from sscd_vec.encoder.model import SSCDModel, build_model, pooled_dim
from sscd_vec.encoder.trunks import EfficientNetLite, ResNetTrunk
from sscd_vec.models import resolve
from sscd_vec.normalize import Whitening
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.pixels import PixelSource, as_squares

log = logging.getLogger(__name__)

IMAGENET = "imagenet"
RESNET_STEM = 4  # conv1, bn1, relu, maxpool
FUSED_IMAGES = 16  # frozen stages on a CPU: few enough for the caches
ENCODE_AT_ONCE = 64

# Whitened heads: images per feature of the trunk, and rows per dimension below which variances are
# shrunk towards their mean.
IMAGES_PER_FEATURE = 5
ROWS_PER_DIMENSION = 10
DECODE_AT_ONCE = 256

Float32 = npt.NDArray[np.float32]


def initial_model(config: TrainConfig) -> SSCDModel:
    """Build the model and load what ``config.init_from`` names.

    An earlier encoder must have the same trunk. Its mean and std are kept, and its head too if the
    shape is the same; otherwise a new head starts fresh.

    Raises:
        FileNotFoundError: No model of that name or at that path; lists the known names.
        ValueError: The weights do not fit the trunk.
        ImportError: The package that carries the ImageNet weights is not installed.
    """
    torch.manual_seed(config.seed)
    encoder = config.encoder
    if not config.init_from:
        return build_model(encoder, zero_init_residual=config.zero_init_residual)
    if config.init_from == IMAGENET:
        return imagenet_model(encoder)
    earlier, weights = read_checkpoint(resolve(config.init_from, validate=validate_release))
    if earlier.trunk != encoder.trunk:
        raise ValueError(
            f"init_from={config.init_from} has the trunk {earlier.trunk}, this run asks for "
            f"{encoder.trunk}: set trunk={earlier.trunk!r}"
        )
    model = build_model(encoder.replace(mean=earlier.mean, std=earlier.std))
    _load_weights(model, weights)
    return model


def _load_weights(model: SSCDModel, weights: Mapping[str, Tensor]) -> None:
    """Load the trunk, and the head if it has the same shape."""
    own = model.state_dict()
    fresh = [
        name
        for name, tensor in own.items()
        if name.startswith("head.") and (name not in weights or weights[name].shape != tensor.shape)
    ]
    if fresh:
        log.info("the head starts fresh: the loaded one has another shape")
        weights = {name: t for name, t in weights.items() if not name.startswith("head.")}
    missing, extra = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not name.startswith("head.")]
    if missing or extra:
        raise ValueError(f"weights do not fit: missing {missing[:5]}, unexpected {extra[:5]}")


@torch.no_grad()
def encode(
    model: SSCDModel, images: Tensor, describe: Callable[[Tensor], Tensor] | None = None
) -> Float32:
    """Descriptors of uint8 or [0, 1] float images, in eval mode; or what ``describe`` returns."""
    describe = describe or model
    was_training = model.training
    model.eval()
    parts = []
    for part in torch.split(images, ENCODE_AT_ONCE):
        unit = part.float() / 255 if part.dtype == torch.uint8 else part
        parts.append(describe(normalize(model, unit)).float().cpu())
    model.train(was_training)
    return torch.cat(parts).numpy()


def normalize(model: SSCDModel, images: Tensor) -> Tensor:
    """``(x - mean) / std`` of [0, 1] images, channels_last, on the model's device."""
    device = next(model.parameters()).device
    mean = torch.tensor(model.config.mean, device=device)[:, None, None]
    std = torch.tensor(model.config.std, device=device)[:, None, None]
    return (images.to(device) - mean).div_(std).contiguous(memory_format=torch.channels_last)


def whiten_head(model: SSCDModel, images: PixelSource, size: int, ranks: Ranks) -> None:
    """Set the head to the whitening of the trunk's features, the same on every rank.

    ``W (f - mean)``, the PCA whitening of the pooled features, is a linear layer: a good descriptor
    before the first step, where a random head must be learned first. Its weights are scaled to the
    size of those it replaces, so that a learning rate keeps its meaning.

    Args:
        model: A model with a linear head.
        images: Training images; five per feature are read, evenly spaced.
        size: Side of the square images to encode.
        ranks: The first one fits; the others get its weights.

    Raises:
        ValueError: The head has more dimensions than the trunk has features.
    """
    width = pooled_dim(model.trunk)
    if model.config.dim > width:
        raise ValueError(
            f"head_init='whitened' with dim={model.config.dim}: {model.config.trunk} has {width} "
            f"features, expected dim to be at most that"
        )
    head = model.head
    assert isinstance(head, nn.Linear)  # the configuration refuses others
    with torch.no_grad():
        if ranks.first:
            count = min(len(images), IMAGES_PER_FEATURE * width)
            few = count < ROWS_PER_DIMENSION * model.config.dim
            features = pooled_features(model, images, size, count)
            fitted = Whitening.fit(features, dim=model.config.dim, eps="oas" if few else 0.0)
            matrix = torch.from_numpy(fitted.matrix.copy())
            matrix *= head.weight.std().cpu() / matrix.std()
            head.weight.copy_(matrix)
            head.bias.copy_(-matrix @ torch.from_numpy(fitted.mean.copy()))
        for parameter in head.parameters():
            ranks.from_first(parameter)


def pooled_features(
    model: SSCDModel, images: PixelSource, size: int, count: int
) -> Iterator[Float32]:
    """The trunk's pooled features of ``count`` evenly spaced images, some rows at a time."""
    chosen = np.linspace(0, len(images) - 1, count).astype(np.int64)
    for start in range(0, count, DECODE_AT_ONCE):
        pixels = images.take(chosen[start : start + DECODE_AT_ONCE]).tensors()
        yield encode(model, as_squares(pixels, size), model.pooled)


def stages_of(trunk: nn.Module) -> list[nn.Module]:
    """The stem and the stages of a trunk, in the order images pass through them.

    ResNets have a stem and four stages, EfficientNet-Lite a stem, seven stages and the last
    convolution. Any other trunk is one stage.
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

    def __init__(self, model: SSCDModel, frozen_stages: int = 0, gem_p: float = 0.0) -> None:
        """Freeze the stem and the first ``frozen_stages`` stages; 0 freezes nothing.

        Args:
            model: The model to train.
            frozen_stages: Number of stages after the stem that are not trained.
            gem_p: GeM exponent in training; 0 uses the model's own.

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
        config = model.config.replace(gem_p=gem_p or model.config.gem_p)
        self.trained = SSCDModel(rest, model.head, config)
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
        """The frozen stages' features of images, without a graph.

        Their weights never change, so on a CPU in float32 they run as in the encoder: batch norms
        folded, convolutions fused.
        """
        plain = images.device.type != "cpu" or torch.is_autocast_enabled("cpu")
        if len(self.frozen) == 0 or plain or not can_fuse():
            return cast(Tensor, self.frozen(images))
        if not self._fused:
            self._fused = [fuse_convolutions(fold_batch_norms(copy.deepcopy(self.frozen).eval()))]
        return torch.cat([self._fused[0](part) for part in torch.split(images, FUSED_IMAGES)])

    def describe(self, features: Tensor, precision: torch.dtype = torch.float32) -> Tensor:
        """Unit descriptors, as the loss sees them, of the frozen stages' features.

        Only the trunk runs in a lower ``precision``: 1 / tau multiplies a descriptor's rounding
        error by twenty.
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
