"""``python benchmarks`` lists what runs, runs it by name, and records the command to type."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import results

ROOT = results.BENCHMARKS.parent


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["disc", "copydays"])
def test_the_protocols_run_by_their_path(script: str) -> None:
    shown = run(f"benchmarks/{script}.py", "--help")
    assert shown.returncode == 0 and "--model" in shown.stdout, shown.stderr


def test_an_unknown_name_lists_every_benchmark() -> None:
    refused = run("benchmarks", "speed/nothing")
    assert refused.returncode != 0 and "got speed/nothing" in refused.stderr
    for name in ("disc", "accuracy/ablation", "speed/search", "faults/kill", "release/ship_model"):
        assert f"\n  {name} " in refused.stderr
    assert "speed/measure" not in refused.stderr, "speed/measure.py does not run on its own"


def test_a_benchmark_runs_by_name_and_its_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = results.BENCHMARKS / "speed" / "dry_run.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--folder", "/somewhere/else", "--dim", "8"])
    record = json.loads(results.write("x", {}, tmp_path).read_text())
    assert record["command"] == "python benchmarks speed/dry_run --folder else --dim 8"
    monkeypatch.setattr(sys, "argv", [str(results.BENCHMARKS / "disc.py"), "--disc", "set"])
    record = json.loads(results.write("x", {}, tmp_path).read_text())
    assert record["command"] == "python benchmarks/disc.py --disc set"
    sizes = ("--references", "300", "--queries", "20", "--training", "200", "--dim", "8")
    done = run("benchmarks", "speed/dry_run", *sizes)
    assert done.returncode == 0 and "micro_ap" in done.stdout, done.stderr
