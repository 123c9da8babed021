"""Optimizer and schedules: LARS, parameter groups, learning rate, lambda, averaged weights.

Learning rate and lambda are plain functions of the step: nothing to save or resume.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sscd_vec.encoder.model import SSCDModel
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.model import stages_of

MOMENTUM = 0.9
TRUST = 0.001
EPS = 1e-8
ENTROPY_RAMP_START = 0.1  # lambda begins at a tenth of its value: the first minutes need it


def build_optimizer(model: SSCDModel, config: TrainConfig) -> Optimizer:
    """LARS or AdamW over the model's trainable parameters; the loop sets the learning rate."""
    groups = parameter_groups(model, config.decay, config.layer_decay, config.exempt_norms)
    return LARS(groups, lr=0.0) if config.optimizer == "lars" else torch.optim.AdamW(groups, lr=0.0)


def parameter_groups(
    model: SSCDModel, weight_decay: float, layer_decay: float, exempt_norms: bool = True
) -> list[dict[str, Any]]:
    """Optimizer groups: stages by their distance from the head, biases and norms apart.

    A stage k steps before the head learns at ``layer_decay ** k`` of the rate (``scale``). With
    ``exempt_norms`` biases and norms take neither weight decay nor LARS's adaptation (``adapt``).
    """
    parts: list[nn.Module] = [model.head, *reversed(stages_of(model.trunk))]
    groups: list[dict[str, Any]] = []
    seen: set[int] = set()
    for distance, part in enumerate(parts):
        trainable = [p for p in part.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, trainable))
        scale = layer_decay**distance
        for adapt in (True, False):
            chosen = [p for p in trainable if (p.ndim > 1 or not exempt_norms) == adapt]
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


def scheduled(config: TrainConfig, step: int, steps: int) -> tuple[float, float]:
    """The learning rate and the entropy weight at a step of a run."""
    warmup = round(config.warmup * steps)
    rate = config.peak_learning_rate * learning_rate_factor(step, steps, warmup)
    return rate, config.entropy_weight * entropy_factor(step, steps, config.entropy_ramp)


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to zero, per step.

    ``(t + 1) / w`` for ``t < w``; after that ``(1 + cos(pi * (t - w) / (T - w))) / 2``.

    Args:
        step: t, counted from 0.
        steps: T, the length of the run.
        warmup: w, the steps of warm-up.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def entropy_factor(step: int, steps: int, ramp: float) -> float:
    """Fraction of lambda at this step: from a tenth to 1 over the first ``ramp`` of the run."""
    length = ramp * steps
    if step >= length:
        return 1.0
    return ENTROPY_RAMP_START + (1 - ENTROPY_RAMP_START) * step / length


class LARS(Optimizer):
    r"""LARS (You et al. 2017): momentum SGD with a trust ratio per tensor, as in SimCLR.

    For a weight :math:`w` with gradient :math:`g`, decay :math:`\beta`, momentum :math:`\mu`::

        g <- g + beta * w
        r  = trust * |w| / (|g| + eps)      (1 where |w| or |g| is 0)
        v <- mu * v + r * g
        w <- w - lr * v

    Groups with ``adapt=False`` take neither decay nor the ratio.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.0,
        momentum: float = MOMENTUM,
        trust: float = TRUST,
        eps: float = EPS,
    ) -> None:
        """Optimize ``params``; every setting can also be given per group."""
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "trust": trust,
            "eps": eps,
            "adapt": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads this on None
        """Apply one step; ``closure`` recomputes the loss if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [w for w in group["params"] if w.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [w.grad for w in weights]
            if group["adapt"]:
                gradients = _adapted(weights, gradients, group)
            velocities = []
            for weight in weights:
                state = self.state[weight]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(weight)
                velocities.append(state["velocity"])
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, gradients)
            torch._foreach_add_(weights, velocities, alpha=-group["lr"])
        return loss


def _adapted(weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Gradients with weight decay, times their trust ratio."""
    decayed = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
    weight_norms = torch.stack(torch._foreach_norm(weights))
    gradient_norms = torch.stack(torch._foreach_norm(decayed))
    ratios = group["trust"] * weight_norms / (gradient_norms + group["eps"])
    ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
    scaled: tuple[Tensor, ...] = torch._foreach_mul(decayed, list(ratios.unbind()))
    return list(scaled)


class AverageWeights:
    """An exponential moving average of the weights, which validates better than the last step.

    ``a <- d a + (1 - d) w`` over every floating tensor of a model, running statistics included. The
    decay starts small, ``d_t = min(decay, (1 + t) / (10 + t))``, so that the start is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start at the model's weights."""
        self.decay = decay
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move towards the model's weights after ``step``, counted from 0."""
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

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Let ``model`` hold the averaged weights inside the block."""
        current = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(self.weights)
        try:
            yield
        finally:
            model.load_state_dict(current)
