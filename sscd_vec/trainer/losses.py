"""Loss and gradients of one step over the global batch, in chunks where it does not fit.

Cached gradients (Gao et al. 2021): encode all views without a graph, take the loss and its
gradient at the descriptors, then encode chunk by chunk again with a graph and back-propagate that
gradient. Only one chunk's activations are ever held, so the contrastive batch can be of any size.
BatchNorm then sees the chunk.

Memory (Wang et al. 2020): a batch of 128 shows a descriptor 127 other images, a search millions.
Weights change little from step to step, so the descriptors of the last thousands of images are
further negatives for the price of one matrix product. They get no gradient.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sscd_vec.kernels import SSCDLoss, sscd_loss
from sscd_vec.kernels.objective import product_dtype
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.model import SplitModel, batch_norms
from sscd_vec.trainer.ring import Ring


class Memory:
    """The newest descriptors of first views, the same on every rank.

    Attributes:
        z: (m, d) unit descriptors, oldest first, m at most the memory's size.
        sources: (m, 2) their sources.
    """

    def __init__(self, size: int) -> None:
        """Keep at most ``size`` rows; 0 keeps none."""
        self._size = size
        self.z = torch.empty(0, 0)
        self.sources = torch.empty(0, 2, dtype=torch.int64)

    def strangers(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that share no source with these, and their sources."""
        if not len(self.z):
            return self.z, sources[:0]
        apart = ~torch.isin(self.sources, sources).any(dim=1)
        return self.z[apart], self.sources[apart]

    def add(self, z: Tensor, sources: Tensor) -> None:
        """Remember descriptors, except mixed and non-finite ones; the oldest are forgotten."""
        if not self._size:
            return
        plain = (sources[:, 0] == sources[:, 1]) & z.isfinite().all(dim=1)
        old = self.z if len(self.z) else z[:0]
        self.z = torch.cat([old, z[plain]])[-self._size :].clone()
        self.sources = torch.cat([self.sources.to(sources.device), sources[plain]])[-self._size :]

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue."""
        return {"z": self.z, "sources": self.sources}

    def load(self, saved: Mapping[str, Any] | None, device: torch.device) -> None:
        """Continue from ``state``; None, from a run without a memory, changes nothing."""
        if saved is not None and self._size:
            self.z = saved["z"][-self._size :].to(device)
            self.sources = saved["sources"][-self._size :].to(device)


@dataclass(frozen=True)
class Objective:
    """``InfoNCE-mix + lambda * KoLeo`` over all ranks' descriptors, in float32.

    Under autocast on a GPU the descriptors of negatives are multiplied in half precision.

    Attributes:
        tau: Temperature.
        ranks: The processes that share the batch.
        memory: Descriptors of earlier steps, as further negatives.
        exact_negatives: Multiply negatives in float32 under autocast too.
        ring: Pass the ranks' descriptors round instead of gathering them; takes no memory.
    """

    tau: float
    ranks: Ranks = Ranks()
    memory: Memory = field(default_factory=lambda: Memory(0))
    exact_negatives: bool = False
    ring: bool = False

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
        if self.ring and self.ranks.count > 1:
            return self._in_a_ring(own.detach(), sources, entropy_weight)
        everyone = self.ranks.gather(own.detach())
        if not bool(torch.isfinite(everyone).all()):
            # A broken forward pass: every rank sees it and skips the step.
            return _broken(own)
        all_sources = self.ranks.gather(sources)
        earlier, earlier_sources = self.memory.strangers(all_sources)
        self._remember(everyone, all_sources)
        products = torch.float32 if self.exact_negatives else None
        if self.ranks.count == 1 and not len(earlier):
            loss = sscd_loss(own, sources, self.tau, entropy_weight, products=products)
            gradient = torch.autograd.grad(loss.total, own)[0]
            return SSCDLoss(*(part.detach() for part in loss)), gradient
        everyone.requires_grad_()
        first = self.ranks.rank * len(own)
        loss = sscd_loss(
            own,
            sources,
            self.tau,
            entropy_weight,
            all_z=torch.cat([everyone, earlier]) if len(earlier) else everyone,
            all_sources=torch.cat([all_sources, earlier_sources]),
            row_offset=first,
            products=products,
        )
        as_row, as_column = torch.autograd.grad(loss.total, (own, everyone))
        as_column = self.ranks.sum_own_rows(as_column)
        return self._mean(loss), (as_row + as_column) / self.ranks.count

    def _in_a_ring(
        self, z: Tensor, sources: Tensor, entropy_weight: float
    ) -> tuple[SSCDLoss, Tensor]:
        if self.ranks.any(not bool(torch.isfinite(z).all())):
            return _broken(z)
        products = product_dtype(z, torch.float32 if self.exact_negatives else None)
        ring = Ring(z, self.ranks.gather(sources), self.tau, self.ranks, products)
        loss, gradient = ring.gradient(entropy_weight)
        return self._mean(loss), gradient / self.ranks.count

    def _mean(self, loss: SSCDLoss) -> SSCDLoss:
        mean = self.ranks.sum(torch.stack([part.detach() for part in loss])) / self.ranks.count
        return SSCDLoss(*mean.unbind())

    def _remember(self, everyone: Tensor, sources: Tensor) -> None:
        """Keep the first views, the first half of every rank's rows: the references of a search."""
        halves = 2 * self.ranks.count
        first = torch.arange(halves, device=everyone.device).remainder(2) == 0
        rows = first.repeat_interleave(len(everyone) // halves)
        self.memory.add(everyone[rows], sources[rows])


def _broken(z: Tensor) -> tuple[SSCDLoss, Tensor]:
    nothing = torch.full_like(z, torch.nan)
    return SSCDLoss(*nothing.new_full((5,), torch.nan).unbind()), nothing


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
    """Add the gradient of the global loss to this rank's parameters; does not sum over ranks.

    Args:
        model: The model, in training mode.
        images: (n, 3, s, s) this rank's views, normalized.
        sources: (n, 2) their sources.
        objective: The loss.
        entropy_weight: lambda at this step.
        chunk: Views encoded at once; 0 for all.
        precision: Autocast type of the trunk; the loss is told of it.
        describe: A compiled ``model.describe``, if there is one.
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
        with torch.autocast(images.device.type, precision, enabled=lower):
            loss, gradient = objective.gradient(z, sources, entropy_weight)
        torch.autograd.backward(z, _scaled(gradient, scale))
        return loss

    states = []
    encoded = []
    with torch.no_grad(), _running_statistics_kept(model.trained):
        for part in chunks:
            states.append(_random_state(part.device))
            encoded.append(describe(part, precision))
    with torch.autocast(images.device.type, precision, enabled=lower):
        loss, gradient = objective.gradient(torch.cat(encoded), sources, entropy_weight)
    gradients = torch.split(_scaled(gradient, scale), size)
    for part, state, dz in zip(chunks, states, gradients, strict=True):
        _set_random_state(state, part.device)  # the same dropout as in the first pass
        torch.autograd.backward(describe(part, precision), dz)
    return loss


def _scaled(gradient: Tensor, scale: Callable[[Tensor], Tensor] | None) -> Tensor:
    return gradient if scale is None else scale(gradient)


def _random_state(device: torch.device) -> Tensor:
    """State of the generator that dropout on ``device`` draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _running_statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm use its batch's statistics without recording them; the second pass does."""
    momenta = [(norm, norm.momentum) for norm in batch_norms(module)]
    for norm, _ in momenta:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum
