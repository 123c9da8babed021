"""Descriptors of many files: known ones from the cache, others encoded and kept as they come."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.encoder import Encoder
from sscd_vec.encoder.images import ImageError, Pixels, load_pixels
from sscd_vec.photos.descriptor_cache import DescriptorCache
from sscd_vec.photos.folder import ImageFile, Unreadable
from sscd_vec.photos.tiles import crops

Float32 = NDArray[np.float32]
PART = 64  # files encoded, kept and handed on at a time
TILED_SIDE = 4  # crops need pixels: images are decoded at up to so many times the model's size


@dataclass(frozen=True)
class Described:
    """Some files and their descriptors.

    Attributes:
        files: Those that could be read.
        descriptors: For each, ``(crops, d)``: one row without tiles.
        unreadable: Those that could not.
    """

    files: list[ImageFile]
    descriptors: list[Float32]
    unreadable: list[Unreadable]


def describe_files(
    encoder: Encoder,
    files: Sequence[ImageFile],
    cache: DescriptorCache,
    *,
    tiles: int = 1,
    on_files: Callable[[int], None] | None = None,
) -> Iterator[Described]:
    """Describe files part by part, in order.

    Args:
        encoder: The model.
        files: What to describe.
        cache: Looked into first, written to after every part.
        tiles: Crops per side; 1 for whole images.
        on_files: Called with the number of files finished since the last call.
    """
    for start in range(0, len(files), PART):
        part = files[start : start + PART]
        values: dict[int, Float32 | str] = {}
        for number, file in enumerate(part):
            known = cache.get(file)
            if known is not None:
                values[number] = known
        unknown = [number for number in range(len(part)) if number not in values]
        if unknown:
            new = _encode(encoder, [part[number] for number in unknown], tiles)
            readable = [
                (part[number], value)
                for number, value in zip(unknown, new, strict=True)
                if not isinstance(value, str)
            ]
            cache.put([file for file, _ in readable], [value for _, value in readable])
            values.update(zip(unknown, new, strict=True))
        yield _sorted(part, values)
        if on_files is not None:
            on_files(len(part))


def describe_pixels(encoder: Encoder, images: Sequence[Pixels], tiles: int) -> list[Float32]:
    """Descriptors ``(crops, d)`` of images already decoded."""
    views = [crops(image, tiles) for image in images]
    flat = [view for image in views for view in image]
    rows = encoder.encode(flat, show_progress=False)
    return np.split(rows, np.cumsum([len(image) for image in views])[:-1])


def _encode(encoder: Encoder, files: Sequence[ImageFile], tiles: int) -> list[Float32 | str]:
    if tiles > 1:
        return _encode_tiled(encoder, files, tiles)
    encoded = encoder.encode([file.path for file in files], on_error="skip", show_progress=False)
    values: list[Float32 | str] = [""] * len(files)
    for row, position in zip(encoded.descriptors, encoded.positions.tolist(), strict=True):
        values[position] = row[None]
    for skipped in encoded.skipped:
        values[skipped.position] = skipped.reason
    return values


def _encode_tiled(encoder: Encoder, files: Sequence[ImageFile], tiles: int) -> list[Float32 | str]:
    side = encoder.config.size * TILED_SIDE

    def decode(file: ImageFile) -> Pixels | str:
        try:
            return load_pixels(file.path, reduce_to=lambda height, width: (side, side))
        except ImageError as error:
            return error.reason

    values: list[Float32 | str] = []
    # Few at a time: tiles are cut from images at full size.
    with ThreadPoolExecutor(2) as threads:
        for start in range(0, len(files), 4):
            decoded = list(threads.map(decode, files[start : start + 4]))
            images = [image for image in decoded if not isinstance(image, str)]
            rows = iter(describe_pixels(encoder, images, tiles) if images else [])
            values += [d if isinstance(d, str) else next(rows) for d in decoded]
    return values


def _sorted(part: Sequence[ImageFile], values: dict[int, Float32 | str]) -> Described:
    described = Described([], [], [])
    for number, file in enumerate(part):
        value = values[number]
        if isinstance(value, str):
            described.unreadable.append(Unreadable(file.path, value))
        else:
            described.files.append(file)
            described.descriptors.append(value)
    return described
