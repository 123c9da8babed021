"""The losses as operators of torch, over an engine that provides their sums.

``info_nce = (1/n) sum_i mean_{j in P_i} log(1 + e^{lse_i - s_ij})`` with ``lse_i`` the log-sum-exp
of row i's negatives, and ``koleo = -(1/2n) sum_i log max(d2_i, 1e-6)`` with ``d2_i`` the squared
distance to its nearest negative. An engine computes ``lse``, the neighbours and the gradients:
``chunked`` in torch, ``tiled`` in Triton. What happens here is O(n). Few rows on a CPU are left to
``dense``.

Operators (``torch.ops.sscd_vec``) are opaque to compilers, known to fake tensors, to autograd and
to the FLOP counter.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from sscd_vec.kernels import dense
from sscd_vec.kernels.batch import GlobalBatch, NearestNegative, Positives, Scan, SSCDLoss
from sscd_vec.kernels.chunked import ChunkedStep
from sscd_vec.kernels.reference import CLAMP

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRITON_DIMENSION = 2048  # of a row whose gradient fits a multiprocessor's registers 16 times
Context = Any  # torch gives the context of an operator no type that fits,
Operator = Any  # and exports no name for the type of an operator


class Step(Protocol):
    """The sums over tiles and pairs that a loss needs; ``chunked`` documents each.

    Attributes:
        saved: (3, m) int32 that the next step over the same batch may be given.
    """

    saved: Tensor

    def scan(self, *, lse: bool, nearest: bool) -> Scan:
        """Each local row's log-sum-exp over negatives, and its most similar negative."""

    def positives(self, lse: Tensor) -> Positives:
        """Each local row's loss from its positives, and the loss's derivative by ``lse``."""

    def squared_distance(self, index: Tensor) -> Tensor:
        """``||z_i - z_index(i)||^2``; of no meaning at index -1."""

    def push_negatives(
        self, lse: Tensor, pull: Tensor, similarity: Tensor, dz: Tensor, dall: Tensor | None
    ) -> None:
        """Fill ``dz`` and ``dall``, zero so far, with the negatives' part of InfoNCE's gradient."""

    def pull_positives(self, lse: Tensor, count: Tensor, dz: Tensor, dall: Tensor | None) -> None:
        """Add the positives' part to ``dz`` and ``dall``."""

    def add_pair_gradient(
        self, index: Tensor, slope: Tensor, dz: Tensor, dall: Tensor | None
    ) -> None:
        """Add the gradient of ``sum_i slope_i ||z_i - z_index(i)||^2 / 2`` to both sides."""


def runs_on_triton(x: Tensor) -> bool:
    """Whether the Triton kernels take ``x``: a GPU tensor of their dtypes, Triton installed."""
    return x.is_cuda and x.dtype in TRITON_DTYPES and find_spec("triton") is not None


def nearest_negative(batch: GlobalBatch) -> NearestNegative:
    """Distance and index of the nearest negative, by the engine's scan."""
    with torch.no_grad():
        distance, index = _nearest(*_inputs(batch))
    return NearestNegative(distance, index, index >= 0)


def koleo(batch: GlobalBatch) -> Tensor:
    """KoLeo alone."""
    spread: Tensor = _losses(*_inputs(batch), 1.0, batch.z.dtype, False, True)[1]
    return spread


def info_nce(batch: GlobalBatch, tau: float, products: torch.dtype) -> Tensor:
    """InfoNCE alone."""
    contrast: Tensor = _losses(*_inputs(batch), tau, products, True, False)[0]
    return contrast


def sscd_loss(
    batch: GlobalBatch, tau: float, entropy_weight: float, products: torch.dtype
) -> SSCDLoss:
    """Both from one scan."""
    contrast, spread, positive, negative, *_ = _losses(*_inputs(batch), tau, products, True, True)
    return SSCDLoss(contrast + entropy_weight * spread, contrast, spread, positive, negative)


def sums_of(
    batch: GlobalBatch, tau: float, products: torch.dtype, saved: Tensor | None = None
) -> Step:
    """A step of the engine that takes these tensors."""
    if not _on_triton(batch.z):
        return ChunkedStep(batch, tau, products, saved)
    from sscd_vec.kernels.tiled import TiledStep

    return TiledStep(batch, tau, products, saved)


def asked_for(values: Tensor | None) -> Tensor:
    """What an engine leaves out unless it is asked for."""
    if values is None:
        raise RuntimeError("the engine's scan left out what it was asked for")
    return values


def spread_of(squared: Tensor, has_negative: Tensor) -> tuple[Tensor, Tensor]:
    """KoLeo of the squared distances to the neighbours, and its slopes by half of them, times n."""
    # At the clamp a pair contributes a constant: no gradient.
    slope = torch.where(has_negative & (squared >= CLAMP), -1.0 / squared, 0.0)
    log_distance = torch.where(has_negative, squared.clamp(min=CLAMP).log(), 0.0)
    return log_distance.mean() / -2, slope


def mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; NaN of none."""
    return torch.where(chosen, values, 0.0).sum() / chosen.sum()


def full_precision(z: Tensor) -> AbstractContextManager[object]:
    """No autocast inside: 1/tau would multiply the error of a half-precision product by 20."""
    if not torch.is_autocast_enabled(z.device.type):
        return nullcontext()
    return torch.autocast(z.device.type, enabled=False)


def product_dtype(z: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which negatives are multiplied; never wider than the descriptors."""
    if wanted is None and z.is_cuda and torch.is_autocast_enabled("cuda"):
        # Unit rows need precision and no range: float16 rounds them 8 times finer than bfloat16.
        wanted = torch.float16
    if wanted is None or wanted.itemsize >= z.dtype.itemsize:
        return z.dtype
    if not wanted.is_floating_point:
        raise TypeError(f"products must be a floating-point dtype, got {wanted}")
    return wanted


def refuse_second_derivative(backward: Operator, name: str) -> None:
    """Make the operator ``backward``, the gradient of ``name``, refuse to be differentiated."""

    def refuse(ctx: Context, *unused: object) -> None:
        raise RuntimeError(
            f"{name} has a first derivative only, and a second one was asked for "
            "(create_graph=True); use its namesake in sscd_vec.kernels.reference for that"
        )

    backward.register_autograd(refuse)


@custom_op("sscd_vec::nearest_negative", mutates_args=())
def _nearest(
    z: Tensor,
    all_z: Tensor | None,
    sources: Tensor,
    all_sources: Tensor | None,
    row_offset: int | None,
) -> tuple[Tensor, Tensor]:
    """(n,) distances and (n,) rows of the nearest negatives: inf and -1 without any."""
    with full_precision(z):
        batch = _batch(z, all_z, sources, all_sources, row_offset)
        if _is_few(z, all_z, z.dtype):
            return dense.nearest(batch)
        step = sums_of(batch, 1.0, z.dtype)
        index = asked_for(step.scan(lse=False, nearest=True).index)
        distance = step.squared_distance(index).sqrt_()
        return distance.masked_fill_(index < 0, float("inf")), index


@_nearest.register_fake
def _(
    z: Tensor,
    all_z: Tensor | None,
    sources: Tensor,
    all_sources: Tensor | None,
    row_offset: int | None,
) -> tuple[Tensor, Tensor]:
    return z.new_empty(len(z), dtype=_wide(z)), z.new_empty(len(z), dtype=torch.int64)


@custom_op("sscd_vec::losses", mutates_args=())
def _losses(
    z: Tensor,
    all_z: Tensor | None,
    sources: Tensor,
    all_sources: Tensor | None,
    row_offset: int | None,
    tau: float,
    products: torch.dtype,
    contrast: bool,
    spread: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """InfoNCE, KoLeo, mean positive cosine, mean nearest-negative cosine; and what backward needs.

    A loss that is not asked for is 0 and costs nothing. Backward needs (5, n) lse, pull and count
    of the positives, cosine and slope of the neighbours (of few rows (1, n) slopes); (n,) the
    neighbours; the engine's own.
    """
    with full_precision(z):
        batch = _batch(z, all_z, sources, all_sources, row_offset)
        if _is_few(z, all_z, products):
            return dense.losses(batch, tau, contrast=contrast, spread=spread)
        step = sums_of(batch, tau, products)
        found = step.scan(lse=contrast, nearest=spread)
        info, spread_loss, similarity, near = (found.similarity.new_zeros(()) for _ in range(4))
        nothing = found.similarity.new_zeros(len(z))
        lse, pull, count, slope = nothing, nothing, nothing, nothing
        index = sources.new_full((len(z),), -1)
        if contrast:
            lse = asked_for(found.lse)
            positive = step.positives(lse)
            pull, count = positive.pull, positive.count
            info = positive.loss.mean()
            similarity = mean_where(positive.similarity, count > 0)
        if spread:
            index = asked_for(found.index)
            spread_loss, slope = spread_of(step.squared_distance(index), index >= 0)
            near = mean_where(found.similarity, index >= 0)
        rows = torch.stack([lse, pull, count, found.similarity, slope])
        return info, spread_loss, similarity, near, rows, index, step.saved


@_losses.register_fake
def _(
    z: Tensor,
    all_z: Tensor | None,
    sources: Tensor,
    all_sources: Tensor | None,
    row_offset: int | None,
    tau: float,
    products: torch.dtype,
    contrast: bool,
    spread: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, everyone = len(z), sources if all_sources is None else all_sources
    info, spread_loss, similarity, near = (z.new_empty((), dtype=_wide(z)) for _ in range(4))
    index = z.new_empty(n, dtype=torch.int64)
    if _is_few(z, all_z, products):
        rows, saved = (z.new_empty(m, k, dtype=_wide(z)) for m, k in ((1, n), (n, len(everyone))))
    else:
        kept = 2 * len(everyone) if row_offset is not None and _on_triton(z) else 0
        rows, saved = z.new_empty(5, n, dtype=_wide(z)), z.new_empty(3, kept, dtype=torch.int32)
    return info, spread_loss, similarity, near, rows, index, saved


@custom_op("sscd_vec::losses_backward", mutates_args=())
def _losses_backward(
    info_slope: Tensor | None,
    koleo_slope: Tensor | None,
    z: Tensor,
    all_z: Tensor | None,
    sources: Tensor,
    all_sources: Tensor | None,
    row_offset: int | None,
    rows: Tensor,
    index: Tensor,
    saved: Tensor,
    tau: float,
    products: torch.dtype,
    to_all: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients by z and, if ``to_all``, by all_z (else empty); a slope of None is 0."""
    with full_precision(z):
        batch = _batch(z, all_z, sources, all_sources, row_offset)
        if _is_few(z, all_z, products):
            kept = (batch, rows, index, saved)
            return dense.gradient(info_slope, koleo_slope, *kept, to_all=to_all)
        lse, pull, count, similarity, slope = rows
        step = sums_of(batch, tau, products, saved)
        dz = torch.zeros(z.shape, dtype=rows.dtype, device=z.device)
        dall = dz if batch.whole else None
        if to_all:
            dall = torch.zeros(batch.all_z.shape, dtype=rows.dtype, device=z.device)
        if info_slope is not None:
            step.push_negatives(lse, pull, similarity, dz, dall)
            step.pull_positives(lse, count, dz, dall)
            dz.mul_(info_slope / len(z))
            if dall is not None and dall is not dz:
                dall.mul_(info_slope / len(z))
        if koleo_slope is not None:
            step.add_pair_gradient(index, slope * (koleo_slope / len(z)), dz, dall)
        elsewhere = dall if to_all and dall is not None else dz.new_empty(0)
        return dz.to(z.dtype), elsewhere.to(z.dtype)


@_losses_backward.register_fake
def _(
    info_slope: Tensor | None,
    koleo_slope: Tensor | None,
    z: Tensor,
    all_z: Tensor | None,
    sources: Tensor,
    all_sources: Tensor | None,
    row_offset: int | None,
    rows: Tensor,
    index: Tensor,
    saved: Tensor,
    tau: float,
    products: torch.dtype,
    to_all: bool,
) -> tuple[Tensor, Tensor]:
    elsewhere = z.new_empty(all_z.shape) if to_all and all_z is not None else z.new_empty(0)
    return z.new_empty(z.shape), elsewhere


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, all_z, sources, all_sources, row_offset, tau, products, contrast, spread = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(z, all_z, sources, all_sources, *output[4:])
    ctx.settings = (row_offset, tau, products, contrast, spread)


def _backward(
    ctx: Context, info_slope: Tensor | None, koleo_slope: Tensor | None, *unused: Tensor
) -> tuple[Tensor | None, ...]:
    z, all_z, sources, all_sources, rows, index, saved = ctx.saved_tensors
    row_offset, tau, products, contrast, spread = ctx.settings
    to_all = all_z is not None and ctx.needs_input_grad[1]
    dz, dall = _losses_backward(
        *(info_slope if contrast else None, koleo_slope if spread else None),
        *(z, all_z, sources, all_sources, row_offset, rows, index, saved, tau, products, to_all),
    )
    return dz, dall if to_all else None, *[None] * 7


_losses.register_autograd(_backward, setup_context=_keep)
refuse_second_derivative(_losses_backward, "sscd_loss")


@register_flop_formula(torch.ops.sscd_vec.losses)
def _(z: Sequence[int], all_z: Sequence[int] | None, *unused: object, **more: object) -> int:
    """One similarity per pair of rows, ``2 n N d``."""
    return 2 * z[0] * (z if all_z is None else all_z)[0] * z[1]


@register_flop_formula(torch.ops.sscd_vec.losses_backward)
def _(
    info_slope: Sequence[int] | None,
    koleo_slope: Sequence[int] | None,
    z: Sequence[int],
    all_z: Sequence[int] | None,
    *unused: object,
    **more: object,
) -> int:
    """The similarity again, and one product for each side that gets a gradient."""
    if info_slope is None:
        return 0
    sides = 1 if all_z is None else 2
    return 4 * sides * z[0] * (z if all_z is None else all_z)[0] * z[1]


def _is_few(z: Tensor, all_z: Tensor | None, products: torch.dtype) -> bool:
    return dense.takes(z, all_z, products) and not _on_triton(z)


def _on_triton(z: Tensor) -> bool:
    return runs_on_triton(z) and z.shape[1] <= TRITON_DIMENSION


def _inputs(
    batch: GlobalBatch,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, int | None]:
    # A whole batch is passed once: no operator takes a tensor twice.
    if batch.whole:
        return batch.z, None, batch.sources, None, 0
    return batch.z, batch.all_z, batch.sources, batch.all_sources, batch.row_offset


def _batch(
    z: Tensor,
    all_z: Tensor | None,
    sources: Tensor,
    all_sources: Tensor | None,
    row_offset: int | None,
) -> GlobalBatch:
    if all_z is None or all_sources is None:
        return GlobalBatch(z, sources, z, sources, 0, whole=True)
    return GlobalBatch(z, sources, all_z, all_sources, row_offset, whole=False)


def _wide(z: Tensor) -> torch.dtype:
    return torch.float64 if z.dtype == torch.float64 else torch.float32
