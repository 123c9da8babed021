"""Averaged weights: an exponential moving average, which validates better than the last step."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class AverageWeights:
    """``a <- d a + (1 - d) w`` over every floating tensor of a model, running statistics included.

    The decay starts small, ``d_t = min(decay, (1 + t) / (10 + t))``, so that the random start is
    forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start at the model's weights."""
        self.decay = decay
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move towards the model's weights after ``step`` (counted from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                self.weights[name].lerp_(tensor, 1 - decay)
            else:
                self.weights[name].copy_(tensor)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Continue from saved weights."""
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)
