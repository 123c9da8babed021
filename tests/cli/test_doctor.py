"""The doctor: a whole install passes, each kind of broken one fails and says what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sscd_vec import doctor
from sscd_vec.cli import main


def test_whole_install_is_healthy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sscd_vec", "doctor", "--json", "--cache-dir", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert done.returncode == 0 and report["healthy"]
    assert {"torch", "devices", "faiss", "milvus", "bfloat16", "cache", "models"} <= set(found)
    assert str(tmp_path) in found["cache"]["detail"]


def test_gpu_build_overwritten_by_cpu_build_fails_with_the_repair() -> None:
    check = doctor.faiss_verdict("1.15.1", False, 0, cpu_dist="1.15.1", gpu_dist="1.15.0")
    assert check.status == "fail"
    assert check.remedy == "pip install --force-reinstall --no-deps faiss-gpu==1.15.0"


@pytest.mark.parametrize(
    ("gpu_build", "cpu_dist", "gpu_dist", "status"),
    [
        (False, "1.15.1", None, "ok"),
        (True, "1.15.1", "1.15.1", "ok"),
        (True, None, "1.15.1", "ok"),
        (True, "1.15.1", "1.14.0", "note"),
    ],
)
def test_faiss_verdicts(
    gpu_build: bool, cpu_dist: str | None, gpu_dist: str | None, status: str
) -> None:
    assert doctor.faiss_verdict("1.15.1", gpu_build, 0, cpu_dist, gpu_dist).status == status


def test_library_that_kills_the_process_is_a_failed_line() -> None:
    def dies() -> list[doctor.Check]:
        doctor._probe("import os, signal; os.kill(os.getpid(), signal.SIGILL); answer = {}")
        return []

    (check,) = doctor._guarded(dies)
    assert check.status == "fail" and "signal 4" in check.detail and check.remedy


def test_a_broken_torch_still_gives_the_whole_report(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no symbol')")
    done = subprocess.run(
        [sys.executable, "-m", "sscd_vec", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    report = json.loads(done.stdout)
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert done.returncode == 1 and not report["healthy"]
    assert status["torch"] == "fail"
    assert status["cache"] == status["models"] == status["faiss"] == "ok"


def test_import_error_is_quoted() -> None:
    with pytest.raises(doctor.ProbeError, match="no_such_library"):
        doctor._probe("import no_such_library; answer = {}")


def test_unwritable_cache_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (check,) = doctor._cache(tmp_path / "models")
    assert check.status == "fail" and "SSCD_VEC_CACHE" in check.remedy


def test_broken_install_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = doctor.Check("torch", "fail", "no symbol", "reinstall")
    monkeypatch.setattr(doctor, "examine", lambda cache_dir: [broken])
    monkeypatch.setattr("sys.argv", ["sscd-vec", "doctor"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
