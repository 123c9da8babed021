"""Anything that holds an image, to pixels: oriented RGB, uint8, ``(height, width, 3)``.

Every kind of input ends in the same eight bits, so the same image has the same descriptor however
it came. An input that cannot become pixels raises ``ImageError`` with its name and the reason, and
nothing else. Nothing here needs torch, though tensors are understood.
"""

import os
import sys
import threading
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.encoder.opening import (
    FORMATS,
    Refused,
    TargetSize,
    check_size,
    error_reason,
    exif_orientation,
    open_checked,
)
from sscd_vec.files import (
    COMPRESSED_TARS,
    LIST_EXTENSIONS,
    ImageFile,
    Unreadable,
    find_images,
    printable_path,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FORMATS",
    "ImageError",
    "ImageInput",
    "Inputs",
    "Pixels",
    "TargetSize",
    "images_of",
    "input_name",
    "is_encoded",
    "is_image_input",
    "is_open_file",
    "load_pixels",
    "open_image",
]

Pixels: TypeAlias = NDArray[np.uint8]
ImageInput: TypeAlias = (
    "str | os.PathLike[str] | ImageFile | bytes | bytearray | memoryview | IO[bytes] | Image.Image"
    " | NDArray[Any] | Tensor"
)
Inputs: TypeAlias = "ImageInput | Iterable[ImageInput]"

_LARGE_BYTES = 256 * 2**20
_STRIP_PIXELS = 2**18
# What turns an image upright, by its EXIF orientation, and which ones lie with the last row first.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LAST_FIRST = (3, 4, 6, 7)

# One huge image at a time, so that memory does not grow with the number of decoding threads.
_large_image = threading.Lock()
# A caller's PIL image loads its file lazily and is not safe in two threads, and may be given twice:
# one lock out of these, chosen by the object.
_given_images = tuple(threading.Lock() for _ in range(64))


class ImageError(ValueError):
    """An input that cannot become pixels.

    Attributes:
        name: The input: its path, or its kind and position.
        reason: What is wrong with it.
    """

    def __init__(self, name: str, reason: str) -> None:
        """Keep both parts; the message is ``name: reason``."""
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        """Return ``name: reason``."""
        return f"{self.name}: {self.reason}"


def load_pixels(
    source: ImageInput,
    *,
    name: str | None = None,
    reduce_to: TargetSize | None = None,
    most_pixels: int | None = None,
) -> Pixels:
    """Return the pixels of one image, upright, RGB on white, ``(height, width, 3)`` uint8.

    Decoding a file takes 1 GiB at most (12 bytes per ``PIL.Image.MAX_IMAGE_PIXELS``), and only one
    image at a time may take more than 256 MiB.

    Args:
        source: Path, ``ImageFile``, encoded bytes, open binary file, PIL image, array ``(h, w)`` or
            ``(h, w, 1 | 3 | 4)``, or tensor ``(h, w)`` or ``(1 | 3 | 4, h, w)``. Arrays and
            tensors are uint8, or float in [0, 1], which are rounded to eight bits.
        name: What to call it in an error; its path or kind otherwise.
        reduce_to: The height and width the caller will resize an image of (height, width) to.
            Large JPEG files are then decoded at 1/2, 1/4 or 1/8 of their size, never below twice
            that.
        most_pixels: Average a larger file down to at most so many pixels, by a whole factor, while
            it is converted: it is never held at full size a second time.

    Raises:
        ImageError: It is missing, empty, broken, not an image, too small, too long or too large.
    """
    try:
        if isinstance(source, np.ndarray):
            return _from_array(source)
        if _is_tensor(source):
            array = source.detach().cpu()
            array = array.float() if array.is_floating_point() else array
            return _from_array(array.numpy(), channels_first=True)
        if isinstance(source, Image.Image):
            check_size(source.height, source.width)
            with _given_images[id(source) // 16 % len(_given_images)]:
                return _from_pil(source)
        if isinstance(source, Unreadable):
            raise Refused(source.reason)
        return _from_file(source, reduce_to, most_pixels)
    except Exception as error:  # Pillow's readers raise all kinds on broken files
        cause = None if isinstance(error, Refused) else error
        raise ImageError(name or input_name(source), error_reason(error)) from cause


def open_image(source: "str | os.PathLike[str] | ImageFile | bytes | IO[bytes]") -> Image.Image:
    """Open an encoded image without decoding it, to look at its size, format and metadata.

    Raises:
        ImageError: It cannot be opened; says why.
    """
    try:
        return open_checked(source)[0]
    except Exception as error:  # Pillow's readers raise all kinds on broken files
        raise ImageError(input_name(source), error_reason(error)) from error


def images_of(inputs: Inputs) -> tuple[Iterable[ImageInput], int | None]:
    """Return the images ``inputs`` stands for, still unpulled, and how many if that is known.

    A folder, a tar or a list of files (``.txt``, ``.lst``, ``.list``) stands for its images, as
    ``find_images`` finds them; what looks like an image there and cannot be read comes first, to be
    refused when it is loaded.

    Raises:
        TypeError: It is neither an image nor an iterable.
        ValueError: It is an array or tensor of neither one image nor a batch, or a damaged tar.
    """
    if isinstance(inputs, str | os.PathLike) and _is_collection(Path(inputs)):
        unreadable: list[Unreadable] = []
        found = find_images(inputs, unreadable.append)
        return cast(list[ImageInput], [*unreadable, *found]), len(unreadable) + len(found)
    if is_image_input(inputs):
        return (inputs,), 1
    if (isinstance(inputs, np.ndarray) or _is_tensor(inputs)) and inputs.ndim not in (1, 4):
        raise ValueError(
            "expected one image (h, w[, c]) or a batch of four axes, got shape "
            f"{tuple(inputs.shape)}"
        )
    if not isinstance(inputs, Iterable):
        raise TypeError(
            "expected a path, bytes, a binary file, a PIL image, an array, a tensor or an iterable "
            f"of them, got {type(inputs).__name__}"
        )
    return cast(Iterable[ImageInput], inputs), len(inputs) if isinstance(inputs, Sized) else None


def is_image_input(source: object) -> TypeGuard[ImageInput]:
    """Whether ``source`` is one image, and not a collection of them."""
    if isinstance(source, np.ndarray) or _is_tensor(source):
        return source.ndim in (2, 3)
    return isinstance(source, Image.Image) or is_encoded(source)


def is_encoded(source: object) -> bool:
    """Whether ``source`` is an image still to be decoded: a path, bytes or a file."""
    paths, encoded = str | os.PathLike, bytes | bytearray | memoryview
    return isinstance(source, paths | encoded | ImageFile) or is_open_file(source)


def is_open_file(source: object) -> bool:
    """Whether ``source`` is read like a file: it has a position that reading moves."""
    return hasattr(source, "read") and not isinstance(source, ImageFile)


def input_name(source: object, position: int | None = None) -> str:
    """Name an input: its path if it has one, else its kind, with its position."""
    if isinstance(source, ImageFile):
        return source.id
    if isinstance(source, Unreadable):
        return printable_path(source.path)
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    path = getattr(source, "filename", None) or getattr(source, "name", None)
    if isinstance(path, str) and path:
        return path
    if isinstance(source, Image.Image):
        kind = "PIL image"
    elif isinstance(source, bytes | bytearray | memoryview):
        kind = "bytes"
    else:
        kind = type(source).__name__
    return kind if position is None else f"{kind} at position {position}"


def _is_collection(path: Path) -> bool:
    listed = (".tar", *LIST_EXTENSIONS, *COMPRESSED_TARS)
    return path.name.lower().endswith(listed) or path.is_dir()


def _is_tensor(source: object) -> "TypeGuard[Tensor]":
    torch = sys.modules.get("torch")  # whoever has a tensor has loaded torch
    return torch is not None and isinstance(source, torch.Tensor)


def _from_file(source: object, reduce_to: TargetSize | None, most_pixels: int | None) -> Pixels:
    image, needed = open_checked(source, reduce_to, most_pixels)
    with image:
        if needed <= _LARGE_BYTES:
            return _from_pil(image, most_pixels)
        with _large_image:
            return _from_pil(image, most_pixels)


def _from_pil(image: Image.Image, most_pixels: int | None = None) -> Pixels:
    """Convert an image, of an animation its first frame, strip by strip: never twice in memory."""
    opened = image.size
    image.load()
    orientation = exif_orientation(image)
    width, height = image.size
    if image.size != opened:  # an icon that its directory calls smaller
        check_size(height, width)
    factor = _reduction(height, width, most_pixels)
    rows = max(1, _STRIP_PIXELS // (width * factor)) * factor  # so that no block is cut
    white = _white(image)
    tall, wide = -(-height // factor), -(-width // factor)
    upright = np.empty((wide, tall, 3) if orientation >= 5 else (tall, wide, 3), np.uint8)
    for start in range(0, height, rows):
        end = min(height, start + rows)
        strip = image if rows >= height else image.crop((0, start, width, end))
        rgb = _to_rgb(strip, white)
        if factor > 1:
            rgb = rgb.reduce(factor)
        top, below = start // factor, -(-end // factor)
        if orientation in _TURNS:
            rgb = rgb.transpose(_TURNS[orientation])
        first, last = (tall - below, tall - top) if orientation in _LAST_FIRST else (top, below)
        upright[np.s_[:, first:last] if orientation >= 5 else np.s_[first:last]] = np.asarray(rgb)
    return upright


def _reduction(height: int, width: int, most_pixels: int | None) -> int:
    """The whole factor by which to average an image down."""
    factor = 1
    while most_pixels is not None and -(-height // factor) * -(-width // factor) > most_pixels:
        factor += 1
    return factor


def _white(image: Image.Image) -> float:
    """The value of white in a float image: 1, or 255 if anything is above 1."""
    if image.mode != "F":
        return 255.0
    highest = image.getextrema()[1]
    return 1.0 if isinstance(highest, int | float) and highest <= 1 else 255.0


def _to_rgb(image: Image.Image, white: float = 255.0) -> Image.Image:
    mode = image.mode
    if mode.startswith("I"):  # 16 bits, in Pillow's several spellings of it
        return Image.fromarray(_eight_bits(np.asarray(image), 65535)).convert("RGB")
    if mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image), white)).convert("RGB")
    if "transparency" in image.info or mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        rgba = image.convert("RGBA")
        white_page = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white_page, rgba).convert("RGB")
    return image if mode == "RGB" else image.convert("RGB")


def _eight_bits(values: NDArray[Any], white: float) -> Pixels:
    """``round(255 · v / white)``; refuses what lies outside [0, white]."""
    wide = values.astype(np.float32)  # exact up to 24 bits
    low, high = float(wide.min()), float(wide.max())
    if not (low >= 0 and high <= white):  # written so that NaN is refused too
        raise Refused(f"values from {low:g} to {high:g}; expected 0 (black) to {white:g} (white)")
    scaled: NDArray[np.float32] = wide * np.float32(255.0 / white)
    return np.rint(scaled).astype(np.uint8)


def _from_array(array: NDArray[Any], *, channels_first: bool = False) -> Pixels:
    layout = "(c, h, w)" if channels_first else "(h, w, c)"
    if array.ndim not in (2, 3):
        raise Refused(f"shape {array.shape}; expected (h, w) or {layout}")
    if array.ndim == 2:
        array = array[:, :, None]
    elif channels_first:
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in (1, 3, 4):
        shape = array.transpose(2, 0, 1).shape if channels_first else array.shape
        raise Refused(f"shape {shape}; expected {layout} with c = 1 (gray), 3 (RGB) or 4 (RGBA)")
    check_size(*array.shape[:2])
    if np.issubdtype(array.dtype, np.floating):
        array = _eight_bits(array, 1.0)
    elif array.dtype != np.uint8:
        raise Refused(f"values of type {array.dtype}; expected uint8, or float in [0, 1]")
    if array.shape[2] == 4:
        image = Image.fromarray(np.ascontiguousarray(array), "RGBA")
        return np.array(_to_rgb(image), np.uint8)
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))
