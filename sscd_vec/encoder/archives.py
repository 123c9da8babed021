"""The pickles inside torch's files: checked before they are read, and read without running them.

A TorchScript archive is a zip of ``code/`` (TorchScript source), ``data.pkl`` (the module tree) and
``data/N`` (raw tensor storage). Only the last two are opened here, ``data.pkl`` with an unpickler
that knows tensors, plain containers and inert module objects and refuses every other name.
``torch.jit.load`` is never called.
"""

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from sscd_vec.models import CheckpointError

_DEEPEST = 64
_MOST_PICKLE = 16 * 2**20  # bytes; one of a ResNet-50 has a hundred thousand
_MOST_GROWTH = 64  # values a pickle may stand for, per byte of it
_LEAST_LIMIT = 2**22
_LEGACY_PICKLES = 5  # magic number, version, system, state, keys of storages
_MUTATORS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_BUSY = -2  # total of a value that is being counted
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


def check_pickle(file: IO[bytes]) -> None:
    """Refuse the next pickle in ``file`` if reading it could take far more memory than it has.

    Two ways are known: a memo slot of a huge number, for which the reader makes room, and values
    that hold each other twice at every level, which double whenever they are written out, compared
    or walked. Nothing is built here; the values are only counted.

    Raises:
        CheckpointError: It could, or it is not a pickle.
    """
    begin, values = file.tell(), list[_Value]()
    stack: list[_Value | None] = []  # None is a mark
    memo: dict[int, _Value] = {}
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if opcode.name.endswith("PUT") and int(argument or 0) > number:
                raise CheckpointError(f"its pickle asks for {argument} memo slots: a memory bomb")
            _follow(opcode, argument, stack, memo, values)
    except CheckpointError:
        raise
    except Exception as error:  # damaged pickles raise all kinds
        raise CheckpointError(f"not a file of torch.save ({error or type(error)})") from error
    limit = max(_LEAST_LIMIT, _MOST_GROWTH * (file.tell() - begin))
    for value in values:
        if _total(value) > limit:
            raise CheckpointError(
                f"its pickle of {file.tell() - begin} bytes stands for more than {limit} values: a "
                "memory bomb"
            )


class _Value:
    """A value of a pickle: what it holds, its own size and, once known, its size written out."""

    __slots__ = ("parts", "size", "total")

    def __init__(self, parts: "list[_Value]", size: int) -> None:
        self.parts, self.size, self.total = parts, size, -1


def _follow(
    opcode: pickletools.OpcodeInfo,
    argument: Any,  # noqa: ANN401 - a number, text or nothing
    stack: list[_Value | None],
    memo: dict[int, _Value],
    values: list[_Value],
) -> None:
    """Do to the stack what an opcode does, with sizes in place of values."""
    name = opcode.name
    if name.endswith("PUT") or name == "MEMOIZE":
        memo[len(memo) if argument is None else argument] = _value(stack[-1])
    elif name.endswith("GET"):
        stack.append(memo[argument])
    elif name in ("MARK", "DUP"):
        stack.append(None if name == "MARK" else stack[-1])
    elif name not in ("PROTO", "FRAME", "STOP"):
        parts = _taken(opcode, stack)
        if name in _MUTATORS:
            parts[0].parts.extend(parts[1:])
            stack.append(parts[0])
        elif opcode.stack_after:
            size = len(argument) if isinstance(argument, str | bytes | bytearray) else 1
            values.append(_Value(parts, size))
            stack.append(values[-1])


def _taken(opcode: pickletools.OpcodeInfo, stack: list[_Value | None]) -> list[_Value]:
    """Pop what an opcode takes: a number of values, or all above the last mark."""
    before = opcode.stack_before
    marked: list[_Value] = []
    count = len(before)
    if pickletools.markobject in before:
        count = before.index(pickletools.markobject)
        while (top := stack.pop()) is not None:
            marked.append(top)
    parts = [_value(stack.pop()) for _ in range(count)]
    return parts[::-1] + marked


def _value(top: _Value | None) -> _Value:
    if top is None:
        raise ValueError("a mark where a value belongs")
    return top


def _total(value: _Value) -> int:
    """Size of a value written out in full; what it holds twice counts twice."""
    waiting = [value]
    while waiting:
        top = waiting[-1]
        if top.total == _BUSY:  # all it holds is known
            top.total = top.size + sum(part.total for part in top.parts)
        if top.total >= 0:
            waiting.pop()
            continue
        top.total = _BUSY
        for part in top.parts:
            if part.total == _BUSY:
                raise CheckpointError("its pickle holds a value inside itself")
            if part.total < 0:
                waiting.append(part)
    return value.total


def check_saved(path: Path) -> None:
    """Check every pickle of a ``torch.save`` file, of either format, before torch reads it.

    Raises:
        CheckpointError: See ``check_pickle``.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    check_pickle(io.BytesIO(_record(archive, name)))
        return
    with path.open("rb") as file:
        for _ in range(_LEGACY_PICKLES):
            if file.peek(1)[:1] in (b"\x80", b"("):
                check_pickle(file)


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
        pickled = io.BytesIO(_record(archive, f"{root}data.pkl"))
        check_pickle(pickled)
        pickled.seek(0)
        super().__init__(pickled)
        self._archive, self._root = archive, root
        self._module = type("Module", (_Module,), {})
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
            return self._module
        if full == "collections.OrderedDict":
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if full in self._known:
            return self._known[full]
        raise CheckpointError(
            f"the TorchScript archive's pickle asks for {full}, which is not a tensor, container "
            "or module. It was refused and nothing was run."
        )

    def persistent_load(self, pid: object) -> Tensor:
        """Return the raw storage ``("storage", type, key, device, size)``."""
        match pid:
            case ("storage", torch.dtype() as dtype, str(key), _, int(size)):
                pass
            case _:
                raise CheckpointError(f"unknown kind of stored tensor: {str(pid)[:80]}")
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
    if name.endswith(".pkl") and entry.file_size > _MOST_PICKLE:
        raise CheckpointError(f"{name} has {entry.file_size} bytes, {_MOST_PICKLE} are allowed")
    return archive.read(entry)
