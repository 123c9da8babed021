"""Every kind of model file is read, and gives the descriptors of the module it came from."""

import hashlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from sscd_vec.encoder.checkpoint import (
    load_model,
    read_checkpoint,
    write_pretrained,
)
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import build_model, fingerprint
from sscd_vec.encoder.torchvision_trunks import VITS
from sscd_vec.models import CheckpointError
from tests.encoder.original_modules import ClassySSCD, DinoViT, TorchvisionSSCD, randomized

State = dict[str, Tensor]
jit: Any = torch.jit  # has no type annotations


def torchvision_resnet18(dim: int = 32) -> TorchvisionSSCD:
    torch.manual_seed(0)
    return randomized(TorchvisionSSCD(ResNet(BasicBlock, [2, 2, 2, 2], num_classes=dim)))


@pytest.fixture(scope="module")
def resnet18() -> TorchvisionSSCD:
    return torchvision_resnet18()


@pytest.fixture(scope="module")
def lite() -> tuple[EncoderConfig, State]:
    torch.manual_seed(0)
    config = EncoderConfig(trunk="efficientnet_lite0", dim=8, size=192, size_mode="square")
    return config, build_model(config).state_dict()


def images(side: int = 64) -> Tensor:
    """Two pictures of different colour, so that their descriptors differ clearly."""
    noise = torch.randn(2, 3, side, side + 32, generator=torch.Generator().manual_seed(5))
    return noise + torch.tensor([[1.0, -1.0, 0.0], [-2.0, 0.0, 2.0]])[:, :, None, None]


@torch.no_grad()
def assert_same_descriptors(original: nn.Module, path: Path, x: Tensor) -> EncoderConfig:
    config, state = read_checkpoint(path)
    expected = original(x)
    # A check that could not tell two images apart would prove nothing.
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    torch.testing.assert_close(load_model(config, state)(x), expected, atol=1e-5, rtol=0)
    return config


def script(module: nn.Module, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit.script(module).save(str(path))


def trace(module: nn.Module, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit.trace(module, images()).save(str(path))


# ----------------------------------------------------------------- the released layouts


def listing(state: dict[str, Any]) -> tuple[int, str]:
    lines = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(state.items()))
    return len(state), hashlib.sha256(lines.encode()).hexdigest()[:16]


def test_the_modules_here_have_the_tensors_of_the_released_files() -> None:
    """Number and hash of the names and shapes in the released files."""
    with torch.device("meta"):
        resnet50 = TorchvisionSSCD(ResNet(Bottleneck, [3, 4, 6, 3], num_classes=512))
        small = TorchvisionSSCD(ResNet(BasicBlock, [2, 2, 2, 2], num_classes=256))
        classy50 = ClassySSCD((3, 4, 6, 3), groups=1, width=64, dim=512)
        classy101 = ClassySSCD((3, 4, 23, 3), groups=32, width=4, dim=1024)
    assert listing(resnet50.state_dict()) == (320, "2b06124622511e75")
    assert listing(classy50.state_dict()) == (320, "c8a3aa35af33de21")
    assert listing(classy101.state_dict()) == (626, "3326939111753d05")
    assert listing(small.state_dict()) == (122, "5e95a620969016b0")


def test_torchvision_resnet50(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = randomized(TorchvisionSSCD(ResNet(Bottleneck, [3, 4, 6, 3], num_classes=512)))
    torch.save(original.state_dict(), tmp_path / "sscd.torchvision.pt")
    config = assert_same_descriptors(original, tmp_path / "sscd.torchvision.pt", images())
    assert config == EncoderConfig()


def test_classy_resnet50_also_inside_torchscript(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = randomized(ClassySSCD((3, 4, 6, 3), groups=1, width=64, dim=512))
    torch.save(original.state_dict(), tmp_path / "sscd.classy.pt")
    config = assert_same_descriptors(original, tmp_path / "sscd.classy.pt", images())
    assert config == EncoderConfig()
    trace(original, tmp_path / "sscd.torchscript.pt")
    traced_config, traced = read_checkpoint(tmp_path / "sscd.torchscript.pt")
    assert traced_config == config
    for name, tensor in read_checkpoint(tmp_path / "sscd.classy.pt")[1].items():
        assert torch.equal(traced[name], tensor), name


def test_classy_resnext101(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = randomized(ClassySSCD((3, 4, 23, 3), groups=32, width=4, dim=1024))
    torch.save(original.state_dict(), tmp_path / "anything.bin")
    config = assert_same_descriptors(original, tmp_path / "anything.bin", images(32))
    assert (config.trunk, config.dim) == ("resnext101_32x4d", 1024)


def test_dino_vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VITS, "vit_tiny", (32, 2, 4, 64))
    torch.manual_seed(0)
    original = DinoViT(width=64, heads=4, depth=2, patch=32).eval()
    torch.save(original.state_dict(), tmp_path / "dino.pth")
    x = torch.randn(2, 3, 224, 224)
    config = assert_same_descriptors(original, tmp_path / "dino.pth", x)
    assert config == EncoderConfig.vit_baseline("vit_tiny")


# ----------------------------------------------------------------- kinds of file


def write_plain(module: nn.Module, path: Path) -> None:
    torch.save(module.state_dict(), path)


def write_legacy(module: nn.Module, path: Path) -> None:
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=False)


def write_training(module: nn.Module, path: Path) -> None:
    state = OrderedDict((f"model.{name}", it) for name, it in module.state_dict().items())
    torch.save({"epoch": 3, "state_dict": state, "optimizer_states": [{"lr": 0.1}]}, path)


def write_wrapped(module: nn.Module, path: Path) -> None:
    state = {f"module._orig_mod.model.{name}": it for name, it in module.state_dict().items()}
    torch.save({"model": state}, path)


def write_safetensors(module: nn.Module, path: Path) -> None:
    save_file(dict(module.state_dict()), path)


def write_without_counters(module: nn.Module, path: Path) -> None:
    state = {k: v for k, v in module.state_dict().items() if "num_batches" not in k}
    torch.save(state, path)


@pytest.mark.parametrize(
    "write",
    [
        write_plain,
        write_legacy,
        write_training,
        write_wrapped,
        write_safetensors,
        write_without_counters,
        script,
        trace,
    ],
)
def test_every_kind_of_file(
    write: Callable[[nn.Module, Path], None], resnet18: TorchvisionSSCD, tmp_path: Path
) -> None:
    path = tmp_path / "model"  # no ending: the content decides
    write(resnet18, path)
    config, state = read_checkpoint(path)
    assert config == EncoderConfig(trunk="resnet18", dim=32)
    expected = resnet18.state_dict()
    for name in ("conv1.weight", "layer3.1.bn2.running_var", "layer2.0.downsample.1.bias"):
        assert torch.equal(state[f"trunk.{name}"], expected[f"backbone.{name}"])
    assert torch.equal(state["head.bias"], expected["backbone.fc.bias"])
    assert len(state) == len(expected)
    if write is script:
        assert_same_descriptors(resnet18, path, images())


def test_a_narrow_resnet_is_told_from_its_weights(tmp_path: Path) -> None:
    model = build_model(EncoderConfig(trunk="resnet18_w32", dim=8))
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    config, weights = read_checkpoint(tmp_path / "plain.pt")
    assert config == model.config
    assert weights["trunk.layer4.1.conv2.weight"].shape == (256, 256, 3, 3)


def test_half_precision_is_read_as_float32(resnet18: TorchvisionSSCD, tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        state = {
            k: v.to(dtype) if v.is_floating_point() else v for k, v in resnet18.state_dict().items()
        }
        save_file(state, tmp_path / "half.safetensors")
        _, read = read_checkpoint(tmp_path / "half.safetensors")
        assert {t.dtype for t in read.values()} == {torch.float32, torch.int64}
        expected = state["backbone.conv1.weight"].float()
        assert torch.equal(read["trunk.conv1.weight"], expected)


def test_folder_round_trip(lite: tuple[EncoderConfig, State], tmp_path: Path) -> None:
    config, state = lite
    write_pretrained(tmp_path / "a" / "b", config, state)
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    read_config, read = read_checkpoint(tmp_path / "a" / "b")
    assert read_config == config
    assert list(read) == list(state)
    assert all(torch.equal(read[name], state[name]) for name in state)
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert {path.stat().st_mode for path in (tmp_path / "a" / "b").iterdir()} == {
        ordinary.stat().st_mode
    }, "whoever may read new files may read the model"
    # The weights alone are enough: they carry the config along.
    assert read_checkpoint(tmp_path / "a" / "b" / "model.safetensors")[0] == config


def test_half_folder_takes_half_the_room(lite: tuple[EncoderConfig, State], tmp_path: Path) -> None:
    config, state = lite
    write_pretrained(tmp_path, config, state, dtype=torch.float16)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["head.weight"].dtype == torch.float16
    _, read = read_checkpoint(tmp_path)
    assert torch.equal(read["head.weight"], state["head.weight"].half().float())


def test_a_hand_written_flat_config_is_read(
    lite: tuple[EncoderConfig, State], tmp_path: Path
) -> None:
    config, state = lite
    write_pretrained(tmp_path, config, state)
    (tmp_path / "config.json").write_text(json.dumps(config.replace(size=224).to_dict()))
    assert read_checkpoint(tmp_path)[0].size == 224


@pytest.mark.parametrize("trunk", ["efficientnet_lite2", "resnext50_32x4d", "vit_s_16"])
def test_our_own_layout_is_recognized_without_a_config(trunk: str) -> None:
    from sscd_vec.encoder.layouts import OURS, infer_config

    for head in ("linear", "mlp"):
        config = EncoderConfig.from_dict({"trunk": trunk, "dim": 24, "head": head})
        with torch.device("meta"):
            state = build_model(config).state_dict()
        assert infer_config(OURS, state) == config


def test_a_torchvision_trunk_round_trip(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(EncoderConfig(trunk="mobilenet_v3_small", dim=8))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0  # one batch sets the statistics, as training would
    model.train()(images())
    model.eval()
    write_pretrained(tmp_path, model.config, model.state_dict())
    config = assert_same_descriptors(model, tmp_path, images())
    assert config == model.config


def test_trainers_checkpoint_with_its_config(
    lite: tuple[EncoderConfig, State], tmp_path: Path
) -> None:
    config, state = lite
    averaged = {name: it + 1 if it.is_floating_point() else it for name, it in state.items()}
    settings = {"encoder": config.to_dict(), "batch_size": 64}
    saved = {"step": 4, "model": dict(state), "average": None, "config": settings}
    torch.save(saved, tmp_path / "step.pt")
    read_config, read = read_checkpoint(tmp_path / "step.pt")
    assert read_config == config
    assert torch.equal(read["head.bias"], state["head.bias"])
    torch.save(saved | {"average": averaged}, tmp_path / "step.pt")
    assert torch.equal(read_checkpoint(tmp_path / "step.pt")[1]["head.bias"], averaged["head.bias"])


def test_trunk_features_need_no_head(lite: tuple[EncoderConfig, State], tmp_path: Path) -> None:
    config, state = lite
    headless = {name: it for name, it in state.items() if name.startswith("trunk.")}
    write_pretrained(tmp_path, config.replace(features="trunk"), headless)
    read_config, read = read_checkpoint(tmp_path)
    model = load_model(read_config, read)
    assert model.dim == 1280
    assert model.training_descriptors(images()).shape == (2, 8)
    torch.save(headless, tmp_path / "bare.pt")
    assert read_checkpoint(tmp_path / "bare.pt")[0].features == "trunk"


# ----------------------------------------------------------------- what is wrong is named


def broken(state: State, change: str) -> State:
    state = dict(state)
    if change == "missing":
        del state["backbone.layer2.0.conv1.weight"]
    elif change == "extra":
        state["backbone.layer5.weight"] = torch.zeros(1)
    elif change == "misshaped":
        state["backbone.layer2.0.conv1.weight"] = torch.zeros(128, 64, 1, 1)
    elif change == "head":
        del state["backbone.fc.weight"]
    elif change == "nan":
        state["backbone.layer1.0.bn1.bias"] = torch.full((64,), float("nan"))
    elif change == "block":
        state["backbone.layer1.2.conv1.weight"] = torch.zeros(64, 64, 3, 3)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"missing: backbone\.layer2\.0\.conv1\.weight$"),
        ("extra", r"not part of this model: backbone\.layer5\.weight$"),
        (
            "misshaped",
            r"backbone\.layer2\.0\.conv1\.weight is \(128, 64, 1, 1\), \(128, 64, 3, 3\) expected",
        ),
        ("head", r"missing tensor backbone\.fc\.weight: the projection"),
        ("nan", r"NaN or infinity in backbone\.layer1\.0\.bn1\.bias"),
        ("block", "no known ResNet has 3-2-2-2 blocks of two convolutions"),
    ],
)
def test_bad_tensors_are_named_as_the_file_names_them(
    change: str, message: str, resnet18: TorchvisionSSCD, tmp_path: Path
) -> None:
    torch.save(broken(resnet18.state_dict(), change), tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(tmp_path / "bad.pt")
    assert str(caught.value).startswith(str(tmp_path / "bad.pt"))


def test_missing_classy_tensors_are_named_in_classy() -> None:
    from sscd_vec.encoder.layouts import recognize

    with torch.device("meta"):
        state = ClassySSCD((3, 4, 6, 3), groups=1, width=64, dim=8).state_dict()
    for name in ("backbone.blocks.2.block2-5.bn.weight", "backbone.initial_block._module.1.bias"):
        partial = {key: tensor for key, tensor in state.items() if key != name}
        with pytest.raises(CheckpointError, match=f"missing: {name}$"):
            recognize(partial)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        ({"conv1.weight": torch.zeros(2)}, "not the tensors of an SSCD model: conv1.weight"),
        ({}, "holds a dict, not a state dict"),
        ([torch.zeros(2)], "holds a list"),
        (torch.zeros(3), "holds a Tensor"),
        ({"epoch": 3}, "epoch is not a tensor"),
        ({"trunk.net.features.0.weight": torch.zeros(1)}, "config.json"),
    ],
)
def test_other_peoples_files_are_refused(loaded: object, message: str, tmp_path: Path) -> None:
    torch.save(loaded, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "other.pt")


def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model file or folder at .*nowhere"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json in this folder"):
        read_checkpoint(tmp_path)
    for content in (b"", b"hello", b"\x80\x02", b"PK\x03\x04 and then nothing", b"\xff" * 100):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
            read_checkpoint(tmp_path / "file")


def test_damaged_files_are_noticed(lite: tuple[EncoderConfig, State], tmp_path: Path) -> None:
    config, state = lite
    torch.save(dict(state), tmp_path / "model.pt")
    whole = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cut off"):
        read_checkpoint(tmp_path / "cut.pt")
    place = whole.find(state["head.weight"].numpy().tobytes())
    assert place > 0
    (tmp_path / "flip.pt").write_bytes(whole[:place] + b"\x7f" + whole[place + 1 :])
    with pytest.raises(CheckpointError, match=r"fails its CRC|damaged"):
        read_checkpoint(tmp_path / "flip.pt")

    write_pretrained(tmp_path / "folder", config, state)
    weights = tmp_path / "folder" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        read_checkpoint(tmp_path / "folder")
    weights.write_bytes(raw[:100])
    with pytest.raises(CheckpointError):
        read_checkpoint(weights)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: "),
        ("[1]", "not a JSON object"),
        ('{"format": 2, "encoder": {}}', "newer sscd-vec"),
        ('{"trunk": "resnet18", "colour": 1}', "'colour'"),
        ('{"trunk": "resnet9000"}', "unknown trunk 'resnet9000'"),
        ('{"trunk": "resnet18"}', "not those of resnet18 with a linear head to 512"),
    ],
)
def test_bad_configs(
    text: str, message: str, lite: tuple[EncoderConfig, State], tmp_path: Path
) -> None:
    write_pretrained(tmp_path, *lite)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_a_failed_write_leaves_the_folder_as_it_was(
    lite: tuple[EncoderConfig, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, state = lite
    write_pretrained(tmp_path, config, state)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="not part of this model: head.extra"):
        write_pretrained(tmp_path, config, {**state, "head.extra": torch.zeros(1)})

    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("sscd_vec.encoder.checkpoint.file_sha256", full)
    with pytest.raises(OSError, match="disk full"):
        write_pretrained(tmp_path, config, {n: t + 1 for n, t in state.items()})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ----------------------------------------------------------------- fingerprint


def test_fingerprint_changes_with_what_matters(lite: tuple[EncoderConfig, State]) -> None:
    config, state = lite
    changed = dict(state)
    changed["trunk.stem.bn.running_var"] = state["trunk.stem.bn.running_var"] * 1.0001
    marks = {
        fingerprint(config, state, "float32"),
        fingerprint(config, changed, "float32"),
        fingerprint(config, state, "bfloat16"),
        fingerprint(config.replace(size=224), state, "float32"),
        fingerprint(config.replace(size_mode="short"), state, "float32"),
        fingerprint(config.replace(gem_p=1.0), state, "float32"),
        fingerprint(config.replace(mean=(0.5, 0.5, 0.5)), state, "float32"),
        fingerprint(config.replace(std=(0.5, 0.5, 0.5)), state, "float32"),
        fingerprint(config.replace(features="trunk"), state, "float32"),
    }
    assert len(marks) == 9
    assert all(len(mark) == 32 and int(mark, 16) >= 0 for mark in marks)


def test_fingerprint_changes_with_nothing_else(
    lite: tuple[EncoderConfig, State], tmp_path: Path
) -> None:
    config, state = lite
    half = {k: v.half() if v.is_floating_point() else v for k, v in state.items()}
    mark = fingerprint(config, {k: v.float() for k, v in half.items()}, "float32")
    counted = dict(reversed(half.items()))
    counted["trunk.stem.bn.num_batches_tracked"] = torch.tensor(99)
    counted["head.bias"] = -half["head.bias"]  # zeros: minus zero is zero
    assert fingerprint(config, counted, "float32") == mark
    write_pretrained(tmp_path / "folder", config, half)
    torch.save({"model": half, "encoder_config": config.to_dict()}, tmp_path / "file.pt")
    for path in (tmp_path / "folder", tmp_path / "file.pt"):
        read_config, read = read_checkpoint(path)
        assert fingerprint(read_config, read, "float32") == mark
        model = load_model(read_config, read).to(memory_format=torch.channels_last)
        assert fingerprint(config, model.state_dict(), "float32") == mark


def test_fingerprint_of_trunk_features_ignores_the_head(lite: tuple[EncoderConfig, State]) -> None:
    config, state = lite[0].replace(features="trunk"), lite[1]
    headless = {name: it for name, it in state.items() if name.startswith("trunk.")}
    mark = fingerprint(config, state, "float32")
    assert fingerprint(config, headless, "float32") == mark
    assert fingerprint(config.replace(dim=99, head="mlp"), headless, "float32") == mark
