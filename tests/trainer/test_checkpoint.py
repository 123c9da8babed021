import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from sscd_vec.encoder import checkpoint as encoder_checkpoint
from sscd_vec.encoder.checkpoint import read_checkpoint
from sscd_vec.locks import LockHeldError, locked
from sscd_vec.trainer import Result, TrainConfig, Trainer
from sscd_vec.trainer.augment.views import Batch
from sscd_vec.trainer.loop import LOCK, Checkpoints
from sscd_vec.trainer.report import read_metrics
from sscd_vec.trainer.run import Run
from tests.trainer import tiny
from tests.trainer.images import write_folder

CONFIG = TrainConfig(
    trunk=tiny.NAME,
    dim=16,
    size=24,
    batch=8,
    steps=7,
    optimizer="lars",
    learning_rate=1.0,
    entropy_weight=2.0,
    entropy_ramp=0.5,
    recipe={"mixup": 0.2, "cutmix": 0.2},
    ema=0.9,
    chunk=6,
    holdout=0.0,
    checkpoint_every=2,
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), 20, side=32)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tiny.install(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fit(photos: Path, out: Path, *, resume: bool = False) -> Result:
    return Trainer(CONFIG, device="cpu").fit(photos, out, resume=resume, show_progress=False)


def final(out: Path) -> dict[str, object]:
    state = Checkpoints(out, 2).load_newest()
    assert state is not None
    return state


def assert_same(a: object, b: object, where: str = "state") -> None:
    """Equal to the bit, all the way down."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert isinstance(b, dict) and a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert isinstance(b, list) and len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


@pytest.fixture(scope="module")
def uninterrupted(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


def reference_run(photos: Path, out: Path) -> dict[str, object]:
    if not (out / "config.json").exists():
        assert fit(photos, out).finished
    return final(out)


def test_kill_9_while_writing_a_checkpoint_then_resume_to_the_bit(
    photos: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    expected = reference_run(photos, uninterrupted)
    killed = tmp_path / "killed"
    script = (
        "from pathlib import Path; from tests.trainer.test_checkpoint import train_until_killed; "
        f"train_until_killed(Path({str(photos)!r}), Path({str(killed)!r}))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert [f.name for f in Checkpoints(killed, 2).files()] == ["step-00000002.pt"]
    result = fit(photos, killed, resume=True)
    assert result.finished and result.steps == CONFIG.steps
    assert_same(final(killed), expected)
    (config, weights), (wanted, wanted_weights) = map(read_checkpoint, (killed, uninterrupted))
    assert config == wanted
    assert_same(weights, wanted_weights, "weights")
    losses = [
        [(line["step"], line["total"]) for line in read_metrics(run / "metrics.jsonl")]
        for run in (killed, uninterrupted)
    ]
    assert losses[0] == losses[1]


def train_until_killed(photos: Path, out: Path) -> None:
    """Run in a child process: dies with half of its second checkpoint on disk."""
    torch.set_num_threads(1)
    tiny.install(pytest.MonkeyPatch())
    save = torch.save

    def save_or_die(state: dict[str, object], path: Path) -> None:
        save(state, path)
        if state["step"] == 4:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    pytest.MonkeyPatch().setattr(torch, "save", save_or_die)
    fit(photos, out)


@pytest.mark.parametrize("steps", [1, 3])
def test_ctrl_c_saves_and_any_step_resumes_to_the_bit(
    photos: Path,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
) -> None:
    expected = reference_run(photos, uninterrupted)
    take_step = Run.take_step

    def interrupted_step(run: Run, batch: Batch) -> dict[str, Any]:
        figures = take_step(run, batch)
        if run.step == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return figures

    with monkeypatch.context() as patched:
        patched.setattr(Run, "take_step", interrupted_step)
        stopped = fit(photos, tmp_path)
    assert (stopped.finished, stopped.steps) == (False, steps)
    assert fit(photos, tmp_path, resume=True).finished
    assert_same(final(tmp_path), expected)


def test_a_run_is_not_overwritten(photos: Path, uninterrupted: Path) -> None:
    reference_run(photos, uninterrupted)
    with pytest.raises(FileExistsError, match="holds a run"):
        fit(photos, uninterrupted)


def test_one_process_at_a_time_trains_into_a_folder(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    with (
        locked(out / LOCK, purpose="train into this folder"),
        pytest.raises(LockHeldError, match=rf"process {os.getpid()} .* to train into this folder"),
    ):
        fit(photos, out)
    assert fit(photos, out).finished, "the folder is free again"


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        assert checkpoints.save(step, {"step": step}) is not None
    assert [f.name for f in checkpoints.files()] == ["step-00000002.pt", "step-00000003.pt"]
    newest = checkpoints.load_newest()
    assert newest is not None and newest["step"] == 3


def test_a_full_disk_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"step": 1})

    def full(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert checkpoints.save(2, {"step": 2}) is None
    assert "No space left" in caplog.text
    assert [f.name for f in checkpoints.folder.iterdir()] == ["step-00000001.pt"]
    newest = checkpoints.load_newest()
    assert newest is not None and newest["step"] == 1


def test_a_disk_too_full_for_the_encoder_stops_in_words_and_resumes(
    photos: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference_run(photos, uninterrupted)

    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(encoder_checkpoint, "save_file", full)
        with pytest.raises(OSError, match=r"No space left.*last good checkpoint stays"):
            fit(photos, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert fit(photos, tmp_path, resume=True).finished
    assert_same(final(tmp_path), expected)
    assert_same(read_checkpoint(tmp_path)[1], read_checkpoint(uninterrupted)[1], "weights")


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"step": 1})
    newest = checkpoints.save(2, {"step": 2})
    assert newest is not None
    newest.write_bytes(newest.read_bytes()[:100])
    state = checkpoints.load_newest()
    assert state is not None and state["step"] == 1
    assert "cannot be read" in caplog.text
    assert Checkpoints(tmp_path / "empty", 2).load_newest() is None
