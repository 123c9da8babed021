"""Whole descriptors in registers, and the order in which the pair kernels walk from row to row."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.launch import FUSED, jit

OPTIONS = {"num_warps": 2, **FUSED}  # 8 of 512 numbers for each thread
ROWS = 1  # of a program on a GPU: all its threads walk one run, and nothing diverges
INTERPRETED_ROWS = 64  # the interpreter pays per operation, whatever its size


class Runs(NamedTuple):
    """For rows a, where among sorted entries the rows b sharing a's sources lie.

    Attributes:
        entry: (2m,) int32, ``2 b + slot`` for each source slot of the m rows b, by source id.
        begin: (n, 2) int32, for each source slot of a the first entry of its run.
        end: (n, 2) int32, one past the last.
    """

    entry: Tensor
    begin: Tensor
    end: Tensor


def source_runs(sources: Tensor, other_sources: Tensor) -> Runs:
    """Sort the entries of ``other_sources`` and find the runs of each pair of ``sources``."""
    ids, entry = other_sources.flatten().sort(stable=True)
    begin = torch.searchsorted(ids, sources)
    end = torch.searchsorted(ids, sources, right=True)
    return Runs(entry.int(), begin.int(), end.int())


def row_block(z: Tensor) -> dict[str, int]:
    """Rows and columns of a block of whole descriptors that a program holds."""
    rows = INTERPRETED_ROWS if z.is_cpu else ROWS
    return {"BLOCK_R": rows, "BLOCK_D": triton.next_power_of_2(z.shape[1])}


@jit
def load_rows(
    z_ptr: tl.tensor, i: tl.tensor, chosen: tl.tensor, d: tl.tensor, D: tl.constexpr
) -> tl.tensor:
    """Rows i of z in float32; 0 for those not chosen."""
    at = z_ptr + i.to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(at, mask=chosen[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@jit
def store_rows(
    z_ptr: tl.tensor,
    i: tl.tensor,
    chosen: tl.tensor,
    d: tl.tensor,
    D: tl.constexpr,
    values: tl.tensor,
) -> None:
    """Write the chosen rows i of z."""
    at = z_ptr + i.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, values, mask=chosen[:, None] & (d < D)[None, :])
