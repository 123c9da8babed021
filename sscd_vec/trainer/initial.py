"""The model a run starts from: fresh, an earlier encoder, a released file, or an ImageNet trunk."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from sscd_vec.encoder.checkpoint import read_checkpoint, validate_release
from sscd_vec.encoder.imagenet import imagenet_model
from sscd_vec.encoder.model import SSCDModel, build_model
from sscd_vec.models import resolve
from sscd_vec.trainer.config import TrainConfig

log = logging.getLogger(__name__)

IMAGENET = "imagenet"


def initial_model(config: TrainConfig) -> SSCDModel:
    """Build the model and load what ``config.init_from`` names.

    An earlier encoder must have the same trunk. Its head is kept if it has the same shape,
    otherwise the new head starts fresh; its mean and std are taken over.

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
    load_weights(model, weights)
    return model


def load_weights(model: SSCDModel, weights: Mapping[str, Tensor]) -> None:
    """Load the trunk, and the head if it has the same shape."""
    own = model.state_dict()
    fresh = [
        name
        for name, tensor in own.items()
        if name.startswith("head.") and (name not in weights or weights[name].shape != tensor.shape)
    ]
    if fresh:
        log.info("the head starts fresh: its shape differs from the one loaded")
        weights = {name: t for name, t in weights.items() if not name.startswith("head.")}
    missing, extra = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not name.startswith("head.")]
    if missing or extra:
        raise ValueError(f"weights do not fit: missing {missing[:5]}, unexpected {extra[:5]}")
