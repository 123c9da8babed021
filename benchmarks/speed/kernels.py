"""The kernels: bytes moved, what the compiler made of them, and speed where speed can be measured.

    python benchmarks speed/kernels          # bytes; CPU loss against the N x N form; GPU, if any
    python benchmarks speed/kernels --aot    # registers, spills, shared memory, occupancy; no GPU
    python benchmarks speed/kernels --bytes  # the table of bytes alone

Figures go to ``results/kernels.json`` (``results/kernels_aot.json`` with ``--aot``).
"""

import argparse
import ctypes
import gc
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from results import RUN, write
from speed.measure import interleaved, peak_mib, resident_mib
from sscd_vec import kernels
from sscd_vec.kernels import reference

DIMENSION = 512
GEM_SHAPES = ((64, 2048, 9, 9), (256, 2048, 7, 7), (32, 512, 41, 41))
LOSS_ROWS = (8192, 32768)


@dataclass(frozen=True)
class Traffic:
    """Bytes a kernel moves between its programs and memory, counted from its loads and stores.

    Attributes:
        kernel: Which.
        shape: On what.
        moved: Bytes loaded and stored by all programs, whether or not a cache serves them.
        least: Bytes of all inputs and outputs, each once.
        operations: Floating-point operations of its matrix products.
    """

    kernel: str
    shape: str
    moved: int
    least: int
    operations: int = 0


def gem_traffic(shape: tuple[int, int, int, int], size: int) -> list[Traffic]:
    """GeM on a map of ``size`` bytes per element: every element once."""
    n, c, h, w = shape
    x, y = n * c * h * w * size, n * c * size
    wide = n * c * 4 if size < 4 else 0  # y in float32, kept for the backward of half precisions
    saved = n * c * 4
    text = f"{n}x{c}x{h}x{w}, {size} bytes"
    return [
        Traffic("gem_forward", text, x + y + wide, x + y),
        Traffic("gem_backward", text, 2 * x + y + saved, 2 * x + y + saved),
    ]


def loss_traffic(rows: int, size: int, dimension: int = DIMENSION) -> list[Traffic]:
    """The kernels of ``sscd_loss`` on a whole batch of two unmixed views of each image."""
    from sscd_vec.kernels import push, scan

    config = (scan.FLOAT32_CONFIGS if size == 4 else scan.HALF_CONFIGS)[0].kwargs
    tile = push.FLOAT32_TILE if size == 4 else push.HALF_TILE
    matrix, sources = rows * dimension * size, rows * 2 * 4
    scalars = rows * 4
    text = f"{rows}x{dimension}, {size} bytes"
    blocks = -(-rows // config["BLOCK_M"])
    column_blocks = -(-rows // config["BLOCK_N"])
    scan_moved = blocks * (matrix + sources) + column_blocks * (matrix + sources) + 3 * scalars
    parts = -(-dimension // tile["BLOCK_D"])  # each recomputes the tiles
    row_blocks, others = -(-rows // tile["BLOCK_M"]), -(-rows // tile["BLOCK_N"])
    gradient = rows * dimension * 4
    per_part = row_blocks * (matrix + sources + scalars) + others * (matrix + sources)
    push_moved = parts * (per_part + scalars) + row_blocks * matrix + gradient
    once = matrix + sources + scalars
    products = 2 * rows * rows * dimension
    # Two views: a row finds its one positive in a run of four entries (two rows, two slots) that it
    # walks for each of its slots, reading one entry and two or four source ids at each step.
    walk = rows * (2 * 8 + 4 * (4 + 2 * 4) + 4 * (4 + 4 * 4))
    return [
        Traffic("scan", text, scan_moved, matrix + sources + 3 * scalars, products),
        Traffic("positives", text, 2 * matrix + walk + 5 * scalars, once + 4 * scalars),
        Traffic("distance", text, 2 * matrix + 8 * rows + scalars, matrix + 8 * rows + scalars),
        Traffic("push", text, push_moved, once + gradient, (parts + 1) * products),
        Traffic("pull", text, 2 * matrix + walk + 11 * scalars + 2 * gradient, once + 2 * gradient),
        Traffic(
            "pair_gradient",
            text,
            3 * matrix + 2 * gradient + rows * (3 * 8 + 8 + 8),
            matrix + 2 * gradient + rows * (8 + 4),
        ),
    ]


def traffic() -> list[Traffic]:
    """Every kernel and shape."""
    found = [t for shape in GEM_SHAPES for size in (4, 2) for t in gem_traffic(shape, size)]
    return found + [t for rows in LOSS_ROWS for size in (4, 2) for t in loss_traffic(rows, size)]


def print_traffic(rows: list[Traffic]) -> None:
    """Bytes moved against the least possible."""
    print(f"{'kernel':14} {'shape':28} {'moved MB':>12} {'least MB':>10} {'ratio':>7} {'TFLOP':>7}")
    for t in rows:
        flops = f"{t.operations / 1e12:7.2f}" if t.operations else " " * 7
        ratio = t.moved / t.least
        print(
            f"{t.kernel:14} {t.shape:28} {t.moved / 1e6:12.1f} {t.least / 1e6:10.1f} "
            f"{ratio:7.2f} {flops}"
        )


def loss_batch(rows: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of each image, one row in forty mixed, as in training."""
    generator = torch.Generator().manual_seed(0)
    z = F.normalize(torch.randn(rows, DIMENSION, generator=generator))
    ids = torch.arange(rows) % (rows // 2)
    sources = torch.stack([ids, ids], dim=1)
    sources[::40, 1] = sources[torch.randperm(rows, generator=generator)[: len(sources[::40])], 0]
    return z.to(device), sources.to(device)


def loss_step(loss: Callable[..., kernels.SSCDLoss], rows: int) -> Callable[[], None]:
    """Forward and backward of a loss, as a candidate of the stopwatch."""
    z, sources = loss_batch(rows)

    return partial(_step, loss, z, sources)


def peak_memory(name: str, rows: int) -> dict[str, float]:
    """MiB that one forward and backward adds to a fresh process, and the process's peak."""
    run = subprocess.run(
        [
            *RUN,
            "speed/kernels",
            "--memory-of",
            name,
            "--rows",
            str(rows),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    added, peak, seconds = map(float, run.stdout.split())
    return {"added_mib": added, "process_peak_mib": peak, "seconds": seconds}


def report_memory(name: str, rows: int) -> None:
    """The child of ``peak_memory`` (Linux): peak resident memory over what was there before."""
    step = loss_step({"reference": reference, "kernels": kernels}[name].sscd_loss, rows)
    loss_step(kernels.sscd_loss, 64)()  # what torch sets up on first use is not the loss's
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory the allocator kept would be used again unseen
    before = resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing torch
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    peak = peak_mib()
    print(peak - before, peak, seconds)


def cpu_loss(rows: int, rounds: int) -> dict[str, object]:
    """``sscd_loss`` against the N x N form: interleaved time, and memory in fresh processes."""
    steps = {
        "reference": loss_step(reference.sscd_loss, rows),
        "kernels": loss_step(kernels.sscd_loss, rows),
    }
    taken = interleaved(steps, rounds=rounds)
    speedup = taken["kernels"].speedup_over(taken["reference"])
    memory = {name: peak_memory(name, rows) for name in steps}
    share = memory["reference"]["added_mib"] / memory["kernels"]["added_mib"]
    large = peak_memory("kernels", 32768)
    print(f"sscd_loss on CPU, N={rows}, d={DIMENSION}, forward + backward: {speedup:.2f}x faster")
    print(f"  memory: 1/{share:.0f} of the N x N form's {memory['reference']['added_mib']:.0f} MiB")
    print(f"  N=32768: process peak {large['process_peak_mib']:.0f} MiB")
    return {
        "rows": rows,
        "dimension": DIMENSION,
        "threads": torch.get_num_threads(),
        "seconds": {name: timing.seconds for name, timing in taken.items()},
        "speedup": speedup,
        "memory": memory,
        "memory_ratio": share,
        "rows_32768": large,
    }


def gpu_speed(
    gem_shapes: Sequence[tuple[int, int, int, int]] = GEM_SHAPES,
    rows: Sequence[int] = LOSS_ROWS[:1],
    device: str = "cuda",
) -> list[dict[str, object]]:
    """GB/s, TFLOP/s and ratios to eager and ``torch.compile``, on the GPU at hand."""
    from triton.testing import do_bench

    found: list[dict[str, object]] = []

    def measure(name: str, candidates: dict[str, Callable[[], object]], t: Traffic) -> None:
        seconds = {key: do_bench(run) / 1e3 for key, run in candidates.items()}
        mine = seconds["triton"]
        figures: dict[str, object] = {
            "name": name,
            "shape": t.shape,
            "gigabytes_per_second": t.least / mine / 1e9,
            "teraflops": t.operations / mine / 1e12,
            **{f"ratio_to_{key}": s / mine for key, s in seconds.items() if key != "triton"},
        }
        found.append(figures)
        print(figures)

    pools = _three_ways(kernels.gem_pool, reference.gem_pool)
    for shape in gem_shapes:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(*shape, device=device, dtype=dtype).requires_grad_()
            forward, backward = gem_traffic(shape, dtype.itemsize)
            measure(forward.kernel, {k: partial(f, x.detach()) for k, f in pools.items()}, forward)
            steps = {k: _backward(f(x), x) for k, f in pools.items()}
            measure(backward.kernel, steps, backward)
    searches = _three_ways(kernels.nearest_negative, reference.nearest_negative)
    losses = _three_ways(kernels.sscd_loss, reference.sscd_loss)
    for n in rows:
        for dtype in (torch.float32, torch.bfloat16):
            z, sources = loss_batch(n, device)
            z = z.to(dtype)
            parts = {t.kernel: t for t in loss_traffic(n, dtype.itemsize)}
            search = _sum("nearest_negative", [parts["scan"], parts["distance"]])
            measure(search.kernel, {k: partial(f, z, sources) for k, f in searches.items()}, search)
            step = _sum("sscd_loss forward+backward", list(parts.values()))
            measure(
                step.kernel, {k: partial(_step, f, z, sources) for k, f in losses.items()}, step
            )
    return found


def _three_ways(
    ours: Callable[..., Any], plain: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    return {"triton": ours, "eager": plain, "compile": torch.compile(plain)}


def _backward(pooled: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    """The backward pass alone, again and again."""
    return partial(torch.autograd.grad, pooled, x, torch.ones_like(pooled), retain_graph=True)


def _step(loss: Callable[..., Any], z: torch.Tensor, sources: torch.Tensor) -> None:
    torch.autograd.backward(loss(z.detach().requires_grad_(), sources).total)


def _sum(name: str, parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        name,
        parts[0].shape,
        moved=sum(t.moved for t in parts),
        least=sum(t.least for t in parts),
        operations=sum(t.operations for t in parts),
    )


def print_aot(workers: int) -> list[dict[str, object]]:
    """Compile every variant for every target and print what came out, with the time it took."""
    from speed import aot

    print(
        f"{'variant':40} {'target':7} {'tensor cores':12} {'regs':>5} {'spill':>5} "
        f"{'shared':>7} {'programs':>8} {'occupancy':>9} {'seconds':>7}"
    )
    rows = []
    for c in aot.compile_all(workers=workers):
        rows.append(asdict(c))
        print(
            f"{c.variant:40} {c.target:7} {c.tensor_cores or '-':12} {c.registers:5} "
            f"{c.spilled:5} {c.shared:7} {c.programs:8} {c.occupancy:9.2f} {c.seconds:7.2f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--aot", action="store_true", help="compile for four GPUs, print the table")
    parser.add_argument("--bytes", action="store_true", help="only the bytes moved")
    parser.add_argument("--rows", type=int, default=8192, help="descriptors in the CPU benchmark")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the CPU benchmark")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of --aot")
    parser.add_argument("--memory-of", choices=("reference", "kernels"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        report_memory(options.memory_of, options.rows)
        return
    if options.aot:
        print("wrote", write("kernels_aot", print_aot(options.workers)))
        return
    moved = traffic()
    print_traffic(moved)
    if options.bytes:
        return
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit(
            "TRITON_INTERPRET is set: the interpreter proves correctness, never speed; unset it"
        )
    figures: dict[str, object] = {"traffic": [asdict(t) for t in moved]}
    figures["cpu"] = cpu_loss(options.rows, options.rounds)
    if torch.cuda.is_available():
        figures["gpu"] = gpu_speed()
    else:
        print("no GPU here: no GPU speed")
    print("wrote", write("kernels", figures))


if __name__ == "__main__":
    main()
