"""The kernels: bytes moved, what the compiler made of them, and speed where speed can be measured.

    python benchmarks speed/kernels          # bytes; CPU loss against the N x N form; GPU, if any
    python benchmarks speed/kernels --small  # CPU loss of a small batch against the N x N form
    python benchmarks speed/kernels --aot    # cost of the machine code, lower bounds; no GPU
    python benchmarks speed/kernels --bytes  # the table of bytes alone

Figures go to ``results/kernels.json`` (``kernels_small.json``, ``kernels_aot.json``).
"""

import argparse
import ctypes
import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

from results import RUN, write
from speed.measure import interleaved, peak_mib, resident_mib
from speed.roofline import (
    DIMENSION,
    GEM_SHAPES,
    LOSS_ROWS,
    Traffic,
    gem_traffic,
    loss_traffic,
    roofline,
    traffic,
)
from sscd_vec import kernels
from sscd_vec.kernels import objective, reference

SMALL_BATCH = 128  # views of a batch on a CPU


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


def small_batch(rows: int, rounds: int, steps: int = 5) -> dict[str, object]:
    """``sscd_loss`` of a small batch against the N x N form, interleaved turns of ``steps``.

    Steps are so short that a busy machine interrupts many: processor time is stated beside time.
    """
    losses = {"N x N": reference.sscd_loss, "ours": kernels.sscd_loss}
    processor: dict[str, list[float]] = {name: [] for name in losses}
    turns = {
        name: partial(_timed_steps, loss_step(loss, rows), steps, processor[name])
        for name, loss in losses.items()
    }
    taken = interleaved(turns, rounds=rounds, warmup=1, shuffled=True)
    ratios = [a / b for a, b in zip(processor["N x N"][1:], processor["ours"][1:], strict=True)]
    found: dict[str, object] = {
        "rows": rows,
        "dimension": DIMENSION,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "speedup": taken["ours"].speedup_over(taken["N x N"]),
        "speedup in processor time": statistics.median(ratios),
    }
    print(found)
    return found


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

    pools = _ways(kernels.gem_pool, reference.gem_pool, device)
    for shape in gem_shapes:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(*shape, device=device, dtype=dtype).requires_grad_()
            forward, backward = gem_traffic(shape, dtype.itemsize)
            measure(forward.kernel, {k: partial(f, x.detach()) for k, f in pools.items()}, forward)
            steps = {k: _backward(f(x), x) for k, f in pools.items()}
            measure(backward.kernel, steps, backward)
    searches = _ways(kernels.nearest_negative, reference.nearest_negative, device)
    losses = _ways(kernels.sscd_loss, reference.sscd_loss, device)
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


def _ways(
    ours: Callable[..., Any], plain: Callable[..., Any], device: str
) -> dict[str, Callable[..., Any]]:
    """The kernels, our own torch path, and the definition: eager, compiled, compiled in bf16."""
    compiled = torch.compile(plain)
    return {
        "triton": ours,
        "chunked": partial(_without_triton, ours),
        "eager": plain,
        "compile": compiled,
        "compile_bf16": partial(_in_bf16, compiled, device),
    }


def _without_triton(ours: Callable[..., Any], *arguments: object) -> object:
    with patch.object(objective, "runs_on_triton", lambda x: False):
        return ours(*arguments)


def _in_bf16(compiled: Callable[..., Any], device: str, *arguments: object) -> object:
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        return compiled(*arguments)


def _backward(pooled: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    """The backward pass alone, again and again."""
    return partial(torch.autograd.grad, pooled, x, torch.ones_like(pooled), retain_graph=True)


def _step(loss: Callable[..., Any], z: torch.Tensor, sources: torch.Tensor) -> None:
    torch.autograd.backward(loss(z.detach().requires_grad_(), sources).total)


def _timed_steps(run: Callable[[], None], steps: int, seconds: list[float]) -> None:
    """Run ``steps`` times, and note the processor time that took."""
    start = time.process_time()
    for _ in range(steps):
        run()
    seconds.append(time.process_time() - start)


def _sum(name: str, parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        name,
        parts[0].shape,
        moved=sum(t.moved for t in parts),
        least=sum(t.least for t in parts),
        operations=sum(t.operations for t in parts),
    )


def aot_figures(workers: int) -> dict[str, object]:
    """Compile every launch for every target, print its cost, and the lower bounds that follow."""
    from speed import aot

    found = [asdict(figures) for figures in aot.compile_all(workers=workers)]
    by_target: dict[str, dict[str, list[dict[str, object]]]] = {}
    for row in found:
        kind = "matrix" if row["variant"].startswith(("scan", "push")) else "other"
        by_target.setdefault(row["target"], {"matrix": [], "other": []})[kind].append(row)
        clocks = [row[f"{name}_clocks"] for name in ("issue", "tensor", "shared")]
        shown = " ".join(f"{x:5.2f}" if x is not None else "    -" for x in clocks)
        print(f"{row['variant']:34} {row['target']:7} {row['instruction'] or '-':8} {shown}")
    bounds = roofline([row for row in found if row["issue_clocks"] is not None])
    for bound in bounds:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in bound.items()})
    return {"targets": by_target, "roofline": bounds}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--aot", action="store_true", help="compile for four GPUs, print the cost")
    parser.add_argument("--small", action="store_true", help="a small batch on the CPU")
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
        print("wrote", write("kernels_aot", aot_figures(options.workers)))
        return
    if options.small:
        print("wrote", write("kernels_small", small_batch(SMALL_BATCH, options.rounds)))
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
