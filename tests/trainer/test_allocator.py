"""Freed memory stays with the process while training, and goes back afterwards."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from sscd_vec.encoder.backends.native import return_freed_memory
from sscd_vec.trainer.allocator import freed_memory_kept

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def given_back(size=64 << 20):
    block = torch.ones(size, dtype=torch.uint8)
    held = resident()
    del block
    return held - resident()

usual = given_back()
with freed_memory_kept():
    kept = given_back()
    held = resident()
    return_freed_memory()
    between = held - resident()
    given_back()
    held = resident()
released = held - resident()
after = given_back(512 << 20)  # more than any hole the heap was left with
print(usual, kept, between, released, after)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_blocks_are_kept_inside_and_returned_outside() -> None:
    """In a process of its own: how many bytes leave it when 64 MiB are freed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    usual, kept, between, released, after = map(int, done.stdout.split())
    most, little = 48 << 20, 16 << 20
    assert usual > most
    assert kept < little
    assert between > most  # as every few steps of a run
    assert released > most
    assert after > most
