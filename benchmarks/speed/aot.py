"""The kernels as they are launched, compiled ahead of time for GPUs that are not here.

``record`` runs the library's own code with Triton's compiler and no GPU: every launch is compiled
with the arguments, alignments and settings it really has, and goes no further. From the result we
read what decides whether a kernel can be fast (``speed.sass``): tensor-core instructions, issue
slots, registers, spills, shared memory, bytes.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from speed import sass
from sscd_vec.kernels import gem_pool, objective, push, scan, sscd_loss
from sscd_vec.kernels.launch import Gpu

DIMENSION = 512  # of the descriptors
ROWS = 4096  # of the global batch
LOCAL_ROWS = 1024  # of a rank
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Target:
    """A GPU: how Triton names it, and what one of its multiprocessors holds.

    Attributes:
        name: Its usual name.
        target: Triton's name for it.
        gpu: What the library chooses tiles by.
        shared_total: Shared memory of a multiprocessor, bytes.
        registers: 32-bit registers of a multiprocessor.
        threads: Threads a multiprocessor keeps.
        rate: Half-precision multiply-adds of a multiprocessor's tensor cores per clock.
    """

    name: str
    target: GPUTarget
    gpu: Gpu
    shared_total: int
    registers: int
    threads: int
    rate: int


TARGETS = (
    Target(
        *("sm_80", GPUTarget("cuda", 80, 32), Gpu(80, 163 << 10, 108)),
        *(164 << 10, 65536, 2048, 1024),
    ),
    Target(
        *("sm_90", GPUTarget("cuda", 90, 32), Gpu(90, 227 << 10, 132)),
        *(228 << 10, 65536, 2048, 2048),
    ),
    Target(
        *("sm_100", GPUTarget("cuda", 100, 32), Gpu(100, 227 << 10, 148)),
        *(228 << 10, 65536, 2048, 4096),
    ),
    Target(
        *("gfx942", GPUTarget("hip", "gfx942", 64), Gpu(0, 64 << 10, 304)),
        *(64 << 10, 4 * 512 * 64, 2048, 1024),
    ),
)


@dataclass(frozen=True)
class Launch:
    """A kernel that was compiled instead of started.

    Attributes:
        kernel: Its name.
        settings: Its constants and options.
        compiled: What Triton made of it.
    """

    kernel: str
    settings: dict[str, Any]
    compiled: Any


@dataclass(frozen=True)
class Figures:
    """What the compiler made of a launch for a target.

    Attributes:
        variant: Kernel, dtype and settings.
        target: The target's name.
        instruction: Its matrix instruction (mma, wgmma, tcgen05, mfma), or "".
        shapes: Rows and columns of its matrix instructions (NVIDIA), as "64x32, 64x256".
        registers: Per thread (AMD: vector and accumulation registers).
        spilled: Bytes of registers per thread kept in local memory.
        shared: Bytes of shared memory of a program.
        shared_limit: The most the target gives one.
        programs: Programs a multiprocessor can hold.
        occupancy: Share of a multiprocessor's threads they are.
        wide_load_bytes: Bytes of a program's loads of at least 8 bytes a lane (NVIDIA).
        product_ratio: Multiply-adds of its tensor cores over those of the definition (times three
            for float32 in two parts).
        issue_clocks: Clocks to issue a tile's instructions, per 1000 multiply-adds of the
            definition; tiles without mates.
        tensor_clocks: Clocks of the tensor cores, in the same unit.
        shared_clocks: Clocks of shared memory without conflicts, in the same unit.
        bytes_per_flop: Bytes a tile loads, over its floating-point operations.
    """

    variant: str
    target: str
    instruction: str
    shapes: str
    registers: int
    spilled: int
    shared: int
    shared_limit: int
    programs: int
    occupancy: float
    wide_load_bytes: int | None = None
    product_ratio: float | None = None
    issue_clocks: float | None = None
    tensor_clocks: float | None = None
    shared_clocks: float | None = None
    bytes_per_flop: float | None = None


class _StandIn:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_device(self) -> str:
        return self._target.name

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target.target


@contextlib.contextmanager
def record(target: Target, only: Collection[str] = ()) -> Iterator[list[Launch]]:
    """Send CPU tensors to the Triton kernels, compiled for ``target``, and collect the launches.

    Args:
        target: The GPU.
        only: Kernels to compile, all if empty; a launch of any other does nothing.
    """
    found: list[Launch] = []
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *arguments: object, **settings: Any) -> object:  # noqa: ANN401
        name = kernel.fn.__name__.removesuffix("_kernel")
        if only and name not in only:
            return None
        made = run(kernel, *arguments, **{**settings, "warmup": True})
        found.append(Launch(name, settings, made))
        return made

    driver.set_active(_StandIn(target))
    with (
        patch.object(triton.JITFunction, "run", compile_only),
        patch.object(objective, "runs_on_triton", lambda x: True),
        patch.object(scan, "gpu_of", lambda device: target.gpu),
        patch.object(push, "gpu_of", lambda device: target.gpu),
    ):
        yield found


def pool(dtype: torch.dtype, layout: torch.memory_format, size: int, p: float) -> None:
    """Pool a map of ``size`` x ``size`` pixels, forward and backward."""
    x = torch.rand(4, 256, size, size, dtype=dtype).contiguous(memory_format=layout)
    torch.autograd.backward(gem_pool(x.requires_grad_(), p).sum())


def lose(dtype: torch.dtype, products: torch.dtype, rows: int) -> None:
    """Forward and backward of the loss of a whole batch, or of ``rows`` rows of it."""
    everyone = F.normalize(torch.randn(ROWS, DIMENSION)).to(dtype)
    ids = torch.arange(ROWS) % (ROWS // 2)
    sources = torch.stack([ids, ids], dim=1)
    if rows == ROWS:
        loss = sscd_loss(everyone.requires_grad_(), sources, products=products)
    else:
        local = slice(rows, 2 * rows)
        loss = sscd_loss(
            *(everyone[local].clone().requires_grad_(), sources[local]),
            all_z=everyone.clone().requires_grad_(),
            all_sources=sources,
            row_offset=rows,
            products=products,
        )
    torch.autograd.backward(loss.total)


def workloads() -> dict[str, Callable[[], None]]:
    """What the library does with its kernels, by name."""
    found: dict[str, Callable[[], None]] = {}
    for name in ("fp32", "bf16"):
        for p in (3.0, 1.0, 2.5):
            for layout, memory, size in (
                ("NCHW 7x7", torch.contiguous_format, 7),
                ("NCHW 9x9", torch.contiguous_format, 9),
                ("NCHW 8x8", torch.contiguous_format, 8),
                ("NHWC 9x9", torch.channels_last, 9),
            ):
                found[f"{name} {layout} p={p:g}"] = partial(pool, DTYPES[name], memory, size, p)
    slices = {"whole": ROWS, "slice": LOCAL_ROWS, "few": scan.FEW_ROWS}
    for name, products in (("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp16")):
        for part, rows in slices.items():
            loss = partial(lose, DTYPES[name], DTYPES[products], rows)
            found[f"{name} rows, {products} products, {part}"] = loss
    return found


def compile_all(
    names: Iterable[str] | None = None, only: tuple[str, ...] = (), workers: int = 2
) -> list[Figures]:
    """The figures of every launch of these workloads (all by default) for every target.

    Args:
        names: Workloads.
        only: Kernels to compile, all if empty.
        workers: Processes.
    """
    chosen = list(workloads() if names is None else names)
    jobs = [(name, target.name, only) for target in TARGETS for name in chosen]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        found = {(x.variant, x.target): x for part in pool.map(_compile, jobs) for x in part}
    return list(found.values())


def figures(variant: str, target: Target, launch: Launch) -> Figures:
    """Read a compiled launch."""
    asm, metadata = launch.compiled.asm, launch.compiled.metadata
    warps, shared = int(metadata.num_warps), int(metadata.shared)
    if target.target.backend == "hip":
        instruction, registers, spilled = _read_amd(asm["amdgcn"])
        more: dict[str, Any] = {"shapes": ""}
    else:
        registers, spilled = sass.usage(asm["cubin"])
        instruction = _instruction(asm["ptx"])
        more = _cost(target, launch, sass.listing(asm["cubin"]), warps)
    programs = _programs(target, warps * target.target.warp_size, registers, shared)
    return Figures(
        variant=variant,
        target=target.name,
        instruction=instruction,
        registers=registers,
        spilled=spilled,
        shared=shared,
        shared_limit=target.gpu.shared,
        programs=programs,
        occupancy=programs * warps * target.target.warp_size / target.threads,
        **more,
    )


def _compile(job: tuple[str, str, tuple[str, ...]]) -> list[Figures]:
    name, target = job[0], next(t for t in TARGETS if t.name == job[1])
    with record(target, job[2]) as found:
        workloads()[name]()
    by_variant = {_variant(name, launch): launch for launch in found}
    return [figures(variant, target, launch) for variant, launch in by_variant.items()]


def _variant(workload: str, launch: Launch) -> str:
    """A name that launches of the same binary share: rows and products by what a kernel reads."""
    reads = workload
    if "rows" in workload:
        reads = workload.split()[2 if launch.kernel in ("scan", "push") else 0]
    words = [launch.kernel, "" if launch.kernel == "mark" else reads]
    words.append(str(launch.settings.get("ANCHORS", "")))
    if launch.kernel in ("scan", "mark"):
        words.append(f"{launch.settings['BLOCK_M']}x{launch.settings['BLOCK_N']}")
    words.append("turned" if launch.settings.get("TURNED") else "")
    return " ".join(word for word in words if word)


def _cost(target: Target, launch: Launch, text: str, warps: int) -> dict[str, Any]:
    wide = sum(width for width in sass.load_widths(text) if width >= 8) * 32 * warps
    if launch.kernel not in ("scan", "push"):
        return {"shapes": "", "wide_load_bytes": wide}
    settings = launch.settings
    rounds = -(-settings["D"] // settings["BLOCK_K"]) if launch.kernel == "scan" else 1
    cost = sass.tile_cost(text, warps, rounds)
    pairs = settings["BLOCK_M"] * settings["BLOCK_N"]
    meant = pairs * settings["D"] * (1 if launch.kernel == "scan" else 2)
    products = 1 if settings["PARTS"] == 1 else 3
    # tcgen05 with 64 rows uses half of the tensor cores.
    idle = 2 if target.name == "sm_100" and cost.shapes[0][0] == 64 else 1
    return {
        "shapes": ", ".join(f"{m}x{n}" for m, n in cost.shapes),
        "wide_load_bytes": wide,
        "product_ratio": cost.multiply_adds / (products * meant),
        "issue_clocks": 1000 * cost.issue_clocks / meant,
        "tensor_clocks": 1000 * idle * cost.multiply_adds / target.rate / meant,
        "shared_clocks": 1000 * cost.shared_clocks / meant,
        "bytes_per_flop": cost.bytes / (2 * meant),
    }


def _instruction(ptx: str) -> str:
    found = re.search(r"(tcgen05)\.mma|(wgmma)\.mma_async|(mma)\.sync", ptx)
    return next(filter(None, found.groups())) if found else ""


def _read_amd(text: str) -> tuple[str, int, int]:
    registers = int(_find(r"\.vgpr_count:\s+(\d+)", text))
    spilled = int(_find(r"\.private_segment_fixed_size:\s+(\d+)", text))
    return ("mfma" if "v_mfma" in text else "", registers, spilled)


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's report has no {pattern!r}: {text[:500]}")
    return found[1]


def _programs(target: Target, threads: int, registers: int, shared: int) -> int:
    """Programs a multiprocessor holds, by threads, registers (in units of 8), shared memory."""
    by_registers = target.registers // (threads * max(8, -(-registers // 8) * 8))
    by_shared = target.shared_total // max(1, shared)
    return min(target.threads // threads, by_registers, by_shared)
