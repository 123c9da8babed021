"""One pass over similarity tiles for both losses: each row's log-sum-exp and its nearest negative.

Per row of tiles: ``top = max_k s_ik``, ``index = argmax_k s_ik`` and ``total = sum_k e^{s_ik -
top}`` over the negatives k, updated tile by tile. The tile never leaves the multiprocessor. Least
bytes: both matrices once and three numbers per row; every row block reads all columns again, from
L2 while they fit. Products: 2 n N d, and three times as many for float32 in two parts.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.batch import Scan
from sscd_vec.kernels.launch import Gpu, column_splits, gpu_of, jit, start
from sscd_vec.kernels.tiles import Factors, Runs, add_product, load_tile, mark_tiles, without_mates

FEW_ROWS = 64  # at most as many get a tile of as many rows, on half the warps


@jit
def scan_kernel(
    a_ptr: tl.tensor,
    a_low_ptr: tl.tensor,
    b_ptr: tl.tensor,
    b_low_ptr: tl.tensor,
    a_rank_ptr: tl.tensor,
    b_rank_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    top_ptr: tl.tensor,
    total_ptr: tl.tensor,
    index_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    columns_per_split: tl.tensor,
    flag_stride: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    LSE: tl.constexpr,
    NEAREST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """``top_i = max_k t_ik``, its lowest k, ``sum_k 2^(scale (t_ik - top_i))``; ``t = a.b``."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    index = tl.full((BLOCK_M,), -1, tl.int32)
    end = tl.minimum((split + 1) * columns_per_split, columns)
    # Flattened, both loops are one pipeline: the next tile is loaded while this one is summed up.
    for first in tl.range(split * columns_per_split, end, BLOCK_N, num_stages=STAGES, flatten=True):
        j = first + tl.arange(0, BLOCK_N)
        t = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start_k in range(0, D, BLOCK_K):
            a = load_tile(a_ptr, i, rows, start_k + k, D, BLOCK_K)
            b = load_tile(b_ptr, j, end, start_k + k, D, BLOCK_K)
            if PARTS == 2:
                a_low = load_tile(a_low_ptr, i, rows, start_k + k, D, BLOCK_K)
                b_low = load_tile(b_low_ptr, j, end, start_k + k, D, BLOCK_K)
                t = add_product(a, tl.trans(b_low), t, WIDE)
                t = add_product(a_low, tl.trans(b), t, WIDE)
            t = add_product(a, tl.trans(b), t, WIDE)
        flagged = tl.load(flag_ptr + tl.program_id(0) * flag_stride + first // BLOCK_N) != 0
        if flagged | (first + BLOCK_N > end):
            t = without_mates(t, a_rank_ptr, i, rows, b_rank_ptr, j, end)
        best = tl.max(t, axis=1)
        higher = tl.maximum(top, best)
        if NEAREST:
            lowest = tl.min(tl.where(t == best[:, None], j[None, :], columns), axis=1)
            index = tl.where(best > top, lowest, index)
        if LSE:
            part = tl.sum(tl.exp2(t * scale - (higher * scale)[:, None]), axis=1)
            total = total * tl.exp2((top - higher) * scale) + part
        top = higher
    out = split.to(tl.int64) * rows + i
    inside = i < rows
    tl.store(top_ptr + out, top, mask=inside)
    tl.store(total_ptr + out, total, mask=inside)
    tl.store(index_ptr + out, index, mask=inside)


def scan(
    a: Factors,
    b: Factors,
    runs: Runs,
    tau: float,
    *,
    lse: bool,
    nearest: bool,
    splits: int | None = None,
) -> Scan:
    """Log-sum-exp of the negatives and the most similar negative of each local row.

    Args:
        a: The local rows.
        b: The global batch.
        runs: Who shares a source with whom.
        tau: Temperature of the log-sum-exp.
        lse: Whether to return the former.
        nearest: Whether to return the latter.
        splits: Parts into which the columns are cut; as many as fill the GPU by default.
    """
    (n, d), columns = a.high.shape, len(b.high)
    gpu = gpu_of(a.high.device)
    tile = scan_tile(gpu, a.parts, n)
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    splits = splits or column_splits(n, columns, block_m, gpu)
    per_split = triton.cdiv(triton.cdiv(columns, splits), block_n) * block_n
    splits = triton.cdiv(columns, per_split)
    flags = mark_tiles(runs, n, columns, block_m, block_n)
    top = a.high.new_empty(splits, n, dtype=torch.float32)
    total = torch.empty_like(top)
    index = torch.empty_like(top, dtype=torch.int32)
    # Products of two scaled factors; base 2, the hardware's own exponential.
    unit = 1.0 / (a.scale * b.scale)
    start(
        scan_kernel,
        (triton.cdiv(n, block_m), splits),
        a.high,
        *(a.low, b.high, b.low, runs.rank, runs.all_rank, flags, top, total, index),
        *(n, columns, per_split, flags.shape[1], unit / (tau * math.log(2.0))),
        D=d,
        PARTS=a.parts,
        WIDE=a.wide,
        LSE=lse,
        NEAREST=nearest,
        **tile,
    )
    highest = top.amax(0)
    return Scan(
        lse=_log_sum(top, total, highest, unit / tau) if lse else None,
        index=_lowest_index(top, index, highest) if nearest else None,
        similarity=highest * unit,
    )


def scan_tile(gpu: Gpu, parts: int, rows: int) -> dict[str, int]:
    """Tile, stages and warps of ``scan_kernel``, by the GPU and the rows at hand."""
    if rows <= FEW_ROWS:
        sizes = (FEW_ROWS, 64, 32 if gpu.shared < 96 << 10 else 64, 2, 4)
    elif gpu.generation >= 90:
        sizes = (128, 256, 64, 3, 8) if parts == 1 else (128, 128, 64, 3, 8)
    elif gpu.generation == 80:
        sizes = (128, 128, 32, 3, 8)
    else:
        sizes = (128, 64, 32, 2, 8)
    return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "num_warps"), sizes, strict=True))


def _log_sum(top: Tensor, total: Tensor, highest: Tensor, scale: float) -> Tensor:
    """Join the parts' sums; a row without negatives has a total of 0, and -inf as its logarithm."""
    joined = (total * ((top - highest) * scale).exp()).sum(0)
    return highest * scale + joined.log()


def _lowest_index(top: Tensor, index: Tensor, highest: Tensor) -> Tensor:
    """The lowest row among the parts that reach the maximum, -1 if none has a negative."""
    nobody = torch.iinfo(index.dtype).max
    candidate = torch.where((top == highest) & (index >= 0), index, nobody).amin(0).long()
    return torch.where(candidate == nobody, -1, candidate)
