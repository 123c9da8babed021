"""Small requests that are huge, or endless, when their images are decoded."""

import io
import struct
import zlib
from functools import cache
from typing import Any

from PIL import Image

from sscd_vec.cli.pictures import draw


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:  # noqa: ANN401 - Pillow's
    """An image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@cache
def bombs() -> dict[str, list[bytes]]:
    """The images of one request of each kind; none is above 4 MB."""
    single = {
        "TIFF, one tile of 46336²": tile_bomb(46336),
        "TIFF, 200 000 tags": tag_bomb(200_000),
        "JPEG, 12 000 scans": scan_bomb(12_000),
        "JPEG, 90 scans of 4 megapixels": scan_bomb(90, 2000),
        "PPM, a megabyte of comments": b"P3\n" + b"#\n" * 500_000 + b"2 2\n255\n" + b"0 " * 12,
        "PNG, 62 megapixels of one colour": encoded(Image.new("RGB", (7900, 7900)), "PNG"),
        "PNG, 15 megapixels of one colour": encoded(Image.new("RGBA", (3900, 3900)), "PNG"),
        "PNG, 10 gigapixels": png_bomb(100_000, 100_000),
        "PNG, text of 60 MB": text_bomb(60 * 2**20),
        "GIF, 60 megapixels": encoded(Image.new("P", (7700, 7700)), "GIF"),
        "JPEG, 60 megapixels in ten scans": encoded(
            Image.new("RGB", (7700, 7700)), "JPEG", progressive=True, subsampling=0
        ),
        "WebP, 26 megapixels": encoded(Image.new("RGB", (5100, 5100)), "WEBP", lossless=True),
        "WebP, 100 megapixels": encoded(Image.new("RGB", (10_000, 10_000)), "WEBP", lossless=True),
    }
    album = 16 * [single["PNG, 15 megapixels of one colour"]]
    return {name: [bomb] for name, bomb in single.items()} | {"album of 16 PNG": album}


def tile_bomb(side: int) -> bytes:
    """A TIFF of 64×64 pixels in one tile of ``side`` squared."""
    tags = {
        256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: 9,
    }  # fmt: skip
    rows = b"".join(struct.pack("<HHLL", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<LBQH", 17, 0, 0, len(tags)) + rows + bytes(4)


def tag_bomb(tags: int) -> bytes:
    """A BigTIFF whose directory goes on and on."""
    entries = b"".join(struct.pack("<HHQQ", 40_000 + n % 20_000, 4, 1, n) for n in range(tags))
    return b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, tags) + entries + bytes(8)


def scan_bomb(scans: int, side: int = 256) -> bytes:
    """A progressive JPEG that repeats its last scan."""
    plain = encoded(draw(1).resize((side, side)), "JPEG", progressive=True, quality=20)
    last = plain.rindex(b"\xff\xda")
    scan = plain[last:-2][:90]  # its head and some of its data
    return plain[:last] + scan * scans + b"\xff\xd9"


def png_bomb(width: int, height: int) -> bytes:
    """A PNG that claims any size."""
    header = struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    return _png((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100_000), 9)))


def text_bomb(size: int) -> bytes:
    """A PNG with compressed text."""
    header = struct.pack(">LLBBBBB", 64, 64, 8, 0, 0, 0, 0)
    text = b"Comment\0\0" + zlib.compress(b"a" * size, 9)
    return _png((b"IHDR", header), (b"zTXt", text), (b"IDAT", zlib.compress(bytes(64 * 65))))


def _png(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, data in (*chunks, (b"IEND", b"")):
        parts.append(struct.pack(">L", len(data)) + kind + data)
        parts.append(struct.pack(">L", zlib.crc32(kind + data)))
    return b"".join(parts)
