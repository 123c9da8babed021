"""Freed memory stays with the process while training, and goes back afterwards."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from sscd_vec.encoder.memory import return_freed_memory
from sscd_vec.trainer.allocator import freed_memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(32 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

usual = faults()
with freed_memory_kept():
    torch.zeros(32 << 20, dtype=torch.uint8)
    kept = faults()
    held = resident()
    return_freed_memory()
    between = held - resident()
    torch.zeros(32 << 20, dtype=torch.uint8)
    held = resident()
released = held - resident()
print(usual, kept, faults(), between, released)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_blocks_are_reused_inside_and_returned_outside() -> None:
    """In a process of its own: page faults count what the kernel had to clear."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    usual, kept, after, between, released = map(int, done.stdout.split())
    # At least so many faults for twenty fresh blocks, even where the kernel hands out huge pages,
    # which it may begin or cease to do at any moment.
    fresh = 20 * 8
    assert usual >= fresh
    assert kept < fresh / 4
    assert after >= fresh
    assert between * 4096 > 16 << 20  # as every few steps of a run
    assert released * 4096 > 16 << 20
