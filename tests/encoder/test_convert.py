"""``sscd-vec convert``: any model to a safe folder, from the command line."""

import json
from pathlib import Path

import pytest
import torch
import typer
from torchvision.models.resnet import BasicBlock, ResNet
from typer.testing import CliRunner

from sscd_vec.cli.convert import convert, convert_model
from sscd_vec.encoder.checkpoint import read_checkpoint
from sscd_vec.encoder.config import EncoderConfig
from tests.encoder.original_modules import TorchvisionSSCD, randomized

app = typer.Typer()
app.command()(convert)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    module = randomized(TorchvisionSSCD(ResNet(BasicBlock, [2, 2, 2, 2], num_classes=16)))
    path = tmp_path_factory.mktemp("source") / "model.torchvision.pt"
    torch.save(module.state_dict(), path)
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_file_becomes_a_folder(source: Path, tmp_path: Path) -> None:
    code, out, err = run(source, tmp_path / "out")
    assert (code, err) == (0, "")
    assert "resnet18, linear head, 16 dimensions" in out
    assert "short side 288" in out
    assert str(tmp_path / "out") in out
    config, state = read_checkpoint(tmp_path / "out")
    assert config == EncoderConfig(trunk="resnet18", dim=16)
    for name, tensor in read_checkpoint(source)[1].items():
        assert torch.equal(state[name], tensor)


def test_json_for_programs(source: Path, tmp_path: Path) -> None:
    code, out, _ = run(source, tmp_path / "out", "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["converted"] is True
    assert summary["encoder"] == EncoderConfig(trunk="resnet18", dim=16).to_dict()
    assert (summary["dim"], summary["tensors"]) == (16, 122)
    again = convert_model(tmp_path / "out", tmp_path / "again")
    assert again["fingerprint"] == summary["fingerprint"]


def test_half_is_half_the_size(source: Path, tmp_path: Path) -> None:
    whole = convert_model(source, tmp_path / "whole")
    half = convert_model(source, tmp_path / "half", half=True)
    assert half["bytes"] == pytest.approx(whole["bytes"] / 2, rel=0.01)
    assert half["fingerprint"] != whole["fingerprint"]


def test_a_model_is_not_overwritten_unasked(source: Path, tmp_path: Path) -> None:
    convert_model(source, tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    code, out, err = run(source, tmp_path)
    assert code == 1
    assert "already holds config.json and model.safetensors; --overwrite replaces" in err
    assert out == ""
    assert (tmp_path / "config.json").read_bytes() == before
    assert run(source, tmp_path, "--overwrite")[0] == 0


def test_what_cannot_be_read_is_exit_code_one(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    for name in ("text.pt", "nowhere.pt"):
        code, out, err = run(tmp_path / name, tmp_path / "out")
        assert (code, out) == (1, "")
        assert err.startswith("not converted: ")
        assert name in err
        code, out, _ = run(tmp_path / name, tmp_path / "out", "--json")
        assert code == 1
        assert name in json.loads(out)["error"]
    assert not (tmp_path / "out").exists()
