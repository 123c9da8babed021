"""The tensors of a TorchScript archive, read without running any of it.

An archive is a zip of ``code/`` (TorchScript source), ``data.pkl`` (the module tree) and ``data/N``
(raw tensor storage). Only the last two are opened here, ``data.pkl`` with an unpickler that knows
tensors, plain containers and inert module objects and refuses every other name. ``torch.jit.load``
is never called.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sscd_vec.models import CheckpointError

_DEEPEST = 64
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def is_torchscript(archive: zipfile.ZipFile) -> bool:
    """Whether a zip is a TorchScript archive and not one of ``torch.save``."""
    names = [name.split("/", 1)[-1] for name in archive.namelist()]
    return "constants.pkl" in names or any(name.startswith("code/") for name in names)


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Return the parameters and buffers of the module in ``path``, named as ``state_dict()`` does.

    Raises:
        CheckpointError: The archive has no module tree, its weights are folded into its code, or
            its pickle asks for anything but tensors and modules.
    """
    with zipfile.ZipFile(path) as archive:
        entries = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(entries) != 1:
            raise CheckpointError("not a TorchScript archive (no data.pkl inside)")
        root = entries[0].removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in archive.namelist() and _record(archive, order).strip() != b"little":
            raise CheckpointError("written on a big-endian machine; convert it there")
        try:
            module = _ModuleReader(archive, root).load()
        except CheckpointError:
            raise
        except Exception as error:  # pickle and torch raise all kinds on a damaged tree
            raise CheckpointError(f"damaged module tree ({error or type(error)})") from error
        state: dict[str, Tensor] = {}
        _collect(module, "", state, 0)
        if not state and any(name.startswith(f"{root}constants/") for name in archive.namelist()):
            raise CheckpointError(
                "a frozen TorchScript module: its weights are constants of its code and "
                "have no names. Export it again without torch.jit.freeze or optimize_for_inference."
            )
    return state


class _ModuleReader(pickle.Unpickler):
    """Unpickles tensors, plain containers and module trees; calls nothing a file can name.

    What ``find_class`` hands out is made anew for each archive, so nothing a pickle does to these
    objects outlives the call.
    """

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(_record(archive, f"{root}data.pkl")))
        self._archive, self._root = archive, root
        self._storages: dict[str, Tensor] = {}
        self._known: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor_v2": lambda *args: _tensor(*args[:4]),
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "torch.jit._pickle.restore_type_tag": lambda value, _: value,
            "torch.jit._pickle.build_intlist": lambda values: values,
            "torch.jit._pickle.build_doublelist": lambda values: values,
            "torch.jit._pickle.build_boollist": lambda values: values,
            "torch.jit._pickle.build_tensorlist": lambda values: values,
        }

    def find_class(self, module: str, name: str) -> object:
        """Resolve the few names a module tree needs."""
        full = f"{module}.{name}"
        if module == "__torch__" or module.startswith("__torch__."):
            return type("Module", (_Module,), {})
        if full == "collections.OrderedDict":
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if full in self._known:
            return self._known[full]
        raise CheckpointError(
            f"the TorchScript archive's pickle asks for {full}, which is no tensor, container or "
            "module. It was refused and nothing was run."
        )

    def persistent_load(self, pid: object) -> Tensor:
        """Return the raw storage ``("storage", type, key, device, size)``."""
        match pid:
            case ("storage", torch.dtype() as dtype, str(key), _, int(size)):
                pass
            case _:
                raise CheckpointError(f"unknown kind of stored tensor in the archive: {pid}")
        if key not in self._storages:
            raw = _record(self._archive, f"{self._root}data/{key}")
            if len(raw) != size * dtype.itemsize:
                raise CheckpointError(
                    f"storage {key} holds {len(raw)} bytes, {size * dtype.itemsize} were declared"
                )
            flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0)
            self._storages[key] = flat.to(dtype)
        return self._storages[key]


class _Module:
    """A module of the archive: its attributes and nothing of its class."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.attributes = state


def _tensor(storage: Tensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Rebuild a tensor; torch refuses a view that leaves its storage."""
    return torch.as_strided(storage, tuple(size), tuple(stride), offset)


def _collect(value: object, name: str, state: dict[str, Tensor], depth: int) -> None:
    """Walk the module tree, naming each tensor by its path."""
    if depth > _DEEPEST:
        raise CheckpointError(f"modules nested more than {_DEEPEST} deep at {name[:80]}…")
    if isinstance(value, Tensor):
        state[name] = value
    elif isinstance(value, _Module):
        for key, child in getattr(value, "attributes", {}).items():
            _collect(child, f"{name}.{key}" if name else str(key), state, depth + 1)


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read one record, its CRC checked; only stored records, so its size is the file's own."""
    try:
        entry = archive.getinfo(name)
    except KeyError as error:
        raise CheckpointError(f"the archive lacks its record {name}") from error
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"record {name} is compressed, which torch never writes")
    return archive.read(entry)
