"""Model files: any kind a user holds is read, one safe kind is written.

The content of a file says what it is, never its name. Pickles are read with
``torch.load(weights_only=True)`` only, TorchScript archives without running them.
"""

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sscd_vec.encoder.archives import check_saved, is_torchscript, read_torchscript
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.layouts import recognize
from sscd_vec.encoder.model import SSCDModel, build_head, pooled_dim
from sscd_vec.files import PathLike, file_sha256, staging
from sscd_vec.models import CONFIG_FILE, WEIGHTS_FILE, CheckpointError, Released, check_archive

_FORMAT = 1
# Where training checkpoints keep weights and config; averaged weights are the ones to use.
_STATES = ("average", "state_dict", "model_state_dict", "model")
_CONFIGS = ("encoder_config", "config")


def read_model(path: PathLike, **changes: object) -> SSCDModel:
    """Read a model from any kind of file or folder, in evaluation mode.

    Args:
        path: See ``read_checkpoint``.
        changes: Fields of its config to change, such as ``size``.

    Raises:
        FileNotFoundError: Nothing is there.
        CheckpointError: It is not a model we can read; says why.
    """
    return _with_weights(*_read(path, changes))


def read_checkpoint(path: PathLike) -> tuple[EncoderConfig, dict[str, Tensor]]:
    """Read the config and the tensors of a model.

    Args:
        path: A folder with ``config.json`` and ``model.safetensors``, a ``.safetensors`` file, a
            ``torch.save`` file (released or training checkpoint) or a TorchScript archive.

    Returns:
        The config, and the float32 tensors under our names, checked against it: complete, none too
        many, of the right shapes and finite.

    Raises:
        FileNotFoundError: Nothing is there.
        CheckpointError: It is not a model we can read; says why.
    """
    model, state = _read(path, {})
    return model.config, state


def load_model(config: EncoderConfig, state: Mapping[str, Tensor]) -> SSCDModel:
    """Build the model of ``config`` around the tensors ``state``, in evaluation mode.

    The model takes the tensors over without copying. Trunk features need no head; where ``state``
    has none, the model has a fresh one to train.

    Raises:
        CheckpointError: Tensors are missing, too many, misshaped or not finite.
    """
    return _with_weights(*recognize(state, config))


def write_pretrained(
    folder: PathLike,
    config: EncoderConfig,
    state_dict: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

    ``config.json`` holds the hash of the weights, so an interrupted overwrite cannot pair one
    model's config with another's weights unnoticed.

    Args:
        folder: Made if absent.
        config: What the tensors are.
        state_dict: Tensors under our names, as ``SSCDModel.state_dict()`` gives them.
        dtype: Store floating-point tensors as this (``torch.float16`` halves the file).

    Raises:
        CheckpointError: The tensors are not those of ``config``.
    """
    folder = Path(folder)
    _, state = recognize(state_dict, config)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.to(dtype if dtype and tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in state.items()
    }
    with staging(folder / CONFIG_FILE) as settings, staging(folder / WEIGHTS_FILE) as weights:
        # One entry only: safetensors writes several in no fixed order, and the same weights must
        # give the same file.
        save_file(stored, weights, metadata={"sscd_vec": json.dumps(config.to_dict())})
        described = {
            "format": _FORMAT,
            "encoder": config.to_dict(),
            "weights_sha256": file_sha256(weights),
        }
        settings.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        weights.chmod(settings.stat().st_mode)  # safetensors makes files for their owner alone


def validate_release(path: Path, expected: Released) -> None:
    """Read a released model that is new in the cache.

    Raises:
        CheckpointError: It is not a model, or another than ``expected``.
    """
    config, _ = read_checkpoint(path)
    if (config.trunk, config.dim) != (expected.trunk, expected.dim):
        raise CheckpointError(
            f"holds {config.trunk} with {config.dim} dimensions, "
            f"{expected.trunk} with {expected.dim} expected"
        )


def _read(path: PathLike, changes: dict[str, object]) -> tuple[SSCDModel, dict[str, Tensor]]:
    """The model without memory for its weights, and its tensors."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no model file or folder at {path}")
    try:
        config, state = _read_folder(path) if path.is_dir() else _read_file(path)
        return recognize(state, config, **changes)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _with_weights(model: SSCDModel, state: dict[str, Tensor]) -> SSCDModel:
    """Give a model on the meta device its tensors, and a fresh head where there is none."""
    if not any(name.startswith("head.") for name in state):
        model.head = build_head(pooled_dim(model.trunk), model.config)
        state |= {f"head.{name}": tensor for name, tensor in model.head.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(True)


def _read_folder(folder: Path) -> tuple[EncoderConfig, dict[str, Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"no {name} in this folder; save_pretrained writes both")
    try:
        described = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(described, dict):
            raise ValueError("not a JSON object")
        if described.pop("format", _FORMAT) != _FORMAT:
            raise ValueError("written by a newer sscd-vec: upgrade to read it")
        expected = described.pop("weights_sha256", None)
        config = EncoderConfig.from_dict(described.get("encoder", described))
    except ValueError as error:
        raise CheckpointError(f"{CONFIG_FILE}: {error}") from error
    if expected is not None and expected != file_sha256(folder / WEIGHTS_FILE):
        raise CheckpointError(
            f"{WEIGHTS_FILE} is not the file {CONFIG_FILE} was written with (SHA-256 differs): it "
            "is damaged, was replaced, or a save was interrupted. Save or copy the folder again, "
            f"or delete weights_sha256 from {CONFIG_FILE} if you replaced the weights on purpose."
        )
    return config, _read_safetensors(folder / WEIGHTS_FILE)


def _read_file(path: Path) -> tuple[EncoderConfig | None, dict[str, Tensor]]:
    if not path.is_file():  # a pipe or device would block or never end
        raise CheckpointError("not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return _config_of(path), _read_safetensors(path)
    check_archive(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            torchscript = is_torchscript(archive)
        if torchscript:
            return None, _no_larger(read_torchscript(path), size)
    config, state = _read_pickle(path)
    return config, _no_larger(state, size)


def _no_larger(state: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Refuse tensors that repeat their bytes: written out, they are larger than their file."""
    unfolded = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if unfolded > size:
        raise CheckpointError(
            f"its tensors unfold to {unfolded} bytes, the file has {size}: a memory bomb"
        )
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"not a readable safetensors file ({error})") from error


def _config_of(path: Path) -> EncoderConfig | None:
    """The config inside a safetensors file of ours."""
    try:
        with safe_open(path, framework="pt") as file:
            described = (file.metadata() or {}).get("sscd_vec")
        return EncoderConfig.from_dict(json.loads(described)) if described else None
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"not a readable safetensors file ({error})") from error


def _read_pickle(path: Path) -> tuple[EncoderConfig | None, dict[str, Tensor]]:
    check_saved(path)
    try:
        with warnings.catch_warnings():  # of a pickle's protocol; what is wrong is said below
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        needs = f"it asks for {asked[1]}" if asked else "it is not a plain pickle of tensors"
        raise CheckpointError(
            f"refused, nothing was run: loading this file needs more than tensors ({needs}), and a "
            "pickle that needs more can run any program. If you trust it, save its tensors alone "
            "where it came from: torch.save(model.state_dict(), …)."
        ) from error
    except Exception as error:  # torch and pickle raise all kinds on a damaged file
        raise CheckpointError(f"not a file of torch.save ({error or type(error)})") from error
    config = None
    if isinstance(loaded, dict):
        config = next((c for key in _CONFIGS if (c := _config_in(loaded.get(key)))), None)
        loaded = next((loaded[key] for key in _STATES if isinstance(loaded.get(key), dict)), loaded)
    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointError(f"holds a {type(loaded).__name__}, not a state dict of tensors")
    strange = [str(name) for name, value in loaded.items() if not isinstance(value, Tensor)]
    if strange:
        raise CheckpointError(f"not a state dict: {', '.join(strange[:5])} is not a tensor")
    return config, {str(name): tensor for name, tensor in loaded.items()}


def _config_in(described: object) -> EncoderConfig | None:
    """The encoder's config, where a training checkpoint holds one."""
    if not isinstance(described, dict):
        return None
    try:
        return EncoderConfig.from_dict(described.get("encoder", described))
    except (TypeError, ValueError):
        return None
