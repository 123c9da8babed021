"""A FAISS file and its sidecar: written, mapped, damaged, killed halfway, read during a save."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from sscd_vec import locks
from sscd_vec.adapters.faiss import FaissIndex, IndexConflict, IndexFileError, files, settings
from sscd_vec.adapters.faiss.files import finish_save
from sscd_vec.adapters.faiss.settings import find_sidecar, sidecar_path
from sscd_vec.files import staging_path
from sscd_vec.locks import locked
from sscd_vec.normalize import FingerprintMismatch, Normalizer, ScoreNorm, UncalibratedError

from .conftest import DIM, Photos, unit

# Lists in a layout that FAISS cannot map.
PANORAMA = pytest.param(
    "IVF4,FlatPanorama4",
    marks=pytest.mark.skipif(not hasattr(faiss, "IndexIVFFlatPanorama"), reason="an older FAISS"),
)


@pytest.fixture
def index(photos: Photos, normalizer: Normalizer) -> FaissIndex:
    made = FaissIndex(normalizer)
    made.add(photos.ids, photos.references, [{"n": i} for i in range(600)])
    return made


def test_the_file_is_a_plain_faiss_file(index: FaissIndex, photos: Photos, tmp_path: Path) -> None:
    path = tmp_path / "photos.faiss"
    index.save(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos.faiss", "photos.faiss.sidecar"]
    plain = faiss.read_index(str(path))
    values, rows = plain.search(index.normalizer.queries(photos.queries), 10)
    found = index.search(photos.queries, 10)
    assert [f"r{row}" for row in rows.ravel()] == found.ids.tolist()
    np.testing.assert_array_equal(values.ravel(), found.scores)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF4,Flat", "IVF4,PQ5x4", PANORAMA])
def test_reopened_it_answers_the_same(
    factory: str, mmap: bool, photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    made = FaissIndex(normalizer, factory)
    made.add(photos.ids, photos.references, [{"név": f"kép {i}"} for i in range(600)])
    made.remove(photos.ids[:5])
    made.save(tmp_path / "a.faiss")
    opened = FaissIndex.open(tmp_path / "a.faiss", normalizer, mmap=mmap)
    assert len(opened) == 595 and "r5" in opened and "r4" not in opened
    before, after = made.search(photos.queries, 5), opened.search(photos.queries, 5)
    assert before.ids.tolist() == after.ids.tolist()
    np.testing.assert_array_equal(before.scores, after.scores)
    assert after.metadata == before.metadata and after[6][0].metadata is not None
    if mmap:
        for change in (lambda: opened.add("x", photos.references[0]), lambda: opened.remove("r9")):
            with pytest.raises(RuntimeError, match="read-only"):
                change()
    else:
        opened.add("x", photos.references[0])
        assert len(opened) == 596


def test_another_normalizer_is_refused_but_another_query_side_is_not(
    index: FaissIndex, photos: Photos, tmp_path: Path
) -> None:
    path = tmp_path / "a.faiss"
    index.save(path)
    other = Normalizer.fit(unit(np.random.default_rng(9).normal(size=(500, DIM))))
    with pytest.raises(FingerprintMismatch) as error:
        FaissIndex.open(path, other)
    assert index.normalizer.reference_fingerprint in str(error.value)
    assert other.reference_fingerprint in str(error.value)

    changed = index.normalizer.with_score_norm(ScoreNorm(beta=0.5, n=1, n_end=5))
    found = FaissIndex.open(path, changed).search(photos.queries, 10)
    best = -np.sort(-changed.scores(photos.queries, photos.references), axis=1)[:, :10]
    np.testing.assert_allclose(found.scores.reshape(best.shape), best, atol=1e-4)
    with pytest.raises(UncalibratedError):
        FaissIndex.open(path, changed).range_search(photos.queries)


def test_damaged_files_say_so(index: FaissIndex, normalizer: Normalizer, tmp_path: Path) -> None:
    path = tmp_path / "a.faiss"
    with pytest.raises(FileNotFoundError, match="no such index file"):
        FaissIndex.open(path, normalizer)
    index.save(path)
    beside = sidecar_path(path)
    whole, about = path.read_bytes(), beside.read_bytes()

    def expect(message: str, mmap: bool = False) -> None:
        with pytest.raises(IndexFileError, match=message):
            FaissIndex.open(path, normalizer, mmap=mmap)
        path.write_bytes(whole)
        beside.write_bytes(about)

    path.write_bytes(whole[:-100])
    expect("truncated, altered")
    path.write_bytes(whole[:-100])
    expect("truncated, altered", mmap=True)
    path.write_bytes(whole[:5000] + b"\0" + whole[5001:])
    expect("names SHA-256|belongs to another")
    beside.write_bytes(about[:-100])
    expect("truncated")
    beside.write_bytes(about[:-1] + bytes([about[-1] ^ 1]))
    expect("damaged")
    beside.write_bytes(b"\x10\0\0\0\0\0\0\0not a safetensors file at all")
    expect("not a sidecar written by sscd-vec")
    beside.write_bytes(b"")
    expect("not a sidecar")
    beside.write_bytes(about.replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    expect("expected sidecar format 1, got 9")
    beside.unlink()
    expect("sidecar a.faiss.sidecar is missing")
    assert len(FaissIndex.open(path, normalizer)) == 600


@pytest.mark.parametrize("mmap", [False, True])
def test_a_damaged_header_says_so_whatever_is_damaged(
    mmap: bool, photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "a.faiss"
    made = FaissIndex(normalizer)
    made.add(photos.ids[:3], photos.references[:3], [{"n": i} for i in range(3)])
    made.save(path)
    beside = sidecar_path(path)
    raw = beside.read_bytes()
    refused = 0
    for place in range(8 + int.from_bytes(raw[:8], "little")):
        beside.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        try:
            opened = FaissIndex.open(path, normalizer, mmap=mmap, trusted=True)
        except (IndexFileError, FingerprintMismatch):
            refused += 1
        else:  # a name that nobody reads, or with mmap a hash of what is not read
            assert opened.search(photos.references[:3], 1).ids.tolist() == photos.ids[:3]
    assert refused > 500


def test_a_foreign_faiss_file_is_refused(normalizer: Normalizer, tmp_path: Path) -> None:
    faiss.write_index(faiss.IndexFlatIP(32), str(tmp_path / "other.faiss"))
    with pytest.raises(IndexFileError, match="sidecar other.faiss.sidecar is missing"):
        FaissIndex.open(tmp_path / "other.faiss", normalizer)


@pytest.fixture
def halfway(index: FaissIndex, tmp_path: Path) -> Path:
    """The index of generation 2, its sidecar still staged, and beside it that of generation 1."""
    path = tmp_path / "a.faiss"
    index.save(path)
    old = sidecar_path(path).read_bytes()
    index.remove("r0")
    index.save(path)
    shutil.move(sidecar_path(path), staging_path(sidecar_path(path)))
    sidecar_path(path).write_bytes(old)
    return path


def test_a_save_killed_between_its_two_renames_is_finished_by_open(
    halfway: Path, normalizer: Normalizer
) -> None:
    beside = sidecar_path(halfway)
    old = beside.read_bytes()
    assert len(FaissIndex.open(halfway, normalizer, mmap=True)) == 599
    assert beside.read_bytes() == old, "opening read-only changes nothing"
    with locked(halfway.parent):  # whoever is saving will finish it
        assert len(FaissIndex.open(halfway, normalizer)) == 599
    assert beside.read_bytes() == old
    assert len(FaissIndex.open(halfway, normalizer)) == 599
    assert settings.read_header(find_sidecar(halfway, whole=True))[0].generation == 2
    assert not staging_path(beside).exists()


def test_a_killed_save_opens_without_write_permission(
    halfway: Path, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("read-only folder")

    monkeypatch.setattr(os, "replace", forbidden)
    assert len(FaissIndex.open(halfway, normalizer)) == 599


class Crash(BaseException):
    """Stands for the end of the process."""


def test_two_crashes_in_a_row_leave_a_whole_pair(
    index: FaissIndex,
    photos: Photos,
    normalizer: Normalizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, replace = tmp_path / "a.faiss", os.replace

    def crash_before_renaming(target: Path, saved: FaissIndex) -> None:
        def renaming(source: Path, to: Path) -> None:
            if to == target:
                raise Crash
            replace(source, to)

        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(os, "replace", renaming)
            saved.save(path)

    index.save(path)
    index.remove("r0")
    crash_before_renaming(sidecar_path(path), index)
    another = FaissIndex(normalizer)
    another.add(["new"], photos.references[:1])
    crash_before_renaming(path, another)
    opened = FaissIndex.open(path, normalizer)
    assert len(opened) == 599 and "r1" in opened
    crash_before_renaming(path, another)  # its sidecar belongs to no index: it must not be taken
    assert len(FaissIndex.open(path, normalizer, mmap=True)) == 599
    finish_save(path)
    assert len(FaissIndex.open(path, normalizer)) == 599
    another.save(path)
    assert len(FaissIndex.open(path, normalizer)) == 1


@pytest.mark.parametrize("mmap", [False, True])
def test_a_save_that_ends_while_its_sidecar_is_looked_for_is_seen(
    halfway: Path, normalizer: Normalizer, mmap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, read_header = sidecar_path(halfway), settings.read_header

    def reading(path: Path) -> Any:  # noqa: ANN401
        if path == staging_path(beside):
            os.replace(path, beside)  # the saver's last step, since the files were listed
        return read_header(path)

    monkeypatch.setattr(settings, "read_header", reading)
    assert len(FaissIndex.open(halfway, normalizer, mmap=mmap)) == 599


@pytest.mark.parametrize("mmap", [False, True])
def test_a_save_between_the_header_and_the_arrays_of_a_sidecar_is_seen(
    index: FaissIndex,
    photos: Photos,
    normalizer: Normalizer,
    tmp_path: Path,
    mmap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, read_header = tmp_path / "a.faiss", settings.read_header
    index.save(path)
    smaller = FaissIndex(normalizer)
    smaller.add(["new"], photos.references[:1])
    headers = 0

    def reading(of: Path) -> Any:  # noqa: ANN401
        nonlocal headers
        headers += 1
        found = read_header(of)
        if headers == 2:  # the first is read to find the sidecar
            smaller.save(path)
        return found

    monkeypatch.setattr(settings, "read_header", reading)
    opened = FaissIndex.open(path, normalizer, mmap=mmap)
    assert len(opened) == 1 and "new" in opened


@pytest.mark.parametrize("saves", [1, files.ATTEMPTS + 1])
@pytest.mark.parametrize("mmap", [False, True])
def test_opening_goes_on_until_no_save_comes_between(
    index: FaissIndex,
    normalizer: Normalizer,
    tmp_path: Path,
    mmap: bool,
    saves: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "a.faiss"
    generations = []
    for _ in range(2):
        index.save(path)
        generations.append((path.read_bytes(), sidecar_path(path).read_bytes()))
        index.remove(["r0", "r1"])
    ends, attempts = settings.ends_digest, 0

    def saving(of: Path) -> str:
        """Between two looks at the index file comes a save, into inodes that are used again."""
        nonlocal attempts
        attempts += 1
        try:
            with locked(tmp_path, wait=False):
                if attempts <= saves:
                    new_index, new_sidecar = generations[(attempts + 1) % 2]
                    path.write_bytes(new_index)
                    sidecar_path(path).write_bytes(new_sidecar)
                    os.utime(path, ns=(attempts, attempts))  # clocks tick slower than this test
        except BlockingIOError:
            pass
        return ends(of)

    monkeypatch.setattr(settings, "ends_digest", saving)
    opened = FaissIndex.open(path, normalizer, mmap=mmap)
    assert attempts == min(saves, files.ATTEMPTS) + 1, "in the end savers are kept out"
    monkeypatch.undo()
    assert len(opened) == opened.index.ntotal == len(FaissIndex.open(path, normalizer))


SAVE_FOREVER = """
import sys
import numpy as np
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.normalize import Normalizer
path, acks = sys.argv[1:]
rng = np.random.default_rng(0)
index = FaissIndex(Normalizer.identity(16))
for n in range(10**6):
    rows = rng.normal(size=(50, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index.add([f"{n}-{i}" for i in range(50)], rows, [{"n": n}] * 50)
    index.save(path)
    with open(acks, "a") as file:
        file.write(f"{50 * (n + 1)}\\n")
"""


def test_kill_9_in_a_loop_leaves_a_whole_pair(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for turn in range(8):
        folder = tmp_path / str(turn)
        folder.mkdir()
        path, acks = folder / "a.faiss", folder / "acks"
        acks.write_text("")
        child = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(path), str(acks)])
        deadline = time.monotonic() + 60
        while acks.read_text().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.wait()
        saved = int(acks.read_text().split()[-1])
        opened = FaissIndex.open(path, Normalizer.identity(16))
        assert saved <= len(opened) <= saved + 50
        assert len(opened) % 50 == 0
        assert f"{saved // 50 - 1}-49" in opened
        opened.add("after", np.eye(16, dtype=np.float32)[0])
        opened.save(path)
        assert sorted(os.listdir(folder)) == ["a.faiss", "a.faiss.sidecar", "acks"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("part", ["a.faiss.new", "a.faiss.sidecar.new"])
def test_a_save_that_does_not_fit_on_the_disk_leaves_nothing_behind(
    part: str, index: FaissIndex, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "a.faiss"
    index.save(path)
    saved = sorted(os.listdir(tmp_path))
    index.remove("r0")
    (tmp_path / part).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        index.save(path)
    assert sorted(os.listdir(tmp_path)) == saved
    assert len(FaissIndex.open(path, normalizer)) == 600
    index.save(path)
    assert len(FaissIndex.open(path, normalizer)) == 599


def test_each_rename_is_on_disk_before_the_next(
    index: FaissIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    replace = os.replace

    def renaming(source: Path, target: Path) -> None:
        steps.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", renaming)
    monkeypatch.setattr(files, "sync_folder", lambda _: steps.append("forced"))
    index.save(tmp_path / "a.faiss")
    assert steps[:-1] == ["forced", "a.faiss", "forced", "a.faiss.sidecar", "forced"]
    assert steps[-1] == "inspected.json"
    with pytest.raises(IsADirectoryError, match="expected the path of a file"):
        index.save(tmp_path)


def test_what_cannot_be_mapped_says_what_to_do(
    index: FaissIndex, normalizer: Normalizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise RuntimeError("could not load these lists")

    index.save(tmp_path / "a.faiss")
    monkeypatch.setattr(faiss, "read_index", refusing)
    with pytest.raises(IndexFileError, match="could not load these lists.*open it without mmap"):
        FaissIndex.open(tmp_path / "a.faiss", normalizer, mmap=True)


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no lock there")
def test_a_save_that_has_to_wait_says_for_what(
    index: FaissIndex,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    with ThreadPoolExecutor(1) as thread:
        with locked(tmp_path):
            saving = thread.submit(index.save, tmp_path / "a.faiss")
            deadline = time.monotonic() + 30
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not saving.done()
            assert [record.getMessage() for record in caplog.records] == [
                f"{tmp_path}: waiting for its lock (another process)"
            ]
        saving.result(timeout=30)
    index.save(tmp_path / "a.faiss")  # nobody is in the way: not a word
    assert len(caplog.records) == 1


# ---------------------------------------------------------------------- one file, two processes


def test_commit_saves_where_the_index_belongs(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "a.faiss"
    index = FaissIndex(normalizer, path=path)
    assert index.path == path and not path.exists() and index.generation == 0
    index.commit()
    assert path.exists() and index.generation == 1, "an empty one is an index too"
    index.add(photos.ids, photos.references)
    index.commit()
    opened = FaissIndex.open(path, normalizer)
    assert len(opened) == 600 and opened.generation == index.generation == 2
    opened.remove("r0")
    opened.commit()
    opened.commit()
    assert FaissIndex.open(path, normalizer).generation == 3
    with pytest.raises(FileExistsError, match=r"use FaissIndex\.open"):
        FaissIndex(normalizer, path=path)
    with pytest.raises(RuntimeError, match="has no path"):
        FaissIndex(normalizer).commit()


def test_a_commit_never_loses_what_another_process_has_saved(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "a.faiss"
    first = FaissIndex(normalizer, path=path)
    beside = FaissIndex(normalizer, path=path)
    first.add(photos.ids[:10], photos.references[:10])
    first.commit()
    second = FaissIndex.open(path, normalizer)
    second.add("second", photos.references[20])
    second.commit()
    first.add("first", photos.references[21])
    for change in (first.commit, first.close, lambda: first.save(path)):
        with pytest.raises(IndexConflict, match="saved generation 2 .* this index was at gener"):
            change()
    beside.add("beside", photos.references[22])
    with pytest.raises(IndexConflict, match="saved generation 2 .* this index was made"):
        beside.commit()
    assert "second" in FaissIndex.open(path, normalizer)
    first.save(tmp_path / "b.faiss")  # what was added here can still be kept
    assert "first" in FaissIndex.open(tmp_path / "b.faiss", normalizer)
    again = FaissIndex.open(path, normalizer)
    again.add("first", photos.references[21])
    again.commit()
    assert {"second", "first"} <= FaissIndex.open(path, normalizer).present(["second", "first"])


@pytest.mark.parametrize("mmap", [False, True])
def test_a_reader_sees_what_another_process_has_saved(
    mmap: bool, photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "a.faiss"
    writer = FaissIndex(normalizer, path=path)
    writer.add(photos.ids[:10], photos.references[:10])
    writer.commit()
    reader = FaissIndex.open(path, normalizer, mmap=mmap)
    assert not reader.reload_if_changed() and not writer.reload_if_changed()
    writer.add(photos.ids[10:], photos.references[10:])
    assert not reader.reload_if_changed(), "it was not saved"
    writer.commit()
    assert len(reader) == 10
    assert reader.reload_if_changed() and not reader.reload_if_changed()
    assert len(reader) == 600 and reader.generation == 2
    assert reader.search(photos.references[590:], 1).ids.tolist() == photos.ids[590:]
    assert not writer.reload_if_changed(), "its own save is nothing new"
    assert not FaissIndex(normalizer).reload_if_changed()


def test_a_reload_never_loses_what_was_not_committed(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    path = tmp_path / "a.faiss"
    writer = FaissIndex(normalizer, path=path)
    writer.commit()
    other = FaissIndex.open(path, normalizer)
    other.add("mine", photos.references[0])
    writer.add("theirs", photos.references[1])
    writer.commit()
    with pytest.raises(IndexConflict, match="while rows were added or removed here"):
        other.reload_if_changed()
    assert "mine" in other
    reader = FaissIndex.open(path, normalizer)
    another = FaissIndex(normalizer, metric="l2")
    another.save(path)
    with pytest.raises(IndexFileError, match="another kind of index lies there now"):
        reader.reload_if_changed()
    assert "theirs" in reader, "it goes on with what it has"


def test_a_rename_that_was_finished_is_nothing_new(halfway: Path, normalizer: Normalizer) -> None:
    reader = FaissIndex.open(halfway, normalizer, mmap=True)
    finish_save(halfway)
    assert not staging_path(sidecar_path(halfway)).exists()
    assert not reader.reload_if_changed()


def test_a_reader_needs_no_permission_to_write(
    index: FaissIndex, photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    index.save(tmp_path / "a.faiss")
    tmp_path.chmod(0o500)

    def everything() -> list[tuple[str, int, int]]:
        places = [tmp_path, *sorted(tmp_path.iterdir())]
        return [(p.name, p.stat().st_mtime_ns, p.stat().st_ctime_ns) for p in places]

    before = everything()  # root may write anywhere: it must not want to
    try:
        for mmap in (False, True):
            opened = FaissIndex.open(tmp_path / "a.faiss", normalizer, mmap=mmap)
            assert opened.search(photos.references[:3], 1).ids.tolist() == photos.ids[:3]
            assert not opened.reload_if_changed()
            opened.close()
        assert everything() == before
    finally:
        tmp_path.chmod(0o700)
