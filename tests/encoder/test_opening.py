"""The door for image files: what costs too much is refused before it is decoded."""

import io
import os
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from sscd_vec.encoder import images, opening
from sscd_vec.encoder.images import ImageError, load_pixels, open_image


def noise(height: int = 64, width: int = 64) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def reason_of(source: Any) -> str:  # noqa: ANN401
    with pytest.raises(ImageError) as caught:
        load_pixels(source)
    return caught.value.reason


# ---------------------------------------------------------------------- bombs

Tag = tuple[int, int, int, int]  # number, type, count, value


def tiff(tags: list[Tag], *, big: bool = False) -> bytes:
    """A directory of tags, and 64 × 64 pixels of gray behind it."""
    size, entry = (20, "<HHQQ") if big else (12, "<HHLL")
    head = b"II+\0\x08\0\0\0" + struct.pack("<Q", 16) if big else b"II*\0" + struct.pack("<L", 8)
    count = struct.pack("<Q" if big else "<H", len(tags))
    data = len(head) + len(count) + size * len(tags) + 8
    entries = [struct.pack(entry, n, k, c, data if n in (273, 324) else v) for n, k, c, v in tags]
    return head + count + b"".join(entries) + bytes(8) + bytes(4096)


GRAY: list[Tag] = [(256, 3, 1, 64), (257, 3, 1, 64), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
STRIP: list[Tag] = [(273, 4, 1, 0), (277, 3, 1, 1), (278, 3, 1, 64), (279, 4, 1, 4096)]


def huge_tile() -> bytes:
    tile: list[Tag] = [(322, 4, 1, 46336), (323, 4, 1, 46336), (324, 4, 1, 0), (325, 4, 1, 4096)]
    return tiff([*GRAY[:3], (259, 3, 1, 8), GRAY[4], (277, 3, 1, 1), *tile])


def many_tags() -> bytes:
    own: list[Tag] = [(1000 + number, 3, 1, 1) for number in range(40_000)]
    return tiff([*GRAY, *STRIP, *own], big=True)


def many_values() -> bytes:
    return tiff([*GRAY, (273, 4, 1_000_000, 0), *STRIP[1:]]) + bytes(4_000_000)


def many_scans() -> bytes:
    content = encoded(noise(), "JPEG", progressive=True)
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    return content[:end] + content[last:end] * 200 + content[end:]


def exif_block(tags: int) -> bytes:
    entries = b"".join(struct.pack("<HHLL", number, 3, 1, 1) for number in range(tags))
    return b"II*\0" + struct.pack("<LH", 8, tags) + entries + bytes(4)


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def jpeg_with(*segments: bytes) -> bytes:
    content = encoded(noise(), "JPEG")
    return content[:2] + b"".join(segments) + content[2:]


def jpeg_exif() -> bytes:
    block = exif_block(60_000)
    cuts = [block[start : start + 65_000] for start in range(0, len(block), 65_000)]
    return jpeg_with(*(segment(0xE1, b"Exif\0\0" + cut) for cut in cuts))


def png_with(*chunks: tuple[bytes, bytes]) -> bytes:
    content = encoded(noise(), "PNG")
    start = content.index(b"IDAT") - 4
    made = [
        struct.pack(">L", len(data)) + kind + data + struct.pack(">L", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return content[:start] + b"".join(made) + content[start:]


def large_icon() -> bytes:
    png = encoded(Image.new("L", (2000, 2000)), "PNG")
    entry = struct.pack("<BBBBHHLL", 64, 64, 0, 0, 1, 32, len(png), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + png


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a tile of 46336² in a TIFF of 64²": (huge_tile, "64×64 pixels may need"),
    "40 000 tags in a BigTIFF": (many_tags, "40009 tags in its header"),
    "a million offsets in a TIFF": (many_values, "values in its header"),
    "200 more scans in a JPEG": (many_scans, "more than 100 scans"),
    "60 000 EXIF tags in a JPEG": (jpeg_exif, "60000 tags in its header"),
    "60 000 EXIF tags in a PNG": (lambda: png_with((b"eXIf", exif_block(60_000))), "60000 tags"),
    "5 000 MPF tags in a JPEG": (
        lambda: jpeg_with(segment(0xE2, b"MPF\0" + exif_block(5_000))),
        "5000 tags",
    ),
    "20 000 comments in a JPEG": (lambda: jpeg_with(segment(0xFE, b"") * 20_000), "segments"),
    "2 MiB of EXIF in a JPEG": (
        lambda: jpeg_with(segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 33),
        "bytes of EXIF",
    ),
    "20 000 chunks in a PNG": (lambda: png_with(*[(b"prVt", b"")] * 20_000), "10000 pieces"),
    "2 000 comments in a plain PPM": (
        lambda: b"P2 64 64 255\n" + b"#\n" * 2_000 + b"1 " * 4096,
        "more than 1000 comments",
    ),
    "a comment of 20 kB in a PPM": (
        lambda: b"P5 #" + b"x" * 20_000 + b"\n64 64 255\n" + bytes(4096),
        "10000 pieces",
    ),
    "nine million values of an odd range": (lambda: b"P6 3000 1000 254\n", "convert it"),
    "an icon of 2000² in a directory of 64²": (large_icon, "an icon of 2000×2000"),
    "60 000 icons": (lambda: struct.pack("<HHH", 0, 1, 60_000) + bytes(10**6), "60000 icons"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_would_take_too_long_or_too_much_is_refused(bomb: str) -> None:
    make, reason = BOMBS[bomb]
    assert reason in reason_of(make())


def test_a_million_scanned_pixels_times_scans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(noise(), "JPEG", progressive=True)
    load_pixels(content)
    monkeypatch.setattr(opening, "MOST_SCANNED", 64 * 64 * 5)
    assert "scans of 64×64 pixels take too long" in reason_of(content)


def test_what_cameras_write_is_not_mistaken_for_a_bomb() -> None:
    scan = encoded(noise(), "JPEG", progressive=True)
    sources = [
        scan,
        jpeg_with(segment(0xE1, b"Exif\0\0" + exif_block(100))),
        jpeg_with(segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(60_000))),
        scan + b"\xff\xda" * 500,  # a film behind the image, as phones have it
        jpeg_with(segment(0xEE, b"thumbnail" + b"\xff\xda" * 500)),
        tiff([*GRAY, *STRIP]),
        encoded(noise(), "TIFF", compression="tiff_lzw"),
        encoded(Image.new("RGB", (64, 64)), "ICO"),
        b"P5\n# made by hand\n64 64\n255\n" + bytes(4096),
    ]
    for source in sources:
        assert load_pixels(source).shape == (64, 64, 3)


# ---------------------------------------------------------------------- memory


def test_memory_follows_what_pillow_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(noise(100, 100), "WEBP")  # 19 bytes per pixel, 12 per allowed one
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12_000)
    assert "too many pixels: 100×100 pixels may need" in reason_of(content)
    for allowed in (20_000, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", allowed)
        assert load_pixels(content).shape == (100, 100, 3)


def test_a_file_larger_than_any_image_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(2**31)  # a hole: takes no room
    monkeypatch.setattr("os.fdopen", lambda *_: pytest.fail("it was opened to be read"))
    assert "its file alone may need 2048 MiB" in reason_of(path)


PEAK = """
import re, sys, pathlib
from sscd_vec.encoder.images import load_pixels
from sscd_vec.encoder.opening import open_checked

def peak(reset=False):
    if reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024

for name in sys.argv[1:]:
    image, needed = open_checked(name)
    image.close()
    load_pixels(name)  # libraries are loaded now
    before = peak(reset=True)
    pixels = load_pixels(name)
    print(pathlib.Path(name).name, needed, peak() - before)
    del pixels
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_decoding_takes_no_more_than_was_said(tmp_path: Path) -> None:
    coarse = noise(30, 40).resize((2000, 1500))
    kinds: dict[str, dict[str, Any]] = {
        "a.jpg": {},
        "b.jpg": {"progressive": True, "subsampling": 0},
        "c.png": {"compress_level": 1},
        "d.webp": {"method": 0},
        "e.avif": {"speed": 10},
        "f.tif": {"compression": "tiff_lzw"},
        "g.bmp": {},
        "h.jp2": {},
    }
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, options in kinds.items():
        coarse.save(tmp_path / name, **options)
    coarse.save(tmp_path / "i.jpg", exif=exif)
    coarse.convert("RGBA").save(tmp_path / "j.webp", method=0, lossless=True)
    names = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *names], capture_output=True, text=True, check=True
    )
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == len(names)
    for line in lines:
        name, needed, taken = line.split()
        assert int(taken) <= int(needed) + 4 * 2**20, line


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "LA", "CMYK", "1", "I;16", "F"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_strips_give_the_same_pixels(
    mode: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode in ("I;16", "F"):
        values = np.arange(37 * 23).reshape(37, 23)
        image = Image.fromarray(values.astype(np.uint16) if mode == "I;16" else values / 999)
    else:
        image = noise(37, 23).convert(mode)
    image.getexif()[0x0112] = orientation
    whole = load_pixels(image)
    monkeypatch.setattr(images, "_STRIP_PIXELS", 100)
    strips = load_pixels(image)
    np.testing.assert_array_equal(strips, whole)
    assert strips.shape[:2] == ((23, 37) if orientation > 4 else (37, 23))
    assert strips.flags.c_contiguous


# ---------------------------------------------------------------------- files that are none


def within_a_minute(work: Callable[[], object]) -> object:
    """What ``work`` returns; a failure and not a hang if it never does."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert results, "it hangs, or failed"
    return results[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_named_like_an_image_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "b.jpg")
    assert within_a_minute(lambda: reason_of(tmp_path / "b.jpg")) == "not a regular file"
    items, count = images.images_of(tmp_path)
    assert count == 1
    (item,) = items
    assert within_a_minute(lambda: reason_of(item)) == "not a regular file"


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device here")
def test_a_device_is_not_read() -> None:
    assert reason_of("/dev/zero") == "not a regular file"


def test_a_found_image_swapped_for_another_program_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("it was started"))
    path = tmp_path / "swapped.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    with pytest.raises(ImageError, match="not an image, or of a format that is not read"):
        open_image(path)
    assert "not an image" in reason_of(path)


def test_an_image_is_opened_without_being_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(encoded(noise(40, 60), "JPEG"))
    with open_image(path) as image:
        assert (image.size, image.format) == ((60, 40), "JPEG")
    with pytest.raises(ImageError, match="more than 100 scans"):
        open_image(many_scans())
