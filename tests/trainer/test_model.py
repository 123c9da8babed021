"""Where a model starts: from others' weights, with a head that whitens the trunk's features."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from sscd_vec import models
from sscd_vec.encoder.checkpoint import read_checkpoint, write_pretrained
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import build_model
from sscd_vec.files import find_images
from sscd_vec.normalize import Whitening
from sscd_vec.trainer import TrainConfig, Trainer
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.model import SplitModel, encode, initial_model, whiten_head
from sscd_vec.trainer.pixels import MemoryPixels, PixelSource, Storage, as_squares
from sscd_vec.trainer.run import Run
from tests.trainer import tiny
from tests.trainer.images import write_folder

SIZE = 24


@pytest.fixture(autouse=True)
def tiny_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.install(monkeypatch)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), 200, side=32)


@pytest.fixture(scope="module")
def pixels(photos: Path) -> MemoryPixels:
    return MemoryPixels(find_images(photos), Storage(36))


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


def test_starting_from_an_earlier_encoder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    earlier = build_model(EncoderConfig(trunk=tiny.NAME, dim=16, mean=(0.1, 0.2, 0.3)))
    write_pretrained(tmp_path, earlier.config, earlier.state_dict())
    expected = earlier.state_dict()
    same = TrainConfig(trunk=tiny.NAME, dim=16, init_from=str(tmp_path))
    started = initial_model(same)
    assert started.config.mean == (0.1, 0.2, 0.3)
    for name, tensor in started.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with caplog.at_level(logging.INFO):
        wider = initial_model(same.with_changes(dim=24))
    assert "head starts fresh" in caplog.text
    assert wider.head.state_dict()["weight"].shape[0] == 24
    assert torch.equal(wider.trunk.state_dict()["0.weight"], expected["trunk.0.weight"])
    with pytest.raises(ValueError, match="has the trunk tiny"):
        initial_model(same.with_changes(trunk="resnet18"))


def test_training_may_pool_otherwise_than_the_encoder() -> None:
    torch.manual_seed(0)
    model = build_model(EncoderConfig(trunk=tiny.NAME, dim=16, gem_p=3.0)).eval()
    images = torch.randn(4, 3, 24, 24)
    average = SplitModel(model, gem_p=1.0).eval()
    with torch.no_grad():
        features = model.trunk(images).clamp(min=1e-6).mean(dim=(2, 3))
        expected = torch.nn.functional.normalize(model.head(features), dim=1)
        torch.testing.assert_close(average(images), expected, atol=1e-5, rtol=0)
        assert not torch.allclose(average(images), model(images), atol=1e-3)
        torch.testing.assert_close(SplitModel(model).eval()(images), model(images))
    assert model.config.gem_p == 3.0, "what is written pools as its config says"


def test_its_descriptors_are_the_whitened_features(pixels: MemoryPixels) -> None:
    model = build_model(EncoderConfig(trunk=tiny.NAME, dim=8))
    fresh = model.head.state_dict()["weight"].clone()
    images = as_squares(pixels.take(np.arange(160)).tensors(), SIZE)
    features = encode(model, images, model.pooled)
    whiten_head(model, pixels, SIZE, Ranks())
    spread = np.linspace(0, 199, min(200, 5 * features.shape[1])).astype(int)
    fitted_on = encode(model, as_squares(pixels.take(spread).tensors(), SIZE), model.pooled)
    expected = Whitening.fit(fitted_on, dim=8).apply(features)
    np.testing.assert_allclose(encode(model, images), expected, atol=2e-4)
    assert model.head.state_dict()["weight"].std() == pytest.approx(float(fresh.std()), rel=1e-3)


def test_few_photos_still_give_a_head(photos: Path) -> None:
    model = build_model(EncoderConfig(trunk=tiny.NAME, dim=16))
    whiten_head(model, MemoryPixels(find_images(photos)[:6], Storage(36)), SIZE, Ranks())
    assert torch.isfinite(model.head.state_dict()["weight"]).all()


def test_more_dimensions_than_features_are_refused(pixels: MemoryPixels) -> None:
    model = build_model(EncoderConfig(trunk=tiny.NAME, dim=4096))
    with pytest.raises(ValueError, match="dim=4096.*expected dim to be at most that"):
        whiten_head(model, pixels, SIZE, Ranks())


def test_settings_without_a_linear_head_or_a_start_are_refused() -> None:
    for other in ({"head": "mlp"}, {"init_from": ""}):
        with pytest.raises(ValueError, match="expected a linear head"):
            TrainConfig.from_dict({"head_init": "whitened", "init_from": "imagenet"} | other)
    with pytest.raises(ValueError, match="head_init='pca'"):
        TrainConfig(head_init="pca")  # type: ignore[arg-type]


def test_a_run_starts_with_it_and_a_resumed_one_keeps_what_it_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_folder(tmp_path / "photos", 40, side=32)
    model = build_model(EncoderConfig(trunk=tiny.NAME, dim=16))
    write_pretrained(tmp_path / "earlier", model.config, model.state_dict())
    config = TrainConfig(
        trunk=tiny.NAME,
        dim=8,
        size=SIZE,
        inference_size=SIZE,
        size_mode="square",
        init_from=str(tmp_path / "earlier"),
        head_init="whitened",
        batch=8,
        steps=2,
        optimizer="adamw",
        learning_rate=1e-9,
        ema=0.5,
        holdout=0.0,
    )
    whitened = []

    def counted(run: Run, photos: PixelSource) -> None:
        whitened.append(len(photos))
        original(run, photos)

    original = Run.whiten_head
    monkeypatch.setattr(Run, "whiten_head", counted)
    Trainer(config, device="cpu").fit(photos, tmp_path / "run", show_progress=False)
    longer = config.with_changes(steps=3)
    Trainer(longer, device="cpu").fit(photos, tmp_path / "run", resume=True, show_progress=False)
    assert whitened == [40]
    saved = torch.load(max((tmp_path / "run" / "checkpoints").glob("*.pt")), weights_only=True)
    expected = build_model(config.encoder)
    expected.load_state_dict(
        {k: v for k, v in model.state_dict().items() if k.startswith("trunk.")}, strict=False
    )
    whiten_head(expected, MemoryPixels(find_images(photos), Storage(config.pixels)), SIZE, Ranks())
    for weights in (saved["model"], saved["average"]):
        ours, theirs = weights["head.weight"], expected.head.state_dict()["weight"]
        torch.testing.assert_close(ours / ours.norm(), theirs / theirs.norm(), rtol=0, atol=1e-4)
