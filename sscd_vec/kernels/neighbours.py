"""KoLeo's pairs: exact distances to the neighbours the scan found, and gradients to both sides.

``koleo = -(1/n) sum_i log ||z_i - z_j(i)||``; its derivative by ``z_i`` is ``slope_i (z_i - z_j)``
with ``slope_i = -1 / (n ||z_i - z_j||^2)``, and the opposite by ``z_j``. A row can be the neighbour
of many: each row adds up its own pairs in a fixed order, so the gradient repeats bit by bit,
without atomics. Both kernels read each pair of descriptors once, ``8 n d`` bytes in float32, the
least possible.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.batch import GlobalBatch
from sscd_vec.kernels.launch import ROW_OPTIONS, jit, load_rows, row_block, store_rows


@jit
def distance_kernel(
    z_ptr: tl.tensor,
    all_ptr: tl.tensor,
    index_ptr: tl.tensor,
    squared_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``squared_i = ||z_i - z_index(i)||^2`` from the difference, exact where products cancel."""
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = i < rows
    j = tl.load(index_ptr + i, mask=inside, other=-1)
    difference = load_rows(z_ptr, i, inside, d, D) - load_rows(all_ptr, j, j >= 0, d, D)
    tl.store(squared_ptr + i, tl.sum(difference * difference, axis=1), mask=inside)


@jit
def pair_gradient_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    index_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    order_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    ANCHORS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``gradient_a += slope_a (a - b_index(a)) + sum_{b: index(b) = a} slope_b (a - b)``.

    ANCHORS says which of the two sums counts: "a" the first, "b" the second, or "both".
    """
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = i < rows
    a = load_rows(a_ptr, i, inside, d, D)
    gradient = load_rows(gradient_ptr, i, inside, d, D)
    if ANCHORS != "b":
        j = tl.load(index_ptr + i, mask=inside, other=-1)
        slope = tl.load(slope_ptr + i, mask=inside, other=0.0)
        gradient += slope[:, None] * (a - load_rows(b_ptr, j, j >= 0, d, D))
    if ANCHORS != "a":
        begin = tl.load(begin_ptr + i, mask=inside, other=0)
        end = tl.load(end_ptr + i, mask=inside, other=0)
        for step in range(0, tl.max(end - begin, axis=0)):
            valid = begin + step < end
            j = tl.load(order_ptr + begin + step, mask=valid, other=0)
            slope = tl.load(slope_ptr + j, mask=valid, other=0.0)
            gradient += slope[:, None] * (a - load_rows(b_ptr, j, valid, d, D))
    store_rows(gradient_ptr, i, inside, d, D, gradient)


def squared_distance(batch: GlobalBatch, index: Tensor) -> Tensor:
    """``||z_i - z_index(i)||^2`` in float32; of no meaning at index -1."""
    z, all_z = batch.z.contiguous(), batch.all_z.contiguous()
    squared = z.new_empty(len(z), dtype=torch.float32)
    block = row_block(z)
    distance_kernel[(triton.cdiv(len(z), block["BLOCK_R"]),)](
        *(z, all_z, index, squared, len(z)), D=z.shape[1], **block, **ROW_OPTIONS
    )
    return squared


def add_pair_gradient(
    batch: GlobalBatch, index: Tensor, slope: Tensor, dz: Tensor, dall: Tensor | None
) -> None:
    """Add the gradient of ``sum_i slope_i ||z_i - z_index(i)||^2 / 2``, slopes fixed."""
    z, all_z = batch.z.contiguous(), batch.all_z.contiguous()
    neighbours, order = index.sort(stable=True)
    rows = torch.arange(len(all_z), device=z.device)
    begin = torch.searchsorted(neighbours, rows)
    end = torch.searchsorted(neighbours, rows, right=True)
    block = row_block(z)
    sides = [(z, all_z, dz, "both" if batch.whole else "a")]
    if dall is not None and not batch.whole:
        sides.append((all_z, z, dall, "b"))
    for a, b, gradient, anchors in sides:
        pair_gradient_kernel[(triton.cdiv(len(a), block["BLOCK_R"]),)](
            *(a, b, index, slope, order, begin, end, gradient, len(a)),
            D=z.shape[1],
            ANCHORS=anchors,
            **block,
            **ROW_OPTIONS,
        )
