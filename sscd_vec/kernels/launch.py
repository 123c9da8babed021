"""How the Triton kernels are declared, tuned and spread over a GPU, and what they share.

The pair kernels hold whole descriptors in registers and walk from row to row along sorted source
ids.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSED = {"enable_fp_fusion": True}  # multiply-add in one rounding; said aloud, as its default moves
ROW_OPTIONS = {"num_warps": 2, **FUSED}  # 8 of 512 numbers for each thread
ROWS = 1  # of a program on a GPU: all its threads walk one run, and nothing diverges
INTERPRETED_ROWS = 64  # the interpreter pays per operation, whatever its size
Kernel = Any  # Triton ships no types
WAVES = 2  # programs per multiprocessor below which the columns of a row block are split


def jit(function: Callable[..., Any]) -> Kernel:
    """``triton.jit`` with a type: the kernel, to be launched as ``kernel[grid](...)``."""
    return triton.jit(function)


def tuned(kernel: Kernel, configs: Sequence[triton.Config], key: Sequence[str]) -> Kernel:
    """The kernel, its tile chosen by timing ``configs`` once per key and dtype, kept on disk."""
    # Where Triton cannot keep it, the choice lasts as long as the process.
    known = inspect.signature(triton.autotune).parameters
    kept = {"cache_results": True} if "cache_results" in known else {}
    return triton.autotune(list(configs), list(key), **kept)(kernel)


def input_precision(z: Tensor, *, hip: bool = torch.version.hip is not None) -> str:
    """How a kernel multiplies tiles of ``z``: float32 as three tf32 products, or exactly if it can.

    1/tau multiplies a similarity's error by 20, which rules out plain tf32. AMD's matrix cores
    multiply float32 as it is. Triton's interpreter (CPU tensors) multiplies the bits of bfloat16 as
    if they were integers, so these are widened for it.
    """
    if z.dtype == torch.bfloat16 and z.device.type == "cpu":
        return "wide"
    return "tf32x3" if z.dtype == torch.float32 and not hip else "ieee"


def column_splits(rows: int, columns: int, block: int, device: torch.device) -> int:
    """Parts into which the columns are cut so that few rows still fill the GPU."""
    if device.type == "cpu":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-WAVES * processors // -(-rows // block))
    return max(1, min(wanted, columns // (4 * block)))


def compact(sources: Tensor, all_sources: Tensor) -> tuple[Tensor, Tensor]:
    """Source ids as int32 ranks: comparing tiles of them costs a quarter of int64 pairs."""
    ids = all_sources.flatten().sort().values
    rank, all_rank = (torch.searchsorted(ids, s.contiguous()) for s in (sources, all_sources))
    return rank.int(), all_rank.int()


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
