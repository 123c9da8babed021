import io
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, features

from sscd_vec.encoder.images import (
    ImageError,
    ImageInput,
    images_of,
    input_name,
    is_image_input,
    load_pixels,
)
from sscd_vec.files import Unreadable, find_images


def gradient(height: int = 40, width: int = 60) -> NDArray[np.uint8]:
    """A picture without symmetry: red grows to the right, green downwards, blue in one corner."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    picture = np.stack((255 * x / width, 255 * y / height, 200 * (x + y < 20)), axis=2)
    return picture.astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def error_of(source: object) -> ImageError:
    with pytest.raises(ImageError) as caught:
        load_pixels(cast(ImageInput, source))
    return caught.value


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_files_give_their_pixels(kind: str, tmp_path: Path) -> None:
    pixels = gradient()
    content = encoded(Image.fromarray(pixels), kind)
    path = tmp_path / "picture"  # the content decides, not the name
    path.write_bytes(content)
    with path.open("rb") as file:
        for source in (path, str(path), content, bytearray(content), memoryview(content), file):
            loaded = load_pixels(source)
            assert loaded.dtype == np.uint8 and loaded.flags.c_contiguous
            np.testing.assert_array_equal(loaded, pixels)


@pytest.mark.parametrize("kind", ["WEBP", "AVIF"])
def test_modern_formats(kind: str) -> None:
    if not features.check(kind.lower()):
        pytest.skip(f"this Pillow has no {kind}")
    loaded = load_pixels(encoded(Image.fromarray(gradient()), kind, quality=95))
    assert np.abs(loaded.astype(int) - gradient()).mean() < 4


def test_arrays_tensors_and_pil_images_are_the_same_pixels() -> None:
    pixels = gradient()
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    sources: list[Any] = [
        pixels,
        pixels[::-1][::-1],
        pixels.astype(np.float32) / 255,
        tensor,
        tensor.float() / 255,
        tensor.double() / 255,
        (tensor / 255).requires_grad_(),
        Image.fromarray(pixels),
    ]
    for source in sources:
        np.testing.assert_array_equal(load_pixels(source), pixels)


def test_gray_is_repeated() -> None:
    gray = gradient()[:, :, 0]
    wanted = np.repeat(gray[:, :, None], 3, axis=2)
    for source in (gray, gray[:, :, None], torch.from_numpy(gray), torch.from_numpy(gray)[None],
                   Image.fromarray(gray), encoded(Image.fromarray(gray), "PNG")):  # fmt: skip
        np.testing.assert_array_equal(load_pixels(source), wanted)


def test_transparency_lies_on_white() -> None:
    pixels = gradient()
    alpha = np.zeros(pixels.shape[:2], np.uint8)
    alpha[:, :30] = 255
    rgba = np.dstack((pixels, alpha))
    wanted = np.where(alpha[:, :, None] == 255, pixels, 255).astype(np.uint8)
    for source in (rgba, torch.from_numpy(rgba).permute(2, 0, 1), Image.fromarray(rgba),
                   encoded(Image.fromarray(rgba), "PNG")):  # fmt: skip
        np.testing.assert_array_equal(load_pixels(source), wanted)
    half = np.zeros((8, 8, 4), np.uint8)
    half[:, :, 3] = 128
    assert np.abs(load_pixels(half).astype(int) - 127).max() <= 1


def test_palette_with_a_transparent_colour() -> None:
    indices = np.zeros((8, 10), np.uint8)
    indices[:, 5:] = 1
    image = Image.fromarray(indices).convert("P")
    image.putpalette([10, 20, 30, 200, 100, 50])
    opaque, clear = encoded(image, "PNG"), encoded(image, "PNG", transparency=1)
    assert load_pixels(opaque)[0, 9].tolist() == [200, 100, 50]
    assert load_pixels(clear)[0, 9].tolist() == [255, 255, 255]
    assert load_pixels(clear)[0, 0].tolist() == [10, 20, 30]


def test_gray_and_alpha() -> None:
    image = Image.new("LA", (6, 6), (100, 0))
    assert (load_pixels(encoded(image, "PNG")) == 255).all()


def test_cmyk_jpeg() -> None:
    image = Image.new("CMYK", (32, 32), (0, 255, 255, 0))  # red ink
    red, green, blue = load_pixels(encoded(image, "JPEG", quality=95))[16, 16].tolist()
    assert red > 220 and green < 40 and blue < 40


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = (np.linspace(0, 65535, 40 * 60).reshape(40, 60)).astype(np.uint16)
    image = Image.fromarray(values)
    for source in (image, encoded(image, "PNG"), encoded(image, "TIFF")):
        loaded = load_pixels(source)
        np.testing.assert_array_equal(loaded[:, :, 0], np.rint(values / 257).astype(np.uint8))


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_float_tiff(scale: float) -> None:
    values = np.linspace(0, scale, 64, dtype=np.float32).reshape(8, 8)
    loaded = load_pixels(encoded(Image.fromarray(values), "TIFF"))
    np.testing.assert_allclose(loaded[:, :, 1], values * (255 / scale), atol=0.51)


def test_bilevel() -> None:
    image = Image.fromarray(gradient()[:, :, 0] > 100)
    assert set(np.unique(load_pixels(encoded(image, "PNG")))) == {0, 255}


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    content = encoded(
        frames[0], kind, save_all=True, append_images=frames[1:],
        **({"lossless": True} if kind == "WEBP" else {}),
    )  # fmt: skip
    assert (load_pixels(content) == (255, 0, 0)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    pixels = gradient()
    stored: dict[int, Callable[[], NDArray[np.uint8]]] = {
        # What a camera stores for each tag so that the picture is upright once turned back.
        1: lambda: pixels,
        2: lambda: pixels[:, ::-1],
        3: lambda: pixels[::-1, ::-1],
        4: lambda: pixels[::-1],
        5: lambda: pixels.transpose(1, 0, 2),
        6: lambda: np.rot90(pixels, 1),
        7: lambda: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: lambda: np.rot90(pixels, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored[orientation]()))
    content = encoded(image, "PNG", exif=exif)
    np.testing.assert_array_equal(load_pixels(content), pixels)
    with Image.open(io.BytesIO(content)) as opened:
        np.testing.assert_array_equal(load_pixels(opened), pixels)


def test_broken_exif_does_not_break_the_picture() -> None:
    content = encoded(Image.fromarray(gradient()), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    with pytest.warns(UserWarning, match="Corrupt EXIF"):  # Pillow's own
        assert load_pixels(content).shape == (40, 60, 3)


@pytest.mark.parametrize("progressive", [False, True])
def test_large_jpegs_are_decoded_small_on_request(progressive: bool) -> None:
    pixels = gradient(800, 1200)
    content = encoded(Image.fromarray(pixels), "JPEG", quality=95, progressive=progressive)
    assert load_pixels(content).shape == (800, 1200, 3)
    assert load_pixels(content, reduce_to=lambda h, w: (100, 150)).shape == (200, 300, 3)
    assert load_pixels(content, reduce_to=lambda h, w: (110, 165)).shape == (400, 600, 3)
    assert load_pixels(content, reduce_to=lambda h, w: (401, 601)).shape == (800, 1200, 3)
    small = load_pixels(content, reduce_to=lambda h, w: (100, 150)).astype(int)
    assert np.abs(small - pixels[2::4, 2::4]).mean() < 4


def test_gray_and_turned_jpegs_are_reduced_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(Image.fromarray(gradient(400, 800)).convert("L"), "JPEG", exif=exif)
    assert load_pixels(content, reduce_to=lambda h, w: (h // 4, w // 4)).shape == (400, 200, 3)


# What cannot be used.


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "empty"),
        (b"\0", "not an image"),
        (b"not an image at all", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
        (io.BytesIO(), "empty"),
        (io.StringIO("text"), "binary mode"),
        ("no/such/file.jpg", "no such file"),
        ("https://example.org/a.jpg", "URL"),
        (None, "NoneType"),
        (7, "int"),
        (np.zeros((4, 4, 3), np.int64), "int64"),
        (np.zeros((4, 4, 5), np.uint8), r"shape (4, 4, 5)"),
        (np.zeros((3, 8, 8), np.uint8), r"(h, w, c)"),
        (torch.zeros(8, 8, 3), r"(c, h, w)"),
        (np.zeros((2, 4, 4, 3), np.uint8), "shape"),
        (np.zeros((0, 4, 3), np.uint8), "4×0"),
        (torch.full((3, 8, 8), 2.0), "0 (black) to 1 (white)"),
        (torch.full((3, 8, 8), -0.1), "0 (black) to 1 (white)"),
        (torch.full((3, 8, 8), float("nan")), "nan"),
        (np.zeros((1, 1, 3), np.uint8), "1×1"),
        (encoded(Image.new("RGB", (1, 1)), "PNG"), "1×1"),
        (encoded(Image.new("RGB", (20000, 3)), "PNG"), "20000×3"),
        (encoded(Image.new("RGB", (3, 20000)), "JPEG"), "3×20000"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_unusable_inputs_say_why(source: object, reason: str) -> None:
    assert reason in error_of(source).reason


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_truncated_files(kind: str, part: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(noise), kind)
    error = error_of(content[: int(part * len(content))])
    assert error.name == "bytes" and error.reason


def test_damaged_png() -> None:
    content = bytearray(encoded(Image.fromarray(gradient()), "PNG"))
    content[80] ^= 0xFF
    assert "decoded" in error_of(bytes(content)).reason


def test_decompression_bomb_is_refused_before_it_grows() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100000)))
    bomb += chunk(b"IEND", b"")
    assert "too many pixels" in error_of(bomb).reason


def test_a_folder_is_not_an_image(tmp_path: Path) -> None:
    assert "folder" in error_of(tmp_path).reason


def test_errors_name_the_input(tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"\xff\xd8\xff\xe0")
    error = error_of(path)
    assert error.name == str(path) and str(error) == f"{path}: {error.reason}"
    with path.open("rb") as file:
        assert error_of(file).name == str(path)
    assert input_name(b"", 4) == "bytes at position 4"
    assert input_name(Image.new("L", (2, 2)), 0) == "PIL image at position 0"


def test_a_given_pil_image_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "large.jpg"
    Image.fromarray(gradient(400, 600)).save(path)
    with Image.open(path) as image:
        assert load_pixels(image, reduce_to=lambda h, w: (50, 75)).shape == (400, 600, 3)
        assert image.size == (600, 400)


def test_a_folder_stands_for_the_images_that_indexing_finds(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.png", "sub/c.webp", ".hidden.png", "no-ending", "note.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(Image.fromarray(gradient()), "PNG"))
    with tarfile.open(tmp_path / "more.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "inside.png")
    (tmp_path / "empty.jpg").touch()
    unreadable: list[Unreadable] = []
    found = find_images(tmp_path, unreadable.append)
    assert [one.path.name for one in unreadable] == ["empty.jpg"]
    items, count = images_of(tmp_path)
    names = [input_name(one) for one in items]
    assert count == len(names) == 6
    assert names == [str(tmp_path / "empty.jpg"), *(one.id for one in found)]
    assert names[-1].endswith("c.webp") and str(tmp_path / "more.tar/inside.png") in names


def test_tars_and_lists_stand_for_their_images(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.fromarray(gradient()), "PNG"))
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(path, "one.png")
        tar.add(path, "two.png")
    (tmp_path / "list.txt").write_text("# mine\na.png\n")
    for place, count in ((tmp_path / "shard.tar", 2), (str(tmp_path / "list.txt"), 1)):
        items, known = images_of(place)
        assert known == count
        for one in items:
            np.testing.assert_array_equal(load_pixels(one), gradient())
    with pytest.raises(ValueError, match="compressed.*repack it as a plain .tar"):
        (tmp_path / "shard.tar.gz").touch()
        images_of(tmp_path / "shard.tar.gz")


def test_a_found_image_is_an_input(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.fromarray(gradient()), "PNG"))
    (found,) = find_images(path)
    np.testing.assert_array_equal(load_pixels(found), gradient())
    path.unlink()
    with pytest.raises(ImageError, match=f"{path}: no such file"):
        load_pixels(found)


def test_one_image_is_told_from_many() -> None:
    ones: list[Any] = ["a", Path("a"), b"", Image.new("L", (2, 2)), np.zeros((2, 2)), io.BytesIO()]
    assert all(is_image_input(one) for one in ones)
    many: list[Any] = [[], iter(()), np.zeros((1, 2, 2, 3)), torch.zeros(1, 3, 2, 2), {"a": 1}]
    assert not any(is_image_input(one) for one in many)
