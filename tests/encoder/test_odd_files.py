"""Files that lead decoders astray cost little, and end in pixels or ImageError."""

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

HUGE = 2**28  # bytes that a chunk unpacks to
MOST_BYTES, MOST_SECONDS = 96 * 2**20, 3.0  # of memory, and of the processor
LOAD = """
import json, resource, sys, time
from sscd_vec.encoder.images import ImageError, load_pixels

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

load_pixels(sys.argv[1])  # libraries are loaded now
for name in sys.argv[2:]:
    before, begun = peak(), time.process_time()
    try:
        end = str(load_pixels(name).shape)
    except ImageError as error:
        end = error.reason
    print(json.dumps([name, end, peak() - before, time.process_time() - begun]))
"""


def encoded(mode: str, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((64, 64)).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def png_with(kind: bytes, body: bytes) -> bytes:
    content = encoded("RGB", "PNG")
    start = content.index(b"IDAT") - 4
    chunk = struct.pack(">L", len(body)) + kind + body + struct.pack(">L", zlib.crc32(kind + body))
    return content[:start] + chunk + content[start:]


def packed() -> bytes:
    return zlib.compress(bytes(HUGE), 9)


def many_texts() -> bytes:
    """Each text is of the size Pillow allows, all of them are not."""
    text = PngImagePlugin.PngInfo()
    for number in range(80):
        text.add_text(f"k{number}", "x" * (2**20 - 1), zip=True)
    return encoded("RGB", "PNG", pnginfo=text)


def directory(entries: list[tuple[int, int, int, int]], following: int) -> bytes:
    tags = b"".join(struct.pack("<HHLL", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + tags + struct.pack("<L", following)


def tiff(following: int, *more: tuple[int, int, int, int]) -> bytes:
    """A gray TIFF of 64 × 64 pixels; ``following`` is where its next directory begins."""
    short, long = 3, 4
    entries = [(256, short, 1, 64), (257, short, 1, 64), (258, short, 1, 8), (259, short, 1, 1)]
    entries += [(262, short, 1, 1), (273, long, 1, 512), (278, short, 1, 64)]
    entries = sorted([*entries, (279, long, 1, 4096), *more])
    content = (b"II*\0" + struct.pack("<L", 8) + directory(entries, following)).ljust(300, b"\0")
    second = directory(entries, 8)  # leads back to the first
    return (content + second).ljust(512, b"\0") + bytes(4096)


def jpeg_with(marker: int, body: bytes, mode: str = "RGB") -> bytes:
    content = encoded(mode, "JPEG")
    inserted = bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body
    return content[:2] + inserted + content[2:]


def exif(following: int, *entries: tuple[int, int, int, int]) -> bytes:
    block = b"II*\0" + struct.pack("<L", 8) + directory([(274, 3, 1, 6), *entries], following)
    return jpeg_with(0xE1, b"Exif\0\0" + block)


def adobe(transform: int, mode: str, length: int = 12) -> bytes:
    marker = b"Adobe" + struct.pack(">HHHB", 100, 0, 0, transform)
    return jpeg_with(0xEE, marker[:length], mode)


FILES: dict[str, Callable[[], bytes]] = {
    "text-packed.png": lambda: png_with(b"zTXt", b"key\0\0" + packed()),
    "text-international.png": lambda: png_with(b"iTXt", b"key\0\1\0\0\0" + packed()),
    "text-many.png": many_texts,
    "profile-packed.png": lambda: png_with(b"iCCP", b"name\0\0" + packed()),
    "profile-rubbish.jpg": lambda: jpeg_with(0xE2, b"ICC_PROFILE\0\1\1" + b"\xff" * 60_000),
    "directory-is-its-own-next.tif": lambda: tiff(8),
    "directories-in-a-circle.tif": lambda: tiff(300),
    "exif-in-a-circle.tif": lambda: tiff(0, (34665, 4, 1, 8)),
    "parts-in-a-circle.tif": lambda: tiff(0, (330, 4, 1, 8)),
    "exif-is-its-own-next.jpg": lambda: exif(8),
    "exif-in-a-circle.jpg": lambda: exif(0, (34665, 4, 1, 8), (34853, 4, 1, 8)),
    **{
        f"adobe-{transform}-{mode}.jpg": lambda t=transform, m=mode: adobe(t, m)  # type: ignore[misc]
        for transform in (0, 1, 2, 255)
        for mode in ("L", "RGB", "CMYK")
    },
    **{f"adobe-cut-{n}.jpg": lambda n=n: adobe(1, "CMYK", n) for n in (5, 6, 11)},  # type: ignore[misc]
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, int, float]]]:
    """How each file ended, in one process: pixels or a reason, memory it took, seconds."""
    folder = tmp_path_factory.mktemp("odd")
    plain = folder / "plain.png"
    plain.write_bytes(encoded("RGB", "PNG"))
    for name, make in FILES.items():
        (folder / name).write_bytes(make())
    command = [sys.executable, "-c", LOAD, str(plain), *(str(folder / name) for name in FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    yield {
        Path(name).name: (end, taken, seconds)
        for name, end, taken, seconds in map(json.loads, done.stdout.splitlines())
    }


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in kilobytes elsewhere")
@pytest.mark.parametrize("name", FILES)
def test_it_costs_little(name: str, loaded: dict[str, tuple[str, int, float]]) -> None:
    end, taken, seconds = loaded[name]
    assert end
    assert taken < MOST_BYTES, f"{taken / 2**20:.0f} MiB: {end}"
    assert seconds < MOST_SECONDS, f"{seconds:.1f} s: {end}"


def test_odd_adobe_markers_change_no_size(loaded: dict[str, tuple[str, int, float]]) -> None:
    for name, (end, _, _) in loaded.items():
        if name.startswith("adobe") and "cut" not in name:
            assert end == "(64, 64, 3)", name
