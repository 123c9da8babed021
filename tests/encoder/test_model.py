"""SSCDModel: the formula, its parts, and every trunk by name."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from sscd_vec.encoder import torchvision_trunks
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import SSCDModel, build_model
from sscd_vec.encoder.torchvision_trunks import VITS, ViTTrunk, torchvision_names
from sscd_vec.encoder.trunks import (
    LITES,
    EfficientNetLite,
    InvertedResidual,
    build_trunk,
    trunk_names,
)
from tests.encoder.original_modules import randomized


@pytest.fixture(scope="module")
def resnet18() -> SSCDModel:
    torch.manual_seed(0)
    return build_model(EncoderConfig(trunk="resnet18", dim=32)).eval()


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def meta_model(config: EncoderConfig) -> SSCDModel:
    with torch.device("meta"):
        return build_model(config).eval()


@torch.no_grad()
def test_is_gem_then_linear_then_unit_length(resnet18: SSCDModel) -> None:
    x = images(2, 3, 64, 96)
    features = resnet18.feature_map(x)
    assert features.shape == (2, 512, 2, 3)
    pooled = (features.clamp(min=1e-6) ** 3).mean((2, 3)) ** (1 / 3)
    torch.testing.assert_close(resnet18.pooled(x), pooled)
    head = resnet18.head
    assert isinstance(head, nn.Linear)
    z = pooled @ head.weight.T + head.bias
    torch.testing.assert_close(resnet18(x), z / z.norm(dim=1, keepdim=True))
    torch.testing.assert_close(resnet18(x).norm(dim=1), torch.ones(2))


@torch.no_grad()
def test_trunk_is_torchvisions_resnet(resnet18: SSCDModel) -> None:
    reference = models.resnet18(weights=None).eval()
    state = resnet18.trunk.state_dict()
    assert set(reference.state_dict()) - set(state) == {"fc.weight", "fc.bias"}
    reference.load_state_dict(state, strict=False)
    x = images(1, 3, 64, 64)
    pooled = resnet18.feature_map(x).mean((2, 3))
    torch.testing.assert_close(reference.fc(pooled), reference(x))


def test_head_starts_xavier_uniform_with_zero_bias() -> None:
    torch.manual_seed(0)
    linear = build_model(EncoderConfig(trunk="resnet18", dim=128)).head
    assert isinstance(linear, nn.Linear)
    bound = math.sqrt(6 / (512 + 128))
    assert linear.weight.abs().max() <= bound
    assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not linear.bias.any()


def test_mlp_head_has_two_layers() -> None:
    model = build_model(EncoderConfig(trunk="resnet18", dim=16, head="mlp"))
    shapes = [tuple(parameter.shape) for parameter in model.head.parameters()]
    assert shapes == [(512, 512), (512,), (16, 512), (16,)]
    x = images(2, 3, 32, 32)
    layers = list(model.eval().head.children())
    with torch.no_grad():
        expected = F.normalize(layers[2](torch.relu(layers[0](model.pooled(x)))))
        torch.testing.assert_close(model(x), expected)


@torch.no_grad()
def test_trunk_features_leave_the_head_out_but_train_through_it(resnet18: SSCDModel) -> None:
    config = resnet18.config.replace(features="trunk")
    model = SSCDModel(resnet18.trunk, resnet18.head, config)
    x = images(2, 3, 64, 64)
    assert (model.dim, resnet18.dim) == (512, 32)
    torch.testing.assert_close(model(x), F.normalize(resnet18.pooled(x)))
    torch.testing.assert_close(model.training_descriptors(x), resnet18(x))


def test_zero_init_residual_starts_every_branch_at_zero() -> None:
    for trunk in ("resnet50", "efficientnet_lite0"):
        model = build_model(EncoderConfig(trunk=trunk), zero_init_residual=True)
        plain = build_model(EncoderConfig(trunk=trunk))
        if trunk == "resnet50":
            names = [name for name, _ in model.named_modules() if name.endswith("bn3")]
            assert len(names) == 16
        else:
            blocks = dict(model.named_modules()).items()
            names = [
                f"{name}.project.bn"
                for name, it in blocks
                if isinstance(it, InvertedResidual) and it.skip
            ]
            assert len(names) == 9
        for name in names:
            assert not model.get_submodule(name).get_parameter("weight").any()
            assert plain.get_submodule(name).get_parameter("weight").all()


def test_gradients_reach_every_weight(resnet18: SSCDModel) -> None:
    model = copy.deepcopy(resnet18).train()
    torch.autograd.backward(model.training_descriptors(images(4, 3, 32, 32)).sum(0)[0])
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("trunk", "channels", "parameters"),
    [
        ("resnet18", 512, 11_176_512),
        ("resnet18_w32", 256, 2_814_976),
        ("resnet18_w16", 128, 717_216),
        ("resnet50", 2048, 23_508_032),
        ("resnext101_32x4d", 2048, 42_128_704),
        ("resnext101_32x8d", 2048, 86_742_336),
    ],
)
def test_resnets(trunk: str, channels: int, parameters: int) -> None:
    model = meta_model(EncoderConfig(trunk=trunk))
    assert sum(p.numel() for p in model.trunk.parameters()) == parameters
    x = torch.empty(2, 3, 288, 384, device="meta")
    assert model.feature_map(x).shape == (2, channels, 9, 12)
    assert model(x).shape == (2, 512)


# ------------------------------------------------------------------------ torchvision by name

# Each family once; the reference is written out by hand from the network's own parts.
FAMILIES = {
    "alexnet": lambda net, x: net.features(x),
    "vgg11_bn": lambda net, x: net.features(x),
    "squeezenet1_1": lambda net, x: net.features(x),
    "densenet121": lambda net, x: torch.relu(net.features(x)),
    "googlenet": None,
    "inception_v3": None,
    "mobilenet_v2": lambda net, x: net.features(x),
    "mobilenet_v3_small": lambda net, x: net.features(x),
    "efficientnet_b0": lambda net, x: net.features(x),
    "convnext_tiny": lambda net, x: net.features(x),
    "mnasnet0_5": lambda net, x: net.layers(x),
    "shufflenet_v2_x0_5": None,
    "regnet_y_400mf": lambda net, x: net.trunk_output(net.stem(x)),
    "swin_t": lambda net, x: net.norm(net.features(x)).permute(0, 3, 1, 2),
}
WIDTHS = {"googlenet": 1024, "inception_v3": 2048, "shufflenet_v2_x0_5": 1024}


@pytest.mark.parametrize("name", [name for name, by_hand in FAMILIES.items() if by_hand is None])
def test_trunk_widths_of_branching_networks(name: str) -> None:
    model = meta_model(EncoderConfig(trunk=name))
    shape = model.feature_map(torch.empty(1, 3, 224, 256, device="meta")).shape
    assert shape[1] == WIDTHS[name]
    assert min(shape[2:]) > 1


@pytest.mark.parametrize("name", ["squeezenet1_1", "densenet121", "mobilenet_v3_small", "swin_t"])
@torch.no_grad()
def test_feature_map_is_the_networks_own(name: str) -> None:
    torch.manual_seed(0)
    trunk = randomized(build_trunk(name))
    network = models.get_model(name, weights=None).eval()
    own = {key.removeprefix("net."): value for key, value in trunk.state_dict().items()}
    missing, extra = network.load_state_dict(own, strict=False)
    assert not extra
    assert all(key.startswith(("classifier", "head")) for key in missing)
    by_hand = FAMILIES[name]
    assert by_hand is not None
    x = images(1, 3, 96, 128)
    assert trunk(x).std() > 0.01
    torch.testing.assert_close(trunk(x), by_hand(network, x))


@pytest.mark.parametrize(
    "name",
    ["alexnet", "vgg11_bn", "mobilenet_v2", "efficientnet_b0", "convnext_tiny"]
    + ["mnasnet0_5", "regnet_y_400mf"],
)
def test_feature_map_has_the_shape_of_the_networks_own(name: str) -> None:
    by_hand = FAMILIES[name]
    assert by_hand is not None
    x = torch.empty(2, 3, 224, 288, device="meta")
    network = models.get_model(name, weights=None).eval().to("meta")
    with torch.device("meta"):
        trunk = build_trunk(name).eval()
    assert trunk(x).shape == by_hand(network, x).shape
    # Nothing of the classifier is carried along.
    assert not any("classifier" in key or ".fc." in key for key in trunk.state_dict())


def test_a_torchvision_trunk_trains_switches_modes_and_copies() -> None:
    model = build_model(EncoderConfig(trunk="mobilenet_v3_small", dim=8))
    model.train()
    torch.autograd.backward(model.training_descriptors(images(2, 3, 64, 64)).sum())
    copied = copy.deepcopy(model).eval()
    model.eval()
    x = images(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(copied(x), model(x))
        torch.testing.assert_close(model(x), model(x))


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 222 * 222, 5)), "any size"),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5)), "no feature map"),
    ],
)
def test_a_network_without_a_map_of_any_size_is_refused(
    network: nn.Module, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision_trunks, "_network", lambda name: network.to("meta"))
    with pytest.raises(ValueError, match=f"maxvit_t cannot be a trunk: .*{reason}"):
        build_trunk("maxvit_t")


def test_unknown_trunk_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean resnet5.*Known: alexnet.*wide_resnet50_2"):
        build_model(EncoderConfig(trunk="resnet5"))
    assert {"resnext101_32x4d", "efficientnet_lite4", "vit_s_8"} <= set(trunk_names())
    assert set(torchvision_names()) <= set(trunk_names())


# ----------------------------------------------------------------------- EfficientNet-Lite, ViT


@pytest.mark.parametrize(
    ("name", "blocks", "parameters"),
    # Parameters of the published networks without their classifiers.
    [
        ("efficientnet_lite0", 16, 3_371_008),
        ("efficientnet_lite1", 21, 4_135_680),
        ("efficientnet_lite2", 21, 4_811_072),
        ("efficientnet_lite3", 24, 6_916_096),
        ("efficientnet_lite4", 30, 11_725_568),
    ],
)
def test_efficientnet_lite_sizes(name: str, blocks: int, parameters: int) -> None:
    with torch.device("meta"):
        trunk = EfficientNetLite(name)
    assert sum(len(list(stage.children())) for stage in trunk.stages) == blocks
    assert sum(p.numel() for p in trunk.parameters()) == parameters
    for layer in trunk.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert (layer.eps, layer.momentum) == (1e-3, 0.01)
    assert len(LITES) == 5


@torch.no_grad()
def test_efficientnet_lite_pads_as_tensorflow_does() -> None:
    """A stride-2 layer on an even side pads after, never before."""
    trunk = EfficientNetLite("efficientnet_lite0").eval()
    x = images(1, 3, 64, 96)
    stem = trunk.stem.get_submodule("conv")
    padded = F.conv2d(F.pad(x, (0, 1, 0, 1)), stem.get_parameter("weight"), stride=2)
    torch.testing.assert_close(trunk.stem[1](trunk.stem[0](x)), padded)
    assert trunk(x).shape == (1, 1280, 2, 3)


@torch.no_grad()
def test_vit_pools_cls_and_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(VITS, "vit_tiny", (16, 2, 4, 64))
    model = build_model(EncoderConfig.vit_baseline("vit_tiny")).eval()
    trunk = model.trunk
    assert isinstance(trunk, ViTTrunk)
    nn.init.normal_(trunk.class_token)
    x = images(1, 3, 224, 224)
    cls, patches = trunk.tokens(x)
    assert patches.shape == (1, 64, 14, 14)
    gem = patches.clamp(min=1e-6).pow(4).mean((2, 3)).pow(0.25)
    torch.testing.assert_close(model(x), F.normalize(torch.cat((cls, gem), 1)))
    assert (model.dim, model.config.size, model.config.size_mode) == (128, 224, "square")


@torch.no_grad()
def test_vit_is_torchvisions_at_its_own_size_and_runs_at_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(VITS, "vit_tiny", (32, 2, 4, 64))
    reference = models.VisionTransformer(224, 32, 2, 4, 64, 256).eval()
    model = build_model(EncoderConfig(trunk="vit_tiny", dim=8)).eval()
    state = {k: v for k, v in reference.state_dict().items() if not k.startswith("heads")}
    model.trunk.load_state_dict(state)
    nn.init.normal_(reference.heads.head.weight)
    x = images(1, 3, 224, 224)
    trunk = model.trunk
    assert isinstance(trunk, ViTTrunk)
    torch.testing.assert_close(reference.heads(trunk.tokens(x)[0]), reference(x))
    assert model.feature_map(images(1, 3, 100, 288)).shape == (1, 64, 3, 9)
    assert model(images(2, 3, 100, 288)).shape == (2, 8)
