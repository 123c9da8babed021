"""Whose names a checkpoint's tensors have, and the network they are of.

Our names are ``trunk.…`` and ``head.…``. Each other layout is one function from our name of a
tensor to theirs, so a missing tensor can be named as its file would name it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sscd_vec.encoder.config import EncoderConfig, Head
from sscd_vec.encoder.model import SSCDModel, build_model
from sscd_vec.encoder.torchvision_trunks import VITS
from sscd_vec.encoder.trunks import LITES, RESNETS, scaled_stages
from sscd_vec.models import CheckpointError

_NAMED = 8  # tensors named in one error before "and n more"
# What training frameworks put in front of every name: a wrapper's attribute.
_WRAPPERS = ("module.", "_orig_mod.", "model.")

_CLASSY_STEM = {"conv1": "initial_block._module.0", "bn1": "initial_block._module.1"}
_CLASSY_BLOCK = {
    "conv1": "convolutional_block.0",
    "bn1": "convolutional_block.1",
    "conv2": "convolutional_block.3",
    "bn2": "convolutional_block.4",
    "conv3": "convolutional_block.6",
}
_DINO = {
    "class_token": "cls_token",
    "conv_proj": "patch_embed.proj",
    "encoder.pos_embedding": "pos_embed",
    "encoder.ln": "norm",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "self_attention.in_proj_": "attn.qkv.",
    "self_attention.out_proj": "attn.proj",
    "mlp.0": "mlp.fc1",
    "mlp.3": "mlp.fc2",
}


@dataclass(frozen=True)
class Layout:
    """One way to name the tensors of a model.

    Attributes:
        title: What to call it in an error.
        mark: The tensor by which it is recognized.
        theirs: Our name of a tensor to theirs, given whether a block's last batch norm is ``bn3``.
    """

    title: str
    mark: str
    theirs: Callable[[str, bool], str]


def recognize(
    state: Mapping[str, Tensor], config: EncoderConfig | None = None, **changes: object
) -> tuple[SSCDModel, dict[str, Tensor]]:
    """Recognize the network that tensors are of, build it without memory, and use its names.

    Args:
        state: Tensors in any known layout, with or without a wrapper's prefix.
        config: What they are; read from the tensors if None.
        changes: Fields of the config to change.

    Returns:
        The model on the meta device, and contiguous CPU tensors in the order of its
        ``state_dict()``, floating point as float32. Where the descriptor is trunk features there
        may be no head.

    Raises:
        CheckpointError: Names the tensors that are missing, too many, misshaped or not finite, as
            the file names them.
    """
    state = strip_wrappers(state)
    layout = detect(state)
    config = config or infer_config(layout, state)
    config = config.replace(**changes) if changes else config
    try:
        with torch.device("meta"):
            model = build_model(config)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    expected = model.state_dict()
    if config.features == "trunk" and not any(name.startswith("head.") for name in state):
        expected = {name: it for name, it in expected.items() if not name.startswith("head.")}
    names = {ours: layout.theirs(ours, is_bottleneck(config.trunk)) for ours in expected}
    _check_names(layout, config, state, {names[ours]: it for ours, it in expected.items()})
    renamed = {
        ours: _plain(state[theirs]) if theirs in state else torch.zeros((), dtype=torch.int64)
        for ours, theirs in names.items()
    }
    broken = [names[it] for it, value in renamed.items() if not np.isfinite(value.numpy()).all()]
    if broken:
        raise CheckpointError(f"NaN or infinity in {_some(broken)}: training diverged, or damage")
    return model, renamed


def detect(names: Collection[str]) -> Layout:
    """Recognize the layout that ``names`` are in.

    Raises:
        CheckpointError: None of them; says what was found and what is known.
    """
    for layout in LAYOUTS:
        if layout.mark in names:
            return layout
    if any(name.startswith(("trunk.", "head.")) for name in names):
        return OURS
    some = ", ".join(sorted(names)[:5]) or "no tensor at all"
    marks = "; ".join(f"{layout.title} (has {layout.mark})" for layout in LAYOUTS)
    raise CheckpointError(
        f"these are not the tensors of an SSCD model: {some}{', …' if len(names) > 5 else ''}. "
        f"Known layouts: {OURS.title} (trunk.…, head.…); {marks}."
    )


def infer_config(layout: Layout, state: Mapping[str, Tensor]) -> EncoderConfig:
    """Read architecture and descriptor size from the tensors.

    Raises:
        CheckpointError: The tensors are those of no known architecture.
    """
    if layout is DINO:
        return EncoderConfig.vit_baseline(_infer_vit(state, "patch_embed.proj.weight", r"blocks"))
    if layout is TORCHVISION:
        block = "backbone.layer1.0."
        trunk = _infer_resnet(
            state, r"backbone\.layer([1-4])\.(\d+)\.", block + "conv2", block + "conv3"
        )
    elif layout is CLASSY:
        block = "backbone.blocks.0.block0-0.convolutional_block."
        trunk = _infer_resnet(
            state, r"backbone\.blocks\.([0-3])\.block\d-(\d+)\.", block + "3", block + "6"
        )
    elif "trunk.conv_proj.weight" in state:
        blocks = r"trunk\.encoder\.layers\.encoder_layer_"
        trunk = _infer_vit(state, "trunk.conv_proj.weight", blocks)
    elif "trunk.stem.conv.weight" in state:
        trunk = _infer_lite(state)
    elif "trunk.conv1.weight" in state:
        block = "trunk.layer1.0."
        trunk = _infer_resnet(
            state, r"trunk\.layer([1-4])\.(\d+)\.", block + "conv2", block + "conv3"
        )
    else:
        raise CheckpointError(
            "the tensors do not say which trunk they belong to; keep the config.json that "
            "save_pretrained wrote beside model.safetensors and load that folder"
        )
    return _with_head(layout, state, trunk)


def strip_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the prefixes ``model.``, ``module.``, ``_orig_mod.`` that every name begins with."""
    plain = dict(state)
    while plain:
        prefix = next((w for w in _WRAPPERS if all(name.startswith(w) for name in plain)), None)
        if prefix is None:
            break
        plain = {name.removeprefix(prefix): tensor for name, tensor in plain.items()}
    return plain


def is_bottleneck(trunk: str) -> bool:
    """Whether the blocks of ``trunk`` have three convolutions (ResNet-50 and deeper)."""
    return trunk in RESNETS and RESNETS[trunk][0].expansion == 4


def _torchvision_name(ours: str, bottleneck: bool) -> str:
    part, name = ours.split(".", 1)
    return f"backbone.{name}" if part == "trunk" else f"backbone.fc.{name}"


def _classy_name(ours: str, bottleneck: bool) -> str:
    part, name = ours.split(".", 1)
    if part == "head":
        return f"embeddings.1.{name}"
    block = re.fullmatch(r"layer(\d)\.(\d+)\.(\w+)\.(.+)", name)
    if block is None:
        layer, field = name.split(".", 1)
        return f"backbone.{_CLASSY_STEM[layer]}.{field}"
    stage, number, layer, field = int(block[1]) - 1, block[2], block[3], block[4]
    last = "bn3" if bottleneck else "bn2"  # Classy keeps the last batch norm outside its Sequential
    layer = "bn" if layer == last else _CLASSY_BLOCK.get(layer, layer)
    return f"backbone.blocks.{stage}.block{stage}-{number}.{layer}.{field}"


def _dino_name(ours: str, bottleneck: bool) -> str:
    name = ours.removeprefix("trunk.")
    block = re.fullmatch(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)", name)
    prefix, name = (f"blocks.{block[1]}.", block[2]) if block else ("", name)
    for mine, theirs in _DINO.items():
        if name.startswith(mine):
            return f"{prefix}{theirs}{name.removeprefix(mine)}"
    return ours


OURS = Layout("sscd-vec", "trunk.", lambda ours, bottleneck: ours)
TORCHVISION = Layout("torchvision", "backbone.conv1.weight", _torchvision_name)
CLASSY = Layout("Classy Vision", "backbone.initial_block._module.0.weight", _classy_name)
DINO = Layout("DINO ViT", "patch_embed.proj.weight", _dino_name)
LAYOUTS = (TORCHVISION, CLASSY, DINO)


def _with_head(layout: Layout, state: Mapping[str, Tensor], trunk: str) -> EncoderConfig:
    """Size and kind of the projection; a file without one describes trunk features."""
    heads: tuple[tuple[Head, str], ...] = (("linear", "head.weight"), ("mlp", "head.2.weight"))
    for head, ours in heads:
        weight = state.get(layout.theirs(ours, False))
        if weight is not None and weight.ndim == 2:
            return EncoderConfig(trunk=trunk, dim=weight.shape[0], head=head)
    if layout is OURS and not any(name.startswith("head.") for name in state):
        return EncoderConfig(trunk=trunk, features="trunk")
    raise CheckpointError(f"missing tensor {layout.theirs('head.weight', False)}: the projection")


def _infer_resnet(
    state: Mapping[str, Tensor], pattern: str, second_name: str, third_name: str
) -> str:
    """Match blocks per layer, kind of block, groups and width with ``RESNETS``."""
    blocks: dict[str, int] = {}
    for name in state:
        found = re.match(pattern, name)
        if found:
            blocks[found[1]] = max(blocks.get(found[1], 0), int(found[2]) + 1)
    counts = tuple(blocks[layer] for layer in sorted(blocks))
    second = state.get(f"{second_name}.weight")
    if second is None or second.ndim != 4 or 0 in second.shape:
        raise CheckpointError(f"missing or misshaped tensor {second_name}.weight")
    bottleneck = f"{third_name}.weight" in state
    groups, width = second.shape[0] // second.shape[1], second.shape[1]
    for name, (block, layers, known_groups, known_width) in RESNETS.items():
        same = (block.expansion == 4, layers) == (bottleneck, counts)
        if same and (known_groups, known_width) == (groups, width):
            return name
    kind = "three" if bottleneck else "two"
    raise CheckpointError(
        f"no known ResNet has {'-'.join(map(str, counts))} blocks of {kind} convolutions with "
        f"{groups} group(s) of width {width}. Known: {', '.join(RESNETS)}."
    )


def _infer_lite(state: Mapping[str, Tensor]) -> str:
    """Match blocks and channels per stage with EfficientNet-Lite's variants."""
    found: dict[int, tuple[int, int]] = {}
    for name, tensor in state.items():
        block = re.fullmatch(r"trunk\.stages\.(\d+)\.(\d+)\.project\.conv\.weight", name)
        if block:
            stage, number = int(block[1]), int(block[2])
            repeats = max(found.get(stage, (0, 0))[0], number + 1)
            found[stage] = (repeats, tensor.shape[0])
    stages = tuple(found[stage] for stage in sorted(found))
    for variant in LITES:
        if scaled_stages(variant) == stages:
            return variant
    raise CheckpointError(f"no EfficientNet-Lite has stages of (blocks, channels) {stages}")


def _infer_vit(state: Mapping[str, Tensor], projection: str, blocks: str) -> str:
    """Match patch, depth and width with ``VITS``."""
    width, _, patch, _ = state[projection].shape
    numbers = [int(m[1]) for name in state if (m := re.match(rf"{blocks}\.?(\d+)\.", name))]
    depth = max(numbers, default=-1) + 1
    for name, (known_patch, known_depth, _, known_width) in VITS.items():
        if (known_patch, known_depth, known_width) == (patch, depth, width):
            return name
    raise CheckpointError(
        f"no known ViT has {depth} layers of width {width} on {patch}-pixel patches. "
        f"Known: {', '.join(VITS)}."
    )


def _check_names(
    layout: Layout,
    config: EncoderConfig,
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
) -> None:
    """Compare names and shapes, both as the file has them."""
    wrong = {
        "missing": [
            name
            for name in expected  # files of before torch 0.4.1 have no such counters
            if name not in state and not name.endswith("num_batches_tracked")
        ],
        "not part of this model": sorted(set(state) - set(expected)),
        "misshaped": [
            f"{name} is {tuple(state[name].shape)}, {tuple(it.shape)} expected"
            for name, it in expected.items()
            if name in state and state[name].shape != it.shape
        ],
    }
    if any(wrong.values()):
        raise CheckpointError(
            f"the tensors ({layout.title} layout) are not those of {_describe(config)}. "
            + "; ".join(f"{what}: {_some(it)}" for what, it in wrong.items() if it)
        )


def _plain(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).contiguous()


def _describe(config: EncoderConfig) -> str:
    if config.features == "trunk":
        return f"{config.trunk} (trunk features)"
    return f"{config.trunk} with a {config.head} head to {config.dim} dimensions"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
