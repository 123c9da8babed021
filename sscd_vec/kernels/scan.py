"""One pass over similarity tiles for both losses: each row's log-sum-exp and its nearest negative.

Per row of tiles: ``top = max_k s_ik``, ``index = argmax_k s_ik`` and ``total = sum_k e^{s_ik -
top}`` over the negatives k, updated tile by tile. The tile never leaves the multiprocessor. Least
bytes: both matrices once and three numbers per row; every row block reads all columns again, from
L2 while they fit. Products: 2 n N d.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.batch import GlobalBatch, Scan
from sscd_vec.kernels.launch import (
    FUSED,
    Kernel,
    column_splits,
    compact,
    input_precision,
    jit,
    tuned,
)

# A large tile reuses most; a small one keeps more programs alive. float32 products hold each
# operand twice (the parts of tf32x3), so their tiles are shallower. None of them spills registers.
FLOAT32_CONFIGS = (
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 16}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16}, num_warps=4, num_stages=3),
)
HALF_CONFIGS = (
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, num_warps=4, num_stages=3),
)


@jit
def similarity_tile(
    a_ptr: tl.tensor,
    a_rows: tl.tensor,
    a_count: tl.tensor,
    b_ptr: tl.tensor,
    b_rows: tl.tensor,
    b_count: tl.tensor,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """``a_i . b_j`` for a tile of rows i and j, in float32; 0 beyond the last row."""
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + a_rows.to(tl.int64)[:, None] * D + k[None, :]
    b_at = b_ptr + b_rows.to(tl.int64)[None, :] * D + k[:, None]
    a_inside = (a_rows < a_count)[:, None]
    b_inside = (b_rows < b_count)[None, :]
    for start in range(0, D, BLOCK_K):
        if D % BLOCK_K == 0:
            a = tl.load(a_at + start, mask=a_inside, other=0.0)
            b = tl.load(b_at + start, mask=b_inside, other=0.0)
        else:
            a = tl.load(a_at + start, mask=a_inside & (k < D - start)[None, :], other=0.0)
            b = tl.load(b_at + start, mask=b_inside & (k < D - start)[:, None], other=0.0)
        product = add_product(a, b, product, PRECISION)
    return product


@jit
def add_product(a: tl.tensor, b: tl.tensor, to: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """``to + a b`` on tensor cores; "wide" turns half precisions into float32 before."""
    if PRECISION == "wide":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), to, input_precision="ieee")
    return tl.dot(a, b, to, input_precision=PRECISION)


@jit
def mate_tile(
    a_sources: tl.tensor,
    a_rows: tl.tensor,
    a_count: tl.tensor,
    b_sources: tl.tensor,
    b_rows: tl.tensor,
    b_count: tl.tensor,
) -> tl.tensor:
    """Whether rows i and j share a source; everybody is a mate of a row beyond the last."""
    a_inside = a_rows < a_count
    b_inside = b_rows < b_count
    a0 = tl.load(a_sources + 2 * a_rows, mask=a_inside, other=-1)[:, None]
    a1 = tl.load(a_sources + 2 * a_rows + 1, mask=a_inside, other=-1)[:, None]
    b0 = tl.load(b_sources + 2 * b_rows, mask=b_inside, other=-1)[None, :]
    b1 = tl.load(b_sources + 2 * b_rows + 1, mask=b_inside, other=-1)[None, :]
    shared = (a0 == b0) | (a0 == b1) | (a1 == b0) | (a1 == b1)
    return shared | (b0 < 0) | (a0 < 0)


@jit
def scan_kernel(
    z_ptr: tl.tensor,
    all_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    all_sources_ptr: tl.tensor,
    top_ptr: tl.tensor,
    total_ptr: tl.tensor,
    index_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    columns_per_split: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """``top_i = max_k t_ik``, its lowest k, ``sum_k 2^(t_ik - top_i)``; ``t = z.z scale``."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    top = tl.full((BLOCK_M,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    index = tl.full((BLOCK_M,), -1, tl.int32)
    end = tl.minimum((split + 1) * columns_per_split, columns)
    for first in range(split * columns_per_split, end, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        t = similarity_tile(
            z_ptr, i, rows, all_ptr, j, end, D, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
        )
        mate = mate_tile(sources_ptr, i, rows, all_sources_ptr, j, end)
        t = tl.where(mate, float("-inf"), t * scale)
        best, where = tl.max(t, axis=1, return_indices=True, return_indices_tie_break_left=True)
        index = tl.where(best > top, first + where, index)
        higher = tl.maximum(top, best)
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(t - higher[:, None]), axis=1)
        top = higher
    out = split.to(tl.int64) * rows + i
    inside = i < rows
    tl.store(top_ptr + out, top, mask=inside)
    tl.store(total_ptr + out, total, mask=inside)
    tl.store(index_ptr + out, index, mask=inside)


TUNED = {
    configs: tuned(scan_kernel, configs, key=["D"]) for configs in (FLOAT32_CONFIGS, HALF_CONFIGS)
}


def scan(
    batch: GlobalBatch, tau: float, *, lse: bool, nearest: bool, splits: int | None = None
) -> Scan:
    """Log-sum-exp of the negatives and the most similar negative of each local row.

    Args:
        batch: Local rows and global batch.
        tau: Temperature of the log-sum-exp.
        lse: Whether to return the former.
        nearest: Whether to return the latter.
        splits: Parts into which the columns are cut; as many as fill the GPU by default.
    """
    z, all_z = batch.z.contiguous(), batch.all_z.contiguous()
    n, columns = len(z), len(all_z)
    if splits is None:
        splits = column_splits(n, columns, block=128, device=z.device)
    top = z.new_empty(splits, n, dtype=torch.float32)
    total = torch.empty_like(top)
    index = torch.empty_like(top, dtype=torch.int32)
    scale = 1.0 / (tau * math.log(2.0))
    kernel, tile = _kernel_for(z)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK_M"]), splits)](
        *(z, all_z, *compact(batch.sources, batch.all_sources), top, total, index),
        *(n, columns, triton.cdiv(columns, splits), scale),
        D=z.shape[1],
        PRECISION=input_precision(z),
        **tile,
        **FUSED,
    )
    highest = top.amax(0)
    return Scan(
        lse=_log_sum(top, total, highest) if lse else None,
        index=_lowest_index(top, index, highest) if nearest else None,
        similarity=highest / scale,
    )


def _kernel_for(z: Tensor) -> tuple[Kernel, dict[str, int]]:
    """The tuned kernel; under the interpreter, the only way CPU tensors get here, the plain one."""
    configs = FLOAT32_CONFIGS if z.dtype == torch.float32 else HALF_CONFIGS
    return (scan_kernel, configs[0].kwargs) if z.is_cpu else (TUNED[configs], {})


def _log_sum(top: Tensor, total: Tensor, highest: Tensor) -> Tensor:
    """Join the parts' sums; a row without negatives has a total of 0, and -inf as its logarithm."""
    joined = (total * (top - highest).exp2()).sum(0)
    return (highest + joined.log2()) * math.log(2.0)


def _lowest_index(top: Tensor, index: Tensor, highest: Tensor) -> Tensor:
    """The lowest row among the parts that reach the maximum, -1 if none has a negative."""
    nobody = torch.iinfo(index.dtype).max
    candidate = torch.where((top == highest) & (index >= 0), index, nobody).amin(0).long()
    return torch.where(candidate == nobody, -1, candidate)
