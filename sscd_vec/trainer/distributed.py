"""Ranks: one process or many, and everything they share.

The loss is taken over the global batch. Descriptors are gathered, each rank computes its own rows
of the loss, and the gradients that these rows give to other ranks' descriptors are summed back:
gradients through the gather. Parameter gradients are then summed over ranks.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm


@dataclass(frozen=True)
class Ranks:
    """This process among its peers.

    Attributes:
        rank: Its number.
        count: Number of processes.
        local: Its number on this machine, and the number of its GPU.
    """

    rank: int = 0
    count: int = 1
    local: int = 0

    @classmethod
    def join(cls, device_type: str) -> "Ranks":
        """Join the group that ``torchrun`` describes; without one, be a group of one."""
        if "WORLD_SIZE" not in os.environ and not dist.is_initialized():
            return cls()
        if device_type == "cuda" and "LOCAL_RANK" in os.environ:
            # Otherwise "cuda" is the first GPU on every rank, and NCCL refuses to share it.
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        return cls(dist.get_rank(), dist.get_world_size(), local)

    @property
    def first(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's rows, in rank order, without a gradient."""
        if self.count == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_own_rows(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of the rows that are this rank's: a share of the message of ``sum``.

        Args:
            tensor: Rows of every rank, as many of each, in rank order.
        """
        if self.count == 1:
            return tensor
        own = tensor.new_empty(len(tensor) // self.count, *tensor.shape[1:])
        dist.reduce_scatter_tensor(own, tensor.contiguous())
        return own

    def visits(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank's number and rows, the own ones first; the next arrive while these are used.

        Args:
            rows: This rank's rows, as many as every other's.
        """
        for step in range(self.count):
            arrived = self._start_passing(rows) if step < self.count - 1 else None
            yield (self.rank - step) % self.count, rows
            rows = arrived() if arrived else rows

    def pass_on(self, tensor: Tensor) -> Tensor:
        """Send a tensor to the next rank and return the one of the rank before."""
        return self._start_passing(tensor)()

    def _start_passing(self, tensor: Tensor) -> Callable[[], Tensor]:
        if self.count == 1:
            return lambda: tensor
        tensor, received = tensor.contiguous(), torch.empty_like(tensor.contiguous())
        to, of = (self.rank + 1) % self.count, (self.rank - 1) % self.count
        messages = [dist.P2POp(dist.isend, tensor, to), dist.P2POp(dist.irecv, received, of)]
        under_way = dist.batch_isend_irecv(messages)

        def arrived() -> Tensor:
            for message in under_way:
                message.wait()
            return received

        return arrived

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first rank's values, in place."""
        if self.count > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum every parameter's gradient over ranks, in one message per dtype."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        for dtype in {g.dtype for g in gradients}:
            same = [g for g in gradients if g.dtype == dtype]
            flat = self.sum(torch.cat([g.flatten() for g in same]))
            for gradient, summed in zip(
                same, torch.split(flat, [g.numel() for g in same]), strict=True
            ):
                gradient.copy_(summed.view_as(gradient))

    def any(self, happened: bool) -> bool:
        """Whether it happened on any rank."""
        if self.count == 1:
            return happened
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        flag = torch.tensor(int(happened), device=device)
        return bool(self.sum(flag))

    def merged(self, listed: Mapping[str, str]) -> dict[str, str]:
        """Every rank's entries together, on every rank."""
        if self.count == 1:
            return dict(listed)
        parts: list[dict[str, str]] = [{} for _ in range(self.count)]
        dist.all_gather_object(parts, dict(listed))
        return {name: reason for part in parts for name, reason in part.items()}

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.count > 1:
            dist.barrier()


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks. Every rank uses it, so its gradient is the sum of all of theirs."""

    @staticmethod
    def forward(ctx: FunctionCtx, own: Tensor) -> Tensor:
        """Every rank's tensor, added."""
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        """Every rank's gradient, added."""
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def sum_over_ranks(own: Tensor) -> Tensor:
    """Sum over ranks, with gradients."""
    return cast(Tensor, _SumOverRanks.apply(own))


class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the global batch, on any device (torch's own needs a GPU).

    ``y = (x - mu) / sqrt(var + eps) * w + b`` with mu and var over all ranks' rows and pixels.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``(n, c, h, w)``; in eval mode with the running statistics."""
        if not self.training:
            return super().forward(input)
        wide = input.float()
        count = torch.tensor(float(wide.numel() // wide.shape[1]), device=input.device)
        total = sum_over_ranks(torch.cat([wide.sum(dim=(0, 2, 3)), count[None]]))
        everyone = total[-1].detach()
        mean = total[:-1] / everyone
        centred = wide - mean[None, :, None, None]
        variance = sum_over_ranks(centred.square().sum(dim=(0, 2, 3))) / everyone
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                momentum = self.momentum or 0.0
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(variance * everyone / (everyone - 1), momentum)
        normal = centred * torch.rsqrt(variance + self.eps)[None, :, None, None]
        shaped = normal * self.weight[None, :, None, None] + self.bias[None, :, None, None]
        return shaped.to(input.dtype)


def synchronize_batch_norm(model: nn.Module, device_type: str) -> None:
    """Make every BatchNorm2d of ``model`` see the global batch, keeping its parameters."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is not nn.BatchNorm2d:
                continue
            synced: nn.Module
            if device_type == "cuda":
                synced = convert(child)
            else:
                synced = SyncBatchNorm(child.num_features, child.eps, child.momentum)
                synced.weight, synced.bias = child.weight, child.bias
                synced.running_mean, synced.running_var = child.running_mean, child.running_var
                synced.num_batches_tracked = child.num_batches_tracked
            setattr(parent, name, synced)
