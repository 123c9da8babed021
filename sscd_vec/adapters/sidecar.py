"""The sidecar of a FAISS file: the index file it belongs to, and the ids and metadata of its rows.

``photos.faiss`` is a plain FAISS file. ``photos.faiss.sidecar`` is a safetensors file with the ids,
the metadata, the reference fingerprint and the size and SHA-256 of the index file it belongs to.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def sidecar_path(path: Path) -> Path:
    """Where the sidecar of an index file is."""
    return path.with_name(path.name + ".sidecar")


def aside(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(path.name + ".new")


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
    present = [p for p in (beside, aside(beside)) if p.is_file()]
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


def states(path: Path) -> dict[Path, tuple[int, ...] | None]:
    """What tells one generation's index and sidecars from the next; None for what is not there.

    An inode alone does not: a file system soon gives that of a replaced file to another.
    """
    beside = sidecar_path(path)
    return {each: _state(each) for each in (path, beside, aside(beside))}


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read_sidecar(path: Path, mapped: bool) -> tuple[Sidecar, Arrays]:
    """Read a sidecar; its arrays are mapped from the file or read and checked.

    Raises:
        IndexFileError: If it is not a whole sidecar of a format known here.
    """
    about, entries, begin = read_header(path)
    data: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
    try:
        if not mapped:
            data = np.fromfile(path, dtype=np.uint8, offset=begin)
        elif path.stat().st_size > begin:
            data = np.memmap(path, dtype=np.uint8, mode="r", offset=begin)
        arrays = {name: _array(data, entry) for name, entry in entries.items()}
    except (KeyError, TypeError, ValueError) as error:
        # Also what comes of a header and the data of the next save: who reads may try again.
        raise IndexFileError(f"{path}: damaged (its header does not fit its arrays)") from error
    if not mapped and content_digest(arrays) != about.content:
        raise IndexFileError(
            f"{path}: damaged (its arrays do not have the hash they were saved with)"
        )
    return about, arrays


def _array(data: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[Any]:
    first, last = entry["data_offsets"]
    array: NDArray[Any] = data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return array


def read_header(path: Path) -> tuple[Sidecar, dict[str, Any], int]:
    """The description in a sidecar, the places of its arrays, and where the data begins."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(length, size)))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        about: dict[str, Any] = json.loads(header["__metadata__"][KEY])
        form = about.get("format")
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise IndexFileError(f"{path}: not a sidecar written by sscd-vec, or truncated") from error
    if form != FORMAT:
        raise IndexFileError(
            f"{path}: expected sidecar format {FORMAT}, got {form!r}; "
            "open it with the version of sscd-vec that wrote it"
        )
    if size < end:
        raise IndexFileError(f"{path}: truncated, expected {end} bytes, got {size}")
    known = {field.name for field in fields(Sidecar)}
    try:
        sidecar = Sidecar(**{name: about[name] for name in known & about.keys()})
    except TypeError as error:
        raise IndexFileError(f"{path}: damaged ({error})") from error
    return sidecar, entries, 8 + length


def ends_digest(path: Path) -> str:
    """SHA-256 of a file's size, first and last mebibyte."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE))
        file.seek(max(0, size - SAMPLE))
        digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def content_digest(arrays: Arrays) -> str:
    """SHA-256 of arrays, their names and shapes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
