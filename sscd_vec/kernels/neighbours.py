"""KoLeo's pairs: exact distances to the neighbours the scan found, and gradients to both sides.

``koleo = -(1/n) sum_i log ||z_i - z_j(i)||``; its derivative by ``z_i`` is ``slope_i (z_i - z_j)``
with ``slope_i = -1 / (n ||z_i - z_j||^2)``, and the opposite by ``z_j``. A row can be the neighbour
of many, of nearly all if training collapses: pairs are sorted by their neighbour, chunks of pairs
that belong to one neighbour are added up by a program each, and every row adds up its chunks and
its remaining pairs. The order is fixed, so the gradient repeats bit by bit, without atomics. Each
pair of descriptors is read once, ``8 n d`` bytes in float32, the least possible.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.launch import ROW_OPTIONS, jit, load_rows, row_block, start, store_rows

CHUNK = 64  # pairs: no program walks more than two chunks and one 64th of its row's pairs


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
def add_pairs(
    total: tl.tensor,
    a: tl.tensor,
    b_ptr: tl.tensor,
    order_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    d: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:
    """``total + sum slope_b (a - b)`` over the sorted pairs from begin to end."""
    for step in range(0, tl.max(end - begin, axis=0)):
        valid = begin + step < end
        j = tl.load(order_ptr + begin + step, mask=valid, other=0)
        slope = tl.load(slope_ptr + j, mask=valid, other=0.0)
        total += slope[:, None] * (a - load_rows(b_ptr, j, valid, d, D))
    return total


@jit
def chunk_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    neighbour_ptr: tl.tensor,
    order_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    chunks: tl.tensor,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``partial_c = sum slope_b (a - b)`` over chunk c of the sorted pairs, if it has one a."""
    c = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = c < chunks
    row = tl.load(neighbour_ptr + c * CHUNK, mask=inside, other=-1)
    last = tl.load(neighbour_ptr + c * CHUNK + CHUNK - 1, mask=inside, other=-2)
    alone = (row == last) & (row >= 0)
    a = load_rows(a_ptr, row, alone, d, D)
    begin = c * CHUNK
    end = tl.where(alone, begin + CHUNK, begin)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    total = add_pairs(total, a, b_ptr, order_ptr, slope_ptr, begin, end, d, D)
    store_rows(partial_ptr, c, alone, d, D, total)


@jit
def pair_gradient_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    index_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    order_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    ANCHORS: tl.constexpr,
    CHUNK: tl.constexpr,
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
        # Whole chunks from first to last, if there are any, are in partial already.
        first = (begin + CHUNK - 1) // CHUNK
        last = tl.maximum(end // CHUNK, first)
        head = tl.minimum(first * CHUNK, end)
        tail = tl.maximum(last * CHUNK, head)
        gradient = add_pairs(gradient, a, b_ptr, order_ptr, slope_ptr, begin, head, d, D)
        for step in range(0, tl.max(last - first, axis=0)):
            gradient += load_rows(partial_ptr, first + step, first + step < last, d, D)
        gradient = add_pairs(gradient, a, b_ptr, order_ptr, slope_ptr, tail, end, d, D)
    store_rows(gradient_ptr, i, inside, d, D, gradient)


def squared_distance(z: Tensor, all_z: Tensor, index: Tensor) -> Tensor:
    """``||z_i - z_index(i)||^2`` in float32; of no meaning at index -1."""
    squared = z.new_empty(len(z), dtype=torch.float32)
    block = row_block(z)
    start(
        distance_kernel,
        (triton.cdiv(len(z), block["BLOCK_R"]),),
        z,
        *(all_z, index, squared, len(z)),
        D=z.shape[1],
        **block,
        **ROW_OPTIONS,
    )
    return squared


def add_pair_gradient(
    z: Tensor, all_z: Tensor, index: Tensor, slope: Tensor, dz: Tensor, dall: Tensor | None
) -> None:
    """Add the gradient of ``sum_i slope_i ||z_i - z_index(i)||^2 / 2``, slopes fixed.

    Args:
        z: (n, d) the rows.
        all_z: (N, d) the rows their neighbours are among; ``z`` itself for a whole batch.
        index: (n,) the neighbours, -1 for none.
        slope: (n,)
        dz: (n, d) float32.
        dall: (N, d) float32; ``dz`` itself for a whole batch, None if nobody asks.
    """
    whole = dall is dz
    neighbour, order = index.sort(stable=True)
    rows = torch.arange(len(all_z), device=z.device)
    begin = torch.searchsorted(neighbour, rows)
    end = torch.searchsorted(neighbour, rows, right=True)
    chunks, block = len(z) // CHUNK, row_block(z)
    partial = dz.new_empty(chunks, z.shape[1])
    shape = {"D": z.shape[1], "CHUNK": CHUNK, **block, **ROW_OPTIONS}
    if dall is not None and chunks:
        grid = (triton.cdiv(chunks, block["BLOCK_R"]),)
        start(chunk_kernel, grid, all_z, z, neighbour, order, slope, partial, chunks, **shape)
    sides = [(z, all_z, dz, "both" if whole else "a")]
    if dall is not None and not whole:
        sides.append((all_z, z, dall, "b"))
    for a, b, gradient, anchors in sides:
        start(
            pair_gradient_kernel,
            (triton.cdiv(len(a), block["BLOCK_R"]),),
            a,
            *(b, index, slope, order, begin, end, partial, gradient, len(a)),
            ANCHORS=anchors,
            **shape,
        )
