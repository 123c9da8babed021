"""How the Triton kernels are declared and launched, the GPUs they know, and what they share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Kernel = Any  # Triton ships no types
WAVES = 2  # programs per multiprocessor below which the columns of a row block are split
ROW_OPTIONS = {"num_warps": 2}  # 8 of 512 numbers for each thread
ROWS = 1  # of a program on a GPU: all its threads walk one run, and nothing diverges
INTERPRETED_ROWS = 64  # the interpreter pays per operation, whatever its size


@dataclass(frozen=True)
class Gpu:
    """What decides about tiles.

    Attributes:
        generation: 80 for mma (any NVIDIA GPU before or beside the next two), 90 for warp-group
            mma, 100 for tcgen05, 0 for AMD.
        shared: Bytes of shared memory that one program may have.
        processors: Multiprocessors.
    """

    generation: int
    shared: int
    processors: int


def jit(function: Callable[..., Any]) -> Kernel:
    """``triton.jit`` with a type: the kernel, launched by ``start``."""
    return triton.jit(function)


def start(
    kernel: Kernel, grid: tuple[int, ...], first: Tensor, /, *others: object, **settings: object
) -> None:
    """Launch ``kernel`` on the GPU of its first argument, whichever GPU is current."""
    with torch.cuda.device(first.device.index if first.is_cuda else -1):
        # Multiply-add in one rounding is said aloud: Triton's default for it has moved.
        kernel[grid](first, *others, **settings, enable_fp_fusion=True)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind ``device``; CPU tensors come from the interpreter, which takes any tile."""
    if device.type == "cpu":
        return Gpu(80, 163 << 10, 1)
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu(0, 64 << 10, found.multi_processor_count)
    generation = {9: 90, 10: 100}.get(found.major, 80)
    return Gpu(generation, found.shared_memory_per_block_optin, found.multi_processor_count)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, as they were declared."""
    return not isinstance(load_rows, triton.JITFunction)


def column_splits(rows: int, columns: int, block: int, gpu: Gpu) -> int:
    """Parts into which the columns are cut so that few rows still fill the GPU."""
    wanted = -(-WAVES * gpu.processors // -(-rows // block))
    return max(1, min(wanted, columns // (4 * block)))


def row_block(z: Tensor) -> dict[str, int]:
    """Rows and columns of a block of whole descriptors that a program holds."""
    rows = INTERPRETED_ROWS if interpreted() else ROWS
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
