"""From what a client sent to pixels: checked before it is decoded, and never written as it came.

Only plain raster formats are taken (no SVG, no PDF, nothing that starts another program). The size
in pixels is read from the header and checked before decoding, so that a bomb stays folded. A file
that is also something else (a page, a script, an archive, a PDF) is refused; what is kept is
encoded anew from its pixels anyway.
"""

import functools
import io
import zipfile

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.app.limits import Refused
from sscd_vec.encoder.images import FORMATS, ImageError, load_pixels

Pixels = NDArray[np.uint8]  # (height, width, 3)

MARKUP = (b"<script", b"<html", b"<!doctype", b"<?php", b"<svg")
UNMEASURED = ("ICO",)  # holds a PNG of any size, whatever its own header says
PDF_WITHIN = 1024  # a PDF may start this late in a file


def measure(content: bytes, *, pixels: int) -> int:
    """How many pixels an uploaded image has, by its header.

    Args:
        content: The bytes that came.
        pixels: Most pixels allowed.

    Raises:
        Refused: 413 for too many pixels, 415 for what is no image or more than one thing, 422
            for nothing at all.
    """
    if not content:
        raise Refused(422, "the image is empty")
    try:
        with Image.open(io.BytesIO(content), formats=_readable()) as image:
            width, height = image.size
    except Image.DecompressionBombError as error:
        raise Refused(413, f"an image may have {pixels} pixels, this one has far more") from error
    except Exception as error:
        kinds = ", ".join(_readable())
        raise Refused(415, f"not an image of a kind that is read ({kinds})") from error
    if width * height > pixels:
        raise Refused(
            413,
            f"an image may have {pixels} pixels, this one has {width * height}; send it smaller",
        )
    if _is_polyglot(content):
        raise Refused(415, "the file is an image and something else at once; send a plain image")
    return int(width * height)


def decode(content: bytes) -> Pixels:
    """Pixels of an uploaded image that was measured.

    Raises:
        Refused: 422, it is broken.
    """
    try:
        return load_pixels(content, name="the image")
    except ImageError as error:
        raise Refused(422, str(error)) from error


@functools.cache
def _readable() -> tuple[str, ...]:
    """Formats this Pillow can open, of those the encoder reads and whose header tells the size."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN and name not in UNMEASURED)


def _is_polyglot(content: bytes) -> bool:
    lowered = content.lower()
    if any(tag in lowered for tag in MARKUP) or b"%PDF-" in content[:PDF_WITHIN]:
        return True
    return zipfile.is_zipfile(io.BytesIO(content))
