"""How the Triton kernels are declared, tuned and spread over a GPU."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

FUSED = {"enable_fp_fusion": True}  # multiply-add in one rounding; said aloud, as its default moves
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
