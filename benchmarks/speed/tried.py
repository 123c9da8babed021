"""Other forms of the two matrix kernels, compiled for sm_90 and compared with the form in use.

    python benchmarks speed/tried

Each form is the kernel's own source with a few lines replaced, or its own code with another tile.
What it costs is read from the machine code as ``speed/kernels --aot`` does, with three additions.
TMA writes to shared memory without an instruction for it, and registers that spill go through the
same memory: their bytes are added. And a tile that has a single buffer is loaded while nothing is
multiplied: its least time is the sum of both, with the load at 64 bytes a clock from L2. Figures go
to ``results/kernels_tried.json``.
"""

import argparse
import importlib.util
import inspect
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from results import write
from speed import aot, sass
from sscd_vec.kernels import push, scan

TARGET = next(target for target in aot.TARGETS if target.name == "sm_90")
L2_RATE = 64  # bytes a clock for a multiprocessor, more than any is known to reach
TILE = "load_tile({name}_ptr, {rows}, D, BLOCK_{depth})"
BEFORE = "    end = tl.minimum((split"
DESCRIBED = (
    "    {name}_rows = tl.make_tensor_descriptor({name}_ptr, [{count}, D], [D, 1], [{block}])\n"
)


@dataclass(frozen=True)
class Form:
    """One way to write a kernel.

    Attributes:
        kernel: ``push`` or ``scan``.
        products: ``fp32`` or ``bf16``.
        name: What is different.
        tile: Tile, stages and warps instead of the chosen ones.
        source: Pieces of the kernel's file and what replaces them.
        dimension: Of the descriptors.
        buffers: Tiles of columns in shared memory.
    """

    kernel: str
    products: str
    name: str
    buffers: int
    tile: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    dimension: int = aot.DIMENSION


def main() -> None:
    """Compile every form, print it and write the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    rows = [cost(form) for form in forms()]
    print(write("kernels_tried", {"forms": rows}))


def forms() -> list[Form]:
    """What is in use, and what was tried instead."""
    found = []
    for products, buffers in (("bf16", 2), ("fp32", 1)):
        found.append(Form("push", products, "in use", buffers))
        wide = {"BLOCK_N": 128, "STAGES": 1}
        found.append(Form("push", products, "128 columns, 1 buffer", 1, wide))
        four = {"BLOCK_N": 64, "STAGES": buffers, "num_warps": 4}
        found.append(Form("push", products, "64 columns on four warps", buffers, four))
        other = (32, 3) if products == "bf16" else (16, 2)
        more = {"BLOCK_N": other[0], "STAGES": other[1]}
        name = f"{other[0]} columns, {other[1]} buffers"
        found.append(Form("push", products, name, other[1], more))
        found.append(Form("push", products, "TMA", buffers, source=with_tma("push", products)))
        found.append(Form("push", products, "in use, d=256", buffers, dimension=256))
        narrow = {"BLOCK_N": 64, "STAGES": 2}
        name = "64 columns, 2 buffers, d=256"
        found.append(Form("push", products, name, 2, narrow, dimension=256))
    for products in ("bf16", "fp32"):
        found.append(Form("scan", products, "in use", 3))
        tma = with_tma("scan", products)
        found.append(Form("scan", products, "TMA", 3, source=tma))
        loop = {"flatten=True)": "flatten=True, warp_specialize=True)"}
        found.append(Form("scan", products, "TMA, warp_specialize", 3, source={**tma, **loop}))
    return found


def with_tma(kernel: str, products: str) -> dict[str, str]:
    """The replacements that load tiles by descriptors: ``push`` the columns, ``scan`` both."""
    parts = ("", "_low") if products == "fp32" else ("",)
    sides = {"b": ("j, end", "b_count", "BLOCK_N", "first")}
    depth, offset, at = "D", "0", "d"
    if kernel == "scan":
        depth, offset, at = "K", "start_k", "start_k + k"
        sides = {
            "a": ("i, rows", "rows", "BLOCK_M", "tl.program_id(0) * BLOCK_M"),
            "b": ("j, end", "columns", "BLOCK_N", "first"),
        }
    found = {}
    described = ""
    for side, (rows, count, block, first) in sides.items():
        for part in parts:
            name = side + part
            described += DESCRIBED.format(name=name, count=count, block=f"{block}, BLOCK_{depth}")
            load = TILE.format(name=name, rows=f"{rows}, {at}", depth=depth)
            found[f"= {load}"] = f"= {name}_rows.load([{first}, {offset}])"
    return {**found, BEFORE: described + BEFORE}


def cost(form: Form) -> dict[str, object]:
    """Compile a form and read what it costs."""
    module: ModuleType = {"push": push, "scan": scan}[form.kernel]
    work = aot.workloads()[f"{form.products} rows, {form.products} products, whole"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(patch.object(aot, "DIMENSION", form.dimension))
        stack.enter_context(with_tile(form, module))
        if form.source:
            kernel = rewritten(module, form.source, Path(folder))
            stack.enter_context(patch.object(module, f"{form.kernel}_kernel", kernel))
        (launch,) = recorded(form.kernel, work)
        figures = aot.figures(form.name, TARGET, launch)
    row = {
        "kernel": f"{form.kernel} {form.products}",
        "form": form.name,
        **least_clocks(form, launch, figures),
    }
    print(row, flush=True)
    return row


def with_tile(form: Form, module: ModuleType) -> AbstractContextManager[object]:
    """The form's tile instead of the chosen one."""
    name = f"{form.kernel}_tile"
    choose = getattr(module, name)
    return patch.object(module, name, lambda *of: choose(*of) | form.tile)


def rewritten(module: ModuleType, pieces: Mapping[str, str], folder: Path) -> object:
    """The module's kernel with pieces of its source replaced."""
    text = inspect.getsource(module)
    for piece, other in pieces.items():
        if piece not in text:
            raise ValueError(f"the source of {module.__name__} has no {piece!r} to replace")
        text = text.replace(piece, other)
    file = folder / "rewritten.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("rewritten", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file}")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return getattr(made, module.__name__.rsplit(".", 1)[1] + "_kernel")


def recorded(kernel: str, work: Callable[[], None]) -> list[aot.Launch]:
    """The launches of a kernel that a workload would make."""
    with aot.record(TARGET, only=(kernel,)) as launches:
        work()
    return launches


def least_clocks(form: Form, launch: aot.Launch, figures: aot.Figures) -> dict[str, object]:
    """The figures of the table, in clocks per 1000 multiply-adds of the definition."""
    settings = launch.settings
    text = sass.listing(launch.compiled.asm["cubin"])
    sides = settings["BLOCK_N"] + (settings["BLOCK_M"] if form.kernel == "scan" else 0)
    tile = sides * form.dimension * 2 * settings["PARTS"]
    meant = settings["BLOCK_M"] * settings["BLOCK_N"] * form.dimension
    meant *= 1 if form.kernel == "scan" else 2
    load = 1000 * tile / L2_RATE / meant
    rounds = -(-settings["D"] // settings["BLOCK_K"]) if form.kernel == "scan" else 1
    with_spills = text.replace("LDL", "LDS").replace("STL", "STS")
    cost = sass.tile_cost(with_spills, int(launch.compiled.metadata.num_warps), rounds)
    shared = 1000 * cost.shared_clocks / meant
    shared += ("UTMALDG" in text) * load * L2_RATE / sass.SHARED_RATE
    fits = figures.shared <= figures.shared_limit
    busy = max(figures.issue_clocks or 0.0, figures.tensor_clocks or 0.0, shared)
    return {
        "products": figures.shapes,
        "registers": figures.registers,
        "spilled": figures.spilled,
        "shared memory": figures.shared,
        "fits": fits,
        "barriers": text.count("BAR.SYNC"),
        "issue": figures.issue_clocks,
        "tensor": figures.tensor_clocks,
        "shared": shared,
        "load": load,
        "at least": (busy + load if form.buffers == 1 else max(busy, load)) if fits else None,
    }


if __name__ == "__main__":
    main()
