"""GeM pooling and the SSCD losses, without ever building an N x N matrix.

The choice of code follows the tensors: Triton kernels for float32, float16 and bfloat16 tensors on
a GPU, chunked and recomputing torch everywhere else. ``reference`` holds the plain definitions of
both.

Conventions of all losses:

- ``z`` is (n, d) with rows of unit length, ``sources`` is (n, 2) int64, an unmixed image repeating
  its id. Two rows are mates if their pairs intersect; a row's positives are its mates other than
  itself, its negatives all rows that are not its mates.
- A rank passes its own rows as ``z`` and the gathered ones as ``all_z``, ``all_sources``;
  ``row_offset`` says where its slice starts, and so which row of ``all_z`` is a row itself.
- Losses are means over the n local rows. A row without positives adds 0 to InfoNCE, a row without
  negatives 0 to both, and both are still counted in n. So the mean over ranks of equal slices is
  the loss of the global batch. Gradients reach ``z`` (each row as an anchor) and ``all_z`` (each
  row as another's positive or negative). If ``all_z`` comes from a gather whose backward sums over
  ranks, the two add up to (number of ranks) x the gradient of one process on everything, and
  averaging parameter gradients over ranks, as DDP does, makes that exactly the one-process
  gradient.
- Half precisions are computed in float32; a loss is float32 (float64 for float64 descriptors).
- Gradients can be taken once; a second derivative is refused.
"""

import torch
from torch import Tensor

from sscd_vec.kernels import objective
from sscd_vec.kernels.batch import NearestNegative, SSCDLoss, check_temperature, global_batch

__all__ = [
    "NearestNegative",
    "SSCDLoss",
    "gem_pool",
    "info_nce",
    "koleo",
    "nearest_negative",
    "sscd_loss",
]


def gem_pool(x: Tensor, p: float = 3.0, eps: float = 1e-6) -> Tensor:
    """Generalized mean over the last two axes: ``(mean(clamp(x, eps)^p))^(1/p)``.

    Plain torch operations on a CPU (pooling is 0.2 % of a forward pass there) and while a compiler
    or an exporter traces, so that it can fuse them with what precedes; fused kernels on a GPU.

    Args:
        x: (n, c, h, w) feature map, contiguous, channels_last or any other strides.
        p: Exponent, > 0; 1 is the mean, large p approaches the maximum.
        eps: Floor of the activations, > 0.

    Returns:
        (n, c) pooled features of ``x``'s dtype.

    Raises:
        ValueError: If there is not at least one pixel, or p or eps is not positive and finite.
        TypeError: If ``x`` is not floating point, or p or eps is a tensor (p is never learned).
    """
    if x.ndim != 4 or 0 in x.shape[2:]:
        raise ValueError(
            f"x must be (n, c, h, w) with at least one pixel, got shape {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}; call .float() on it")
    if isinstance(p, Tensor) or isinstance(eps, Tensor):
        raise TypeError(
            "p and eps must be numbers, got a tensor: p is fixed (a learned one diverges under a "
            "contrastive loss) and gets no gradient; pass float(p)"
        )
    if not (0 < p < float("inf") and 0 < eps < float("inf")):
        raise ValueError(
            f"p and eps must be positive and finite, got p={p} and eps={eps}; for the maximum use "
            "amax, or a large p"
        )
    if objective.runs_on_triton(x) and not torch.compiler.is_compiling():
        from sscd_vec.kernels.gem import gem_pool_triton

        return gem_pool_triton(x, p, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide.clamp(min=eps)
    if p == 1:
        pooled = wide.mean(dim=(-2, -1))
    elif p == 3:
        pooled = (wide * wide * wide).mean(dim=(-2, -1)).pow(1 / 3)
    else:
        # Scaled by the largest activation, so that x^p neither overflows nor vanishes for a large
        # p; the scale cancels, in the gradient too. An infinite one has no scale.
        top = wide.detach().amax(dim=(-2, -1), keepdim=True)
        top = torch.where(top.isinf(), 1.0, top)
        pooled = (wide / top).pow(p).mean(dim=(-2, -1)).pow(1 / p) * top[..., 0, 0]
    return pooled.to(x.dtype)


def nearest_negative(
    z: Tensor,
    sources: Tensor,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
) -> NearestNegative:
    """Nearest row that shares no source: ``min_j ||z_i - z_j||`` over the rows j not mates of i.

    Args:
        z: (n, d) unit descriptors.
        sources: (n, 2) int64 source ids; an unmixed image repeats its id.
        all_z: (N, d) descriptors to search; ``z`` itself by default.
        all_sources: (N, 2) their source ids.

    Returns:
        Distance, index and whether there is a negative at all; no gradient. Among ties the lowest
        index.
    """
    batch = global_batch(z, sources, all_z, all_sources, knows_self=False)
    return objective.nearest_negative(batch)


def koleo(
    z: Tensor,
    sources: Tensor,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
) -> Tensor:
    """KoLeo: ``-(1/n) sum_i log min_j ||z_i - z_j||`` over the rows j that share no source with i.

    The squared distance is clamped at 1e-6 before the root, so an exact duplicate contributes a
    constant and no gradient. Gradients reach both rows of each pair, and repeat bit by bit.

    Args:
        z: (n, d) unit descriptors.
        sources: (n, 2) int64 source ids.
        all_z: (N, d) the global batch; ``z`` itself by default.
        all_sources: (N, 2) its source ids.

    Returns:
        The loss, a scalar.
    """
    batch = global_batch(z, sources, all_z, all_sources, knows_self=False)
    return objective.koleo(batch)


def info_nce(
    z: Tensor,
    sources: Tensor,
    tau: float,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
    row_offset: int | None = None,
    products: torch.dtype | None = None,
) -> Tensor:
    """InfoNCE over mixed sources, by log-sum-exp over tiles and recomputation in backward.

    ``(1/n) sum_i mean_{j in P_i} -log( e^{s_ij} / (e^{s_ij} + sum_{k not a mate of i} e^{s_ik}) )``
    with ``s = z.z / tau``.

    Args:
        z: (n, d) unit descriptors.
        sources: (n, 2) int64 source ids.
        tau: Temperature.
        all_z: (N, d) the global batch; ``z`` itself by default.
        all_sources: (N, 2) its source ids.
        row_offset: Row of ``all_z`` at which ``z`` starts; needed with ``all_z``.
        products: Dtype in which negatives are multiplied, with float32 sums: float32 for full
            precision, float16 or bfloat16 for speed. By default float16 under autocast on a GPU,
            else that of ``z``. Positives and distances always keep the precision of ``z``.

    Returns:
        The loss, a scalar.
    """
    check_temperature(tau)
    batch = global_batch(z, sources, all_z, all_sources, row_offset)
    return objective.info_nce(batch, tau, objective.product_dtype(z, products))


def sscd_loss(
    z: Tensor,
    sources: Tensor,
    tau: float = 0.05,
    entropy_weight: float = 30.0,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
    row_offset: int | None = None,
    products: torch.dtype | None = None,
) -> SSCDLoss:
    """The SSCD objective ``info_nce + entropy_weight * koleo``, from one pass over similarities.

    Args:
        z: (n, d) unit descriptors.
        sources: (n, 2) int64 source ids.
        tau: Temperature of InfoNCE.
        entropy_weight: The paper's lambda; 30 there, 10 is a safer start.
        all_z: (N, d) the global batch; ``z`` itself by default.
        all_sources: (N, 2) its source ids.
        row_offset: Row of ``all_z`` at which ``z`` starts; needed with ``all_z``.
        products: Dtype in which negatives are multiplied, with float32 sums: float32 for full
            precision, float16 or bfloat16 for speed. By default float16 under autocast on a GPU,
            else that of ``z``. Positives and distances always keep the precision of ``z``.

    Returns:
        The total to back-propagate, its two parts, and two cosines for the log.
    """
    check_temperature(tau)
    batch = global_batch(z, sources, all_z, all_sources, row_offset)
    return objective.sscd_loss(batch, tau, entropy_weight, objective.product_dtype(z, products))
