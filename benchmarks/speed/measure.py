"""Time and memory of candidates, measured in turn: the only honest way on a shared machine.

Every candidate runs once per round, in turn, so that a slow minute of the machine hits all of them.
What is reported is the ratio of each candidate's median to the baseline's, never an absolute time
alone. Memory is what Linux counts for the process; ``ru_maxrss`` is inherited from the parent.
"""

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Timing:
    """Seconds of each round of one candidate."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds per round."""
        return statistics.median(self.seconds)

    def speedup_over(self, baseline: "Timing") -> float:
        """Median over rounds of baseline / self: above 1 is faster than the baseline."""
        return statistics.median(b / s for b, s in zip(baseline.seconds, self.seconds, strict=True))


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int = 5,
    warmup: int = 1,
    shuffled: bool = False,
) -> dict[str, Timing]:
    """Time the candidates in turn, ``rounds`` times, after ``warmup`` unrecorded rounds.

    With ``shuffled``, each round has an order of its own: what a candidate leaves behind (warm
    caches, threads that still spin) then helps or hinders no particular one.
    """
    order, chance = list(candidates.items()), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    # What exists before is set aside: walking all of torch's objects takes longer than many a run.
    gc.collect()
    gc.freeze()
    try:
        for turn in range(warmup + rounds):
            if shuffled:
                chance.shuffle(order)
            for name, run in order:
                gc.collect()
                start = time.perf_counter()
                run()
                elapsed = time.perf_counter() - start
                if turn >= warmup:
                    seconds[name].append(elapsed)
    finally:
        gc.unfreeze()
    return {name: Timing(name, tuple(taken)) for name, taken in seconds.items()}


def resident_mib(pid: int | None = None) -> float:
    """What a process, this one by default, has in memory now."""
    return _status("VmRSS", os.getpid() if pid is None else pid)


def peak_mib() -> float:
    """The most this process has had in memory."""
    return _status("VmHWM", os.getpid())


def _status(field: str, pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}: memory is measured on Linux only")
