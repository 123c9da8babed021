"""A model file never runs anything, whatever kind it claims to be."""

import io
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
