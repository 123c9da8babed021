"""Photos on disk: a folder, an uncompressed tar, or several of either, read one file at a time."""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

IMAGE_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
SMALLEST_SIDE = 64


@dataclass(frozen=True)
class Photo:
    """One image file, or one member of a tar: ``size`` bytes of ``path`` from ``offset``."""

    name: str
    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The file's bytes."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def image(self) -> Image.Image:
        """Decoded RGB pixels."""
        with Image.open(io.BytesIO(self.read())) as image:
            return image.convert("RGB")


def find_photos(sources: Sequence[str | os.PathLike[str]]) -> list[Photo]:
    """List the image files of folders and tars, in the order of their names.

    Args:
        sources: Folders (searched recursively), uncompressed tars, or single image files.

    Raises:
        FileNotFoundError: If a source does not exist.
        ValueError: If a source is a compressed tar, or no image is found.
    """
    photos: list[Photo] = []
    for source in map(Path, sources):
        if source.is_dir():
            photos.extend(_folder_photos(source))
        elif source.suffix.lower() in IMAGE_ENDINGS:
            photos.append(Photo(source.name, str(source), 0, source.stat().st_size))
        elif source.exists():
            photos.extend(_tar_photos(source))
        else:
            raise FileNotFoundError(f"{source}: expected a folder or a tar of photos; it is absent")
    if not photos:
        raise ValueError(f"no image file in {', '.join(map(str, sources))}")
    return sorted(photos, key=lambda photo: (photo.name, photo.path, photo.offset))


def usable(photos: Iterable[Photo]) -> Iterator[Photo]:
    """Drop what is no image, is below 64 pixels, or repeats an earlier photo byte for byte."""
    seen: set[bytes] = set()
    for photo in photos:
        data = photo.read()
        digest = hashlib.sha256(data).digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            with Image.open(io.BytesIO(data)) as image:
                small = min(image.size) < SMALLEST_SIDE
        except (OSError, ValueError, Image.DecompressionBombError):
            continue
        if not small:
            yield photo


def _folder_photos(folder: Path) -> Iterator[Photo]:
    for path in folder.rglob("*"):
        if path.suffix.lower() in IMAGE_ENDINGS and path.is_file():
            yield Photo(path.relative_to(folder).as_posix(), str(path), 0, path.stat().st_size)


def _tar_photos(archive: Path) -> Iterator[Photo]:
    try:
        # "r:" refuses compression: members of a compressed tar have no offset to seek to.
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                if member.isfile() and Path(member.name).suffix.lower() in IMAGE_ENDINGS:
                    yield Photo(member.name, str(archive), member.offset_data, member.size)
    except tarfile.ReadError as error:
        raise ValueError(
            f"{archive}: expected an uncompressed tar ({error}); unpack it and give the folder"
        ) from error
