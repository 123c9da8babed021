import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image

from sscd_vec import Encoder
from sscd_vec.cli.console import SOME_UNREADABLE
from sscd_vec.cli.train import train
from sscd_vec.encoder import backends
from sscd_vec.encoder.backends import Bfloat16Error, bfloat16_problem
from sscd_vec.encoder.checkpoint import read_checkpoint
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.files import ImageFile
from sscd_vec.trainer import TrainConfig, Trainer, TrainingDiverged
from sscd_vec.trainer.augment.recipe import ADVANCED
from sscd_vec.trainer.augment.views import Batch
from sscd_vec.trainer.data import Images
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.model import initial_model
from sscd_vec.trainer.pixels import Storage
from sscd_vec.trainer.report import read_metrics
from sscd_vec.trainer.run import Run
from tests.trainer import tiny
from tests.trainer.images import write_folder

SMALL = TrainConfig(
    trunk=tiny.NAME,
    dim=16,
    size=24,
    inference_size=24,
    size_mode="square",
    batch=8,
    steps=3,
    optimizer="adamw",
    learning_rate=1e-3,
    entropy_weight=1.0,
    holdout=0.0,
)


@pytest.fixture(autouse=True)
def tiny_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.install(monkeypatch)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), 300, side=64)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("few"), 24, side=32)


def test_a_real_run_learns_to_find_copies(photos: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        trunk=tiny.NAME,
        dim=64,
        size=48,
        inference_size=48,
        size_mode="square",
        batch=64,
        steps=60,
        optimizer="adamw",
        learning_rate=0.005,
        entropy_weight=1.0,
        ema=0.5,
        recipe={
            "crop_area": [0.3, 1.0],
            "brightness": 0.4,
            "contrast": 0.4,
            "saturation": 0.4,
            "hue": 0.1,
            "grayscale": 0.1,
        },
        holdout=0.3,
        validate_every=30,
    )
    result = Trainer(config, device="cpu").fit(photos, tmp_path, show_progress=False)
    assert result.finished and result.best is not None
    lines = read_metrics(tmp_path / "metrics.jsonl")
    initial = lines[0]["initial_micro_ap"]
    last = [line["micro_ap"] for line in lines if "micro_ap" in line][-1]
    assert last > 2 * initial and last > initial + 0.15
    steps = [line for line in lines if "total" in line]
    assert [line["step"] for line in steps] == list(range(60))
    assert steps[-1]["info_nce"] < steps[0]["info_nce"] - 0.5

    # What was written is the encoder that was validated, and every record a person looks at.
    encoder = Encoder.from_pretrained(tmp_path, device="cpu")
    assert encoder.config == config.encoder
    z = encoder.encode(sorted(photos.iterdir())[:3])
    assert np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)
    assert TrainConfig.read(tmp_path) == config
    report = (tmp_path / "report.html").read_text()
    assert "before training" in report and "data:image/png;base64," in report
    with Image.open(tmp_path / "report.png") as page:
        assert page.width > 800
    assert list((tmp_path / "tensorboard").glob("events*"))

    # Resumed after its end it changes nothing, histograms and spectrum in the picture included.
    Trainer(config, device="cpu").fit(photos, tmp_path, resume=True, show_progress=False)
    assert (tmp_path / "report.html").read_text() == report


def test_streamed_and_decoded_training_are_the_same(few: Path, tmp_path: Path) -> None:
    losses = []
    for how in ("memory", "stream"):
        config = SMALL.with_changes(decoded=how)
        result = Trainer(config, device="cpu").fit(few, tmp_path / how, show_progress=False)
        assert result.finished
        losses.append([line["total"] for line in read_metrics(tmp_path / how / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("how", ["memory", "stream"])
def test_unreadable_photos_are_listed_by_the_run(tmp_path: Path, how: str) -> None:
    photos = write_folder(tmp_path / "photos", 9, side=32)
    (photos / "00004.png").write_bytes(b"no image")
    config = SMALL.with_changes(decoded=how)
    result = Trainer(config, device="cpu").fit(photos, tmp_path / how, show_progress=False)
    assert result.finished and result.skipped == 1
    assert "00004.png" in (tmp_path / how / "skipped.txt").read_text()


def test_unreadable_photos_held_out_are_listed_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photos = write_folder(tmp_path / "photos", 20, side=32)
    config = SMALL.with_changes(holdout=0.4, steps=1)
    held_out = Images.find(photos, config, ADVANCED).held_out
    assert len(held_out) == 8
    held_out[0].path.write_bytes(b"no image")
    result = Trainer(config, device="cpu").fit(photos, tmp_path / "run", show_progress=False)
    assert result.finished and result.skipped == 1
    assert held_out[0].id in (tmp_path / "run" / "skipped.txt").read_text()
    assert "needs 8 readable images and has 7. Raise holdout (now 0.4)" in caplog.text


def test_names_and_batch_are_checked_before_anything_is_decoded(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(storage: Storage, image: ImageFile) -> str:
        pytest.fail(f"decoded {image.id}")

    monkeypatch.setattr(Storage, "decode", decode)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"trunk": "resnet50x", "batch": 4096}, "Did you mean resnet50"),
        ({"batch": 4096}, r"only 24 to train on: .* such as 4 \(--batch\)"),
        ({"init_from": "no such model"}, "no such model"),
        ({"trunk": "resnet18", "frozen_stages": 4}, "use 0 to 3"),
    ]
    for changes, said in wrong:
        trainer = Trainer(SMALL.with_changes(**changes), device="cpu")
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            trainer.fit(few, tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()


def test_training_that_does_not_help_keeps_the_start(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that knows the copies is spoiled by a learning rate that is far too high."""
    good = SMALL.with_changes(dim=32, size=32, holdout=0.2, batch=64, validate_every=15)
    learned = good.with_changes(learning_rate=5e-3, steps=45)
    first = Trainer(learned, device="cpu").fit(photos, tmp_path / "first", show_progress=False)
    assert first.gained and first.best is not None
    spoiled = {"init_from": str(tmp_path / "first"), "learning_rate": 10.0, "steps": 6}
    settings = tmp_path / "spoiled.json"
    settings.write_text(json.dumps(good.to_dict() | spoiled | {"validate_every": 3}))
    train([photos], config=settings, out=tmp_path / "second")
    said = capsys.readouterr()
    assert f"training did not help: validation µAP stayed at or below {100 * first.best:.1f}" in (
        said.err
    )
    assert "µAP" not in said.out
    kept, start = (read_checkpoint(tmp_path / run)[1] for run in ("second", "first"))
    for name, tensor in start.items():
        assert torch.equal(kept[name], tensor), name
    assert "Training did not help" in (tmp_path / "second" / "report.html").read_text()


def test_crops_from_own_pixels_train_as_well(few: Path, tmp_path: Path) -> None:
    losses = []
    for how in ("memory", "stream"):
        config = SMALL.with_changes(crops="own", decoded=how, recipe={"drawn": 0.2, "compose": 0.3})
        result = Trainer(config, device="cpu").fit(few, tmp_path / how, show_progress=False)
        assert result.finished
        losses.append([line["total"] for line in read_metrics(tmp_path / how / "metrics.jsonl")])
    assert np.isfinite(losses[0]).all()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_average_pooling_in_training_and_gem_in_what_is_written(few: Path, tmp_path: Path) -> None:
    config = SMALL.with_changes(train_gem_p=1.0, gem_p=4.0)
    Trainer(config, device="cpu").fit(few, tmp_path, show_progress=False)
    assert Encoder.from_pretrained(tmp_path, device="cpu").config.gem_p == 4.0
    same = fresh_run(gem_p=4.0).take_step(one_batch())["total"]
    apart = fresh_run(gem_p=4.0, train_gem_p=1.0).take_step(one_batch())["total"]
    plain = fresh_run(gem_p=1.0).take_step(one_batch())["total"]
    assert apart == pytest.approx(plain, rel=1e-5) and abs(apart - same) > 1e-3


def test_the_shortest_run_takes_a_step(few: Path, tmp_path: Path) -> None:
    config = SMALL.with_changes(steps=0, epochs=0.1)
    assert Trainer(config, device="cpu").fit(few, tmp_path, show_progress=False).steps == 1


def test_bad_gradients_skip_the_step_then_stop_with_advice(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = SSCDModel.pooled
    calls: list[int] = []

    def sometimes_nan(model: SSCDModel, images: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        broken = len(calls) in (2, 5, 6)
        return original(model, images * float("nan") if broken else images)

    monkeypatch.setattr(SSCDModel, "pooled", sometimes_nan)
    config = SMALL.with_changes(steps=10, max_bad_steps=2)
    trainer = Trainer(config, device="cpu")
    with pytest.raises(TrainingDiverged, match="smaller entropy weight"):
        trainer.fit(few, tmp_path, show_progress=False)
    assert "step skipped" in caplog.text
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 1, 2]
    assert np.isfinite(lines[2]["total"]), "neither weights nor statistics were spoiled"
    assert "2 steps skipped" in (tmp_path / "report.html").read_text()


def one_batch() -> Batch:
    images = torch.rand(16, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    return Batch(images, (torch.arange(16) % 8)[:, None].repeat(1, 2))


def fresh_run(**changes: object) -> Run:
    config = SMALL.with_changes(**changes)
    return Run(config, initial_model(config), torch.device("cpu"), Ranks(), 9)


def test_a_float16_overflow_is_skipped_and_the_scale_halved() -> None:
    run, batch = fresh_run(precision="float16"), one_batch()
    run._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    figures = run.take_step(batch)
    assert not np.isfinite(figures["gradient_norm"]) and figures["skipped_steps"] == 1
    assert run._scaler.get_scale() == 2.0**19
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    while not np.isfinite(figures["gradient_norm"]):
        figures = run.take_step(batch)
    assert figures["skipped_steps"] >= 3, "more than two, and the run goes on"
    assert run.state()["scaler"]["scale"] == run._scaler.get_scale() < 2.0**18
    resumed = fresh_run(precision="float16")
    resumed.load(run.state())
    assert resumed._scaler.get_scale() == run._scaler.get_scale()
    # The gradient is scaled back: a float16 rounds at 2**-11, and 1 / tau makes that twenty times.
    exact = fresh_run().take_step(batch)
    assert figures["gradient_norm"] == pytest.approx(exact["gradient_norm"], rel=20 * 2.0**-11)
    assert figures["total"] == pytest.approx(exact["total"], rel=20 * 2.0**-11)


def test_bfloat16_trains_as_float32_does() -> None:
    if (problem := bfloat16_problem()) is not None:
        pytest.skip(f"no bfloat16 on this CPU: {problem}")
    rounded, exact = (
        fresh_run(precision=p).take_step(one_batch()) for p in ("bfloat16", "float32")
    )
    # A bfloat16 rounds at 2**-8, and 1 / tau makes that twenty times.
    assert rounded["total"] == pytest.approx(exact["total"], rel=20 * 2.0**-8)
    assert rounded["total"] != exact["total"]
    assert rounded["gradient_norm"] == pytest.approx(exact["gradient_norm"], rel=20 * 2.0**-8)


def test_bfloat16_is_refused_where_the_probe_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "bfloat16_problem", lambda backend: "killed by SIGILL")
    with pytest.raises(Bfloat16Error, match="killed by SIGILL.*float32"):
        fresh_run(precision="bfloat16")


def test_averaged_weights_are_what_is_written(few: Path, tmp_path: Path) -> None:
    config = SMALL.with_changes(ema=0.5, steps=2)
    Trainer(config, device="cpu").fit(few, tmp_path, show_progress=False)
    saved = torch.load(next((tmp_path / "checkpoints").glob("*.pt")), weights_only=True)
    raw, averaged = saved["model"]["head.weight"], saved["average"]["head.weight"]
    assert not torch.equal(raw, averaged)
    written = Encoder.from_pretrained(tmp_path, device="cpu").model.state_dict()["head.weight"]
    assert torch.equal(written, averaged)


def test_a_preview_needs_photos(tmp_path: Path) -> None:
    photos = write_folder(tmp_path, 2, side=16)
    (photos / "00001.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="1 of 2 could be read"):
        Trainer(SMALL, device="cpu").preview(photos, tmp_path / "sheet.png")


def test_command_line_trains_resumes_and_previews(few: Path, tmp_path: Path) -> None:
    settings = tmp_path / "recipe.toml"
    settings.write_text(
        'trunk = "tiny"\ndim = 16\nsize = 24\nbatch = 8\nsteps = 2\noptimizer = "adamw"\n'
        "holdout = 0.0\n[recipe]\njpeg = 0.4\n"
    )
    train([few], config=settings, preview=tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 4 * 2 * 24
    assert not (tmp_path / "run").exists()
    train([few], config=settings, out=tmp_path / "run", set_=["recipe.text=0.3", "tau=0.07"])
    saved = json.loads((tmp_path / "run" / "train.json").read_text())
    assert saved["recipe"] == {"jpeg": 0.4, "text": 0.3}
    assert saved["tau"] == 0.07
    train(None, resume=tmp_path / "run", steps=3)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3
    # A folder of an earlier version: other names, fewer settings.
    (tmp_path / "run" / "images.json").rename(tmp_path / "run" / "photos.json")
    fewer = {k: v for k, v in saved.items() if k not in ("crops", "train_gem_p", "exempt_norms")}
    (tmp_path / "run" / "train.json").write_text(json.dumps(fewer | {"steps": 3}))
    train(None, resume=tmp_path / "run", steps=4)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4
    with pytest.raises(ValueError, match="--config .* with --resume"):
        train(None, resume=tmp_path / "run", config=settings)
    with pytest.raises(ValueError, match="--out .* with --resume"):
        train(None, resume=tmp_path / "run", out=tmp_path / "other")


def test_command_line_says_that_photos_were_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_folder(tmp_path / "photos", 17, side=32)
    (photos / "00003.png").write_bytes(b"no image")
    write_folder(tmp_path / "others", 8, first=50, side=32)
    settings = tmp_path / "s.json"
    settings.write_text(json.dumps({"trunk": "tiny", "dim": 16, "size": 24, "batch": 8}))
    monkeypatch.chdir(tmp_path)
    run, others = tmp_path / "run", Path("others")
    with pytest.raises(typer.Exit) as ended:
        train([photos], config=settings, out=run, steps=1, validation=others)
    assert ended.value.exit_code == SOME_UNREADABLE
    assert "1 unreadable images skipped" in capsys.readouterr().err
    assert TrainConfig.read(run).validation == str(tmp_path / "others"), "resumes from anywhere"
