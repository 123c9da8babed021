"""The image files of a folder, whatever else lies in it.

Symbolic links inside a folder are not followed (no loops, and no file twice), hard links to one
file count once, hidden files and folders (``.thumbnails``, ``.trash``) are left out. A file is
taken for an image by its ending or, where that says nothing, by its first bytes; whether it can
be decoded shows when it is read.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

IMAGE_ENDINGS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .gif .bmp .tif .tiff .heic .heif .avif .jp2 .jxl .svg .psd "
    ".ico .ppm .pgm .tga .dng .cr2 .cr3 .nef .arw .raf .rw2 .orf".split()
)
OTHER_ENDINGS = frozenset(
    ".mp4 .mov .avi .mkv .webm .3gp .mp3 .m4a .wav .txt .md .json .xml .html .csv .pdf .zip .gz "
    ".tar .db .sqlite .py .doc .docx .xls .xlsx .aae .ini .log .safetensors .faiss".split()
)
NO_PERMISSION = "no permission to read it"
SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")


@dataclass(frozen=True)
class ImageFile:
    """A file that looks like an image, and its state when it was seen.

    Attributes:
        path: Absolute path.
        size: Bytes.
        modified: Time of the last change, nanoseconds.
    """

    path: Path
    size: int
    modified: int

    @property
    def id(self) -> str:
        """Name of the file in an index: its absolute path as text."""
        return shown(self.path)


@dataclass(frozen=True)
class Unreadable:
    """A file or folder that could not be read, and why."""

    path: Path
    reason: str


def find_images(
    roots: Iterable[str | os.PathLike[str]],
    on_unreadable: Callable[[Unreadable], None] | None = None,
    *,
    leave_out: Path | None = None,
) -> list[ImageFile]:
    """List the image files of folders and single files, sorted by path, each file once.

    Args:
        roots: Folders (searched through) or files (taken whatever their ending).
        on_unreadable: Called for folders that cannot be listed and empty files.
        leave_out: A folder that is not entered where it lies below a root.

    Raises:
        FileNotFoundError: A root does not exist.
    """
    report = on_unreadable or (lambda _: None)
    skipped = None if leave_out is None else leave_out.resolve()
    found: dict[tuple[int, int], ImageFile] = {}
    for root in map(Path, roots):
        if not root.exists():
            raise FileNotFoundError(f"{shown(root)}: no such file or folder")
        root = root.resolve()
        entries = _walk(root, report, skipped) if root.is_dir() else iter([root])
        for path in entries:
            try:
                status = path.stat()
            except OSError as error:
                report(Unreadable(path, error.strerror or str(error)))
                continue
            if status.st_size == 0:
                report(Unreadable(path, "the file is empty"))
                continue
            image = ImageFile(path, status.st_size, status.st_mtime_ns)
            key = (status.st_dev, status.st_ino)
            if key not in found or image.path < found[key].path:
                found[key] = image
    return sorted(found.values(), key=lambda image: os.fsencode(image.path))


def shown(path: str | os.PathLike[str]) -> str:
    """A path as text that can always be written: bytes that are no UTF-8 become escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _walk(
    folder: Path, report: Callable[[Unreadable], None], skipped: Path | None
) -> Iterator[Path]:
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        try:
            entries = list(os.scandir(current))
        except PermissionError:
            report(Unreadable(current, NO_PERMISSION))
            continue
        except OSError as error:
            report(Unreadable(current, error.strerror or str(error)))
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except OSError as error:
                report(Unreadable(Path(entry.path), error.strerror or str(error)))
                continue
            if stat.S_ISDIR(mode):
                if Path(entry.path) != skipped:
                    waiting.append(Path(entry.path))
            elif stat.S_ISREG(mode) and _looks_like_image(entry.path):
                yield Path(entry.path)


def _looks_like_image(path: str) -> bool:
    ending = os.path.splitext(path)[1].lower()
    if ending in IMAGE_ENDINGS:
        return True
    if ending in OTHER_ENDINGS:
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError:
        return False
    return head.startswith(SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
