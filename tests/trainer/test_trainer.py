import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image

from sscd_vec import Encoder, models
from sscd_vec.cli.console import SOME_UNREADABLE
from sscd_vec.cli.train import train
from sscd_vec.encoder import backends
from sscd_vec.encoder.backends import Bfloat16Error, bfloat16_problem
from sscd_vec.encoder.checkpoint import read_checkpoint
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import SSCDModel, build_model
from sscd_vec.plots import training_report
from sscd_vec.trainer import TrainConfig, Trainer, TrainingDiverged
from sscd_vec.trainer import validation as validation_room
from sscd_vec.trainer.data import find_photos
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.initial import initial_model
from sscd_vec.trainer.journal import read_metrics
from sscd_vec.trainer.mix import Batch
from sscd_vec.trainer.overlay import Overlays
from sscd_vec.trainer.pixels import MemoryPixels
from sscd_vec.trainer.preview import write_preview
from sscd_vec.trainer.run import Run
from sscd_vec.trainer.stages import parameter_groups
from sscd_vec.trainer.validation import Validation
from tests.trainer import tiny
from tests.trainer.photos import write_folder

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
    _, held_out = Trainer(config, device="cpu").split(find_photos(photos))
    assert len(held_out) == 8
    Path(held_out[0].path).write_bytes(b"no image")
    result = Trainer(config, device="cpu").fit(photos, tmp_path / "run", show_progress=False)
    assert result.finished and result.skipped == 1
    assert held_out[0].path in (tmp_path / "run" / "skipped.txt").read_text()
    assert "needs 8 readable photos and has 7. Raise holdout (now 0.4)" in caplog.text


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
    return Run(config, torch.device("cpu"), Ranks(), 9)


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


def test_starting_from_a_model_by_its_name() -> None:
    name = models.shipped()[0]
    config, weights = read_checkpoint(models.resolve(name))
    run = TrainConfig(trunk=config.trunk, dim=config.dim, init_from=name)
    started = initial_model(run)
    assert (started.config.mean, started.config.std) == (config.mean, config.std)
    for key, tensor in started.state_dict().items():
        torch.testing.assert_close(tensor, weights[key].to(tensor.dtype), rtol=0, atol=0)
    with pytest.raises(FileNotFoundError, match=name):
        initial_model(run.with_changes(init_from="no such model"))


def test_starting_from_an_earlier_encoder(
    few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(SMALL, device="cpu").fit(few, tmp_path / "first", show_progress=False)
    same = SMALL.with_changes(init_from=str(tmp_path / "first"))
    expected = Encoder.from_pretrained(tmp_path / "first", device="cpu").model.state_dict()
    ranks = Trainer(same, device="cpu").ranks
    for name, tensor in Run(same, torch.device("cpu"), ranks, 1).model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with caplog.at_level(logging.INFO):
        wider = Run(same.with_changes(dim=24), torch.device("cpu"), ranks, 1).model
    assert "head starts fresh" in caplog.text
    assert wider.head.state_dict()["weight"].shape[0] == 24
    assert torch.equal(wider.trunk.state_dict()["0.weight"], expected["trunk.0.weight"])
    with pytest.raises(ValueError, match="has the trunk tiny"):
        Run(same.with_changes(trunk="resnet18"), torch.device("cpu"), ranks, 1)


def test_layer_decay_slows_the_layers_far_from_the_head() -> None:
    model = build_model(EncoderConfig(trunk="resnet18", dim=8))
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    scale = {id(p): group["scale"] for group in groups for p in group["params"]}
    named = {name: scale[id(parameter)] for name, parameter in model.named_parameters()}
    assert named["head.weight"] == 1.0
    assert named["trunk.layer4.0.conv1.weight"] == 0.5
    assert named["trunk.conv1.weight"] == 0.5**5
    assert len(scale) == len(list(model.parameters()))
    plain = {id(p) for group in groups if not group["adapt"] for p in group["params"]}
    assert plain == {id(p) for p in model.parameters() if p.ndim == 1}
    assert all(group["weight_decay"] == 0 for group in groups if not group["adapt"])


def test_validation_is_perfect_for_a_model_that_knows_and_poor_for_one_that_does_not(
    few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = MemoryPixels(find_photos(few), 32)
    validation = Validation(pixels, pixels, 24, Overlays())
    model = build_model(EncoderConfig(trunk=tiny.NAME, dim=64))
    random = np.random.default_rng(0)

    def directions(count: int) -> NDArray[np.float32]:
        z: NDArray[np.float32] = random.normal(size=(count, 64)).astype(np.float32)
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        return z

    def blind(model: SSCDModel, images: torch.Tensor) -> NDArray[np.float32]:
        return directions(len(images))

    monkeypatch.setattr(validation_room, "encode", blind)
    assert validation(model).micro_ap < 0.5

    references, queries = (
        directions(len(validation.references)),
        directions(len(validation.queries)),
    )
    truth = validation.truth
    for query, reference in zip(truth.query_ids, truth.reference_ids, strict=True):
        queries[query] += 5 * references[reference]
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    answers = {id(validation.queries): queries, id(validation.references): references}

    def knowing(model: SSCDModel, images: torch.Tensor) -> NDArray[np.float32]:
        known = answers.get(id(images))
        return directions(len(images)) if known is None else known

    monkeypatch.setattr(validation_room, "encode", knowing)
    score = validation(model)
    assert score.micro_ap > 0.95
    assert score.copies.mean() > score.others.mean() + 0.3
    assert len(score.spectrum) == min(64, len(pixels))


@pytest.mark.parametrize("dimensions", [0, 1])
def test_a_collapsed_model_is_measured_too(
    few: Path, monkeypatch: pytest.MonkeyPatch, dimensions: int
) -> None:
    """All descriptors one point, or one line: there is little or nothing to whiten."""
    pixels = MemoryPixels(find_photos(few), 32)
    validation = Validation(pixels, pixels, 24, Overlays())

    def collapsed(model: SSCDModel, images: torch.Tensor) -> NDArray[np.float32]:
        z: NDArray[np.float32] = np.zeros((len(images), 2), dtype=np.float32)
        z[:, 0] = 1
        if dimensions == 1:
            z[::2] *= -1
        return z * np.float32(1 + 1e-6)  # rounded up, as unit length may be

    monkeypatch.setattr(validation_room, "encode", collapsed)
    score = validation(build_model(EncoderConfig(trunk=tiny.NAME, dim=2)))
    assert 0 <= score.micro_ap < 0.5
    assert (score.spectrum > 1e-6).sum() == dimensions
    # Drawn without a warning (an error here), both histograms with something in them.
    figure = training_report([], (score.copies, score.others, score.spectrum))
    bars = [bar.get_height() for bar in figure.axes[4].patches if isinstance(bar, Rectangle)]
    assert len(bars) == 120 and sum(bars[:60]) > 0 and sum(bars[60:]) > 0


def test_a_preview_needs_photos(tmp_path: Path) -> None:
    photos = write_folder(tmp_path, 2, side=16)
    (photos / "00001.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="1 of 2 could be read"):
        write_preview(Trainer(SMALL, device="cpu"), photos, tmp_path / "sheet.png")


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
    assert "1 unreadable photos skipped" in capsys.readouterr().err
    assert TrainConfig.read(run).validation == str(tmp_path / "others"), "resumes from anywhere"
