"""The losses as one differentiable function over an engine that provides their sums.

``info_nce = (1/n) sum_i mean_{j in P_i} log(1 + e^{lse_i - s_ij})`` with ``lse_i`` the log-sum-exp
of row i's negatives, and ``koleo = -(1/2n) sum_i log max(d2_i, 1e-6)`` with ``d2_i`` the squared
distance to its nearest negative. An engine computes ``lse``, the neighbours and the gradients:
``chunked`` in torch, ``tiled`` in Triton. What happens here is O(n).
"""

import dataclasses
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from sscd_vec.kernels import chunked
from sscd_vec.kernels.batch import GlobalBatch, NearestNegative, Positives, Scan, SSCDLoss
from sscd_vec.kernels.derivative import Context, only_first
from sscd_vec.kernels.reference import CLAMP

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Engine(Protocol):
    """The sums over tiles and pairs that a loss needs; ``chunked`` documents each."""

    def scan(self, batch: GlobalBatch, tau: float, *, lse: bool, nearest: bool) -> Scan:
        """Each local row's log-sum-exp over negatives, and its most similar negative."""

    def positives(self, batch: GlobalBatch, tau: float, lse: Tensor) -> Positives:
        """Each local row's loss from its positives, and the loss's derivative by ``lse``."""

    def squared_distance(self, batch: GlobalBatch, index: Tensor) -> Tensor:
        """``||z_i - z_index(i)||^2``; of no meaning at index -1."""

    def add_contrast_gradient(
        self,
        batch: GlobalBatch,
        tau: float,
        lse: Tensor,
        pull: Tensor,
        count: Tensor,
        dz: Tensor,
        dall: Tensor | None,
    ) -> None:
        """Fill ``dz`` and ``dall``, zero so far, with the gradient of the sum of InfoNCE."""

    def add_pair_gradient(
        self, batch: GlobalBatch, index: Tensor, slope: Tensor, dz: Tensor, dall: Tensor | None
    ) -> None:
        """Add the gradient of ``sum_i slope_i ||z_i - z_index(i)||^2 / 2`` to both sides."""


def runs_on_triton(x: Tensor) -> bool:
    """Whether the Triton kernels take ``x``: a GPU tensor of their dtypes, Triton installed."""
    return x.is_cuda and x.dtype in TRITON_DTYPES and find_spec("triton") is not None


def nearest_negative(batch: GlobalBatch) -> NearestNegative:
    """Distance and index of the nearest negative, by the engine's scan."""
    engine, batch = _engine(batch)
    with torch.no_grad(), _full_precision(batch.z):
        index = engine.scan(batch, 1.0, lse=False, nearest=True).index
        if index is None:
            raise RuntimeError("the engine's scan was asked for neighbours and found none")
        has_negative = index >= 0
        distance = engine.squared_distance(batch, index).sqrt_()
    return NearestNegative(distance.masked_fill_(~has_negative, float("inf")), index, has_negative)


def koleo(batch: GlobalBatch) -> Tensor:
    """KoLeo alone."""
    engine, batch = _engine(batch)
    outputs: tuple[Tensor, ...] = _Objective.apply(*_inputs(batch), engine, 1.0, False, True)
    return outputs[1]


def info_nce(batch: GlobalBatch, tau: float) -> Tensor:
    """InfoNCE alone."""
    engine, batch = _engine(batch)
    outputs: tuple[Tensor, ...] = _Objective.apply(*_inputs(batch), engine, tau, True, False)
    return outputs[0]


def sscd_loss(batch: GlobalBatch, tau: float, entropy_weight: float) -> SSCDLoss:
    """Both from one scan."""
    engine, batch = _engine(batch)
    outputs: tuple[Tensor, ...] = _Objective.apply(*_inputs(batch), engine, tau, True, True)
    contrast, spread, positive, negative = outputs
    return SSCDLoss(contrast + entropy_weight * spread, contrast, spread, positive, negative)


def _engine(batch: GlobalBatch) -> tuple[Engine, GlobalBatch]:
    """The code that takes these tensors, and the rows in the dtype it computes in."""
    if runs_on_triton(batch.z):
        from sscd_vec.kernels import tiled

        return tiled, batch
    return chunked, _widened(batch)


def _widened(batch: GlobalBatch) -> GlobalBatch:
    """The same rows in float32, or float64 if that is what they are; differentiable."""
    if batch.z.dtype in (torch.float32, torch.float64):
        return batch
    z = batch.z.float()
    return dataclasses.replace(batch, z=z, all_z=z if batch.whole else batch.all_z.float())


def _inputs(batch: GlobalBatch) -> tuple[Tensor, Tensor | None, Tensor, Tensor, int]:
    all_z = None if batch.whole else batch.all_z
    return batch.z, all_z, batch.sources, batch.all_sources, batch.row_offset


class _Objective(torch.autograd.Function):
    """(InfoNCE, KoLeo, mean positive cosine, mean nearest-negative cosine); the last two detached.

    A loss that is not asked for is 0 and costs nothing.
    """

    @staticmethod
    def forward(
        ctx: Context,
        z: Tensor,
        all_z: Tensor | None,
        sources: Tensor,
        all_sources: Tensor,
        row_offset: int,
        engine: Engine,
        tau: float,
        contrast: bool,
        spread: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        others = z if all_z is None else all_z
        batch = GlobalBatch(z, sources, others, all_sources, row_offset, all_z is None)
        with _full_precision(z):
            found = engine.scan(batch, tau, lse=contrast, nearest=spread)
            positive = engine.positives(batch, tau, found.lse) if found.lse is not None else None
            zero = found.similarity.new_zeros(())
            log_distance, slope, negative_similarity = zero, None, zero
            if found.index is not None:
                squared = engine.squared_distance(batch, found.index)
                has_negative = found.index >= 0
                # At the clamp a pair contributes a constant: no gradient.
                slope = torch.where(has_negative & (squared >= CLAMP), -1.0 / squared, 0.0)
                log_distance = (0.5 * squared.clamp(min=CLAMP).log()).where(has_negative, zero)
                negative_similarity = _mean_where(found.similarity, has_negative)
        ctx.settings = (row_offset, engine, tau, all_z is None)
        pull, count = (None, None) if positive is None else (positive.pull, positive.count)
        ctx.save_for_backward(
            z, all_z, sources, all_sources, found.lse, pull, count, found.index, slope
        )
        info = zero if positive is None else positive.loss.mean()
        similarity = zero
        if positive is not None:
            similarity = _mean_where(positive.similarity, positive.count > 0)
        ctx.mark_non_differentiable(similarity, negative_similarity)
        return info, -log_distance.mean(), similarity, negative_similarity

    @staticmethod
    def backward(
        ctx: Context, info_slope: Tensor, koleo_slope: Tensor, *unused: Tensor
    ) -> tuple[Tensor | None, ...]:
        z, all_z, sources, all_sources, lse, pull, count, index, slope = ctx.saved_tensors
        row_offset, engine, tau, whole = ctx.settings
        others = z if whole else all_z
        batch = GlobalBatch(z, sources, others, all_sources, row_offset, whole)
        dtype = (lse if lse is not None else slope).dtype
        dz = torch.zeros(z.shape, dtype=dtype, device=z.device)
        dall = dz if whole else None
        if ctx.needs_input_grad[1]:
            dall = torch.zeros(all_z.shape, dtype=dtype, device=z.device)
        with torch.no_grad(), _full_precision(z):
            if lse is not None:
                engine.add_contrast_gradient(batch, tau, lse, pull, count, dz, dall)
                dz.mul_(info_slope / len(z))
                if dall is not None and not whole:
                    dall.mul_(info_slope / len(z))
            if index is not None:
                slope = slope * (koleo_slope / len(z))
                engine.add_pair_gradient(batch, index, slope, dz, dall)
        inputs = (z, all_z, info_slope, koleo_slope)
        to_z = only_first("sscd_loss", dz.to(z.dtype), *inputs)
        if whole or dall is None:
            return to_z, *[None] * 8
        return to_z, only_first("sscd_loss", dall.to(z.dtype), *inputs), *[None] * 7


def _full_precision(z: Tensor) -> torch.autocast:
    """No autocast inside: 1/tau would multiply the error of a half-precision product by 20."""
    return torch.autocast(z.device.type, enabled=False)


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    return values.where(chosen, values.new_zeros(())).sum() / chosen.sum()
