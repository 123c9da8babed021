"""A FAISS file and its sidecar, saved so that a crash leaves the old pair or the new one.

``photos.faiss`` is a plain FAISS file. ``photos.faiss.sidecar`` is a safetensors file with the ids,
the metadata, the reference fingerprint and the size and SHA-256 of the index file it belongs to.

Saving: the new index and the new sidecar are written beside the old pair under ``.new`` names,
forced to disk and read back; then the index is renamed over the old one (from here on the new pair
counts), then the sidecar. Opening takes whichever sidecar names the index file that is there, so a
crash between the two renames changes nothing.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as to_safetensors

from sscd_vec.adapters.columns import Arrays

FORMAT = 1
KEY = "sscd_vec.sidecar"
SAMPLE = 1 << 20  # bytes at either end of an index file that identify it without reading it all
_DTYPES = {"U8": np.uint8, "I64": np.int64}


class IndexFileError(ValueError):
    """Not an index this version can open: truncated, foreign, altered, orphaned or newer."""


@dataclass(frozen=True)
class Sidecar:
    """What is known about an index file besides its rows.

    Attributes:
        reference_fingerprint: Of the normalizer its vectors were made with.
        factory: FAISS factory string.
        metric: ``"ip"`` or ``"l2"``.
        dim: Dimensions stored, padding included.
        rows: Vectors in the index file, dead ones included.
        generation: How often this index has been saved.
        size: Bytes of the index file.
        sha256: Of the whole index file.
        ends: SHA-256 of its size, first and last mebibyte: tells most generations apart quickly.
        content: SHA-256 of the arrays in this sidecar.
        format: Of the sidecar itself.
    """

    reference_fingerprint: str
    factory: str
    metric: str
    dim: int
    rows: int
    generation: int
    size: int = 0
    sha256: str = ""
    ends: str = ""
    content: str = ""
    format: int = FORMAT


class Write(Protocol):
    """Write an index to an open file, telling a digest each byte on the way."""

    def __call__(self, file: BinaryIO, digest: Callable[[bytes], None]) -> None:
        """Write it."""


def sidecar_path(path: Path) -> Path:
    """Where the sidecar of an index file is."""
    return path.with_name(path.name + ".sidecar")


def save_pair(path: Path, write: Write, about: dict[str, Any], arrays: Arrays) -> Sidecar:
    """Save an index and its sidecar together; return the sidecar written.

    Args:
        path: The index file.
        write: Writes the index.
        about: Fields of ``Sidecar`` up to ``generation``.
        arrays: Ids and metadata.
    """
    with _only_saver(path.parent):
        new_index, new_sidecar = _new(path), _new(sidecar_path(path))
        digest = hashlib.sha256()
        with new_index.open("wb") as file:
            write(file, digest.update)
            _force(file)
        _verify(new_index, digest.hexdigest())
        sidecar = Sidecar(
            **about,
            size=new_index.stat().st_size,
            sha256=digest.hexdigest(),
            ends=ends_digest(new_index),
            content=_content_digest(arrays),
        )
        header = {KEY: json.dumps(asdict(sidecar))}
        raw = to_safetensors(arrays, metadata=header)
        with new_sidecar.open("wb") as file:
            file.write(raw)
            _force(file)
        _verify(new_sidecar, hashlib.sha256(raw).hexdigest())
        # Each step is on disk before the next: a power cut must not keep the second rename only.
        _force_folder(path.parent)
        os.replace(new_index, path)
        _force_folder(path.parent)
        os.replace(new_sidecar, sidecar_path(path))
        _force_folder(path.parent)
    return sidecar


def find_sidecar(path: Path, whole: bool) -> Path:
    """The sidecar that belongs to the index file at ``path``.

    Args:
        path: The index file.
        whole: Compare the whole file's hash, not just both ends.

    Raises:
        FileNotFoundError: If there is no index file.
        IndexFileError: If no sidecar names this file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such index file")
    beside = sidecar_path(path)
    present = [p for p in (beside, _new(beside)) if p.is_file()]
    if not present:
        raise IndexFileError(
            f"{path}: its sidecar {beside.name} is missing, so its ids and fingerprint are "
            "unknown; copy both files together, or use faiss.read_index if it is not from sscd-vec"
        )
    problems = []
    size, ends = path.stat().st_size, ends_digest(path)
    fitting = []
    for candidate in present:
        try:
            about = read_header(candidate)[0]
        except IndexFileError as error:
            problems.append(str(error))
            continue
        if (about.size, about.ends) == (size, ends):
            fitting.append((candidate, about))
        else:
            problems.append(
                f"{candidate.name} belongs to another index file (of {about.size} bytes, this one "
                f"has {size})"
            )
    if fitting and (whole or len(fitting) > 1):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        problems += [
            f"{p.name} names SHA-256 {about.sha256}, the file has {digest}"
            for p, about in fitting
            if about.sha256 != digest
        ]
        fitting = [(p, about) for p, about in fitting if about.sha256 == digest]
    if not fitting:
        raise IndexFileError(
            f"{path}: truncated, altered, or not saved together with its sidecar: "
            f"{'; '.join(problems)}. Restore both files from the same copy, or build it again"
        )
    return fitting[0][0]


def finish_save(path: Path, found: Path) -> None:
    """Do the last rename of a save that was killed before it."""
    if found != sidecar_path(path):
        with _only_saver(path.parent):
            if found.exists():
                os.replace(found, sidecar_path(path))


def read_sidecar(path: Path, mapped: bool) -> tuple[Sidecar, Arrays]:
    """Read a sidecar; its arrays are mapped from the file or read and checked.

    Raises:
        IndexFileError: If it is not a whole sidecar of a format known here.
    """
    about, entries, begin = read_header(path)
    data: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
    if not mapped:
        data = np.fromfile(path, dtype=np.uint8, offset=begin)
    elif path.stat().st_size > begin:
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=begin)
    arrays: Arrays = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        arrays[name] = data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if not mapped and _content_digest(arrays) != about.content:
        raise IndexFileError(
            f"{path}: damaged (its arrays do not have the hash they were saved with)"
        )
    return about, arrays


def read_header(path: Path) -> tuple[Sidecar, dict[str, Any], int]:
    """The description in a sidecar, the places of its arrays, and where the data begins."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(length, size)))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        about = json.loads(header["__metadata__"][KEY])
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise IndexFileError(f"{path}: not a sidecar written by sscd-vec, or truncated") from error
    if about.get("format") != FORMAT:
        raise IndexFileError(
            f"{path}: expected sidecar format {FORMAT}, got {about.get('format')!r}; "
            "open it with the version of sscd-vec that wrote it"
        )
    if size < end:
        raise IndexFileError(f"{path}: truncated, expected {end} bytes, got {size}")
    known = {field.name for field in fields(Sidecar)}
    return Sidecar(**{name: about[name] for name in known & about.keys()}), entries, 8 + length


def ends_digest(path: Path) -> str:
    """SHA-256 of a file's size, first and last mebibyte."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE))
        file.seek(max(0, size - SAMPLE))
        digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _new(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _content_digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise OSError(f"{path}: what was read back is not what was written; check the disk")


def _force(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _force_folder(folder: Path) -> None:
    if sys.platform == "win32":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _only_saver(folder: Path) -> Iterator[None]:
    """Let one process at a time save into a folder."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
