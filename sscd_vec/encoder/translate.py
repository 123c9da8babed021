"""Tensors under anybody's names to tensors under ours, checked against the network they are for."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.layouts import (
    detect,
    infer_config,
    is_bottleneck,
    strip_wrappers,
)
from sscd_vec.encoder.model import build_model
from sscd_vec.models import CheckpointError

_NAMED = 8  # tensors named in one error before "and n more"


def translate(
    state: Mapping[str, Tensor],
    config: EncoderConfig | None = None,
    expected: Mapping[str, Tensor] | None = None,
) -> tuple[EncoderConfig, dict[str, Tensor]]:
    """Rename tensors to ours and check them.

    Args:
        state: Tensors in any known layout, with or without a wrapper's prefix.
        config: What they are; read from the tensors if None.
        expected: Names and shapes of ``config``'s tensors, where the caller has them.

    Returns:
        The config, and contiguous CPU tensors in the order of ``SSCDModel.state_dict()``, floating
        point as float32. Where the descriptor is trunk features there may be no head.

    Raises:
        CheckpointError: Names the tensors that are missing, too many, misshaped or not finite, as
            the file names them.
    """
    state = strip_wrappers(state)
    layout = detect(state)
    config = config or infer_config(layout, state)
    bottleneck = is_bottleneck(config.trunk)
    expected = expected or _expected(config)
    if config.features == "trunk" and not any(name.startswith("head.") for name in state):
        expected = {name: it for name, it in expected.items() if not name.startswith("head.")}
    names = {ours: layout.theirs(ours, bottleneck) for ours in expected}

    def counts_batches(name: str) -> bool:  # files of before torch 0.4.1 have no such counters
        return name.endswith("num_batches_tracked")

    wrong = {
        "missing": [it for it in names.values() if it not in state and not counts_batches(it)],
        "not part of this model": sorted(set(state) - set(names.values())),
        "misshaped": [
            f"{theirs} is {tuple(state[theirs].shape)}, {tuple(expected[ours].shape)} expected"
            for ours, theirs in names.items()
            if theirs in state and state[theirs].shape != expected[ours].shape
        ],
    }
    if any(wrong.values()):
        raise CheckpointError(
            f"the tensors ({layout.title} layout) are not those of {_describe(config)}. "
            + "; ".join(f"{what}: {_some(it)}" for what, it in wrong.items() if it)
        )
    ours_state = {
        ours: _plain(state[theirs]) if theirs in state else torch.zeros((), dtype=torch.int64)
        for ours, theirs in names.items()
    }
    broken = [names[it] for it, value in ours_state.items() if not np.isfinite(value.numpy()).all()]
    if broken:
        raise CheckpointError(f"NaN or infinity in {_some(broken)}: training diverged, or damage")
    return config, ours_state


def _expected(config: EncoderConfig) -> dict[str, Tensor]:
    """Names and shapes of every tensor of ``config``'s model, without memory for them."""
    try:
        with torch.device("meta"):
            return build_model(config).state_dict()
    except ValueError as error:
        raise CheckpointError(str(error)) from error


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
