"""The negatives' part of InfoNCE's gradient, by recomputed tiles.

Negatives are many. The similarity tile is computed again, turned into slopes
``pull_i e^{s_ik - lse_i} / tau`` in registers and multiplied with the descriptors at once: no byte
of a tile is written. The anchors stay in shared memory through the pass, and a tile of the others
is read once for both products. Products: 4 n N d for each side (for a whole batch both sides share
one pass), three times as many for float32 in two parts.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.launch import Gpu, column_splits, gpu_of, jit, start
from sscd_vec.kernels.tiles import Factors, Runs, add_product, load_tile, mark_tiles, without_mates

# A row's largest slope becomes about 2^14, near the top of float16, so that those 2^-28 of it are
# still normal numbers.
HEADROOM = 14.0
# By generation and parts: rows of the gradient in registers, columns of a tile, tiles of columns in
# shared memory; the first that fits is taken. 64 x 512 numbers of the gradient are half of a
# multiprocessor's registers.
TILES = {
    (80, 1): ((64, 32, 2), (32, 32, 2)),
    (80, 2): ((32, 32, 1),),
    (90, 1): ((64, 128, 2), (64, 64, 2), (64, 32, 2)),
    (90, 2): ((64, 128, 1), (64, 32, 1), (64, 16, 1)),
    (100, 1): ((64, 32, 2),),
    (100, 2): ((64, 32, 1),),
    (0, 1): ((32, 16, 1),),
    (0, 2): ((32, 16, 1),),
}
SMALL_TILES = ((32, 16, 1), (16, 16, 1))
LARGEST_GRADIENT = 1 << 15  # numbers of a program


@jit
def add_low_products(
    a: tl.tensor,
    a_low: tl.tensor,
    b: tl.tensor,
    b_low: tl.tensor,
    to: tl.tensor,
    positive: tl.tensor,
    also_positive: tl.tensor,
    APART: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """``to + a b_low + a_low b``; APART keeps the compiler from seeing that one reaches the other.

    Where it sees that, it lays all warps along the rows, and 64 rows are multiplied twice. Two
    conditions that are always true, which it does not know, and that differ, so that it does not
    join them, hide it.
    """
    if APART:
        if positive > 0:
            to = add_product(a, b_low, to, WIDE)
        if also_positive > 0:
            to = add_product(a_low, b, to, WIDE)
        return to
    to = add_product(a, b_low, to, WIDE)
    return add_product(a_low, b, to, WIDE)


@jit
def push_kernel(
    a_ptr: tl.tensor,
    a_low_ptr: tl.tensor,
    b_ptr: tl.tensor,
    b_low_ptr: tl.tensor,
    a_rank_ptr: tl.tensor,
    b_rank_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    a_weight_ptr: tl.tensor,
    b_weight_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    a_count: tl.tensor,
    b_count: tl.tensor,
    b_per_split: tl.tensor,
    flag_stride: tl.tensor,
    scale: tl.tensor,
    unit: tl.tensor,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    ANCHORS: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """``gradient_a = sum_b slope_ab b`` over negatives b, ``slope = sum 2^(a.b scale + weight)``.

    ANCHORS says whose weights count, ``log2(pull / tau) - log2(e) lse`` of the anchor of each pair:
    those of the rows "a", of the rows "b", or of "both" in a whole batch, where each pair is
    anchored twice. Slopes are computed times 2^-shift of their row, and the sum times 2^shift.
    """
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = i < a_count
    a_weight = tl.load(a_weight_ptr + i, mask=inside, other=float("-inf"))[:, None]
    shift = tl.load(shift_ptr + i, mask=inside, other=0.0)
    a = load_tile(a_ptr, i, a_count, d, D, BLOCK_D)
    if PARTS == 2:
        a_low = load_tile(a_low_ptr, i, a_count, d, D, BLOCK_D)
    gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum((split + 1) * b_per_split, b_count)
    for first in tl.range(split * b_per_split, end, BLOCK_N, num_stages=STAGES):
        j = first + tl.arange(0, BLOCK_N)
        b = load_tile(b_ptr, j, end, d, D, BLOCK_D)
        t = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if PARTS == 2:
            b_low = load_tile(b_low_ptr, j, end, d, D, BLOCK_D)
            b_turned, low_turned = tl.trans(b), tl.trans(b_low)
            t = add_low_products(a, a_low, b_turned, low_turned, t, a_count, b_count, APART, WIDE)
        t = add_product(a, tl.trans(b), t, WIDE)
        t = t * scale - shift[:, None]
        flagged = tl.load(flag_ptr + tl.program_id(0) * flag_stride + first // BLOCK_N) != 0
        if flagged | (first + BLOCK_N > end):
            t = without_mates(t, a_rank_ptr, i, a_count, b_rank_ptr, j, end)
        slope = tl.zeros_like(t)
        if ANCHORS != "b":
            slope += tl.exp2(t + a_weight)
        if ANCHORS != "a":
            b_weight = tl.load(b_weight_ptr + j, mask=j < end, other=float("-inf"))
            slope += tl.exp2(t + b_weight[None, :])
        high = slope.to(b.dtype)
        if PARTS == 2:
            low = (slope - high.to(tl.float32)).to(b.dtype)
            gradient = add_low_products(
                high, low, b, b_low, gradient, a_count, b_count, APART, WIDE
            )
        if (PARTS == 2) & APART:
            if end > 0:
                gradient = add_product(high, b, gradient, WIDE)
        else:
            gradient = add_product(high, b, gradient, WIDE)
    gradient *= (tl.exp2(shift) * unit)[:, None]
    out = (split.to(tl.int64) * a_count + i)[:, None] * D + d[None, :]
    tl.store(gradient_ptr + out, gradient, mask=inside[:, None] & (d < D)[None, :])


def push_negatives(
    a: Factors,
    b: Factors,
    runs: Runs,
    weight: Tensor,
    top: Tensor,
    tau: float,
    gradient: Tensor,
    anchors: str,
    splits: int | None = None,
) -> None:
    """Fill ``gradient`` (n, d) with what the negatives among rows b do to rows a.

    Args:
        a: The rows that are pushed.
        b: The rows that push them.
        runs: Who shares a source with whom.
        weight: Of the anchors: ``log2(pull / tau) - log2(e) lse``, -inf where nothing pushes.
        top: Of the anchors: ``log2(e) / tau`` times the cosine of the nearest negative.
        tau: Temperature.
        gradient: (n, d) float32.
        anchors: Which rows are the anchors: "a", "b", or "both" if a and b are one batch.
        splits: Parts into which the rows b are cut; as many as fill the GPU by default.
    """
    (n, d), columns = a.high.shape, len(b.high)
    gpu = gpu_of(a.high.device)
    tile = push_tile(gpu, a.parts, d)
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    splits = splits or column_splits(n, columns, block_m, gpu)
    per_split = triton.cdiv(triton.cdiv(columns, splits), block_n) * block_n
    splits = triton.cdiv(columns, per_split)
    flags = mark_tiles(runs, n, columns, block_m, block_n, turned=anchors == "b")
    ranks = (runs.all_rank, runs.rank) if anchors == "b" else (runs.rank, runs.all_rank)
    partial = gradient if splits == 1 else gradient.new_empty(splits, n, d)
    start(
        push_kernel,
        (triton.cdiv(n, block_m), splits),
        a.high,
        *(a.low, b.high, b.low, *ranks, flags, weight, weight),
        *(shifts(weight, top, n, anchors), partial, n, columns, per_split, flags.shape[1]),
        *(1.0 / (a.scale * b.scale * tau * math.log(2.0)), 1.0 / b.scale),
        D=d,
        PARTS=a.parts,
        WIDE=a.wide,
        ANCHORS=anchors,
        APART=gpu.generation != 100,  # there sums are no matter of warps
        **tile,
    )
    if splits > 1:
        torch.sum(partial, 0, out=gradient)


def shifts(weight: Tensor, top: Tensor, rows: int, anchors: str) -> Tensor:
    """(rows,) by how many powers of two the slopes of a row are divided.

    No slope of an anchor exceeds ``2^(weight + top)``, and none of a row a ``2^(largest weight +
    top_a)``: what is left is at most 2, times the headroom.
    """
    largest = (weight + top).amax()
    if anchors == "b":
        bound = largest.expand(rows)
    elif anchors == "a":
        bound = weight + top
    else:
        bound = torch.maximum(weight + top, torch.minimum(weight.amax() + top, largest))
    return bound.clamp(min=-1e30) - HEADROOM


def push_tile(gpu: Gpu, parts: int, d: int) -> dict[str, int]:
    """Tile, stages and warps of ``push_kernel``: the largest that the GPU's memories hold."""
    block_d = max(16, triton.next_power_of_2(d))
    for rows, columns, buffers in (*TILES[gpu.generation, parts], *SMALL_TILES):
        shared = 2 * parts * (block_d * (rows + buffers * columns) + rows * columns)
        if gpu.generation == 0:  # the rows are in registers, the columns in two orders
            shared = 4 * parts * block_d * columns
        if rows * block_d <= LARGEST_GRADIENT and shared <= gpu.shared:
            break
    per_warp = 1 << (12 if gpu.generation == 0 else 11)  # an AMD thread has twice the registers
    return {
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "BLOCK_D": block_d,
        # Before sm_90 a product is done when the next load begins: one stage more for each buffer.
        "STAGES": buffers + (gpu.generation == 80 and buffers > 1),
        "num_warps": 8 if rows * block_d > 4 * per_warp else 4,
    }
