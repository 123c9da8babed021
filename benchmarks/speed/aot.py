"""Every kernel variant, compiled ahead of time for GPUs that are not here, and what came out.

``triton.compile`` needs no GPU. From the result we read what decides whether a kernel can be fast:
do its products run on tensor cores, do registers spill to memory, does its shared memory fit, and
how many of its programs a multiprocessor can hold.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sscd_vec.kernels import gem, neighbours, pull, push, scan
from sscd_vec.kernels.launch import ROW_OPTIONS, ROWS

DTYPES = ("fp32", "fp16", "bf16")
DIMENSION = 512  # of the descriptors the loss kernels are compiled for
POINTERS = {
    "index_ptr": "*i64",
    "order_ptr": "*i64",
    "begin_ptr": "*i64",
    "end_ptr": "*i64",
}


@dataclass(frozen=True)
class Target:
    """A GPU: how Triton names it, and what one of its multiprocessors holds.

    Attributes:
        name: Its usual name.
        gpu: Triton's target.
        shared_limit: Most shared memory of one program, bytes.
        shared_total: Shared memory of a multiprocessor, bytes.
        registers: 32-bit registers of a multiprocessor.
        threads: Threads a multiprocessor keeps.
    """

    name: str
    gpu: GPUTarget
    shared_limit: int
    shared_total: int
    registers: int
    threads: int


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 163 << 10, 164 << 10, 65536, 2048),
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 << 10, 228 << 10, 65536, 2048),
    Target("sm_100", GPUTarget("cuda", 100, 32), 227 << 10, 228 << 10, 65536, 2048),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 << 10, 64 << 10, 4 * 512 * 64, 2048),
)


@dataclass(frozen=True)
class Variant:
    """One way a kernel is launched.

    Attributes:
        name: Kernel, dtype and settings.
        kernel: The Triton function.
        dtype: Of the feature map or the descriptors, as Triton spells it.
        constants: Values of its constexpr arguments.
        products: Whether it multiplies matrices.
        warps: Warps of a program.
        stages: Depth of the load pipeline.
        narrow: Pointer arguments of that dtype; the other floating ones are float32.
    """

    name: str
    kernel: Any
    dtype: str
    constants: dict[str, Any]
    products: bool = False
    warps: int = 4
    stages: int = 3
    narrow: tuple[str, ...] = ()
    pointers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant for a target.

    Attributes:
        variant: The variant's name.
        target: The target's name.
        products: Whether it multiplies matrices.
        tensor_cores: The matrix instruction found (mma, wgmma, tcgen05.mma, mfma), or "".
        registers: Per thread (AMD: vector and accumulation registers).
        spilled: Bytes of registers per thread kept in local memory.
        shared: Bytes of shared memory of a program.
        shared_limit: The most the target gives one.
        programs: Programs a multiprocessor can hold.
        occupancy: Share of a multiprocessor's threads they are.
        seconds: Processor time of the compiler and its assembler (next to nothing if Triton's cache
            had the kernel).
    """

    variant: str
    target: str
    products: bool
    tensor_cores: str
    registers: int
    spilled: int
    shared: int
    shared_limit: int
    programs: int
    occupancy: float
    seconds: float


def variants(dtypes: tuple[str, ...] = DTYPES) -> Iterator[Variant]:
    """Every kernel with every setting it is launched with, for the given dtypes."""
    for dtype in dtypes:
        yield from _gem_variants(dtype)
        yield from _loss_variants(dtype)


def compile_variant(variant: Variant, target: Target) -> Compiled:
    """Compile a variant for a target and read the result."""
    constants = dict(variant.constants)
    if "PRECISION" in constants:
        exact = target.gpu.backend == "hip" or variant.dtype != "fp32"
        constants["PRECISION"] = "ieee" if exact else "tf32x3"
    signature = {name: _argument(name, variant, constants) for name in variant.kernel.arg_names}
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(variant.kernel.arg_names)
        if name.endswith("_ptr") or name in ("channels", "stride_n")
    }
    source = ASTSource(variant.kernel, signature, constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    start = sum(os.times()[:4])
    compiled = triton.compile(source, target=target.gpu, options=options)
    seconds = sum(os.times()[:4]) - start
    read = _read_amd if target.gpu.backend == "hip" else _read_nvidia
    instruction, registers, spilled = read(compiled.asm)
    shared = int(compiled.metadata.shared)
    programs = _programs(target, variant.warps * target.gpu.warp_size, registers, shared)
    return Compiled(
        variant=variant.name,
        target=target.name,
        products=variant.products,
        tensor_cores=instruction,
        registers=registers,
        spilled=spilled,
        shared=shared,
        shared_limit=target.shared_limit,
        programs=programs,
        occupancy=programs * variant.warps * target.gpu.warp_size / target.threads,
        seconds=seconds,
    )


def compile_all(
    dtypes: tuple[str, ...] = DTYPES, targets: tuple[Target, ...] = TARGETS, workers: int = 2
) -> Iterator[Compiled]:
    """Compile every variant for every target, in ``workers`` processes."""
    jobs = [(variant, target) for target in targets for variant in variants(dtypes)]
    names = [(variant.name, target.name) for variant, target in jobs]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compile_named, names)


def _compile_named(names: tuple[str, str]) -> Compiled:
    variant = next(v for v in variants() if v.name == names[0])
    target = next(t for t in TARGETS if t.name == names[1])
    return compile_variant(variant, target)


def _gem_variants(dtype: str) -> Iterator[Variant]:
    # contiguous: pixels lie next to each other; channels_last: channels do
    layouts = {
        "contiguous": {"BLOCK_C": 8, "BLOCK_S": 128},
        "channels_last": {"BLOCK_C": 128, "BLOCK_S": 8},
    }
    for layout, blocks in layouts.items():
        unit = "stride_c" if layout == "channels_last" else "stride_s"
        for power in (1, 3, 0):
            name = f"{dtype} {layout} p={power or 'any'}"
            constants = {"POWER": power, unit: 1, **blocks}
            yield Variant(
                f"gem_forward {name}",
                gem.gem_forward_kernel,
                dtype,
                {**constants, "KEEP": dtype != "fp32"},
                narrow=("x_ptr", "y_ptr"),
            )
            yield Variant(
                f"gem_backward {name}",
                gem.gem_backward_kernel,
                dtype,
                {**constants, f"dx_{unit}": 1},
                narrow=("x_ptr", "dy_ptr", "dx_ptr"),
            )


def _loss_variants(dtype: str) -> Iterator[Variant]:
    descriptors = ("z_ptr", "all_ptr", "a_ptr", "b_ptr")
    rows = {"D": DIMENSION, "BLOCK_R": ROWS, "BLOCK_D": DIMENSION}
    runs = {"begin_ptr": "*i32", "end_ptr": "*i32"}
    half = dtype != "fp32"
    for config in scan.HALF_CONFIGS if half else scan.FLOAT32_CONFIGS:
        yield Variant(
            f"scan {dtype} {_tile(config)}",
            scan.scan_kernel,
            dtype,
            {"D": DIMENSION, "PRECISION": "", **config.kwargs},
            products=True,
            warps=config.num_warps,
            stages=config.num_stages,
            narrow=descriptors,
            pointers={"index_ptr": "*i32"},
        )
    yield Variant(
        f"positives {dtype}",
        pull.positives_kernel,
        dtype,
        rows,
        warps=ROW_OPTIONS["num_warps"],
        narrow=descriptors,
        pointers=runs,
    )
    yield Variant(
        f"distance {dtype}",
        neighbours.distance_kernel,
        dtype,
        rows,
        warps=ROW_OPTIONS["num_warps"],
        narrow=descriptors,
    )
    for anchors in ("a", "b", "both"):
        chosen = {**rows, "ANCHORS": anchors}
        yield Variant(
            f"push {dtype} {anchors}",
            push.push_kernel,
            dtype,
            {
                "D": DIMENSION,
                "ANCHORS": anchors,
                "PRECISION": "",
                **(push.HALF_TILE if half else push.FLOAT32_TILE),
            },
            products=True,
            warps=push.WARPS,
            stages=push.STAGES,
            narrow=descriptors,
        )
        yield Variant(
            f"pull {dtype} {anchors}",
            pull.pull_kernel,
            dtype,
            chosen,
            warps=ROW_OPTIONS["num_warps"],
            narrow=descriptors,
            pointers=runs,
        )
        yield Variant(
            f"pair_gradient {dtype} {anchors}",
            neighbours.pair_gradient_kernel,
            dtype,
            chosen,
            warps=ROW_OPTIONS["num_warps"],
            narrow=descriptors,
        )


def _tile(config: triton.Config) -> str:
    return "x".join(str(size) for size in config.kwargs.values())


def _argument(name: str, variant: Variant, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in variant.pointers:
        return variant.pointers[name]
    if name in POINTERS:
        return POINTERS[name]
    if name.endswith("sources_ptr") or name == "entry_ptr":
        return "*i32"
    if name.endswith("_ptr"):
        return f"*{variant.dtype if name in variant.narrow else 'fp32'}"
    if name in ("p", "eps", "inverse_tau", "scale"):
        return "fp32"
    return "i64" if "stride_n" in name else "i32"


def _read_nvidia(asm: dict[str, Any]) -> tuple[str, int, int]:
    found = re.search(r"tcgen05\.mma|wgmma\.mma_async|mma\.sync", asm["ptx"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    registers, local = (int(_find(rf"{key}:(\d+)", usage)) for key in ("REG", "LOCAL"))
    stack = int(_find(r"STACK:(\d+)", usage))
    return (
        found[0].split(".mma_async")[0].split(".sync")[0] if found else "",
        registers,
        local + stack,
    )


def _read_amd(asm: dict[str, Any]) -> tuple[str, int, int]:
    text = asm["amdgcn"]
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
