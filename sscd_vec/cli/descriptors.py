"""Descriptors a command is given: a file of them, or a folder of images that is encoded here.

A file is a ``.npy`` ``(n, d)``, memory-mapped, a ``.safetensors`` that holds one such array (or one
named ``descriptors``), or Parquet as ``sscd-vec encode`` writes it, also a folder of such files.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sscd_vec.cli.console import descriptor_cache, list_unreadable
from sscd_vec.files import ImageFile, Unreadable, find_images, printable_path
from sscd_vec.progress import progress_bar
from sscd_vec.shards import DescriptorFiles, holds_descriptors

if TYPE_CHECKING:
    from sscd_vec.bank.describe import Described, ImageEncoder


@dataclass(frozen=True, eq=False)
class Rows:
    """Descriptors and what they are of.

    Attributes:
        descriptors: ``(n, d)``.
        groups: The image of each row, where rows are crops.
        files: The images' files, where they were encoded here.
    """

    descriptors: NDArray[Any]
    groups: NDArray[np.int64] | None = None
    files: tuple[ImageFile, ...] = ()


class ImageReader:
    """Encodes folders of images; the model is loaded when the first one comes.

    Attributes:
        unreadable: Files that could not be read so far.
    """

    def __init__(self, load: "Callable[[], ImageEncoder]", cache: bool) -> None:
        """Take what loads the model, and whether descriptors are kept."""
        self._load, self._cache = load, descriptor_cache(cache)
        self.unreadable: list[Unreadable] = []

    @cached_property
    def encoder(self) -> "ImageEncoder":
        """The model, loaded once."""
        return self._load()

    def find(self, folder: Path) -> list[ImageFile]:
        """The images of a folder.

        Raises:
            ValueError: There are none.
        """
        found = find_images(folder, self.unreadable.append)
        if not found:
            raise ValueError(f"no images in {printable_path(folder)}")
        return found

    def describe(self, files: Sequence[ImageFile], tiles: int = 1) -> "list[Described]":
        """Descriptors of the files that can be read, in order."""
        from sscd_vec.bank.describe import Source, describe

        found: list[Described] = []
        sources = [Source.of_file(file) for file in files]
        with progress_bar("encoding", len(files)) as bar:
            for part in describe(self.encoder, sources, tiles=tiles, cache=self._cache):
                found += [one for one in part if not one.reason]
                self.unreadable += [
                    Unreadable(Path(one.source.id), one.reason) for one in part if one.reason
                ]
                bar.advance(len(part))
        return found

    def rows(self, files: Sequence[ImageFile], tiles: int = 1) -> Rows:
        """All descriptors as one array, with the image of each row where they are tiled.

        Raises:
            ValueError: No image could be read.
        """
        found = self.describe(files, tiles)
        arrays = [one.descriptors for one in found if one.descriptors is not None]
        if not arrays:
            raise ValueError("no image could be read")
        groups = np.repeat(np.arange(len(arrays)), [len(part) for part in arrays])
        kept = tuple(one.source.file for one in found if one.source.file is not None)
        return Rows(np.concatenate(arrays), groups if tiles > 1 else None, kept)

    def list_unreadable(self) -> bool:
        """Name the files that could not be read; whether there were any."""
        list_unreadable(self.unreadable)
        return bool(self.unreadable)


def batches(paths: Sequence[Path], images: ImageReader) -> Iterator[NDArray[Any]]:
    """Descriptors of files and folders, a part at a time."""
    for path in paths:
        if holds_images(path):
            yield images.rows(images.find(path)).descriptors
        elif holds_descriptors(path):
            yield from (rows for _, rows in DescriptorFiles(path).batches())
        else:
            yield read_descriptors(path)


def holds_images(path: Path) -> bool:
    """Whether this is a folder of images, not of descriptors."""
    return path.is_dir() and not holds_descriptors(path)


def read_rows(path: Path, images: ImageReader, tiles: int = 1, groups: Path | None = None) -> Rows:
    """Descriptors of a file, with the images of its rows; or of a folder, tiled here."""
    if holds_images(path):
        return images.rows(images.find(path), tiles)
    return Rows(read_descriptors(path), None if groups is None else np.load(groups))


def read_halves(folder: Path, images: ImageReader, tiles: int, reference_tiles: int) -> list[Rows]:
    """A folder's images as queries and, the other half of them, as references."""
    files = images.find(folder)
    order = np.random.default_rng(0).permutation(len(files)).tolist()
    half = len(files) // 2
    return [
        images.rows([files[number] for number in order[:half]], tiles),
        images.rows([files[number] for number in order[half:]], reference_tiles),
    ]


def read_descriptors(path: Path) -> NDArray[Any]:
    """One ``(n, d)`` array from ``.npy`` (memory-mapped), ``.safetensors`` or Parquet.

    Raises:
        ValueError: If the file holds no such array, or several and none named ``descriptors``.
    """
    if holds_descriptors(path):
        return DescriptorFiles(path).array()
    if path.suffix == ".npy":
        array: NDArray[Any] = np.load(path, mmap_mode="r")
        return array
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path}: expected a .npy, .safetensors or .parquet file of descriptors, or a folder "
            "of images"
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
