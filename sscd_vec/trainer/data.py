"""Photos: where training images lie, found once and read in any order.

A folder is walked; a tar shard (WebDataset layout) is scanned for its members' offsets and read
in place, never unpacked; a list file names one image per line. All three end in one numbered,
sorted list, so that a photo's number is its source id, on every rank and after every resume.
"""

import os
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sscd_vec.files import IMAGE_EXTENSIONS as EXTENSIONS

COMPRESSED_TAR_ENDINGS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

PathLike: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class Photo:
    """One image: a file, or ``length`` bytes of a tar from ``offset``."""

    path: str
    offset: int = 0
    length: int = -1
    member: str = ""

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return f"{self.path}:{self.member}" if self.member else self.path

    def read(self) -> bytes:
        """Its encoded bytes."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


def find_photos(places: PathLike | Iterable[PathLike]) -> list[Photo]:
    """List the images of folders, tar shards and list files, in a fixed order.

    Args:
        places: One or several of: a folder (walked), an image, a ``.tar`` shard, or a text file
            with one image path per line (relative to the list's folder; ``#`` begins a comment).

    Returns:
        The photos, sorted within each place, the places in the order given.

    Raises:
        FileNotFoundError: A place does not exist.
        ValueError: A place holds no image, or is a compressed tar.
    """
    if isinstance(places, str | os.PathLike):
        places = [places]
    photos: list[Photo] = []
    for place in map(Path, places):
        if place.is_dir():
            found = _walk(place)
        elif not place.exists():
            raise FileNotFoundError(f"no images at {place}: it does not exist")
        elif place.name.endswith(COMPRESSED_TAR_ENDINGS):
            raise ValueError(
                f"{place} is compressed and cannot be read in random order: images are compressed "
                "already, so repack it as a plain .tar"
            )
        elif place.suffix == ".tar":
            found = _members(place)
        elif place.suffix.lower() in EXTENSIONS:
            found = [Photo(str(place))]
        else:
            found = _listed(place)
        if not found:
            raise ValueError(
                f"no images in {place}: expected files ending in {', '.join(sorted(EXTENSIONS))}"
            )
        photos += found
    return photos


def hold_out(photos: Sequence[Photo], part: float, most: int) -> tuple[list[Photo], list[Photo]]:
    """Split off an evenly spaced ``part`` of the photos, at most ``most``.

    Returns:
        The photos to train on, and those held out.
    """
    count = min(int(len(photos) * part), most)
    chosen = {i * len(photos) // count for i in range(count)} if count else set()
    kept = [photo for i, photo in enumerate(photos) if i not in chosen]
    return kept, [photos[i] for i in sorted(chosen)]


def _walk(folder: Path) -> list[Photo]:
    """Images and tar shards below ``folder``, links followed, no folder entered twice."""
    found: list[Photo] = []
    entered: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in entered:  # a link to a folder above, or two links to one
            folders.clear()
            continue
        entered.add(real)
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            if path.suffix.lower() in EXTENSIONS:
                found.append(Photo(str(path)))
            elif path.suffix == ".tar":
                found += _members(path)
    return found


def _members(path: Path) -> list[Photo]:
    """Image members of an uncompressed tar, by offset; only headers are read."""
    try:
        with tarfile.open(path, "r:") as shard:
            return [
                Photo(str(path), member.offset_data, member.size, member.name)
                for member in shard
                if member.isfile() and Path(member.name).suffix.lower() in EXTENSIONS
            ]
    except tarfile.ReadError as error:
        raise ValueError(f"{path} is not a readable tar archive: {error}") from error


def _listed(path: Path) -> list[Photo]:
    """Images named line by line in a text file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is neither an image, a .tar nor a UTF-8 list of image paths"
        ) from error
    names = [line.strip() for line in lines]
    return [Photo(str(path.parent / name)) for name in names if name and not name.startswith("#")]
