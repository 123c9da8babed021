"""Descriptors a command is given: a file of them, or a folder of photos that is encoded here.

A file is a ``.npy`` ``(n, d)``, memory-mapped, or a ``.safetensors`` that holds one such array (or
one named ``descriptors``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sscd_vec.cli.console import list_unreadable, progress

if TYPE_CHECKING:
    from sscd_vec.encoder import Encoder
    from sscd_vec.photos.folder import ImageFile, Unreadable


@dataclass(frozen=True, eq=False)
class Rows:
    """Descriptors and, where they are crops, which image each row belongs to."""

    descriptors: NDArray[Any]
    groups: NDArray[np.int64] | None = None


@dataclass
class PhotoReader:
    """Encodes folders of photos; the model is loaded when the first one comes.

    Attributes:
        model: What ``--model`` says.
        device: What ``--device`` says.
        cache: Whether descriptors are kept.
        unreadable: Files that could not be read so far.
    """

    model: str | None
    device: str | None
    cache: bool
    unreadable: "list[Unreadable]" = field(default_factory=list)
    _encoder: "Encoder | None" = None

    @property
    def encoder(self) -> "Encoder":
        """The model, loaded once."""
        if self._encoder is None:
            from sscd_vec.cli.session import open_encoder

            self._encoder = open_encoder(self.model, self.device)
        return self._encoder

    @property
    def fingerprint(self) -> str | None:
        """Of the encoder, if one was needed."""
        return None if self._encoder is None else self._encoder.fingerprint

    def images(self, folder: Path) -> "list[ImageFile]":
        """The photos of a folder."""
        from sscd_vec.photos.folder import find_images

        return find_images([folder], self.unreadable.append)

    def parts(self, files: "Sequence[ImageFile]", tiles: int = 1) -> Iterator[NDArray[np.float32]]:
        """For each readable photo its ``(crops, d)`` descriptors, in order."""
        from sscd_vec.cli.session import open_cache
        from sscd_vec.photos.encode_files import describe_files

        with (
            open_cache(self.encoder, tiles, self.cache) as known,
            progress("encoding", len(files)) as advance,
        ):
            for part in describe_files(self.encoder, files, known, tiles=tiles, on_files=advance):
                self.unreadable += part.unreadable
                yield from part.descriptors

    def rows(self, files: "Sequence[ImageFile]", tiles: int = 1) -> Rows:
        """All of them, with their images where they are tiled.

        Raises:
            ValueError: No photo could be read.
        """
        parts = list(self.parts(files, tiles))
        if not parts:
            raise ValueError("no photo could be read")
        groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return Rows(np.concatenate(parts), groups if tiles > 1 else None)

    def list_unreadable(self) -> bool:
        """Name the files that could not be read; whether there were any."""
        from sscd_vec.photos.folder import shown

        list_unreadable([(shown(problem.path), problem.reason) for problem in self.unreadable])
        return bool(self.unreadable)


def batches(paths: Sequence[Path], photos: PhotoReader) -> Iterator[NDArray[Any]]:
    """Descriptors of files and folders, a part at a time."""
    for path in paths:
        if path.is_dir():
            yield photos.rows(photos.images(path)).descriptors
        else:
            yield read_descriptors(path)


def read_rows(path: Path, photos: PhotoReader, tiles: int = 1, groups: Path | None = None) -> Rows:
    """Descriptors of a file, with the images of its rows; or of a folder, tiled here."""
    if path.is_dir():
        return photos.rows(photos.images(path), tiles)
    return Rows(read_descriptors(path), None if groups is None else np.load(groups))


def read_halves(folder: Path, photos: PhotoReader, tiles: int, reference_tiles: int) -> list[Rows]:
    """A folder's photos as queries and, the other half of them, as references."""
    files = photos.images(folder)
    order = np.random.default_rng(0).permutation(len(files)).tolist()
    half = len(files) // 2
    return [
        photos.rows([files[number] for number in order[:half]], tiles),
        photos.rows([files[number] for number in order[half:]], reference_tiles),
    ]


def read_descriptors(path: Path) -> NDArray[Any]:
    """One ``(n, d)`` array from a ``.npy`` (memory-mapped) or ``.safetensors`` file.

    Raises:
        ValueError: If the file holds no such array, or several and none named ``descriptors``.
    """
    if path.suffix == ".npy":
        array: NDArray[Any] = np.load(path, mmap_mode="r")
        return array
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path}: expected a .npy or .safetensors file of descriptors, or a folder of photos"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            if len(names) > 1 and "descriptors" not in names:
                raise ValueError(
                    f"{path}: expected one array, or one named 'descriptors', got {names}"
                )
            tensor: NDArray[Any] = file.get_tensor(names[0] if len(names) == 1 else "descriptors")
            return tensor
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
