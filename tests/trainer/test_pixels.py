"""Decoded images in memory and streamed; freed memory kept while training."""

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sscd_vec.files import find_images
from sscd_vec.trainer.pixels import (
    MemoryPixels,
    Storage,
    StreamedPixels,
    as_squares,
    bytes_in_memory,
)
from tests.trainer.images import encoded, photo, write_folder, write_tar

PROGRAM = """
import torch
from sscd_vec.encoder.backends.native import return_freed_memory
from sscd_vec.trainer.pixels import freed_memory_kept

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def given_back(size=64 << 20):
    block = torch.ones(size, dtype=torch.uint8)
    held = resident()
    del block
    return held - resident()

usual = given_back()
with freed_memory_kept():
    kept = given_back()
    held = resident()
    return_freed_memory()
    between = held - resident()
    given_back()
    held = resident()
released = held - resident()
after = given_back(512 << 20)  # more than any hole the heap was left with
print(usual, kept, between, released, after)
"""


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
        MemoryPixels(find_images(place), Storage(32)).take(np.arange(5)).pixels
        for place in (folder, shard, listing)
    ]
    assert np.array_equal(pixels[0], pixels[1])
    assert np.array_equal(pixels[0], pixels[2])


def test_unreadable_photos_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 4)
    (folder / "00001.png").write_bytes(b"no image")
    (folder / "00002.png").write_bytes((folder / "00000.png").read_bytes()[:200])
    photos = find_images(folder)
    kept = MemoryPixels(photos, Storage(24))
    assert len(kept) == 2
    assert sorted(Path(name).name for name in kept.skipped) == ["00001.png", "00002.png"]
    assert all(kept.skipped.values())


def test_streamed_photos_equal_decoded_ones_and_replace_the_unreadable(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 5)
    numbers = np.array([3, 0, 4])
    photos = find_images(folder)
    memory, stream = MemoryPixels(photos, Storage(24)), StreamedPixels(photos, Storage(24))
    assert np.array_equal(memory.take(numbers).pixels, stream.take(numbers).pixels)
    (folder / "00003.png").write_bytes(b"gone bad")
    again = StreamedPixels(photos, Storage(24))
    taken = again.take(numbers)
    assert taken.sources.tolist() == [4, 0, 4], "the replacement's own id: no false negative"
    assert np.array_equal(taken.pixels[0], taken.pixels[2])
    assert [Path(name).name for name in again.skipped] == ["00003.png"]


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match="none of the 1 images"):
        StreamedPixels(find_images(tmp_path), Storage(8)).take(np.array([0]))


def test_aspect_ratio_is_kept_beside_the_square(tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(encoded(photo(1, width=120, height=60)))
    taken = MemoryPixels(find_images(tmp_path), Storage(30)).take(np.array([0]))
    assert isinstance(taken.pixels, np.ndarray)
    assert taken.pixels.shape == (1, 30, 30, 3)
    assert taken.aspects.tolist() == [2.0]
    assert bytes_in_memory(find_images(tmp_path), Storage(30)) == taken.pixels.nbytes


def test_an_image_keeps_its_own_pixels_where_asked(tmp_path: Path) -> None:
    shapes = ((120, 60), (50, 90), (64, 64))
    for i, (width, height) in enumerate(shapes):
        (tmp_path / f"{i}.png").write_bytes(encoded(photo(i, width, height)))
    images = find_images(tmp_path)
    storage = Storage(0, own=True)
    for source in (MemoryPixels(images, storage), StreamedPixels(images, storage)):
        taken = source.take(np.arange(3))
        assert taken.aspects.tolist() == pytest.approx([w / h for w, h in shapes])
        for i, tensor in enumerate(taken.tensors()):
            assert np.array_equal(tensor.numpy(), np.asarray(photo(i, *shapes[i])))
    exact = sum(3 * width * height for width, height in shapes)
    assert bytes_in_memory(images, storage) == exact, "all three are in the sample"
    smaller = MemoryPixels(images, Storage(30, own=True)).take(np.arange(3)).tensors()
    assert [tuple(one.shape) for one in smaller] == [(30, 60, 3), (54, 30, 3), (30, 30, 3)]
    large = MemoryPixels(images, Storage(100, own=True)).take(np.arange(3)).tensors()
    assert [one.shape[0] for one in large] == [60, 90, 64], "never enlarged"


def test_squares_of_own_shapes_are_those_of_the_images() -> None:
    shapes = ((40, 60), (80, 20))
    own = [torch.from_numpy(np.array(photo(i, *shape))) for i, shape in enumerate(shapes)]
    squares = as_squares(own, 16)
    for image, square in zip(own, squares, strict=True):
        resized = Image.fromarray(image.numpy()).resize((16, 16), Image.Resampling.BILINEAR)
        expected = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
        assert (square.int() - expected.int()).abs().max() <= 1
    unit = as_squares(own, 16, torch.float32)
    torch.testing.assert_close(unit, squares.float() / 255, atol=1 / 255, rtol=0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_blocks_are_kept_inside_and_returned_outside() -> None:
    """In a process of its own: how many bytes leave it when 64 MiB are freed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    usual, kept, between, released, after = map(int, done.stdout.split())
    most, little = 48 << 20, 16 << 20
    assert usual > most
    assert kept < little
    assert between > most  # as every few steps of a run
    assert released > most
    assert after > most
