"""Anything that holds an image, to pixels: oriented RGB, uint8, ``(height, width, 3)``.

Every kind of input ends in the same eight bits, so the same picture has the same descriptor
however it came. What cannot become pixels raises ``ImageError`` with the item's name and the
reason, and nothing else.
"""

import functools
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

Pixels: TypeAlias = NDArray[np.uint8]
ImageInput: TypeAlias = (
    str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | Image.Image
    | NDArray[Any] | Tensor
)  # fmt: skip
TargetSize: TypeAlias = Callable[[int, int], tuple[int, int]]

# Plain raster formats. Left out on purpose: those that start other programs (EPS, WMF) or are
# documents.
FORMATS = (
    "JPEG", "PNG", "WEBP", "AVIF", "HEIF", "GIF", "TIFF", "BMP", "DIB", "PPM", "JPEG2000",
    "ICO",
)  # fmt: skip
EXTENSIONS = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .webp .avif .heic .heif .gif .tif .tiff .bmp .dib .ppm .pgm"
    " .pbm .pnm .jp2 .j2k .ico".split()
)
MIN_SIDE = 2
MAX_ASPECT_RATIO = 32
_LARGE_PIXELS = 40_000_000
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION_TAG = 0x0112

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
    source: ImageInput, *, name: str | None = None, reduce_to: TargetSize | None = None
) -> Pixels:
    """Return the pixels of one image, upright, RGB on white, ``(height, width, 3)`` uint8.

    Args:
        source: Path, encoded bytes, open binary file, PIL image, array ``(h, w)`` or ``(h, w, 1 |
            3 | 4)``, or tensor ``(h, w)`` or ``(1 | 3 | 4, h, w)``. Arrays and tensors are uint8,
            or float in [0, 1], which are rounded to eight bits.
        name: What to call it in an error; its path or kind otherwise.
        reduce_to: The height and width the caller will resize an image of (height, width) to.
            Large JPEG files are then decoded at 1/2, 1/4 or 1/8 of their size, never below twice
            that.

    Raises:
        ImageError: It is missing, empty, broken, not an image, too small, too long or too large.
    """
    name = name or describe(source)
    try:
        if isinstance(source, np.ndarray):
            pixels = _from_array(source)
        elif isinstance(source, Tensor):
            array = source.detach().cpu()
            pixels = _from_array(array.float().numpy() if array.is_floating_point() else
                                 array.numpy(), channels_first=True)  # fmt: skip
        elif isinstance(source, Image.Image):
            with _given_images[id(source) // 16 % len(_given_images)]:
                pixels = _from_pil(source)
        else:
            pixels = _from_file(source, reduce_to)
    except _Refused as error:
        raise ImageError(name, str(error)) from None
    except UnidentifiedImageError:
        raise ImageError(
            name, f"not an image, or of a format that is not read ({', '.join(_formats())})"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(
            name, f"too many pixels ({error}); raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        ) from None
    except FileNotFoundError:
        raise ImageError(name, "no such file") from None
    except IsADirectoryError:
        raise ImageError(name, "a folder; encode it alone, or its files (walk_images)") from None
    except PermissionError:
        raise ImageError(name, "no permission to read it") from None
    except Exception as error:  # Pillow's readers raise all kinds on broken files
        detail = str(error) or type(error).__name__
        raise ImageError(name, f"cannot be decoded: {detail}") from error
    try:
        _check_size(*pixels.shape[:2])
    except _Refused as error:
        raise ImageError(name, str(error)) from None
    return pixels


def walk_images(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the image files below ``folder`` in a fixed order (sorted, folder by folder).

    Files are chosen by their extension; links to folders are not followed.

    Raises:
        NotADirectoryError: ``folder`` is not a folder.
    """
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{os.fspath(folder)} is not a folder")
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            if os.path.splitext(file)[1].lower() in EXTENSIONS:
                yield Path(parent, file)


def is_image_input(source: object) -> bool:
    """Whether ``source`` is one image, and not a collection of them."""
    if isinstance(source, np.ndarray | Tensor):
        return source.ndim in (2, 3)
    return isinstance(
        source, str | os.PathLike | bytes | bytearray | memoryview | Image.Image
    ) or hasattr(source, "read")


def describe(source: object, position: int | None = None) -> str:
    """Name an input: its path if it has one, else its kind, with its position."""
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


class _Refused(ValueError):
    """A reason, before the name of the item is known."""


@functools.cache
def _formats() -> tuple[str, ...]:
    """Formats this Pillow can open, of those we read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _from_file(source: Any, reduce_to: TargetSize | None) -> Pixels:  # noqa: ANN401 - refused below
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise _Refused("a URL; download it first and pass its bytes or its file")
    file: Any
    if isinstance(source, str | os.PathLike):
        # Opened here and not by Pillow, so that an empty file can be told from a foreign one.
        file = open(source, "rb")  # noqa: SIM115 - closed below
    elif isinstance(source, bytes | bytearray | memoryview):
        file = io.BytesIO(source)
    elif hasattr(source, "read"):
        content = source.read()
        if not isinstance(content, bytes):
            raise _Refused("a text file; open it in binary mode ('rb')")
        file = io.BytesIO(content)
    else:
        raise _Refused(
            "expected a path, bytes, binary file, PIL image, array or tensor, got "
            f"{type(source).__name__}"
        )
    with file:
        if not file.read(1):
            raise _Refused("empty")
        file.seek(0)
        with Image.open(file, formats=_formats()) as image:
            width, height = image.size
            _check_size(height, width)
            if reduce_to is not None:
                target_height, target_width = reduce_to(height, width)
                image.draft(None, (2 * target_width, 2 * target_height))
            if image.width * image.height > _LARGE_PIXELS:
                with _large_image:
                    return _from_pil(image)
            return _from_pil(image)


def _check_size(height: int, width: int) -> None:
    if min(height, width) < MIN_SIDE:
        raise _Refused(f"{width}×{height} pixels; at least {MIN_SIDE} on each side are needed")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise _Refused(
            f"{width}×{height} pixels is more than {MAX_ASPECT_RATIO} times as long as wide; cut "
            "it into pieces and encode those"
        )


def _from_pil(image: Image.Image) -> Pixels:
    image.load()  # the first frame of an animation
    transpose = _TRANSPOSE.get(_orientation(image))
    upright = image if transpose is None else image.transpose(transpose)
    # Not np.array(image): that goes through a second buffer, and faulting it in takes longer.
    return np.asarray(_to_rgb(upright), np.uint8).copy()


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # broken metadata does not break the picture
        return 1
    return orientation if isinstance(orientation, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    mode = image.mode
    if mode.startswith("I"):  # 16 bits, in Pillow's several spellings of it
        return Image.fromarray(_eight_bits(np.asarray(image), 65535)).convert("RGB")
    if mode == "F":
        values = np.asarray(image)
        white = 1.0 if float(values.max()) <= 1 else 255.0
        return Image.fromarray(_eight_bits(values, white)).convert("RGB")
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
        raise _Refused(f"values from {low:g} to {high:g}; expected 0 (black) to {white:g} (white)")
    scaled: NDArray[np.float32] = wide * np.float32(255.0 / white)
    return np.rint(scaled).astype(np.uint8)


def _from_array(array: NDArray[Any], *, channels_first: bool = False) -> Pixels:
    layout = "(c, h, w)" if channels_first else "(h, w, c)"
    if array.ndim not in (2, 3):
        raise _Refused(f"shape {array.shape}; expected (h, w) or {layout}")
    if array.ndim == 2:
        array = array[:, :, None]
    elif channels_first:
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in (1, 3, 4):
        shape = array.transpose(2, 0, 1).shape if channels_first else array.shape
        raise _Refused(f"shape {shape}; expected {layout} with c = 1 (gray), 3 (RGB) or 4 (RGBA)")
    _check_size(*array.shape[:2])
    if np.issubdtype(array.dtype, np.floating):
        array = _eight_bits(array, 1.0)
    elif array.dtype != np.uint8:
        raise _Refused(f"values of type {array.dtype}; expected uint8, or float in [0, 1]")
    if array.shape[2] == 4:
        image = Image.fromarray(np.ascontiguousarray(array), "RGBA")
        return np.array(_to_rgb(image), np.uint8)
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))
