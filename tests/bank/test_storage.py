"""A bank that cannot lose anything: crashes, several writers, damage, read-only storage."""

import errno
import json
import multiprocessing
import os
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from sscd_vec.bank import Bank, BankError
from sscd_vec.bank.location import LOCK, NORMALIZER, RECORDS, SETTINGS, UPLOADS
from sscd_vec.bank.records import BankImage, Records
from sscd_vec.encoder.images import load_pixels
from sscd_vec.files import find_images
from sscd_vec.locks import LockHeldError, locked
from sscd_vec.normalize import Normalizer
from tests.bank.conftest import COUNT, OpenBank
from tests.tiny_encoder import TinyEncoder


def everything_is_found(bank: Bank, images: Path) -> bool:
    return all(
        any(match.is_copy and match.id == file.id for match in bank.search(file.path))
        for file in find_images(images)
    )


class Crash(BaseException):
    """As sudden as a kill, for one process."""


def crash(*_: object, **__: object) -> None:
    raise Crash


@pytest.mark.parametrize("moment", ["announce", "confirm"])
def test_a_crash_between_index_and_records_heals(
    open_bank: OpenBank, place: str, images: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bank(place) as bank:
        bank.add([images / "image-00.png"])
        (images / "image-00.png").write_bytes((images / "image-01.png").read_bytes())
    bank = open_bank(place)
    with monkeypatch.context() as patched:
        patched.setattr(Records, moment, crash)
        patched.setattr(type(bank.storage), "_heal", lambda self: None)
        with pytest.raises(Crash):
            bank.add(images)
    bank.storage.index.close()
    bank.storage._open.close()
    with open_bank(place) as healed:
        assert healed.storage.records.announced() == []
        done = healed.add(images)
        assert done.unreadable == []
        assert len(healed) == COUNT
        assert len(healed.storage.index) == COUNT
        assert everything_is_found(healed, images)


def test_a_failed_write_leaves_nothing_that_joins_later(
    open_bank: OpenBank, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "known.faiss"
    with open_bank(place) as bank:
        bank.add([images / "image-00.png"])
        with monkeypatch.context() as patched:
            patched.setattr(
                type(bank.storage.index), "commit",
                lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device")),
            )  # fmt: skip
            with pytest.raises(OSError, match="No space left"):
                bank.add([images / "image-01.png"])
        assert len(bank) == 1
        bank.add([images / "image-02.png"])
        assert len(bank.storage.index) == 2
        assert str(images / "image-01.png") not in bank
        assert bank.add(images).added == COUNT - 2
        assert everything_is_found(bank, images)


def test_two_banks_open_at_once_see_each_others_images(
    open_bank: OpenBank, images: Path, tmp_path: Path
) -> None:
    paths = sorted(images.iterdir())
    place = tmp_path / "known.faiss"
    with open_bank(place) as first, open_bank(place) as second:
        first.add(paths[:3])
        second.add(paths[3:5])
        first.add(paths[5:])
        second.remove(str(paths[0]))
        assert len(first) == len(second) == COUNT - 1
        assert first.search(paths[4])[0].is_copy
        assert second.search(paths[6])[0].is_copy
        assert not first.search(paths[0])[0].is_copy


def add_some(place: str, paths: list[str], barrier: Any) -> None:  # noqa: ANN401
    normalizer = Normalizer.identity(TinyEncoder.dim).with_threshold(0.8)
    barrier.wait()
    for path in paths:
        with Bank(place, model=TinyEncoder(), normalizer=normalizer) as bank:
            bank.add([path])


def test_four_processes_lose_nothing(open_bank: OpenBank, place: str, images: Path) -> None:
    paths = [str(path) for path in sorted(images.iterdir())]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    workers = [
        context.Process(target=add_some, args=(place, paths[n::4], barrier)) for n in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [0] * 4
    with open_bank(place) as bank:
        assert len(bank) == len(bank.storage.index) == COUNT
        assert everything_is_found(bank, images)
        assert bank.add(images).unchanged == COUNT


def test_a_writer_waits_or_refuses_as_told(
    open_bank: OpenBank, images: Path, tmp_path: Path
) -> None:
    place = tmp_path / "known.faiss"
    with open_bank(place, wait=False) as bank:
        with locked(tmp_path / "known.faiss.bank" / LOCK, purpose="test it"):
            with pytest.raises(LockHeldError, match=f"process {os.getpid()} .* to test it"):
                bank.add(images)
            assert bank.search(images / "image-00.png") == []  # readers need no lock
        assert bank.add(images).added == COUNT


def test_a_lost_index_is_an_error_and_adding_again_heals(
    open_bank: OpenBank, images: Path, tmp_path: Path
) -> None:
    place = tmp_path / "known.faiss"
    with open_bank(place) as bank:
        bank.add(images)
    for file in tmp_path.glob("known.faiss*"):
        if file.is_file():
            file.unlink()
    with open_bank(place) as bank:
        with pytest.raises(BankError, match=f"missing or empty, but {COUNT} images"):
            bank.search(images / "image-00.png")
        assert len(bank) == 0
        assert bank.add(images).added == COUNT
        assert everything_is_found(bank, images)


def test_an_index_restored_from_an_old_copy_heals(
    open_bank: OpenBank, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "known.faiss"
    paths = sorted(images.iterdir())
    with open_bank(place) as bank:
        bank.add(paths[:3])
    old = {f: f.read_bytes() for f in tmp_path.glob("known.faiss*") if f.is_file()}
    with open_bank(place) as bank:
        bank.add(images)
    for file, content in old.items():
        file.write_bytes(content)
    with open_bank(place) as bank:
        assert f"does not have {COUNT - 3} of the {COUNT} images" in caplog.text
        assert len(bank) == 3
        done = bank.add(images)
        assert (done.added, done.unchanged) == (COUNT - 3, 3)
        assert everything_is_found(bank, images)


def test_a_vector_without_a_record_can_be_removed(
    open_bank: OpenBank, place: str, images: Path, encoder: TinyEncoder
) -> None:
    with open_bank(place) as bank:
        bank.add(images)
        bank.storage.index.add(["orphan"], encoder.encode([images / "image-00.png"]))
        bank.storage.index.commit()
    with open_bank(place) as bank:
        assert "orphan" in {match.id for match in bank.search(images / "image-00.png")}
        assert bank.remove("orphan") == 1
        assert "orphan" not in bank


def test_kept_images_that_a_killed_process_left_are_deleted(
    open_bank: OpenBank, images: Path, tmp_path: Path, encoder: TinyEncoder
) -> None:
    place = tmp_path / "known.faiss"
    pixels = load_pixels(images / "image-00.png")
    with open_bank(place) as bank:
        bank.add([pixels], ids=["kept"], keep=True)
    uploads = tmp_path / "known.faiss.bank" / UPLOADS
    (kept,) = uploads.iterdir()
    orphan, half = uploads / f"{'a' * 32}.jpg", uploads / f".{'b' * 32}.jpg.4711.0a0b.new"
    young, mine = uploads / f"{'c' * 32}.jpg", uploads / "notes.txt"
    for path in (orphan, half, young, mine):
        path.write_bytes(b"x")
    for path in (orphan, half, mine, kept):
        os.utime(path, (1e9, 1e9))
    with open_bank(place) as bank:
        assert set(uploads.iterdir()) == {kept, young, mine}
        assert bank.search(pixels)[0].is_copy


def test_a_kept_image_is_taken_back_if_it_is_not_stored(
    open_bank: OpenBank, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bank(tmp_path / "known.faiss") as bank:
        monkeypatch.setattr(type(bank.storage.index), "commit", crash)
        with pytest.raises(Crash):
            bank.add([load_pixels(images / "image-00.png")], ids=["a"], keep=True)
        monkeypatch.undo()
        assert list((tmp_path / "known.faiss.bank" / UPLOADS).iterdir()) == []


def test_a_disk_that_fills_up_before_the_records_loses_nothing(
    open_bank: OpenBank, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "known.faiss"
    paths = sorted(images.iterdir())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_bank(place) as bank:
        with monkeypatch.context() as patched:
            patched.setattr(Records, "confirm", full)
            bank.add(paths[:2])  # the index has them, and the journal
        assert all(bank.search(path)[0].is_copy for path in paths[:2])
        bank.add(paths[2:])
        assert len(bank) == len(bank.storage.index) == COUNT


def test_full_records_are_a_full_disk(tmp_path: Path) -> None:
    records = Records(tmp_path / RECORDS)
    pages = records._db.execute("PRAGMA page_count").fetchone()[0]
    records._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(OSError, match="No space left") as raised:
        records.announce([BankImage(f"{'x' * 900}{n}", "d", 1) for n in range(100)], 1)
    assert raised.value.errno == errno.ENOSPC
    records.close()


def test_read_only_storage_is_searched(
    open_bank: OpenBank, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "bank" / "known.faiss"
    place.parent.mkdir()
    with open_bank(place) as bank:
        bank.add(images)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in place.parent.rglob("*")}
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with open_bank(place, normalizer=None) as bank:
        assert bank.storage.read_only
        assert everything_is_found(bank, images)
        with pytest.raises(BankError, match="read-only"):
            bank.remove(str(images / "image-00.png"))
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in place.parent.rglob("*")} == before


def test_damage_names_the_file_and_the_next_step(
    open_bank: OpenBank, images: Path, tmp_path: Path
) -> None:
    place = tmp_path / "known.faiss"
    folder = tmp_path / "known.faiss.bank"
    with open_bank(place) as bank:
        bank.add(images)
    whole = {name: (folder / name).read_bytes() for name in (SETTINGS, RECORDS)}
    for name, content in {
        SETTINGS: b"{half",
        RECORDS: b"SQLite format 3\0" + b"rubbish" * 1000,
    }.items():
        (folder / name).write_bytes(content)
        with pytest.raises(BankError, match=rf"{name}.*(damaged|not a database)"):
            open_bank(place)
        (folder / name).write_bytes(whole[name])
    settings = json.loads(whole[SETTINGS])
    for change in ({"format": 99}, {"tiles": "2"}, {"model": 5}, {"roots": [7]}, {"more": 1}):
        (folder / SETTINGS).write_text(json.dumps(settings | change))
        with pytest.raises(BankError, match=SETTINGS):
            open_bank(place)


# ---------------------------------------------------------------------- strangers' banks


@pytest.fixture
def stranger(open_bank: OpenBank, images: Path, tmp_path: Path) -> Path:
    """A bank whose settings somebody else wrote: they carry no signature of this user."""
    place = tmp_path / "theirs" / "known.faiss"
    place.parent.mkdir()
    with open_bank(place) as bank:
        bank.add(images)
    rewrite(place, signature="0" * 64)
    return place


def rewrite(place: Path, **changes: object) -> None:
    path = Path(f"{place}.bank") / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def plant(place: Path, name: str, path: Path) -> None:
    """Record an image of any path, as a stranger may."""
    file = find_images(path)[0]
    records = Records(Path(f"{place}.bank") / RECORDS)
    records.announce([BankImage(name, "", 1, file)], 0)
    records.confirm(records.generation)
    records.close()


def test_a_stranger_cannot_delete_or_show_files(
    stranger: Path, open_bank: OpenBank, tmp_path: Path, images: Path
) -> None:
    victim = tmp_path / "private.png"
    shutil.copy(images / "image-00.png", victim)
    link = Path(f"{stranger}.bank") / "uploads" / "link.png"
    link.parent.mkdir()
    link.symlink_to(victim)
    plant(stranger, "upload:x", victim)
    plant(stranger, "upload:y", link)
    with open_bank(stranger, normalizer=None) as bank:
        assert not bank.may_show(victim)
        assert not bank.may_show(link)
        assert not bank.may_show(images / "image-00.png")
        bank.remove(["upload:x", "upload:y"])
    assert victim.exists()
    with open_bank(stranger, normalizer=None, trust=True) as bank:
        assert bank.may_show(images / "image-00.png")
    with open_bank(stranger, normalizer=None) as bank:
        assert bank.may_show(images / "image-00.png")  # trusted once, signed by this user


def test_a_stranger_cannot_choose_the_model(stranger: Path, images: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for model in (str(pipe), "/dev/zero", "sscd_disc_mixup", str(tmp_path)):
        rewrite(stranger, model=model)
        with Bank(stranger) as bank, pytest.raises(BankError, match="if you trust it"):
            bank.search(images / "image-00.png")
    rewrite(stranger, model="")
    with Bank(stranger) as bank, pytest.raises(BankError, match="Encoder object"):
        bank.search(images / "image-00.png")


def test_traps_in_a_strangers_bank_are_refused(
    stranger: Path, open_bank: OpenBank, tmp_path: Path, images: Path
) -> None:
    folder = Path(f"{stranger}.bank")
    for path in (folder / NORMALIZER, folder / RECORDS, stranger):
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(BankError, match="not a regular file"):
            open_bank(stranger, normalizer=None)
        path.unlink()
        path.write_bytes(kept)
    (folder / UPLOADS).symlink_to(images)  # as if the images were the bank's own to delete
    with pytest.raises(BankError, match="is a link"):
        open_bank(stranger, normalizer=None)


@pytest.mark.parametrize("change", ["vectors=1000000000", "path=7", "size='x'", "digest=x'00'"])
def test_altered_records_are_refused(stranger: Path, open_bank: OpenBank, change: str) -> None:
    with sqlite3.connect(Path(f"{stranger}.bank") / RECORDS) as database:
        database.execute(f"UPDATE images SET {change}")
    database.close()
    with pytest.raises(BankError, match="damaged"), open_bank(stranger, normalizer=None) as bank:
        bank.remove(["upload:x"] + [image.id for image in bank.images()])


def test_settings_are_signed_with_a_private_key(
    open_bank: OpenBank, images: Path, tmp_path: Path
) -> None:
    with open_bank(tmp_path / "known.faiss") as bank:
        bank.add(images)
        assert bank.settings.is_trusted
        assert bank.settings.root_folders == [images.resolve()]
    key = Path(os.environ["SSCD_VEC_CACHE"]) / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.write_bytes(os.urandom(32))
    with open_bank(tmp_path / "known.faiss", normalizer=None) as bank:
        assert not bank.settings.is_trusted
        assert bank.settings.root_folders == []
        bank.add(images)  # works, and leaves the stranger's settings alone
        assert not bank.settings.is_trusted


def test_records_survive_a_reader_during_a_write(tmp_path: Path) -> None:
    records = Records(tmp_path / RECORDS)
    records.announce([BankImage("a", "d", 1)], 1)
    reader = Records(tmp_path / RECORDS, read_only=True)
    assert len(reader) == 0
    records.confirm(1)
    assert len(reader) == 1
    with sqlite3.connect(tmp_path / RECORDS) as other:
        assert other.execute("SELECT id FROM images").fetchall() == [("a",)]
    other.close()
    reader.close()
    records.close()
