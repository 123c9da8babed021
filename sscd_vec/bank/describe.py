"""From images to descriptors, many at a time: known files from the cache, the others encoded.

The cache is one SQLite file per encoder fingerprint (and tile layout), keyed by path, size and
time of change. Every part is committed as it is encoded, so an interrupted run continues where it
stopped. Files that could not be read are not remembered: a permission or a plugin may come without
the file changing.
"""

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank.quality import jpeg
from sscd_vec.bank.views import crops
from sscd_vec.encoder.images import (
    ImageError,
    ImageInput,
    Pixels,
    input_name,
    is_open_file,
    load_pixels,
)
from sscd_vec.files import ImageFile, file_sha256, find_images, write_whole

Float32 = NDArray[np.float32]
FORMAT = 3
KEPT_SIDE, KEPT_QUALITY = 1600, 90  # of the JPEGs a bank keeps of images without a file
PART = 64  # images encoded, kept and handed on at a time
TILED_SIDE = 4  # crops need pixels: images are decoded at up to this many times the model's size


class ImageEncoder(Protocol):
    """What a bank needs of an ``Encoder``."""

    @property
    def config(self) -> Any:  # noqa: ANN401 - an EncoderConfig; only its ``size`` matters here
        """Preprocessing settings."""

    @property
    def dim(self) -> int:
        """Size of a descriptor."""

    @property
    def fingerprint(self) -> str:
        """What distinguishes its descriptors."""

    def encode(
        self,
        inputs: Any,  # noqa: ANN401
        *,
        on_error: Any = ...,  # noqa: ANN401
        show_progress: bool | None = ...,
        scale: float = ...,
    ) -> Any:  # noqa: ANN401
        """Descriptors of images."""

    def heatmap(self, image: Any, other: Any) -> Any:  # noqa: ANN401
        """Which part of ``image`` matches ``other``."""


@dataclass(frozen=True)
class Source:
    """An image to describe.

    Attributes:
        id: What to call it.
        image: Anything the encoder takes.
        file: Where it lies, if it lies anywhere.
        digest: SHA-256 of its bytes or pixels, if that is known already.
    """

    id: str
    image: ImageInput
    file: ImageFile | None = None
    digest: str = ""

    @classmethod
    def of_file(cls, file: ImageFile) -> "Source":
        """A file under its own name."""
        return cls(file.id, file if file.member else file.path, file)

    @classmethod
    def of_query(cls, image: "ImageInput | ImageFile", position: int) -> "Source":
        """An image to search for, which may be looked at twice: open files are read now."""
        if isinstance(image, ImageFile):
            return cls.of_file(image)
        name = input_name(image, position)
        return cls(name, cast(IO[bytes], image).read() if is_open_file(image) else image)


def named_sources(images: Iterable[ImageInput], ids: Sequence[str]) -> list[Source]:
    """Images with ids of the caller's own.

    Raises:
        ValueError: There is not one id for each image, or an id comes twice.
    """
    given = list(images)
    if len(given) != len(ids) or len(set(ids)) != len(ids):
        raise ValueError(
            f"ids: expected {len(given)} different ones, one for each image, got {len(ids)} of "
            f"which {len(set(ids))} are different"
        )
    return [
        Source(
            name,
            image,
            next(iter(find_images(image)), None) if isinstance(image, str | os.PathLike) else None,
        )
        for name, image in zip(ids, given, strict=True)
    ]


@dataclass(frozen=True)
class Described:
    """A source and its descriptors ``(views, d)``, or why it has none."""

    source: Source
    descriptors: Float32 | None
    digest: str = ""
    reason: str = ""

    @property
    def rows(self) -> Float32:
        """Its descriptors; raises if it has none."""
        if self.descriptors is None:
            raise ValueError(f"{self.source.id} has no descriptors: {self.reason}")
        return self.descriptors

    def keep_copy(self, folder: Path) -> "Described":
        """The same with a clean JPEG of the image in ``folder`` as its file."""
        path = folder / f"{self.digest[:32]}.jpg"  # never a name the image came with
        if not path.exists():
            folder.mkdir(exist_ok=True)
            pixels = load_pixels(self.source.image, name=self.source.id)
            write_whole(path, jpeg(pixels, KEPT_SIDE, KEPT_QUALITY))
        return replace(self, source=replace(self.source, file=find_images(path)[0]))


@contextmanager
def keeping(
    described: Sequence[Described], folder: Path | None, is_stored: Callable[[Source], bool]
) -> Iterator[list[Described]]:
    """Keep a JPEG of each image without a file, and take it back if the block fails.

    Args:
        described: Images about to be stored.
        folder: Where to keep them; None keeps none.
        is_stored: Whether an image was stored after all.
    """
    kept: list[Described] = []
    new: list[Source] = []
    try:
        for one in described:
            keep = folder is not None and one.source.file is None
            kept.append(one.keep_copy(folder) if folder is not None and keep else one)
            new += [kept[-1].source] if keep else []
        yield kept
    except BaseException:
        for source in new:
            if source.file is not None and not is_stored(source):
                source.file.path.unlink(missing_ok=True)
        raise


def describe(
    encoder: ImageEncoder,
    sources: Sequence[Source],
    *,
    tiles: int = 1,
    scale: float = 1.0,
    cache: Path | None = None,
) -> Iterator[list[Described]]:
    """Describe images in parts, in order.

    Args:
        encoder: The model.
        sources: What to describe.
        tiles: Crops per side; 1 for whole images.
        scale: How large to look at whole images, in units of the model's own size.
        cache: Folder of descriptors of known files: looked into first, written to after every
            part.
    """
    with _opened_cache(cache, encoder, tiles) as known:
        for start in range(0, len(sources), PART):
            yield _describe_part(encoder, sources[start : start + PART], tiles, scale, known)


def _describe_part(
    encoder: ImageEncoder,
    part: Sequence[Source],
    tiles: int,
    scale: float,
    cache: "DescriptorCache | None",
) -> list[Described]:
    known = [None if cache is None or s.file is None else cache.get(s.file) for s in part]
    unknown = [source for source, value in zip(part, known, strict=True) if value is None]
    fresh = iter(_encode(encoder, unknown, tiles, scale))
    described = [
        next(fresh) if value is None else Described(source, *value)
        for source, value in zip(part, known, strict=True)
    ]
    if cache is not None:
        cache.put(
            [
                d
                for d, value in zip(described, known, strict=True)
                if value is None and d.source.file is not None and d.descriptors is not None
            ]
        )
    return described


def digest_of(source: Source) -> str:
    """SHA-256 of an image's encoded bytes, or of its pixels where there are none."""
    if source.digest:
        return source.digest
    image = source.image
    if isinstance(image, str | os.PathLike):
        return file_sha256(image)
    if isinstance(image, ImageFile):
        image = image.read()
    if isinstance(image, bytes | bytearray | memoryview):
        return hashlib.sha256(image).hexdigest()
    pixels = load_pixels(image, name=source.id)
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def describe_pixels(encoder: ImageEncoder, images: Sequence[Pixels], tiles: int) -> list[Float32]:
    """Descriptors ``(views, d)`` of images already decoded."""
    views = [crops(image, tiles) for image in images]
    rows = encoder.encode([view for image in views for view in image], show_progress=False)
    return np.split(np.asarray(rows, np.float32), np.cumsum([len(image) for image in views])[:-1])


def _encode(
    encoder: ImageEncoder, sources: Sequence[Source], tiles: int, scale: float
) -> list[Described]:
    if not sources:
        return []
    values = (
        _encode_tiled(encoder, sources, tiles)
        if tiles > 1
        else encode_whole(encoder, [source.image for source in sources], scale)
    )
    described = []
    for source, value in zip(sources, values, strict=True):
        if isinstance(value, str):
            described.append(Described(source, None, reason=value))
            continue
        try:
            described.append(Described(source, value, digest_of(source)))
        except OSError as error:  # gone since it was encoded
            described.append(Described(source, None, reason=error.strerror or str(error)))
    return described


def encode_whole(
    encoder: ImageEncoder, images: Sequence[ImageInput], scale: float = 1.0
) -> list[Float32 | str]:
    """The descriptor ``(1, d)`` of each image, or why it has none."""
    encoded = encoder.encode(images, on_error="skip", show_progress=False, scale=scale)
    values: list[Float32 | str] = [""] * len(images)
    for row, position in zip(encoded.descriptors, encoded.positions.tolist(), strict=True):
        values[position] = row[None]
    for skipped in encoded.skipped:
        values[skipped.position] = skipped.reason
    return values


def _encode_tiled(
    encoder: ImageEncoder, sources: Sequence[Source], tiles: int
) -> list[Float32 | str]:
    side = encoder.config.size * TILED_SIDE

    def decode(source: Source) -> Pixels | str:
        try:
            return load_pixels(source.image, reduce_to=lambda height, width: (side, side))
        except ImageError as error:
            return error.reason

    values: list[Float32 | str] = []
    # Few at a time: tiles are cut from images at full size.
    with ThreadPoolExecutor(2) as threads:
        for start in range(0, len(sources), 4):
            decoded = list(threads.map(decode, sources[start : start + 4]))
            images = [image for image in decoded if not isinstance(image, str)]
            rows = iter(describe_pixels(encoder, images, tiles) if images else [])
            values += [d if isinstance(d, str) else next(rows) for d in decoded]
    return values


class DescriptorCache:
    """Descriptors of files already encoded. Use as a context manager, or ``close`` it."""

    def __init__(self, path: Path) -> None:
        """Open or create the cache."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, timeout=30, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        if self._db.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            self._db.execute("DROP TABLE IF EXISTS descriptors")  # of another format: made again
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS descriptors (file BLOB PRIMARY KEY, size INTEGER, "
            "modified INTEGER, vectors BLOB, dim INTEGER, digest TEXT) WITHOUT ROWID"
        )
        self._db.execute(f"PRAGMA user_version={FORMAT}")

    def get(self, file: ImageFile) -> tuple[Float32, str] | None:
        """The ``(views, d)`` descriptors and the digest of a file, or None if it is not known."""
        row = self._db.execute(
            "SELECT vectors, dim, digest FROM descriptors WHERE file=? AND size=? AND modified=?",
            (_key(file), file.size, file.modified),
        ).fetchone()
        if row is None:
            return None
        vectors, dim, digest = row
        return np.frombuffer(vectors, np.float32).reshape(-1, dim).copy(), digest

    def put(self, described: Sequence[Described]) -> None:
        """Keep descriptors of files and commit them."""
        rows: list[tuple[object, ...]] = []
        for one in described:
            file, array = one.source.file, one.descriptors
            if file is not None and array is not None:
                content = np.ascontiguousarray(array, np.float32).tobytes()
                state = (_key(file), file.size, file.modified)
                rows.append((*state, content, array.shape[1], one.digest))
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO descriptors VALUES (?,?,?,?,?,?)", rows)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()


@contextmanager
def _opened_cache(
    folder: Path | None, encoder: ImageEncoder, tiles: int
) -> Iterator[DescriptorCache | None]:
    """The cache of an encoder and a tile layout in ``folder``; None without a folder."""
    if folder is None:
        yield None
        return
    suffix = "" if tiles == 1 else f"-tiles{tiles}"
    with DescriptorCache(folder / f"{encoder.fingerprint}{suffix}.sqlite") as cache:
        yield cache


def _key(file: ImageFile) -> bytes:
    return os.fsencode(file.path) + b"\0" + file.member.encode("utf-8", "surrogateescape")
