"""Refusing second derivatives out loud."""

from typing import Any

import torch
from torch import Tensor

Context = Any  # torch gives the context of an autograd.Function no type that fits


def only_first(name: str, gradient: Tensor, *inputs: Tensor | None) -> Tensor:
    """The gradient, refusing to be differentiated itself.

    ``once_differentiable`` of torch refuses only if the incoming gradient needs a derivative; with
    a plain ``loss.backward(create_graph=True)`` it would silently leave the second derivative out.

    Args:
        name: What the error message calls the function.
        gradient: Its gradient, computed without a graph.
        inputs: The function's inputs and incoming gradients.
    """
    if not torch.is_grad_enabled():  # create_graph=False
        return gradient
    refused: Tensor = _OnlyFirst.apply(name, gradient, *inputs)
    return refused


class _OnlyFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, name: str, gradient: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Context, *unused: Tensor) -> None:
        raise RuntimeError(
            f"{ctx.name} has a first derivative only, and a second one was asked for "
            "(create_graph=True); use its namesake in sscd_vec.kernels.reference for that"
        )
