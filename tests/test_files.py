"""Whole-or-nothing writes, hashes, and what counts as an image."""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sscd_vec import files
from sscd_vec.files import (
    Unreadable,
    file_sha256,
    find_images,
    printable_path,
    staging,
    write_whole,
    writing,
)

JPEG = b"\xff\xd8\xff\xe0" + bytes(20)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".new")]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_whole(target, "old")
    with pytest.raises(RuntimeError, match="half-way"), writing(target) as file:
        file.write(b"new, but")
        raise RuntimeError("half-way")
    assert target.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_the_name_appears_only_when_the_bytes_are_complete(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    with staging(target) as staged:
        staged.write_bytes(b"whole")
        assert staged.parent == tmp_path
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert leftovers(tmp_path) == []


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_bytes_and_folder_are_forced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def recording(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", recording)
    write_whole(tmp_path / "a", b"x")
    assert synced[0].endswith(".new")
    assert synced[1] == str(tmp_path.resolve())


def test_staging_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "odd[name]*.txt"
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    old = tmp_path / f".{target.name}.{dead}.abc.new"
    fresh = tmp_path / f".{target.name}.{dead}.def.new"
    mine = tmp_path / f".{target.name}.{os.getpid()}.ghi.new"
    other = tmp_path / f".other.txt.{dead}.abc.new"
    for path in (old, fresh, mine, other):
        path.write_bytes(b"half")
    for path in (old, mine, other):
        os.utime(path, (0, 0))
    write_whole(target, "text")
    assert sorted(leftovers(tmp_path)) == sorted([fresh.name, mine.name, other.name])


def test_hash(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 100_000)
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"abc" * 100_000).hexdigest()


# ---------------------------------------------------------------------- finding images


def names(root: Path, **options: object) -> list[str]:
    found = find_images([root], **options)  # type: ignore[arg-type]
    return [file.path.relative_to(root.resolve()).as_posix() for file in found]


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as shard:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    return path


def test_endings_signatures_hidden_and_hard_links(tmp_path: Path) -> None:
    for name in ("a.jpg", "B.PNG", "c.heic", "sub/d.webp"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"anything")
    (tmp_path / "no_ending").write_bytes(JPEG)
    (tmp_path / "wrong.dat").write_bytes(JPEG)
    (tmp_path / "text").write_bytes(b"hello world, hello")
    (tmp_path / "film.mp4").write_bytes(JPEG)
    (tmp_path / ".hidden.jpg").write_bytes(JPEG)
    (tmp_path / ".trash").mkdir()
    (tmp_path / ".trash" / "x.jpg").write_bytes(JPEG)
    os.symlink(tmp_path, tmp_path / "loop")
    os.link(tmp_path / "a.jpg", tmp_path / "z-hard.jpg")
    assert names(tmp_path) == ["B.PNG", "a.jpg", "c.heic", "no_ending", "sub/d.webp", "wrong.dat"]


def test_links_are_followed_and_a_file_keeps_its_own_name(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far.jpg").write_bytes(JPEG + b"far")
    root = tmp_path / "root"
    root.mkdir()
    (root / "own.jpg").write_bytes(JPEG)
    os.symlink(root / "own.jpg", root / "a-link.jpg")
    os.symlink(elsewhere / "far.jpg", root / "link.jpg")
    os.symlink(elsewhere, root / "folder")
    os.symlink(tmp_path / "gone.jpg", root / "broken.jpg")
    problems: list[Unreadable] = []
    found = find_images(root, problems.append)
    assert [file.path.name for file in found] == ["far.jpg", "own.jpg"]
    assert [p.path.name for p in problems] == ["broken.jpg"]


def test_what_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "fine.jpg").write_bytes(JPEG)
    (tmp_path / "drawing.svg").write_bytes(b"<svg/>")
    os.mkfifo(tmp_path / "pipe.jpg")
    os.mkfifo(tmp_path / "pipe")
    real = os.scandir

    def refusing(path: str | Path) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    problems: list[Unreadable] = []
    found = find_images([tmp_path], problems.append)
    assert [file.path.name for file in found] == ["fine.jpg"]
    assert {(p.path.name, p.reason.split(";")[0]) for p in problems} == {
        ("closed", "no permission to read it"),
        ("empty.jpg", "the file is empty"),
        ("pipe.jpg", "not a regular file"),
        ("drawing.svg", "its format is not decoded"),
    }


def test_overlapping_places_and_single_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.odd").write_bytes(b"whatever")
    (tmp_path / "b.jpg").write_bytes(JPEG)
    places = [tmp_path, tmp_path / "sub", tmp_path / "sub" / "a.odd", tmp_path / "b.jpg"]
    assert [file.path.name for file in find_images(places)] == ["b.jpg", "a.odd"]
    with pytest.raises(FileNotFoundError, match="no such file"):
        find_images([tmp_path / "absent"])


def test_tars_and_lists_give_the_same_bytes_as_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("b.jpg", "a.png"):
        (folder / name).write_bytes(JPEG + name.encode())
    shard = write_tar(
        tmp_path / "shard.tar",
        {"a.png": JPEG + b"a.png", "b.jpg": JPEG + b"b.jpg", "a.json": b"{}"},
    )
    listing = tmp_path / "list.txt"
    listing.write_text("# two images\nphotos/a.png\n\nphotos/b.jpg\n")
    contents = [[f.read() for f in find_images(place)] for place in (folder, shard, listing)]
    assert contents[0] == contents[1] == contents[2] == [JPEG + b"a.png", JPEG + b"b.jpg"]
    assert [f.id for f in find_images(shard)] == [
        f"{shard.resolve()}/{n}" for n in ("a.png", "b.jpg")
    ]


def test_a_folder_may_hold_tars(tmp_path: Path) -> None:
    write_tar(tmp_path / "m.tar", {"x.jpg": JPEG})
    (tmp_path / "z.jpg").write_bytes(JPEG)
    (tmp_path / "a.jpg").write_bytes(JPEG)
    assert [Path(f.id).name for f in find_images(tmp_path)] == ["a.jpg", "x.jpg", "z.jpg"]
    assert names(tmp_path, tars=False) == ["a.jpg", "z.jpg"]


def test_places_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(ValueError, match=r"plain \.tar"):
        find_images(tmp_path / "x.tar.gz")
    (tmp_path / "broken.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ValueError, match="not a readable tar"):
        find_images(tmp_path / "broken.tar")
    (tmp_path / "binary.lst").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8 list"):
        find_images(tmp_path / "binary.lst")


def test_a_folder_left_out(tmp_path: Path) -> None:
    (tmp_path / "aside" / "below").mkdir(parents=True)
    for name in ("a.jpg", "aside/b.jpg", "aside/below/c.jpg"):
        (tmp_path / name).write_bytes(JPEG)
    os.symlink(tmp_path / "aside", tmp_path / "link")
    for folder in (tmp_path / "aside", tmp_path / "link"):
        found = find_images([tmp_path], leave_out=folder)
        assert [file.path.name for file in found] == ["a.jpg"]
    inside = find_images([tmp_path / "aside" / "below"], leave_out=tmp_path / "aside")
    assert [file.path.name for file in inside] == ["c.jpg"]  # asked for by name


def test_paths_that_are_not_text_can_be_printed() -> None:
    assert printable_path(os.fsdecode(b"/x/latin-\xe9.jpg")) == "/x/latin-\\xe9.jpg"
    assert printable_path("/x/ünï.jpg") == "/x/ünï.jpg"


def test_image_formats_are_known_once() -> None:
    assert not files.IMAGE_EXTENSIONS & files.UNSUPPORTED_EXTENSIONS
