"""One training step's loss and gradients over the global batch, in chunks if it does not fit.

Cached gradients (Gao et al. 2021): encode all views without a graph, take the loss and its
gradient at the descriptors, then encode chunk by chunk again with a graph and back-propagate that
gradient. Only one chunk's activations are ever held; the contrastive batch is as large as wished.
BatchNorm then sees the chunk.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sscd_vec.kernels import SSCDLoss, sscd_loss
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.stages import SplitModel, batch_norms


@dataclass(frozen=True)
class Objective:
    """``InfoNCE-mix + lambda * KoLeo`` over all ranks' descriptors, always in float32.

    Attributes:
        tau: Temperature.
        ranks: The processes that share the batch.
    """

    tau: float
    ranks: Ranks = Ranks()

    def gradient(
        self, z: Tensor, sources: Tensor, entropy_weight: float
    ) -> tuple[SSCDLoss, Tensor]:
        """The global loss and its gradient at this rank's descriptors.

        Args:
            z: (n, d) this rank's descriptors.
            sources: (n, 2) their sources.
            entropy_weight: lambda at this step.

        Returns:
            The loss of the global batch, the same on every rank, and ``dL/dz`` (n, d).
        """
        own = z.detach().float().requires_grad_()
        everyone = self.ranks.gather(own.detach())
        if not bool(torch.isfinite(everyone).all()):
            # A broken forward pass: every rank sees it, and the step will be skipped.
            nothing = torch.full_like(own, torch.nan)
            return SSCDLoss(*nothing.new_full((5,), torch.nan).unbind()), nothing
        if self.ranks.count == 1:
            loss = sscd_loss(own, sources, self.tau, entropy_weight)
            gradient = torch.autograd.grad(loss.total, own)[0]
            return SSCDLoss(*(part.detach() for part in loss)), gradient
        everyone.requires_grad_()
        first = self.ranks.rank * len(own)
        loss = sscd_loss(
            own,
            sources,
            self.tau,
            entropy_weight,
            all_z=everyone,
            all_sources=self.ranks.gather(sources),
            row_offset=first,
        )
        as_row, as_column = torch.autograd.grad(loss.total, (own, everyone))
        as_column = self.ranks.sum(as_column)[first : first + len(own)]
        mean = self.ranks.sum(torch.stack([part.detach() for part in loss])) / self.ranks.count
        return SSCDLoss(*mean.unbind()), (as_row + as_column) / self.ranks.count


def backward(
    model: SplitModel,
    images: Tensor,
    sources: Tensor,
    objective: Objective,
    entropy_weight: float,
    *,
    chunk: int = 0,
    precision: torch.dtype = torch.float32,
    describe: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    scale: Callable[[Tensor], Tensor] | None = None,
) -> SSCDLoss:
    """Add the gradient of the global loss to this rank's parameters; not yet summed over ranks.

    Args:
        model: The model, in training mode.
        images: (n, 3, s, s) this rank's views, normalized.
        sources: (n, 2) their sources.
        objective: The loss.
        entropy_weight: lambda at this step.
        chunk: Views encoded at once; 0 for all.
        precision: Autocast type of the trunk.
        describe: The compiled form of ``model.describe``, if there is one.
        scale: Multiplies the gradient against underflow in float16.

    Returns:
        The loss of the global batch and its parts.
    """
    describe = describe or model.describe
    size = chunk if 0 < chunk < len(images) else len(images)
    lower = precision != torch.float32
    with torch.autocast(images.device.type, precision, enabled=lower):
        chunks = [model.frozen_features(part) for part in torch.split(images, size)]
    if len(chunks) == 1:
        z = describe(chunks[0], precision)
        loss, gradient = objective.gradient(z, sources, entropy_weight)
        torch.autograd.backward(z, _scaled(gradient, scale))
        return loss

    states = []
    encoded = []
    with torch.no_grad(), _running_statistics_kept(model.trained):
        for part in chunks:
            states.append(_random_state(part.device))
            encoded.append(describe(part, precision))
    loss, gradient = objective.gradient(torch.cat(encoded), sources, entropy_weight)
    gradients = torch.split(_scaled(gradient, scale), size)
    for part, state, dz in zip(chunks, states, gradients, strict=True):
        _set_random_state(state, part.device)  # the same dropout as in the first pass
        torch.autograd.backward(describe(part, precision), dz)
    return loss


def _scaled(gradient: Tensor, scale: Callable[[Tensor], Tensor] | None) -> Tensor:
    return gradient if scale is None else scale(gradient)


def _random_state(device: torch.device) -> Tensor:
    """The state of the generator that dropout on ``device`` draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _running_statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm use its batch's statistics without recording them: the second pass will."""
    momenta = [(norm, norm.momentum) for norm in batch_norms(module)]
    for norm, _ in momenta:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum
