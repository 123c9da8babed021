"""Memory of the loss on one of several GPUs: with gathered descriptors, and in a ring.

    python benchmarks speed/ring

One rank's step of ``Objective`` runs on CPU tensors with the Triton kernels' own buffers, but no
kernel and no message is sent: what is allocated is what a GPU would allocate. The peak is counted
by torch's profiler at a batch that fits here, and scaled to larger ones: every large buffer grows
with the rows. Inf-CL's figure is the one its authors measured (Cheng et al. 2024, table 1: 8 A800,
262144 pairs of an image and a text, 768 numbers each, 1.45 GB), scaled in the same way.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from results import write
from speed import aot
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.losses import Objective

DIMENSION = 512
RANKS = 8
COUNTED_ROWS = 1 << 18  # of the global batch
MILLION = 1 << 20
BATCHES = (1 << 18, MILLION, 4 * MILLION, 16 * MILLION)
INF_CL = 1.45e9 / (2 * (1 << 18) * 768)  # bytes of a number of the global batch, on 8 GPUs


def main() -> None:
    """Count, print and write ``results/ring_memory.json``."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    counted = {name: peak(ring) for name, ring in (("gathered", False), ("ring", True))}
    per_row = {name: size / COUNTED_ROWS for name, size in counted.items()}
    per_row["Inf-CL"] = INF_CL * DIMENSION
    rows = [
        {
            "descriptors": batch,
            "GPUs": RANKS,
            **{f"{name}, GB": size * batch / 1e9 for name, size in per_row.items()},
        }
        for batch in BATCHES
    ]
    for row in rows:
        print(row)
    figures = {"dimension": DIMENSION, "counted rows": COUNTED_ROWS, "batches": rows}
    print(write("ring_memory", figures))


def peak(ring: bool, rows: int = COUNTED_ROWS) -> int:
    """Most bytes that one rank's step holds beyond its own descriptors and sources."""
    local = rows // RANKS
    z = F.normalize(torch.randn(local, DIMENSION))
    ids = torch.arange(local) // 2
    sources = torch.stack([ids, ids], dim=1)
    objective = Objective(0.05, Ranks(0, RANKS, 0), ring=ring)
    target = next(target for target in aot.TARGETS if target.name == "sm_90")
    with ExitStack() as stack:
        for name, instead in silence().items():
            stack.enter_context(patch.object(dist, name, instead))
        stack.enter_context(aot.record(target, only=("none",)))
        return most_held(lambda: objective.gradient(z, sources, 5.0))


def silence() -> dict[str, Callable[..., object]]:
    """What a rank says to others, without others: the own rows stand for theirs."""

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        for number, part in enumerate(parts):
            part.copy_(tensor)
            if not tensor.is_floating_point():
                part += number * len(tensor)  # other ranks have other images

    return {
        "all_gather": all_gather,
        "all_reduce": lambda tensor: None,
        "reduce_scatter_tensor": lambda own, tensor: own.zero_(),
        "batch_isend_irecv": lambda messages: [],
        "P2POp": lambda *message: None,
        "get_backend": lambda: "gloo",
    }


def most_held(run: Callable[[], object]) -> int:
    """The peak of the bytes that ``run`` has allocated and not yet freed, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    raw = seen.profiler.kineto_results.events() if seen.profiler else []
    changes = sorted((e.start_ns(), e.nbytes()) for e in raw if e.name() == "[memory]")
    held = highest = 0
    for _, change in changes:
        held += change
        highest = max(highest, held)
    return highest


if __name__ == "__main__":
    main()
