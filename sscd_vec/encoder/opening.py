"""Encoded images: the one door every image file comes through.

Only plain raster formats are opened and only regular files are read. Pillow bounds the pixels of an
image and nothing else, but a megabyte can ask for gigabytes (a TIFF tile far larger than its image)
or for minutes (a JPEG of 12 000 scans, a header of 200 000 tags, a PPM full of comments). So what a
file claims is counted here before any of it is decoded. Nothing here needs torch.
"""

import contextlib
import functools
import importlib
import io
import os
import re
import stat
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from PIL import Image, UnidentifiedImageError

from sscd_vec.files import ImageFile

TargetSize: TypeAlias = Callable[[int, int], tuple[int, int]]

# Left out on purpose: formats that start other programs (EPS, WMF) or are documents.
FORMATS = (
    "JPEG", "PNG", "WEBP", "AVIF", "HEIF", "GIF", "TIFF", "BMP", "DIB", "PPM", "JPEG2000",
    "ICO",
)  # fmt: skip
# How the reasons begin that a server answers with a status of their own.
NOT_AN_IMAGE, TOO_LARGE = "not an image", "too many pixels"
MIN_SIDE = 2
MAX_ASPECT_RATIO = 32
# Decoding may take this many bytes per pixel Pillow allows (PIL.Image.MAX_IMAGE_PIXELS): 1 GiB.
BYTES_PER_ALLOWED_PIXEL = 12
MOST_READS = 10_000  # pieces a header may be read in
MOST_SCANS = 100  # of a JPEG; ordinary progressive ones have about ten
MOST_SCANNED = 2 * 10**9  # pixels times scans, some two seconds
MOST_TAGS = 1_000  # of a TIFF or EXIF directory
MOST_EXIF = 2**20  # bytes, of a JPEG
MOST_TAG_VALUES = 2**18  # numbers in all of them, such as the offsets of strips
MOST_COMMENTS = 1_000  # in a PPM of plain text
MOST_SLOW_VALUES = 8_000_000  # of a PPM that Pillow decodes in Python, a microsecond each
MOST_ICONS = 256
MOST_ICON_SIDE = 1024

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # a JPEG marker that is not part of a scan
_TEM, _SOI, _EOI, _SOS, _APP1, _APP2 = 0x01, 0xD8, 0xD9, 0xDA, 0xE1, 0xE2
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF, without DHT, JPG and DAC
_SEQUENTIAL = (0xC0, 0xC1)
_EXIF, _MPF = b"Exif\0\0", b"MPF\0"
_BYTE_TYPES = (1, 2, 6, 7)  # TIFF types that Pillow keeps as bytes
_WIDTH_TAG, _HEIGHT_TAG, _ROWS_TAG, _BITS_TAG = 322, 323, 278, 258  # of a TIFF's tiles and strips
_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2}  # of Pillow's image, other modes 4
_OUTPUT_BYTES = 3
# Bytes per pixel that decoders use beside Pillow's image, measured; the others stay below one.
_BESIDE = {"WEBP": 12, "AVIF": 12, "HEIF": 12, "JPEG2000": 20, "BMP": 3, "DIB": 3}


class Refused(ValueError):
    """Why an image is refused, before its name is known."""


def open_checked(
    source: Any,  # noqa: ANN401
    reduce_to: TargetSize | None = None,
    most_pixels: int | None = None,
) -> tuple[Image.Image, int]:
    """Open an encoded image that is safe to decode; return how many bytes that takes at most.

    Args:
        source: A path, an ``ImageFile``, encoded bytes or an open binary file; anything else is
            refused.
        reduce_to: Have a large JPEG decoded at a fraction; see ``load_pixels``.
        most_pixels: How many of its pixels are kept, at most.

    Raises:
        Refused: It would take too much time or memory, or is not an image file.
    """
    content = read_encoded(source)
    scans = _check_content(content)
    file = _HeaderFile(content)
    image = Image.open(file, formats=_formats())
    width, height = full = image.size
    check_size(height, width)
    if reduce_to is not None:
        target_height, target_width = reduce_to(height, width)
        image.draft(None, (2 * target_width, 2 * target_height))
    kept = image.width * image.height
    kept = kept if most_pixels is None else min(kept, most_pixels)
    needed = _check_cost(image, len(content) + kept * _OUTPUT_BYTES, scans, full)
    file.end_header()
    return image, needed


def read_encoded(source: Any) -> bytes:  # noqa: ANN401 - refused below
    """Read an encoded image: only from a regular file, and no more than may ever be decoded.

    Raises:
        Refused: It is empty, or not a path, bytes or binary file.
        OSError: It cannot be read.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        content = bytes(source)
    elif isinstance(source, ImageFile):
        content = _read_regular(source.path, source.offset, source.size if source.member else None)
    elif isinstance(source, str) and source.startswith(("http://", "https://")):
        raise Refused("a URL; download it first and pass its bytes or its file")
    elif isinstance(source, str | os.PathLike):
        content = _read_regular(source, 0, None)
    elif hasattr(source, "read"):
        content = source.read()
        if not isinstance(content, bytes):
            raise Refused("a text file; open it in binary mode ('rb')")
    else:
        raise Refused(
            "expected a path, bytes, binary file, PIL image, array or tensor, got "
            f"{type(source).__name__}"
        )
    if not content:
        raise Refused("empty")
    return content


def check_size(height: int, width: int) -> None:
    """Refuse an image less than two pixels wide or high, or as long and thin as a ribbon."""
    if min(height, width) < MIN_SIDE:
        raise Refused(f"{width}×{height} pixels; at least {MIN_SIDE} on each side are needed")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise Refused(
            f"{width}×{height} pixels is more than {MAX_ASPECT_RATIO} times as long as wide; cut "
            "it into pieces and encode those"
        )


def exif_orientation(image: Image.Image) -> int:
    """Read how an image lies, 1 (upright) to 8, once its pixels are loaded.

    Only then: the metadata of a PNG may come after its pixels, and Pillow would load them itself.
    """
    exif, text = image.info.get("exif"), image.info.get("Raw profile type exif")
    try:
        if not isinstance(exif, bytes) and isinstance(text, str):  # as old programs wrote it
            exif = bytes.fromhex("".join(text.split("\n")[3:]))
        if isinstance(exif, bytes):
            _check_tags(exif.removeprefix(_EXIF).removeprefix(_EXIF))
        orientation = image.getexif().get(0x0112, 1)
    except Refused:
        raise
    except Exception:  # broken metadata does not break the image
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def error_reason(error: Exception) -> str:
    """Say in a few words why an image could not be used."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, UnidentifiedImageError):
        return f"{NOT_AN_IMAGE}, or of a format that is not read ({', '.join(_formats())})"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"{TOO_LARGE} ({error}); raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "a folder; pass it alone to encode all its images"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    return f"cannot be decoded: {str(error) or type(error).__name__}"


class _HeaderFile(io.BytesIO):
    """An encoded image that may be read in so many pieces while its header is parsed."""

    _left = MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise Refused(f"a header in more than {MOST_READS} pieces (tags, chunks, comments)")
        return super().read(size)

    def end_header(self) -> None:
        """Count no more."""
        vars(self)["read"] = super().read


@functools.cache
def _formats() -> tuple[str, ...]:
    """Formats this Pillow can open, of those we read; HEIC where its plugin is installed."""
    Image.init()
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _read_regular(path: str | os.PathLike[str], offset: int, size: int | None) -> bytes:
    """Read a regular file; a pipe or device would block or never end."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError
        if not stat.S_ISREG(status.st_mode):
            raise Refused("not a regular file")
        _check_bytes(status.st_size if size is None else size, "its file alone")
        file.seek(offset)
        return file.read(-1 if size is None else size)


def _check_content(content: bytes) -> int:
    """Refuse a file whose header alone is slow to read; return a JPEG's scans, or 1."""
    if content[:3] == b"\xff\xd8\xff":
        return _count_scans(content)
    if content[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        _check_tags(content)
    elif content[:4] == b"\0\0\1\0":
        _check_icons(content)
    elif content[:2] in (b"P1", b"P2", b"P3") and content.count(b"#") > MOST_COMMENTS:
        raise Refused(f"more than {MOST_COMMENTS} comments in a PPM of plain text")
    return 1


def _count_scans(content: bytes) -> int:
    """Walk the segments of a JPEG up to its end and count its scans."""
    position, scans, segments, components, frame = 2, 0, 0, 0, 0
    exif, index = b"", b""
    while (found := _MARKER.search(content, position)) is not None:
        marker, position = content[found.start() + 1], found.end()
        if marker == _EOI:
            break
        if marker in (_SOI, _TEM):  # no length follows
            continue
        length = int.from_bytes(content[position : position + 2], "big")
        body = content[position + 2 : position + length]
        position += max(2, length)
        segments += 1
        if marker in _FRAMES:
            frame, components = marker, body[5] if len(body) > 5 else 0
        elif marker == _APP1 and body.startswith(_EXIF):
            exif += body.removeprefix(_EXIF)
        elif marker == _APP2 and body.startswith(_MPF):
            index = body.removeprefix(_MPF)
        elif marker == _SOS:
            scans += 1
            if frame in _SEQUENTIAL and body[:1] == bytes([components]):
                break  # one scan has everything, and is all that is decoded
        if scans > MOST_SCANS or segments > MOST_READS or len(exif) > MOST_EXIF:
            raise Refused(
                f"a JPEG of more than {MOST_SCANS} scans, {MOST_READS} segments or {MOST_EXIF} "
                "bytes of EXIF"
            )
    _check_tags(exif)
    _check_tags(index)
    return max(1, scans)


def _check_tags(content: bytes) -> None:
    """Refuse a TIFF or EXIF block with too many tags or values in its first directory."""
    order, big = "<" if content[:2] == b"II" else ">", content[2:4] in (b"+\0", b"\0+")
    try:
        (start,) = struct.unpack_from(order + ("Q" if big else "L"), content, 8 if big else 4)
        (tags,) = struct.unpack_from(order + ("Q" if big else "H"), content, start)
    except struct.error:
        return  # the directory lies beyond the end: for Pillow to refuse
    entry = struct.Struct(order + ("HHQ8x" if big else "HHL4x"))
    first = start + (8 if big else 2)
    # What a damaged header announces costs nothing: only what is there is read.
    there = min(tags, (len(content) - first) // entry.size)
    if there > MOST_TAGS:
        raise Refused(f"{there} tags in its header; at most {MOST_TAGS} are read")
    entries = entry.iter_unpack(content[first : first + there * entry.size])
    values = sum(min(n, len(content)) for _, kind, n in entries if kind not in _BYTE_TYPES)
    if values > MOST_TAG_VALUES:
        raise Refused(f"{values} values in its header; at most {MOST_TAG_VALUES} are read")


def _check_icons(content: bytes) -> None:
    """Refuse icons that are much larger than their directory can say: Pillow decodes at once."""
    (icons,) = struct.unpack_from("<4xH", content.ljust(6, b"\0"))
    if icons > MOST_ICONS:
        raise Refused(f"{icons} icons in one file; at most {MOST_ICONS} are read")
    there = min(icons, max(0, len(content) - 6) // 16)
    for (start,) in struct.iter_unpack("<12xL", content[6 : 6 + 16 * there]):
        head = content[start : start + 24].ljust(24, b"\0")
        if head.startswith(b"\x89PNG"):
            width, height = struct.unpack_from(">LL", head, 16)
        else:  # a bitmap, and a mask of the same size below it
            width, height = struct.unpack_from("<ll", head, 4)
            height //= 2
        if max(abs(width), abs(height)) > MOST_ICON_SIDE:
            raise Refused(f"an icon of {width}×{height} pixels; at most {MOST_ICON_SIDE} are read")


def _check_cost(image: Image.Image, held: int, scans: int, full: tuple[int, int]) -> int:
    """Return the most bytes that decoding takes beside ``held``, unless they are too many."""
    if scans * full[0] * full[1] > MOST_SCANNED:
        raise Refused(f"{scans} scans of {full[0]}×{full[1]} pixels take too long to decode")
    _check_slow(image)
    beside = _BESIDE.get(image.format or "", 1)
    per_pixel = _PIXEL_BYTES.get(image.mode, 4) + beside
    needed = held + image.width * image.height * per_pixel + _tile_bytes(image)
    if scans > 1:  # libjpeg keeps two bytes of every sample until the last scan
        needed += int(2 * _samples(image) * full[0] * full[1])
    _check_bytes(needed, f"{image.width}×{image.height} pixels")
    return needed


def _check_bytes(needed: int, what: str) -> None:
    if Image.MAX_IMAGE_PIXELS is None:
        return
    allowed = BYTES_PER_ALLOWED_PIXEL * Image.MAX_IMAGE_PIXELS
    if needed > allowed:
        raise Refused(
            f"{TOO_LARGE}: {what} may need {needed >> 20} MiB, {allowed >> 20} are allowed; "
            "raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        )


def _check_slow(image: Image.Image) -> None:
    """Refuse images that Pillow would decode pixel by pixel in Python, if that is slow."""
    names = {tile[0] for tile in getattr(image, "tile", ())}
    values = image.width * image.height * len(image.getbands())
    if names & {"ppm", "ppm_plain"} and values > MOST_SLOW_VALUES:
        raise Refused(
            f"a PPM of {values} values that are plain text or not of 8 or 16 bits; at most "
            f"{MOST_SLOW_VALUES} are decoded: convert it"
        )


def _tile_bytes(image: Image.Image) -> int:
    """Bytes of the largest tile or strip of a TIFF, which is decoded as a whole."""
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return 0
    width, height = tags.get(_WIDTH_TAG), tags.get(_HEIGHT_TAG)
    if not (isinstance(width, int) and isinstance(height, int)):
        rows = tags.get(_ROWS_TAG)
        width, height = image.width, min(rows, image.height) if isinstance(rows, int) else 0
    bits = tags.get(_BITS_TAG, 8)
    return width * height * max(32, sum(bits) if isinstance(bits, tuple) else 8) // 8


def _samples(image: Image.Image) -> float:
    """Samples per pixel of a JPEG: 1.5 with colours at half size, 3 without."""
    layers = [across * down for _, across, down, _ in getattr(image, "layer", ())]
    return sum(layers) / max(layers) if layers and max(layers) else 4.0
