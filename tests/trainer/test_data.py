import gzip
from pathlib import Path

import numpy as np
import pytest

from sscd_vec.trainer.data import find_photos, hold_out
from sscd_vec.trainer.pixels import MemoryPixels, StreamedPixels, bytes_in_memory
from tests.trainer.photos import encoded, photo, write_folder, write_tar


def test_folder_tar_and_list_give_the_same_pixels(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", 5)
    files = sorted(folder.iterdir())
    shard = write_tar(
        tmp_path / "shard.tar",
        {f.name: f.read_bytes() for f in files} | {"00000.json": b"{}", "notes.txt": b"x"},
    )
    listing = tmp_path / "list.txt"
    listing.write_text("# five photos\n" + "\n".join(f"photos/{f.name}" for f in files) + "\n")
    pixels = [
        MemoryPixels(find_photos(place), 32).take(np.arange(5)).pixels
        for place in (folder, shard, listing)
    ]
    assert np.array_equal(pixels[0], pixels[1])
    assert np.array_equal(pixels[0], pixels[2])


def test_a_folder_may_hold_subfolders_and_shards(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", 2)
    write_tar(tmp_path / "shard.tar", {"x.jpg": encoded(photo(9), "JPEG")})
    found = find_photos(tmp_path)
    assert len(found) == 3
    assert [p.member for p in found] == ["x.jpg", "", ""]
    assert found == find_photos(tmp_path), "the order is fixed"
    assert len(find_photos([tmp_path / "a", tmp_path / "shard.tar"])) == 3


def test_places_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_photos(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images in"):
        find_photos(tmp_path / "empty")
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(ValueError, match=r"plain \.tar"):
        find_photos(tmp_path / "x.tar.gz")
    (tmp_path / "broken.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ValueError, match="not a readable tar"):
        find_photos(tmp_path / "broken.tar")
    (tmp_path / "binary.lst").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8 list"):
        find_photos(tmp_path / "binary.lst")


def test_unreadable_photos_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 4)
    (folder / "00001.png").write_bytes(b"no image")
    (folder / "00002.png").write_bytes((folder / "00000.png").read_bytes()[:200])
    photos = find_photos(folder)
    kept = MemoryPixels(photos, 24)
    assert len(kept) == 2
    assert sorted(Path(name).name for name in kept.skipped) == ["00001.png", "00002.png"]
    assert all(kept.skipped.values())


def test_streamed_photos_equal_decoded_ones_and_replace_the_unreadable(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 5)
    numbers = np.array([3, 0, 4])
    photos = find_photos(folder)
    memory, stream = MemoryPixels(photos, 24), StreamedPixels(photos, 24)
    assert np.array_equal(memory.take(numbers).pixels, stream.take(numbers).pixels)
    (folder / "00003.png").write_bytes(b"gone bad")
    again = StreamedPixels(photos, 24)
    taken = again.take(numbers)
    assert taken.sources.tolist() == [4, 0, 4], "the replacement's own id: no false negative"
    assert np.array_equal(taken.pixels[0], taken.pixels[2])
    assert [Path(name).name for name in again.skipped] == ["00003.png"]


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match="none of the 1 photos"):
        StreamedPixels(find_photos(tmp_path), 8).take(np.array([0]))


def test_aspect_ratio_is_kept_beside_the_square(tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(encoded(photo(1, width=120, height=60)))
    taken = MemoryPixels(find_photos(tmp_path), 30).take(np.array([0]))
    assert taken.pixels.shape == (1, 30, 30, 3)
    assert taken.aspects.tolist() == [2.0]
    assert bytes_in_memory(1, 30) == taken.pixels.nbytes


def test_hold_out_is_disjoint_and_complete(tmp_path: Path) -> None:
    photos = find_photos(write_folder(tmp_path, 20, side=8))
    kept, held = hold_out(photos, 0.25, most=100)
    assert (len(kept), len(held)) == (15, 5)
    assert set(kept) | set(held) == set(photos)
    assert len(hold_out(photos, 0.5, most=3)[1]) == 3
    assert hold_out(photos, 0.0, most=3) == (photos, [])


def test_links_are_followed_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos" / "a", 2)
    elsewhere = write_folder(tmp_path / "elsewhere", 1, first=7)
    (tmp_path / "photos" / "a" / "back").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "linked").symlink_to(elsewhere)
    (tmp_path / "photos" / "linked again").symlink_to(elsewhere)
    names = [Path(p.path).name for p in find_photos(tmp_path / "photos")]
    assert sorted(names) == ["00000.png", "00001.png", "00007.png"]
