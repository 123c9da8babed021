"""A linear head that starts as the whitening of what the trunk already knows.

``W (f - mean)``, the PCA whitening of the pooled features of some photos, is a linear layer: a good
descriptor before the first step, where a random head first has to be learnt.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from sscd_vec.encoder.model import SSCDModel, pooled_dim
from sscd_vec.normalize import Whitening
from sscd_vec.normalize.descriptors import Float32
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.pixels import PixelSource
from sscd_vec.trainer.validation import encode, squares

PHOTOS_PER_FEATURE = 5
ROWS_PER_DIMENSION = 10  # with fewer, variances are shrunk towards their mean
DECODE_AT_ONCE = 256


def whiten_head(model: SSCDModel, photos: PixelSource, size: int, ranks: Ranks) -> None:
    """Set the head to the whitening of the trunk's features, the same on every rank.

    It is scaled to the weights' size in the head as built, so that a learning rate means the same.

    Args:
        model: A model with a linear head.
        photos: Training photos; five per feature are read, evenly spaced.
        size: Side of the square images encoded.
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
            count = min(len(photos), PHOTOS_PER_FEATURE * width)
            few = count < ROWS_PER_DIMENSION * model.config.dim
            features = pooled_features(model, photos, size, count)
            fitted = Whitening.fit(features, dim=model.config.dim, eps="oas" if few else 0.0)
            matrix = torch.from_numpy(fitted.matrix.copy())
            matrix *= head.weight.std().cpu() / matrix.std()
            head.weight.copy_(matrix)
            head.bias.copy_(-matrix @ torch.from_numpy(fitted.mean.copy()))
        for parameter in head.parameters():
            ranks.from_first(parameter)


def pooled_features(
    model: SSCDModel, photos: PixelSource, size: int, count: int
) -> Iterator[Float32]:
    """The trunk's pooled features of ``count`` photos, evenly spaced, some rows at a time."""
    chosen = np.linspace(0, len(photos) - 1, count).astype(np.int64)
    for start in range(0, count, DECODE_AT_ONCE):
        pixels = photos.take(chosen[start : start + DECODE_AT_ONCE]).pixels
        yield encode(model, squares(pixels, size), model.pooled)
