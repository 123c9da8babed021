"""The Triton engine of the losses: what ``chunked`` does in torch, composed from the kernels."""

import math

from torch import Tensor

from sscd_vec.kernels.batch import GlobalBatch
from sscd_vec.kernels.launch import compact, source_runs
from sscd_vec.kernels.neighbours import add_pair_gradient, squared_distance
from sscd_vec.kernels.pull import positives, pull_positives
from sscd_vec.kernels.push import push_negatives
from sscd_vec.kernels.scan import scan

__all__ = ["add_contrast_gradient", "add_pair_gradient", "positives", "scan", "squared_distance"]


def add_contrast_gradient(
    batch: GlobalBatch,
    tau: float,
    lse: Tensor,
    pull: Tensor,
    count: Tensor,
    dz: Tensor,
    dall: Tensor | None,
    *,
    splits: int | None = None,
) -> None:
    """Fill ``dz`` and ``dall``, zero so far, with the gradient of the *sum* over rows of InfoNCE.

    Args:
        batch: Local rows and global batch.
        tau: Temperature.
        lse: (n,) log-sum-exp of each row's negatives.
        pull: (n,) derivative of each row's loss by ``lse``.
        count: (n,) positives of each row.
        dz: (n, d) float32.
        dall: (N, d) float32; ``dz`` itself for a whole batch, None if nobody asks.
        splits: Parts into which the other side's rows are cut; as many as fill the GPU by default.
    """
    z, all_z = batch.z.contiguous(), batch.all_z.contiguous()
    sources, all_sources = compact(batch.sources, batch.all_sources)
    weight = ((pull / tau).log() - lse) / math.log(2.0)
    # Without negatives lse is -inf and without positives pull is 0: neither pushes anybody.
    weight = weight.where((pull > 0) & (lse > float("-inf")), float("-inf"))
    offset, anchors = batch.row_offset, "both" if batch.whole else "a"
    push_negatives(z, all_z, sources, all_sources, weight, tau, dz, anchors, splits)
    runs = source_runs(sources, all_sources)
    pull_positives(z, all_z, sources, all_sources, runs, lse, count, offset, tau, dz, anchors)
    if dall is not None and not batch.whole:
        push_negatives(all_z, z, all_sources, sources, weight, tau, dall, "b", splits)
        runs = source_runs(all_sources, sources)
        pull_positives(all_z, z, all_sources, sources, runs, lse, count, -offset, tau, dall, "b")
