"""LARS: layer-wise adaptive rate scaling (You et al. 2017), as SimCLR and the paper use it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTUM = 0.9
TRUST = 0.001
EPS = 1e-8


class LARS(Optimizer):
    r"""Momentum SGD whose step is scaled per tensor by a trust ratio.

    For a weight :math:`w` with gradient :math:`g`, decay :math:`\beta`, momentum :math:`\mu`::

        g <- g + beta * w
        r  = trust * |w| / (|g| + eps)      (1 where |w| or |g| is 0)
        v <- mu * v + r * g
        w <- w - lr * v

    Groups with ``adapt=False`` (biases and norms) take neither decay nor the ratio.
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
        """Optimize ``params``; every setting may also be given per group."""
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
    """Decayed gradients times their trust ratio."""
    decayed = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
    weight_norms = torch.stack(torch._foreach_norm(weights))
    gradient_norms = torch.stack(torch._foreach_norm(decayed))
    ratios = group["trust"] * weight_norms / (gradient_norms + group["eps"])
    ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
    scaled: tuple[Tensor, ...] = torch._foreach_mul(decayed, list(ratios.unbind()))
    return list(scaled)
