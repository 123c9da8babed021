import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from sscd_vec import Encoder
from sscd_vec.cli.train import train
from sscd_vec.encoder import pretrained
from sscd_vec.encoder.checkpoint import read_checkpoint
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import SSCDModel, build_model
from sscd_vec.trainer import TrainConfig, Trainer, TrainingDiverged
from sscd_vec.trainer import validation as validation_room
from sscd_vec.trainer.data import find_photos
from sscd_vec.trainer.initial import initial_model
from sscd_vec.trainer.journal import read_metrics
from sscd_vec.trainer.overlay import Overlays
from sscd_vec.trainer.pixels import MemoryPixels
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


def test_averaged_weights_are_what_is_written(few: Path, tmp_path: Path) -> None:
    config = SMALL.with_changes(ema=0.5, steps=2)
    Trainer(config, device="cpu").fit(few, tmp_path, show_progress=False)
    saved = torch.load(next((tmp_path / "checkpoints").glob("*.pt")), weights_only=True)
    raw, averaged = saved["model"]["head.weight"], saved["average"]["head.weight"]
    assert not torch.equal(raw, averaged)
    written = Encoder.from_pretrained(tmp_path, device="cpu").model.state_dict()["head.weight"]
    assert torch.equal(written, averaged)


def test_starting_from_a_model_by_its_name() -> None:
    name = pretrained.shipped()[0]
    config, weights = read_checkpoint(pretrained.resolve(name))
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
