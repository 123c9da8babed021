"""Triton under its interpreter, and its compiler: each in a process of its own.

Triton chooses interpreter or compiler when a kernel is declared, so the choice must be in the
environment before the kernels are imported, and both cannot live in one process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton kernels need Linux on x86-64")

HERE = Path(__file__).parent / "separate"
ROOT = HERE.parents[2]


@pytest.mark.parametrize(
    ("file", "interpret"),
    [
        ("check_gem.py", "1"),
        ("check_losses.py", "1"),
        ("check_traffic.py", "1"),
        ("check_aot.py", "0"),
    ],
)
def test_in_a_process_of_its_own(file: str, interpret: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": interpret,
        "TRITON_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",  # tiny operations, thousands of them: threads only wait
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed and int(passed[1]) >= 4, run.stdout + run.stderr


def test_the_benchmark_prints_no_speed_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks", "speed/kernels"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0 and "never speed" in run.stderr
    assert "scan" in run.stdout and "faster" not in run.stdout and "GB/s" not in run.stdout
