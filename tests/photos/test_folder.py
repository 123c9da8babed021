"""What counts as an image of a folder."""

import os
from pathlib import Path

import pytest

from sscd_vec.photos.folder import Unreadable, find_images, shown

JPEG = b"\xff\xd8\xff\xe0" + bytes(20)


def test_endings_signatures_links_and_hidden(tmp_path: Path) -> None:
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
    os.symlink(tmp_path / "a.jpg", tmp_path / "link.jpg")
    os.link(tmp_path / "a.jpg", tmp_path / "z-hard.jpg")
    found = [
        file.path.relative_to(tmp_path.resolve()).as_posix() for file in find_images([tmp_path])
    ]
    assert found == ["B.PNG", "a.jpg", "c.heic", "no_ending", "sub/d.webp", "wrong.dat"]


def test_what_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "fine.jpg").write_bytes(JPEG)
    real = os.scandir

    def refusing(path: str | Path) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    problems: list[Unreadable] = []
    found = find_images([tmp_path], problems.append)
    assert [file.path.name for file in found] == ["fine.jpg"]
    assert {(p.path.name, p.reason) for p in problems} == {
        ("closed", "no permission to read it"),
        ("empty.jpg", "the file is empty"),
    }


def test_overlapping_roots_and_single_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.odd").write_bytes(b"whatever")
    (tmp_path / "b.jpg").write_bytes(JPEG)
    found = find_images(
        [tmp_path, tmp_path / "sub", tmp_path / "sub" / "a.odd", tmp_path / "b.jpg"]
    )
    assert [file.path.name for file in found] == ["b.jpg", "a.odd"]
    with pytest.raises(FileNotFoundError, match="no such file"):
        find_images([tmp_path / "absent"])


def test_names_that_are_no_text_can_be_shown() -> None:
    assert shown(os.fsdecode(b"/x/latin-\xe9.jpg")) == "/x/latin-\\xe9.jpg"
    assert shown("/x/ünï.jpg") == "/x/ünï.jpg"


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
