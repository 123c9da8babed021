"""A model file never runs anything, whatever kind it claims to be."""

import io
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sscd_vec.encoder.archives import read_torchscript
from sscd_vec.encoder.checkpoint import read_checkpoint
from sscd_vec.models import CheckpointError

jit: Any = torch.jit  # has no type annotations


class Attack:
    """Writes a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return exec, (f"import pathlib; pathlib.Path({str(self.mark)!r}).touch()",)


def zipped(**records: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records.items():
            archive.writestr(f"model/{name.replace('__', '.')}", content)
    return buffer.getvalue()


def torch_save(attack: Attack) -> bytes:
    buffer = io.BytesIO()
    torch.save({"backbone.conv1.weight": torch.zeros(1), "x": attack}, buffer)
    return buffer.getvalue()


def legacy_torch_save(attack: Attack) -> bytes:
    buffer = io.BytesIO()
    torch.save(attack, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def raw_pickle(attack: Attack) -> bytes:
    return pickle.dumps(attack)


def torchscript(attack: Attack) -> bytes:
    return zipped(data__pkl=pickle.dumps(attack, 2), constants__pkl=b"\x80\x02).")


def torchscript_constants(attack: Attack) -> bytes:
    return zipped(data__pkl=b"\x80\x02}.", constants__pkl=pickle.dumps(attack, 2))


KINDS = [torch_save, legacy_torch_save, raw_pickle, torchscript, torchscript_constants]


@pytest.mark.parametrize("make", KINDS)
def test_nothing_is_run(make: Callable[[Attack], bytes], tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    content = make(Attack(mark))
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert not mark.exists()
    if make in (torch_save, legacy_torch_save, raw_pickle):
        assert "refused, nothing was run" in str(caught.value)
        if make is not raw_pickle:  # its protocol is refused before any name is met
            assert re.search(r"it asks for (\w+\.)?exec", str(caught.value))
    if make is torchscript:
        assert re.search(r"asks for \w+\.exec", str(caught.value))


def test_the_attack_would_have_worked(tmp_path: Path) -> None:
    """The control: unpickled the ordinary way, it does run."""
    pickle.loads(pickle.dumps(Attack(tmp_path / "it-ran")))
    assert (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "os\nsystem",
        "builtins\ngetattr",
        "torch._utils\n_rebuild_tensor_v2.__globals__",
        "torch\nload",
        "torch.jit._pickle\nos",
        "sscd_vec.encoder.archives\npickle",
        "__torch__x\nModule",
    ],
)
def test_names_outside_the_module_tree_are_refused(name: str, tmp_path: Path) -> None:
    module, attribute = name.split("\n")
    pickled = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"."
    path = tmp_path / "model.pt"
    path.write_bytes(zipped(data__pkl=pickled, constants__pkl=b"\x80\x02)."))
    with pytest.raises(CheckpointError, match="refused and nothing was run"):
        read_torchscript(path)


def scripted(module: nn.Module, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit.script(module).save(str(path))


def test_tensors_that_leave_their_storage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    scripted(nn.Linear(3, 5, bias=False), path)
    assert read_torchscript(path)["weight"].shape == (5, 3)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(records)).split("/")[0]
    pickled = records[f"{root}/data.pkl"]
    assert pickled.count(b"K\x05K\x03t") == 1  # the shape (5, 3)
    records[f"{root}/data.pkl"] = pickled.replace(b"K\x05K\x03t", b"K\x09K\x03t")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    with pytest.raises(CheckpointError, match="out of bounds"):
        read_checkpoint(path)


def test_short_and_compressed_storages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    scripted(nn.Linear(3, 5, bias=False), path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    storage = next(name for name in records if name.endswith("data/0"))
    for kind, content, message in (
        (zipfile.ZIP_STORED, b"1234", "holds 4 bytes, 60 were declared"),
        (zipfile.ZIP_DEFLATED, records[storage], "is compressed"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name, original in records.items():
                archive.writestr(name, original, zipfile.ZIP_STORED)
                if name == storage:
                    archive.filelist.pop()
                    del archive.NameToInfo[name]
                    archive.writestr(name, content, kind)
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(path)


def test_a_frozen_module_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit.freeze(jit.script(nn.Linear(3, 5).eval())).save(str(path))
    with pytest.raises(CheckpointError, match=r"Export it again without torch\.jit\.freeze"):
        read_checkpoint(path)


def test_other_attributes_of_a_scripted_module_are_passed_over(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.sizes = [1, 2]
            self.names = {"a": "b"}
            self.rate = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.inner(x) * self.rate
            return scaled

    path = tmp_path / "model.pt"
    odd = Odd()
    scripted(odd, path)
    state = read_torchscript(path)
    assert list(state) == ["inner.weight", "inner.bias"]
    assert torch.equal(state["inner.weight"], odd.inner.weight)


# Files that are small and would need much memory.


def saved(path: Path, content: bytes, **more: bytes) -> Path:
    """An archive of torch.save with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for record, raw in more.items():
            archive.writestr(f"archive/{record}", raw)
    return path


def doubled(levels: int) -> bytes:
    """A pickled list of two lists of two lists …: short, and 2^levels values when written out."""
    value: object = "x"
    for _ in range(levels):
        value = [value, value]
    return pickle.dumps({"state_dict": value}, 2)


def test_a_deflated_archive_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"backbone.conv1.weight": torch.zeros(2_000_000)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    assert path.stat().st_size < 20_000
    with pytest.raises(CheckpointError, match="is compressed, which torch never writes"):
        read_checkpoint(path)


@pytest.mark.parametrize("kind", ["torch.save", "TorchScript"])
def test_a_memo_of_a_billion_slots_is_refused(kind: str, tmp_path: Path) -> None:
    bomb = b"\x80\x02}r" + (2**30).to_bytes(4, "little") + b"."
    more = {"constants.pkl": b"\x80\x02)."} if kind == "TorchScript" else {}
    path = saved(tmp_path / "model.pt", bomb, **more)
    with pytest.raises(CheckpointError, match="asks for 1073741824 memo slots: a memory bomb"):
        read_checkpoint(path)


@pytest.mark.parametrize("kind", ["torch.save", "TorchScript", "before zip archives"])
def test_values_that_double_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    if kind == "before zip archives":
        path.write_bytes(doubled(60))
    else:
        more = {"constants.pkl": b"\x80\x02)."} if kind == "TorchScript" else {}
        saved(path, doubled(60), **more)
    assert path.stat().st_size < 2_000
    with pytest.raises(CheckpointError, match="stands for more than 4194304 values"):
        read_checkpoint(path)


def test_a_value_inside_itself_is_refused(tmp_path: Path) -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="holds a value inside itself"):
        read_checkpoint(saved(tmp_path / "model.pt", pickle.dumps(endless, 2)))


def test_ordinary_sharing_inside_a_checkpoint_is_fine(tmp_path: Path) -> None:
    shared = (0.9, 0.999)
    groups = [{"betas": shared, "name": f"group {number}"} for number in range(500)]
    state = {"head.weight": torch.zeros(3, 2)}
    torch.save({"state_dict": state, "average": state, "groups": groups}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="do not say which trunk"):  # it was read
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_that_repeat_their_bytes_are_refused(legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    state = {"backbone.conv1.weight": torch.zeros(1).expand(50_000, 50_000)}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match="unfold to 10000000000 bytes, the file has"):
        read_checkpoint(path)


def test_repeated_bytes_in_torchscript_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    module = nn.Linear(3, 5, bias=False)
    module.weight = nn.Parameter(torch.zeros(1).expand(20_000, 30_000))
    scripted(module, path)
    assert path.stat().st_size < 50_000
    with pytest.raises(CheckpointError, match="unfold to 2400000000 bytes, the file has"):
        read_checkpoint(path)


def test_a_pickle_of_many_megabytes_is_not_a_module_tree(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", bytes(17 * 2**20), **{"constants.pkl": b"\x80\x02)."})
    with pytest.raises(CheckpointError, match="data.pkl has 17825792 bytes, 16777216 are allowed"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("field", "value"), [("size", 10**9), ("dim", 10**9), ("size", 4097), ("dim", 65537)]
)
def test_an_absurd_config_is_refused(field: str, value: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    config = {"trunk": "resnet18", "features": "trunk", field: value}
    (tmp_path / "config.json").write_text(json.dumps({"encoder": config}))
    with pytest.raises(CheckpointError, match=rf"{field} must be an integer from 1 to \d+, got"):
        read_checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_or_device_is_not_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt")
    for path in (tmp_path / "model.pt", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_checkpoint(path)
