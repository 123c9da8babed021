"""Files: whole-or-nothing writes, hashes, and finding images. One promise for every room.

A write stages its bytes beside the target, forces them to disk and only then renames, so a crash
at any moment leaves the old file or the new one.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

PathLike: TypeAlias = str | os.PathLike[str]

IMAGE_EXTENSIONS = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .webp .avif .heic .heif .gif .tif .tiff .bmp .dib .ppm .pgm"
    " .pbm .pnm .jp2 .j2k .ico".split()
)
# Images, but of formats that are not decoded: reported by name instead of passed over.
UNSUPPORTED_EXTENSIONS = frozenset(
    ".jxl .svg .psd .tga .dng .cr2 .cr3 .nef .arw .raf .rw2 .orf".split()
)
LIST_EXTENSIONS = frozenset({".txt", ".lst", ".list"})
COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
# Not worth opening to look for an image signature.
_OTHER_EXTENSIONS = frozenset(
    ".mp4 .mov .avi .mkv .webm .3gp .mp3 .m4a .wav .txt .md .json .xml .html .csv .pdf .zip .gz "
    ".tar .tgz .bz2 .xz .zst .db .sqlite .py .doc .docx .xls .xlsx .aae .ini .log .safetensors "
    ".faiss .index .parquet .lst .list".split()
)
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
_ABANDONED_AFTER = 3600.0  # seconds before the staging file of a dead process is removed

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------- writing


@contextmanager
def writing(path: PathLike) -> Iterator[BinaryIO]:
    """Open a file to write; it takes its name, complete and on disk, when the block ends.

    An exception inside the block leaves whatever was at ``path`` before.
    """
    with staging(path) as staged, staged.open("wb") as file:
        yield file


@contextmanager
def staging(path: PathLike) -> Iterator[Path]:
    """Like ``writing``, for writers that take a path: one beside the target, renamed at the end."""
    target = Path(path)
    _remove_abandoned(target)
    name = f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.new"
    staged = target.with_name(name)
    try:
        yield staged
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staged, target)
    except BaseException:
        staged.unlink(missing_ok=True)  # a full disk must not stay full
        raise
    sync_folder(target.parent)


def write_whole(path: PathLike, content: str | bytes) -> None:
    """Write a small file, whole or not at all; text as UTF-8."""
    with writing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def staging_path(path: Path) -> Path:
    """The fixed staging name of a file whose rename may be finished after a crash."""
    return path.with_name(path.name + ".new")


def sync_folder(folder: Path) -> None:
    """Force renames and new names in a folder to disk."""
    if sys.platform == "win32":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: PathLike) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_abandoned(target: Path) -> None:
    """Remove staging files that killed processes left for this target."""
    for left in target.parent.glob(f".{_escape_glob(target.name)}.*.new"):
        process = left.name.removeprefix(f".{target.name}.").split(".")[0]
        with contextlib.suppress(OSError):
            old = time.time() - left.stat().st_mtime > _ABANDONED_AFTER
            if old and process.isdecimal() and not _is_alive(int(process)):
                left.unlink()


def _escape_glob(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# ---------------------------------------------------------------------- finding images


@dataclass(frozen=True)
class ImageFile:
    """An image on disk: a file, or a member of a tar, and its state when it was found.

    Attributes:
        path: Absolute path of the file or of the tar.
        size: Bytes of the image.
        modified: When the file (or tar) last changed, in nanoseconds.
        member: Name inside the tar; '' for a file.
        offset: Where the image begins in the tar.
    """

    path: Path
    size: int
    modified: int
    member: str = ""
    offset: int = 0

    @property
    def id(self) -> str:
        """Its name in an index: the absolute path as text, ``shard.tar/member`` inside a tar."""
        name = printable_path(self.path)
        return f"{name}/{self.member}" if self.member else name

    def read(self) -> bytes:
        """Its encoded bytes."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size if self.member else -1)


@dataclass(frozen=True)
class Unreadable:
    """A file or folder that could not be read, and why."""

    path: Path
    reason: str


def find_images(
    places: PathLike | Iterable[PathLike],
    on_unreadable: Callable[[Unreadable], None] | None = None,
    *,
    leave_out: Path | None = None,
    tars: bool = True,
) -> list[ImageFile]:
    """List the images of folders, tars, list files and single files; each file once.

    Folders are walked without hidden entries, links are followed, no folder is entered twice. A
    file counts as an image by its ending, or without a telling one by its first bytes.

    Args:
        places: One or several of: a folder, an image (whatever its ending), an uncompressed
            ``.tar``, or a ``.txt`` file that names one image per line (``#`` begins a comment).
        on_unreadable: Called for what looks like an image and cannot be one: folders without
            permission, empty files, pipes, image formats that are not decoded.
        leave_out: A folder that is not entered where it lies below a place.
        tars: Whether to look into the tars of a folder.

    Returns:
        The images, sorted by path within each place, the places in the order given.

    Raises:
        FileNotFoundError: A place does not exist.
        ValueError: A place is a compressed or damaged tar, or a list that is not UTF-8.
    """
    if isinstance(places, str | os.PathLike):
        places = [places]
    finder = _Finder(on_unreadable or _ignore, leave_out, tars)
    for place in map(Path, places):
        if not place.exists():
            raise FileNotFoundError(f"{printable_path(place)}: no such file or folder")
        finder.take(place)
    return list(finder.found.values())


def printable_path(path: PathLike) -> str:
    """A path as text that can always be written: bytes that are not UTF-8 become escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _ignore(problem: Unreadable) -> None:
    logger.debug("%s: %s", printable_path(problem.path), problem.reason)


class _Finder:
    """Images by what identifies them on disk, in the order they are listed."""

    def __init__(
        self, report: Callable[[Unreadable], None], leave_out: Path | None, tars: bool
    ) -> None:
        self.found: dict[tuple[object, ...], ImageFile] = {}
        self._report = report
        self._leave_out = None if leave_out is None else leave_out.resolve()
        self._tars = tars

    def take(self, place: Path) -> None:
        """Add everything a place stands for."""
        if place.is_dir():
            self._walk(place.resolve())
        elif place.name.lower().endswith(COMPRESSED_TARS):
            raise ValueError(
                f"{printable_path(place)} is compressed and cannot be read in random order: images "
                "are compressed already, so repack it as a plain .tar"
            )
        elif place.suffix.lower() == ".tar":
            self._members(place)
        elif place.suffix.lower() in LIST_EXTENSIONS:
            for listed in _listed(place):
                self._file(listed)
        else:
            self._file(Path(os.path.abspath(place)))

    def _walk(self, root: Path) -> None:
        files: list[Path] = []
        entered: set[tuple[int, int]] = set()
        waiting = [root]
        while waiting:
            folder = waiting.pop()
            try:
                status = folder.stat()
                if (status.st_dev, status.st_ino) in entered:  # a link to a folder seen before
                    continue
                entered.add((status.st_dev, status.st_ino))
                entries = list(os.scandir(folder))
            except OSError as error:
                self._report(Unreadable(folder, _why(error)))
                continue
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                path = Path(entry.path)
                try:
                    is_folder = entry.is_dir()
                except OSError as error:
                    self._report(Unreadable(path, _why(error)))
                    continue
                if not is_folder:
                    files.append(path)
                elif self._leave_out is None or path.resolve() != self._leave_out:
                    waiting.append(path)
        # Links last: a file found under its own name keeps it.
        for path in sorted(files, key=lambda file: (file.is_symlink(), os.fsencode(file))):
            self._below_folder(path)
        self._sort(root)

    def _below_folder(self, path: Path) -> None:
        ending = path.suffix.lower()
        if ending == ".tar" and self._tars:
            self._members(path)
        elif ending in UNSUPPORTED_EXTENSIONS:
            self._report(
                Unreadable(path, "its format is not decoded; convert it to JPEG, PNG or WebP")
            )
        elif ending in IMAGE_EXTENSIONS or (
            ending not in _OTHER_EXTENSIONS and _has_image_signature(path)
        ):
            self._file(path)

    def _file(self, path: Path) -> None:
        try:
            status = path.stat()
        except OSError as error:
            self._report(Unreadable(path, _why(error)))
            return
        if not stat.S_ISREG(status.st_mode):
            self._report(Unreadable(path, "not a regular file"))
        elif not status.st_size:
            self._report(Unreadable(path, "the file is empty"))
        else:
            key = (status.st_dev, status.st_ino)
            self.found.setdefault(key, ImageFile(path, status.st_size, status.st_mtime_ns))

    def _members(self, path: Path) -> None:
        """Image members of an uncompressed tar, by offset; only headers are read."""
        path = path.resolve()
        modified = path.stat().st_mtime_ns
        try:
            with tarfile.open(path, "r:") as shard:
                for member in shard:
                    if member.isfile() and Path(member.name).suffix.lower() in IMAGE_EXTENSIONS:
                        image = ImageFile(
                            path, member.size, modified, member.name, member.offset_data
                        )
                        self.found.setdefault((str(path), member.name), image)
        except tarfile.ReadError as error:
            raise ValueError(
                f"{printable_path(path)} is not a readable tar archive: {error}"
            ) from error

    def _sort(self, root: Path) -> None:
        """Bring what was found below ``root`` into the order of its paths."""
        below = [(key, image) for key, image in self.found.items() if root in image.path.parents]
        for key, _ in below:
            del self.found[key]
        self.found.update(sorted(below, key=lambda item: os.fsencode(item[1].id)))


def _listed(path: Path) -> list[Path]:
    """Images named line by line in a text file, relative to its folder."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{printable_path(path)}: expected a UTF-8 list of image paths, one per line"
        ) from error
    names = [line.strip() for line in lines]
    folder = path.resolve().parent
    return [folder / name for name in names if name and not name.startswith("#")]


def _has_image_signature(path: Path) -> bool:
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            return False
        with path.open("rb") as file:
            head = file.read(16)
    except OSError:
        return False
    return head.startswith(_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def _why(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "no permission to read it"
    return error.strerror or str(error)
