"""The negatives' part of InfoNCE's gradient, by recomputed tiles.

Negatives are many. The similarity tile is computed again, turned into slopes
``pull_i e^{s_ik - lse_i} / tau`` in registers and multiplied with the descriptors at once: no byte
of a tile is written. Products: 4 n N d for each side (for a whole batch both sides share one pass,
4 N^2 d, against 6 N^2 d for recomputing or 4 N^2 d plus an N x N matrix).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.launch import FUSED, column_splits, input_precision, jit
from sscd_vec.kernels.scan import add_product, mate_tile, similarity_tile

# One tile each, the largest found that spills no register on any target. BLOCK_D columns of the
# gradient stay in registers through the pass, and every further part of d recomputes the tiles:
# half precisions hold 512 at once, float32 with its three products 256.
FLOAT32_TILE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 16, "BLOCK_D": 256}
HALF_TILE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "BLOCK_D": 512}
WARPS, STAGES = 8, 2


@jit
def push_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_sources_ptr: tl.tensor,
    b_sources_ptr: tl.tensor,
    a_weight_ptr: tl.tensor,
    b_weight_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    a_count: tl.tensor,
    b_count: tl.tensor,
    b_per_split: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    ANCHORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``gradient_a = sum_b slope_ab b`` over negatives b, ``slope = sum 2^(a.b scale + weight)``.

    ANCHORS says whose weights count, ``log2(pull / tau) - log2(e) lse`` of the anchor of each pair:
    those of the rows "a", of the rows "b", or of "both" in a whole batch, where each pair is
    anchored twice.
    """
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(2)
    a_weight = tl.load(a_weight_ptr + i, mask=i < a_count, other=float("-inf"))
    gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum((split + 1) * b_per_split, b_count)
    for first in range(split * b_per_split, end, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        t = similarity_tile(
            a_ptr, i, a_count, b_ptr, j, end, D, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
        )
        mate = mate_tile(a_sources_ptr, i, a_count, b_sources_ptr, j, end)
        t = tl.where(mate, float("-inf"), t * scale)
        slope = tl.zeros_like(t)
        if ANCHORS != "b":
            slope += tl.exp2(t + a_weight[:, None])
        if ANCHORS != "a":
            b_weight = tl.load(b_weight_ptr + j, mask=j < end, other=float("-inf"))
            slope += tl.exp2(t + b_weight[None, :])
        mask = (j < end)[:, None] & (d < D)[None, :]
        b = tl.load(b_ptr + j.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
        gradient = add_product(slope.to(b.dtype), b, gradient, PRECISION)
    out = (split.to(tl.int64) * a_count + i)[:, None] * D + d[None, :]
    mask = (i < a_count)[:, None] & (d < D)[None, :]
    tl.store(gradient_ptr + out, gradient, mask=mask)


def push_negatives(
    a: Tensor,
    b: Tensor,
    a_sources: Tensor,
    b_sources: Tensor,
    weight: Tensor,
    tau: float,
    gradient: Tensor,
    anchors: str,
    splits: int | None,
) -> None:
    """Fill ``gradient`` (n, d) with what the negatives among rows b do to rows a.

    ``weight`` belongs to the rows that ``anchors`` names; ``splits`` cuts the rows b in parts.
    """
    n, d = a.shape
    tile = push_tile(a.dtype, d)
    parts = splits or column_splits(n, len(b), tile["BLOCK_M"], a.device)
    partial = gradient if parts == 1 else gradient.new_empty(parts, n, d)
    push_kernel[(triton.cdiv(n, tile["BLOCK_M"]), triton.cdiv(d, tile["BLOCK_D"]), parts)](
        *(a, b, a_sources, b_sources, weight, weight, partial),
        *(n, len(b), triton.cdiv(len(b), parts), 1.0 / (tau * math.log(2.0))),
        D=d,
        ANCHORS=anchors,
        PRECISION=input_precision(a),
        **tile,
        num_warps=WARPS,
        num_stages=STAGES,
        **FUSED,
    )
    if parts > 1:
        torch.sum(partial, 0, out=gradient)


def push_tile(dtype: torch.dtype, d: int) -> dict[str, int]:
    """Tile of ``push_kernel`` for descriptors of dimension d."""
    tile = FLOAT32_TILE if dtype == torch.float32 else HALF_TILE
    return {**tile, "BLOCK_D": min(tile["BLOCK_D"], max(16, triton.next_power_of_2(d)))}
