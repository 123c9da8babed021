"""What the two matrix kernels share: factors, products, and the tiles that hold mates.

The matrix kernels multiply half precisions only, with float32 sums. float32 descriptors enter as
two float16 matrices, their high and low parts: 22 bits of each number, and three products of the
parts are as exact as three tf32 products at twice their rate.

Nearly all tiles hold negatives only. ``mark_tiles`` finds the others from the sorted sources, and
only these compare sources.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.launch import ROW_OPTIONS, interpreted, jit, row_block, start

FACTOR_SCALE = 4096.0  # keeps the low part of a typical number, 1e-5, a normal float16


class Factors(NamedTuple):
    """Descriptors as the matrix kernels multiply them.

    Attributes:
        high: (n, d) float16 or bfloat16.
        low: (n, d) what is left of float32; ``high`` itself, unread, if nothing is.
        scale: ``high + low`` is this times the descriptors.
    """

    high: Tensor
    low: Tensor
    scale: float

    @classmethod
    def of(cls, z: Tensor, dtype: torch.dtype) -> "Factors":
        """Descriptors for products in ``dtype``."""
        if dtype != torch.float32:
            half = z.to(dtype).contiguous()
            return cls(half, half, 1.0)
        scaled = z.float() * FACTOR_SCALE
        high = scaled.half()
        return cls(high, (scaled - high).half(), FACTOR_SCALE)

    @property
    def parts(self) -> int:
        """1, or 2 for float32."""
        return 1 if self.low is self.high else 2

    @property
    def wide(self) -> bool:
        """Whether to multiply in float32: the interpreter takes bfloat16 bits for integers."""
        return interpreted() and self.high.dtype == torch.bfloat16


class Runs(NamedTuple):
    """The global batch in the order of its source ids, and where each row's mates lie in it.

    Attributes:
        entry: (2N,) int32, ``2 row + slot`` for each source slot of the global batch, by id.
        begin: (m, 2) int32, the first entry that shares this source; m rows, the local ones or all.
        end: (m, 2) int32, one past the last.
        offset: Local row i is row ``offset + i`` of ``begin`` and ``end``.
        rank: (n, 2) int32, equal for equal sources of the local rows and the global batch.
        all_rank: (N, 2) int32.
    """

    entry: Tensor
    begin: Tensor
    end: Tensor
    offset: int
    rank: Tensor
    all_rank: Tensor

    @classmethod
    def of_slice(cls, saved: Tensor, offset: int, rows: int) -> "Runs":
        """Runs of local rows that are a slice of the global batch, from ``sorted_sources``."""
        entry, begin, end = saved[0], saved[1].view(-1, 2), saved[2].view(-1, 2)
        # The first entry of a run is a rank: equal ids have the same, others another.
        return cls(entry, begin, end, offset, begin[offset : offset + rows], begin)

    @classmethod
    def of_bank(cls, sources: Tensor, all_sources: Tensor) -> "Runs":
        """Runs of rows that need not be in the global batch, nor their sources."""
        ids, entry = all_sources.flatten().sort(stable=True)
        begin = torch.searchsorted(ids, sources.contiguous()).int()
        end = torch.searchsorted(ids, sources.contiguous(), right=True).int()
        all_rank = torch.searchsorted(ids, all_sources.contiguous()).int()
        absent = torch.where(begin < end, begin, -1)  # no rank of the global batch
        return cls(entry.int(), begin, end, 0, absent, all_rank)

    def of_local_mates(self) -> tuple[Tensor, Tensor]:
        """(N, 2) bounds of the local rows within each run: entries of a run ascend by row."""
        first, last = (2 * row for row in (self.offset, self.offset + len(self.rank)))
        width = len(self.entry)
        rank = self.all_rank.long()
        keys = rank.flatten()[self.entry.long()] * width + self.entry
        begin, end = (torch.searchsorted(keys, rank * width + x) for x in (first, last))
        return begin.int(), end.int()


def sorted_sources(all_sources: Tensor) -> Tensor:
    """(3, 2N) int32: entries by source id, and for each slot the bounds of its run."""
    flat = all_sources.flatten()
    ids, entry = flat.sort(stable=True)
    bounds = (torch.searchsorted(ids, flat, right=right) for right in (False, True))
    return torch.stack([entry, *bounds]).int()


@jit
def load_tile(
    z_ptr: tl.tensor,
    i: tl.tensor,
    count: tl.tensor,
    k: tl.tensor,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Columns k of rows i of z, in blocks of BLOCK_K; 0 beyond the last row or column."""
    at = z_ptr + i.to(tl.int64)[:, None] * D + k[None, :]
    if D % BLOCK_K == 0:
        return tl.load(at, mask=(i < count)[:, None], other=0.0)
    return tl.load(at, mask=(i < count)[:, None] & (k < D)[None, :], other=0.0)


@jit
def add_product(a: tl.tensor, b: tl.tensor, to: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """``to + a b`` on tensor cores; WIDE turns half precisions into float32 before."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), to, input_precision="ieee")
    return tl.dot(a, b, to)


@jit
def without_mates(
    t: tl.tensor,
    a_rank_ptr: tl.tensor,
    i: tl.tensor,
    a_count: tl.tensor,
    b_rank_ptr: tl.tensor,
    j: tl.tensor,
    b_end: tl.tensor,
) -> tl.tensor:
    """The tile with -inf where rows i and j share a source, and beyond the last column."""
    a0 = tl.load(a_rank_ptr + 2 * i, mask=i < a_count, other=-1)[:, None]
    a1 = tl.load(a_rank_ptr + 2 * i + 1, mask=i < a_count, other=-1)[:, None]
    b0 = tl.load(b_rank_ptr + 2 * j, mask=j < b_end, other=-2)[None, :]
    b1 = tl.load(b_rank_ptr + 2 * j + 1, mask=j < b_end, other=-2)[None, :]
    shared = (a0 == b0) | (a0 == b1) | (a1 == b0) | (a1 == b1)
    return tl.where(shared | (b0 == -2), float("-inf"), t)


@jit
def mark_kernel(
    entry_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    rows: tl.tensor,
    offset: tl.tensor,
    stride: tl.tensor,
    TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Flag the tile of each local row i and mate j of it; of j and i if TURNED."""
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = i < rows
    for slot in tl.static_range(2):
        begin = tl.load(begin_ptr + 2 * (i + offset) + slot, mask=inside, other=0)
        end = tl.load(end_ptr + 2 * (i + offset) + slot, mask=inside, other=0)
        for step in range(0, tl.max(end - begin, axis=0)):
            valid = begin + step < end
            j = tl.load(entry_ptr + begin + step, mask=valid, other=0) // 2
            if TURNED:
                tile = (j // BLOCK_M).to(tl.int64) * stride + i // BLOCK_N
            else:
                tile = (i // BLOCK_M).to(tl.int64) * stride + j // BLOCK_N
            tl.store(flag_ptr + tile, tl.full((BLOCK_R,), 1, tl.int8), mask=valid)


def mark_tiles(
    runs: Runs, rows: int, columns: int, block_m: int, block_n: int, *, turned: bool = False
) -> Tensor:
    """(row blocks, column blocks) int8: 1 for tiles that hold mates.

    Args:
        runs: Who shares a source with whom.
        rows: Rows of the tiles: the local ones, or the global batch if ``turned``.
        columns: Their columns: the other side.
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        turned: Whether the local rows are the columns.
    """
    flags = runs.entry.new_zeros(
        triton.cdiv(rows, block_m), triton.cdiv(columns, block_n), dtype=torch.int8
    )
    local = columns if turned else rows
    block = row_block(runs.entry[:, None])["BLOCK_R"]
    start(
        mark_kernel,
        (triton.cdiv(local, block),),
        runs.entry,
        *(runs.begin, runs.end, flags, local, runs.offset, flags.shape[1]),
        TURNED=turned,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=block,
        **ROW_OPTIONS,
    )
    return flags
