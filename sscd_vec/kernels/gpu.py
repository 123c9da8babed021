"""GeM and the losses by Triton kernels, under their own names.

They take what their namesakes in ``sscd_vec.kernels`` take: float32, float16 and bfloat16 tensors
on a GPU, or on a CPU under the Triton interpreter.
"""

from torch import Tensor

from sscd_vec.kernels import objective, tiled
from sscd_vec.kernels.batch import check_temperature, global_batch
from sscd_vec.kernels.gem import gem_pool_triton
from sscd_vec.kernels.results import NearestNegative, SSCDLoss

__all__ = [
    "gem_pool_triton",
    "info_nce_triton",
    "koleo_triton",
    "nearest_negative_triton",
    "sscd_loss_triton",
]


def nearest_negative_triton(
    z: Tensor,
    sources: Tensor,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
) -> NearestNegative:
    """``nearest_negative``: tensor-core tiles with a running maximum, then exact distances."""
    batch = global_batch(z, sources, all_z, all_sources, knows_self=False)
    return objective.nearest_negative(tiled, batch)


def koleo_triton(
    z: Tensor,
    sources: Tensor,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
) -> Tensor:
    """``koleo``: the same search, gradients to both sides of each pair in a fixed order."""
    batch = global_batch(z, sources, all_z, all_sources, knows_self=False)
    return objective.koleo(tiled, batch)


def info_nce_triton(
    z: Tensor,
    sources: Tensor,
    tau: float,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
    row_offset: int | None = None,
) -> Tensor:
    """``info_nce``: log-sum-exp over tiles, recomputed in backward."""
    check_temperature(tau)
    return objective.info_nce(tiled, global_batch(z, sources, all_z, all_sources, row_offset), tau)


def sscd_loss_triton(
    z: Tensor,
    sources: Tensor,
    tau: float = 0.05,
    entropy_weight: float = 30.0,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
    row_offset: int | None = None,
) -> SSCDLoss:
    """``sscd_loss``: both losses from one pass over the similarity tiles."""
    check_temperature(tau)
    batch = global_batch(z, sources, all_z, all_sources, row_offset)
    return objective.sscd_loss(tiled, batch, tau, entropy_weight)
