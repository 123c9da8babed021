"""Index files from elsewhere: verified whole and read by a child process first, and only once."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from faults.indexes import ALTERED, forge, run_altered
from sscd_vec.adapters.faiss import FaissIndex, IndexFileError, files, inspection, settings
from sscd_vec.adapters.faiss.settings import sidecar_path
from sscd_vec.files import file_sha256
from sscd_vec.normalize import Normalizer

from .conftest import Photos

MMAP = pytest.mark.parametrize("mmap", [False, True])


@pytest.fixture
def path(photos: Photos, normalizer: Normalizer, tmp_path: Path) -> Path:
    index = FaissIndex(normalizer)
    index.add(photos.ids, photos.references, [{"n": i} for i in range(600)])
    index.save(tmp_path / "a.faiss")
    return tmp_path / "a.faiss"


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that a child process has read."""
    seen: list[Path] = []
    inspect = inspection.inspect

    def watched(path: Path, about: settings.Settings, mmap: bool) -> None:
        seen.append(path)
        inspect(path, about, mmap)

    monkeypatch.setattr(inspection, "inspect", watched)
    return seen


@MMAP
def test_an_altered_middle_is_refused(mmap: bool, normalizer: Normalizer, path: Path) -> None:
    large = FaissIndex(normalizer)
    rows = np.random.default_rng(0).normal(size=(30_000, 30)).astype(np.float32)
    large.add(range(30_000), rows / np.linalg.norm(rows, axis=1, keepdims=True))
    large.save(path)
    raw = bytearray(path.read_bytes())
    assert len(raw) > 3 * settings.SAMPLE
    assert len(FaissIndex.open(path, normalizer, mmap=mmap)) == 30_000
    raw[len(raw) // 2] ^= 1  # neither end knows about it
    path.write_bytes(raw)
    for _ in range(2):
        with pytest.raises(IndexFileError, match="names SHA-256 .*, the file has"):
            FaissIndex.open(path, normalizer, mmap=mmap)


@MMAP
def test_altered_ids_are_refused(mmap: bool, normalizer: Normalizer, path: Path) -> None:
    raw = sidecar_path(path).read_bytes()
    place = raw.index(b"r100r101")
    sidecar_path(path).write_bytes(raw[:place] + b"x" + raw[place + 1 :])
    with pytest.raises(IndexFileError, match="damaged .*do not have the hash"):
        FaissIndex.open(path, normalizer, mmap=mmap)


def test_what_was_saved_here_is_mapped_without_reading_it(
    path: Path, normalizer: Normalizer, inspected: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    whole = file_sha256

    def hashing(of: Path) -> str:
        read.append(of)
        return whole(of)

    monkeypatch.setattr(settings, "file_sha256", hashing)
    for _ in range(2):
        FaissIndex.open(path, normalizer, mmap=True)
    assert not read and not inspected
    FaissIndex.open(path, normalizer)  # reads all of it anyway
    assert read == [path] and not inspected
    os.utime(path)
    FaissIndex.open(path, normalizer, mmap=True)
    assert read == [path] * 2 and inspected == [path], "it may have changed"
    FaissIndex.open(path, normalizer, mmap=True)
    assert read == [path] * 2 and inspected == [path]


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "HNSW16"])
@MMAP
def test_a_copy_is_inspected_once(
    mmap: bool,
    factory: str,
    normalizer: Normalizer,
    photos: Photos,
    inspected: list[Path],
    tmp_path: Path,
) -> None:
    path, copy = tmp_path / "here.faiss", tmp_path / "elsewhere.faiss"
    made = FaissIndex(normalizer, factory, parameters={"nprobe": 4} if "IVF" in factory else {})
    made.add(photos.ids, photos.references)
    made.save(path)
    copy.write_bytes(path.read_bytes())
    sidecar_path(copy).write_bytes(sidecar_path(path).read_bytes())
    for _ in range(2):
        opened = FaissIndex.open(copy, normalizer, mmap=mmap)
        assert opened.search(photos.references[:9], 1).ids.tolist() == photos.ids[:9]
    assert inspected == [copy]


def test_a_trusted_file_needs_no_child(
    path: Path, normalizer: Normalizer, inspected: list[Path]
) -> None:
    os.utime(path)
    assert len(FaissIndex.open(path, normalizer, trusted=True)) == 600 and not inspected


def test_a_cache_that_cannot_be_written_costs_an_inspection_each_time(
    path: Path,
    normalizer: Normalizer,
    inspected: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "file"))
    for count in (1, 2):
        assert len(FaissIndex.open(path, normalizer)) == 600
        assert inspected == [path] * count


def test_only_the_latest_files_are_remembered(
    path: Path, normalizer: Normalizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "REMEMBERED", 3)
    paths = [tmp_path / f"{i}.faiss" for i in range(5)]
    for each in paths:
        FaissIndex(normalizer).save(each)
    assert [inspection.is_known(each) for each in paths] == [False, False, True, True, True]


@MMAP
def test_a_file_that_kills_its_reader_is_refused(
    mmap: bool, path: Path, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    run = subprocess.run

    def killed(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        return run([command[0], "-c", child], **options)  # type: ignore[call-overload,no-any-return]

    os.utime(path)
    monkeypatch.setattr(subprocess, "run", killed)
    for _ in range(2):
        with pytest.raises(IndexFileError, match="FAISS crashed with signal 11"):
            FaissIndex.open(path, normalizer, mmap=mmap)


def test_a_program_that_is_not_python_starts_no_copy_of_itself(
    path: Path, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(path)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(IndexFileError, match="trusted=True if you know who made it"):
        FaissIndex.open(path, normalizer)
    assert len(FaissIndex.open(path, normalizer, trusted=True)) == 600


def test_a_child_that_never_ends_is_ended(
    path: Path, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(path)
    monkeypatch.setattr(inspection, "SECONDS", 0.01)
    with pytest.raises(IndexFileError, match="no end after 0 s"):
        FaissIndex.open(path, normalizer)


def test_a_file_that_claims_more_than_it_holds_takes_no_memory(
    path: Path, normalizer: Normalizer
) -> None:
    raw = path.read_bytes()
    rows = struct.pack("<q", 600)
    assert raw.count(rows) >= 1
    forge(path, raw.replace(rows, struct.pack("<q", 1 << 33), 1))
    with pytest.raises(IndexFileError, match="FAISS must not read this file here"):
        FaissIndex.open(path, normalizer)


@MMAP
def test_a_graph_that_points_outside_is_refused(
    mmap: bool, photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "graph.faiss"
    made = FaissIndex(normalizer, "HNSW16")
    made.add(photos.ids, photos.references)
    made.save(path)
    index: Any = faiss.read_index(str(path))
    neighbours = faiss.rev_swig_ptr(index.hnsw.neighbors.data(), index.hnsw.neighbors.size())
    raw = path.read_bytes()
    place = raw.index(neighbours.tobytes())
    forge(path, raw[: place + 4000] + struct.pack("<i", 10**9) + raw[place + 4004 :])
    with pytest.raises(IndexFileError, match="FAISS must not read this file here"):
        FaissIndex.open(path, normalizer, mmap=mmap)


@MMAP
def test_lists_that_point_outside_are_refused(
    mmap: bool, photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "lists.faiss"
    made = FaissIndex(normalizer, "IVF4,Flat")
    made.add(photos.ids, photos.references)
    made.save(path)
    lists: Any = faiss.extract_index_ivf(made.index).invlists
    rows = faiss.rev_swig_ptr(lists.get_ids(0), lists.list_size(0)).copy()
    raw, before = path.read_bytes(), rows.tobytes()
    rows[3] = 10**12
    forge(path, raw.replace(before, rows.tobytes(), 1))
    with pytest.raises(IndexFileError, match="a list points outside of the index"):
        FaissIndex.open(path, normalizer, mmap=mmap)


def test_lists_in_another_file_are_refused(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "lists.faiss"
    made = FaissIndex(normalizer, "IVF4,Flat")
    made.add(photos.ids, photos.references)
    made.save(path)
    lists: Any = faiss.extract_index_ivf(made.index)
    elsewhere = faiss.OnDiskInvertedLists(4, lists.code_size, str(tmp_path / "private"))
    elsewhere.merge_from_1(lists.invlists)
    lists.replace_invlists(elsewhere)
    faiss.write_index(made.index, str(tmp_path / "other"))
    forge(path, (tmp_path / "other").read_bytes())
    with pytest.raises(IndexFileError, match="its lists are in another file, .*private"):
        FaissIndex.open(path, normalizer)


@pytest.mark.parametrize("wrong", ["offsets", "dead", "utf8"])
@MMAP
def test_forged_ids_are_refused(
    mmap: bool, wrong: str, photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "a.faiss"
    made = FaissIndex(normalizer, "HNSW16")  # keeps its dead rows
    made.add(photos.ids, photos.references)
    made.remove("r5")
    table = made._storage.table
    arrays = table.arrays()
    if wrong == "offsets":
        arrays["ids.offsets"][300] = -(2**40)
    elif wrong == "dead":
        arrays["dead"][0] = 10**12
    else:
        arrays["ids.data"][7] = 0xFF
    table.arrays = lambda: arrays  # type: ignore[method-assign]  # hashes and all
    made.save(path)
    os.utime(path)
    with pytest.raises(IndexFileError, match="damaged"):
        FaissIndex.open(path, normalizer, mmap=mmap)


@pytest.mark.parametrize("factory", ALTERED)
def test_altered_files_with_forged_sidecars_crash_nobody(factory: str, tmp_path: Path) -> None:
    told = run_altered(factory, range(6), tmp_path)
    assert told["crashed"] == 0 < told["refused"] and told.total() == 6


def test_the_check_passes_what_faiss_makes(photos: Photos, normalizer: Normalizer) -> None:
    for factory in ("NSG16", "IVF4_HNSW4,Flat", "RR32,HNSW16", "IVF4,PQ8x4fs", "IVF4,FlatDedup"):
        made = FaissIndex(normalizer, factory)
        made.add(photos.ids, photos.references)
        inspection.check(made.index, Path("a.faiss"))
    empty = FaissIndex(normalizer, "HNSW16")
    inspection.check(empty.index, Path("a.faiss"))
    assert files.saved_settings(Path("nowhere.faiss")) is None
