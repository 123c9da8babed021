import json
import textwrap
import tomllib
from pathlib import Path

import pytest

from sscd_vec import models
from sscd_vec.encoder.checkpoint import read_checkpoint
from sscd_vec.trainer import TrainConfig
from sscd_vec.trainer.augment.recipe import RECIPES

ROOT = Path(__file__).parents[2]


def test_defaults_are_the_papers() -> None:
    config = TrainConfig()
    assert (config.trunk, config.dim, config.gem_p) == ("resnet50", 512, 3.0)
    assert (config.tau, config.entropy_weight, config.batch) == (0.05, 30.0, 4096)
    assert (config.epochs, config.size, config.inference_size) == (100, 224, 288)
    assert config.peak_learning_rate == pytest.approx(0.3 * 4096 / 256)
    assert config.decay == 1e-6
    assert config.warmup * config.epochs == 5
    assert config.zero_init_residual


def test_learning_rate_follows_the_batch_for_lars_only() -> None:
    assert TrainConfig(batch=512).peak_learning_rate == pytest.approx(0.6)
    adamw = TrainConfig(batch=512, optimizer="adamw")
    assert adamw.peak_learning_rate == TrainConfig(optimizer="adamw").peak_learning_rate
    assert TrainConfig(learning_rate=0.02).peak_learning_rate == 0.02


def test_toml_json_and_run_folder_read_back(tmp_path: Path) -> None:
    toml = tmp_path / "recipe.toml"
    toml.write_text(
        'trunk = "resnet18"\nbatch = 32\n[recipe]\njpeg = 0.4\ncrop_area = [0.2, 1.0]\n'
    )
    config = TrainConfig.read(toml)
    assert (config.trunk, config.batch, config.recipe["jpeg"]) == ("resnet18", 32, 0.4)
    (tmp_path / "train.json").write_text(json.dumps(config.to_dict()))
    assert TrainConfig.read(tmp_path) == config


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("augmentations", "heavy"),
        ("optimizer", "sgd"),
        ("batch", 1),
        ("tau", 0.0),
        ("warmup", 1.0),
        ("ema", 1.0),
        ("dim", 0),
        ("batch", "many"),
        ("batch", 8.5),
        ("seed", -1),
        ("tau", float("nan")),
        ("epochs", float("inf")),
        ("entropy_weight", -1.0),
        ("chunk", -1),
        ("frozen_stages", -1),
        ("learning_rate", -0.1),
        ("layer_decay", 0.0),
        ("max_bad_steps", 0),
        ("frozen_batch_norm", "yes"),
        ("compile", 1),
        ("dim", True),
        ("trunk", 50),
        ("head", "conv"),
        ("size_mode", "crop"),
        ("gem_p", 0.0),
        ("train_gem_p", -1.0),
        ("crops", "sharp"),
        ("exempt_norms", 1),
        ("memory", -1),
        ("recipe", "jpeg"),
    ],
)
def test_bad_settings_are_named(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=setting):
        TrainConfig.from_dict({setting: value})


def test_a_ring_takes_no_memory() -> None:
    with pytest.raises(ValueError, match="ring=true with memory=8: .* set one of them"):
        TrainConfig(ring=True, memory=8)


def test_unknown_setting_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lamda.*entropy_weight"):
        TrainConfig.from_dict({"lamda": 30})
    with pytest.raises(FileNotFoundError, match="no training settings"):
        TrainConfig.read(tmp_path / "absent.toml")


def test_whole_numbers_do_for_fractions_and_null_for_the_default() -> None:
    config = TrainConfig.from_dict({"entropy_weight": 8, "init_from": None, "recipe": {"jpeg": 1}})
    assert (config.entropy_weight, config.init_from) == (8, "")


def test_the_documented_recipe_can_be_read() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    text = textwrap.dedent(page.split("```toml\n")[1].split("```")[0])
    config = TrainConfig.from_dict(tomllib.loads(text))
    assert config.init_from in models.shipped()
    shipped, _ = read_checkpoint(models.resolve(config.init_from))
    assert (config.trunk, config.dim) == (shipped.trunk, shipped.dim), "its head is kept"
    RECIPES[config.augmentations].with_changes(config.recipe)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").rglob("*.toml")), ids=str)
def test_recipes_of_earlier_runs_still_load(recipe: Path) -> None:
    config = TrainConfig.read(recipe)
    RECIPES[config.augmentations].with_changes(config.recipe)
