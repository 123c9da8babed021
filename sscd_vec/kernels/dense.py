"""The losses of a batch so small that its similarities are kept: the path for few CPU rows.

128 views make a matrix of 64 KiB. There the time is the number of operations, not their size, so
nothing is cut into tiles and nothing is computed again: forward keeps the derivative by every
similarity, ``d info_nce / d (z_i.z_k)``, and backward is one product with it (``chunked`` has the
formulas). KoLeo's gradient goes through the differences of rows, exact where products cancel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sscd_vec.kernels import reference
from sscd_vec.kernels.batch import GlobalBatch

# Of a local and a global row: 4 MiB a matrix. Faster than tiles at 2048 rows still (1.1 times, 1.3
# at 1024, 2.2 at 128, one thread), but there it would hold more memory than tiles do.
FEW_PAIRS = 1 << 20


class _Similarities(NamedTuple):
    """Of n local and N global rows."""

    logits: Tensor  # (n, N), over the temperature
    negatives: Tensor  # (n, N) the same, -inf between mates
    mate: Tensor  # (n, N) bool
    top: Tensor  # (n,) of the most similar negative
    nearest: Tensor  # (n,) its row, 0 without any
    found: Tensor  # (n,) bool: there is one


def takes(z: Tensor, all_z: Tensor | None, products: torch.dtype) -> bool:
    """Whether this path is for these rows: few, on a CPU, multiplied as they are."""
    pairs = len(z) * len(z if all_z is None else all_z)
    return z.device.type == "cpu" and pairs <= FEW_PAIRS and products.itemsize >= z.itemsize


def nearest(batch: GlobalBatch) -> tuple[Tensor, Tensor]:
    """(n,) distances and (n,) rows of the nearest negatives: inf and -1 without any."""
    z, all_z = _rows(batch)
    found = _similarities(batch, z, all_z, 1.0)
    distance = torch.linalg.vector_norm(z - all_z[found.nearest], dim=1)
    nobody = ~found.found
    return distance.masked_fill_(nobody, float("inf")), found.nearest.masked_fill_(nobody, -1)


def losses(
    batch: GlobalBatch, tau: float, *, contrast: bool, spread: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """InfoNCE, KoLeo, mean positive cosine, mean nearest-negative cosine; and what backward needs.

    Returns:
        Four scalars, 0 where not asked for; (1, n) slopes of the squared distances to the nearest
        negatives, and (n,) their rows; (n, N) derivatives of InfoNCE by the similarities.
    """
    z, all_z = _rows(batch)
    same = _similarities(batch, z, all_z, tau)
    if contrast:
        info, positive_cosine, derivative = _contrast(same, tau, batch.row_offset or 0)
    else:
        info, positive_cosine, derivative = z.new_zeros(()), z.new_zeros(()), same.logits
    if spread:
        squared = (z - all_z[same.nearest]).square_().sum(1)
        kept = same.found & (squared >= reference.CLAMP)  # at the clamp: a constant, no gradient
        slope = torch.where(kept, -1.0 / squared, 0.0)
        log_distance = squared.clamp_(min=reference.CLAMP).log_()
        spread_loss = torch.where(same.found, log_distance, 0.0).mean() / -2
        near_cosine = torch.where(same.found, same.top, 0.0).sum() * tau / same.found.sum()
    else:
        spread_loss, near_cosine = z.new_zeros(()), z.new_zeros(())
        slope = torch.zeros_like(same.top)
    index = same.nearest.masked_fill_(~same.found, -1)
    return info, spread_loss, positive_cosine, near_cosine, slope[None], index, derivative


def gradient(
    info_slope: Tensor | None,
    koleo_slope: Tensor | None,
    batch: GlobalBatch,
    slope: Tensor,
    index: Tensor,
    derivative: Tensor,
    *,
    to_all: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients by z and, if ``to_all``, by all_z (else empty), from what ``losses`` kept."""
    z, all_z = _rows(batch)
    dall = z.new_empty(0)
    if info_slope is None:
        dz = torch.zeros_like(z)
        dall = torch.zeros_like(all_z) if to_all else dall
    else:
        scaled = derivative * info_slope
        dz = torch.mm(scaled + scaled.T if batch.whole else scaled, all_z)
        dall = torch.mm(scaled.T, z) if to_all else dall
    if koleo_slope is not None:
        near = index.clamp(min=0)
        step = (z - all_z[near]).mul_((slope * (koleo_slope / len(z))).T)
        dz += step
        if batch.whole or to_all:
            (dz if batch.whole else dall).index_add_(0, near, step, alpha=-1)
    return dz.to(batch.z.dtype), dall.to(batch.z.dtype)


def _contrast(same: _Similarities, tau: float, row_offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """InfoNCE, the mean cosine of positives, and the derivative by every similarity."""
    n = len(same.top)
    positive = same.mate
    positive.diagonal(row_offset).fill_(False)
    row, column = positive.nonzero(as_tuple=True)
    count = torch.bincount(row, minlength=n)
    share = count.clamp(min=1).to(same.top.dtype).reciprocal_()[row]
    value = same.logits[row, column]
    # Without negatives the top is -inf, and a difference from it would be NaN.
    top = torch.where(same.found, same.top, 0.0)
    slopes = same.negatives.sub_(top[:, None]).exp_()
    total = slopes.sum(1)
    gap = (total.log() + top)[row] - value
    info = torch.logaddexp(gap, gap.new_zeros(())).mul_(share).sum() / n
    cosine = (value * share).sum() * tau / (count > 0).sum()
    pull = gap.sigmoid_().mul_(share)
    weight = torch.zeros_like(total).index_add_(0, row, pull).div_(total)
    slopes.mul_(torch.where(same.found, weight, 0.0).div_(n * tau)[:, None])
    slopes[row, column] = pull.div_(-n * tau)
    return info, cosine, slopes


def _similarities(batch: GlobalBatch, z: Tensor, all_z: Tensor, tau: float) -> _Similarities:
    logits = torch.mm(z, all_z.T).div_(tau)
    mate = reference.mates(batch.sources, batch.all_sources)
    negatives = logits.masked_fill(mate, float("-inf"))
    top, index = negatives.max(1)
    return _Similarities(logits, negatives, mate, top, index, top > float("-inf"))


def _rows(batch: GlobalBatch) -> tuple[Tensor, Tensor]:
    """Local and global rows in float32, unless they are float64."""
    wide = torch.float64 if batch.z.dtype == torch.float64 else torch.float32
    z = batch.z.to(wide)
    return z, z if batch.whole else batch.all_z.to(wide)
