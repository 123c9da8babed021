"""The sidecar of a FAISS file: what was saved, and the ids and metadata of its rows.

``images.faiss`` is a plain FAISS file. ``images.faiss.sidecar`` is a safetensors file with the ids,
the metadata, the reference fingerprint and the size and SHA-256 of the index file it belongs to.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as to_safetensors

from sscd_vec.adapters.faiss.rows import Arrays
from sscd_vec.files import file_sha256, staging_path

FORMAT = 1
KEY = "sscd_vec.sidecar"
SAMPLE = 1 << 20  # bytes at either end of an index file that identify it without reading it all
States = dict[Path, tuple[int, ...] | None]
_DTYPES = {"U8": np.uint8, "I64": np.int64}


class IndexFileError(ValueError):
    """Not an index this version can open: truncated, foreign, altered, orphaned or newer."""


class IndexConflict(RuntimeError):
    """Another process saved the same file; saving over it would lose what that process added."""


@dataclass(frozen=True)
class Settings:
    """What is known about an index file besides its rows.

    Attributes:
        reference_fingerprint: Of the normalizer its vectors were made with.
        factory: FAISS factory string.
        metric: ``"ip"`` or ``"l2"``.
        dim: Dimensions stored, padding included.
        rows: Vectors in the index file, dead ones included.
        generation: How often this index has been saved.
        plain: Whether it was adopted and holds plain descriptors.
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
    plain: bool = False
    size: int = 0
    sha256: str = ""
    ends: str = ""
    content: str = ""
    format: int = FORMAT

    def to_sidecar(self, arrays: Arrays) -> bytes:
        """The sidecar file with these arrays."""
        made: bytes = to_safetensors(arrays, metadata={KEY: json.dumps(asdict(self))})
        return made


def sidecar_path(path: Path) -> Path:
    """Where the sidecar of an index file is."""
    return path.with_name(path.name + ".sidecar")


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
    present = [p for p in (beside, staging_path(beside)) if p.is_file()]
    if not present:
        raise IndexFileError(
            f"{path}: its sidecar {beside.name} is missing, so its ids and fingerprint are "
            "unknown; copy both files together, or if it is not from sscd-vec, use "
            "FaissIndex.adopt(faiss.read_index(path), ids)"
        )
    problems: list[str] = []
    fitting = _with_same_ends(path, present, problems)
    if fitting and (whole or len(fitting) > 1):
        digest = file_sha256(path)
        problems += [
            f"{p.name} names SHA-256 {settings.sha256}, the file has {digest}"
            for p, settings in fitting
            if settings.sha256 != digest
        ]
        fitting = [(p, settings) for p, settings in fitting if settings.sha256 == digest]
    if not fitting:
        raise IndexFileError(
            f"{path}: truncated, altered, or not saved together with its sidecar: "
            f"{'; '.join(problems)}. Restore both files from the same copy, or build it again"
        )
    return fitting[0][0]


def _with_same_ends(
    path: Path, sidecars: list[Path], problems: list[str]
) -> list[tuple[Path, Settings]]:
    """Sidecars that name the size and both ends of an index file; why the others do not."""
    size, ends = path.stat().st_size, ends_digest(path)
    fitting = []
    for candidate in sidecars:
        try:
            settings = read_header(candidate)[0]
        except IndexFileError as error:
            problems.append(str(error))
            continue
        if (settings.size, settings.ends) == (size, ends):
            fitting.append((candidate, settings))
        else:
            problems.append(
                f"{candidate.name} belongs to another index file (of {settings.size} bytes, this "
                f"one has {size})"
            )
    return fitting


def states(path: Path) -> States:
    """What tells one generation's index and sidecars from the next; None for what is not there.

    An inode alone does not: a file system soon gives that of a replaced file to another.
    """
    beside = sidecar_path(path)
    return {each: _state(each) for each in (path, beside, staging_path(beside))}


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def read_sidecar(path: Path, mapped: bool, verified: bool) -> tuple[Settings, Arrays]:
    """Read a sidecar.

    Args:
        path: The sidecar.
        mapped: Map its arrays from the file rather than reading them.
        verified: Skip the check of the arrays' hash.

    Raises:
        IndexFileError: If it is not a whole sidecar of a format known here.
    """
    settings, entries, begin = read_header(path)
    data: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
    try:
        if not mapped:
            data = np.fromfile(path, dtype=np.uint8, offset=begin)
        elif path.stat().st_size > begin:
            data = np.memmap(path, dtype=np.uint8, mode="r", offset=begin)
        arrays = {name: _array(data, entry) for name, entry in entries.items()}
    except (KeyError, TypeError, ValueError) as error:
        # Also the header of one save and the arrays of the next: a reader may try again.
        raise IndexFileError(f"{path}: damaged (its header does not fit its arrays)") from error
    if not verified and content_digest(arrays) != settings.content:
        raise IndexFileError(
            f"{path}: damaged (its arrays do not have the hash they were saved with)"
        )
    return settings, arrays


def _array(data: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[Any]:
    first, last = entry["data_offsets"]
    array: NDArray[Any] = data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return array


def read_header(path: Path) -> tuple[Settings, dict[str, Any], int]:
    """The settings in a sidecar, the places of its arrays, and where the data begins."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(length, size)))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        about: dict[str, Any] = json.loads(header["__metadata__"][KEY])
        form = about.get("format")
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError, OSError, RecursionError) as error:
        raise IndexFileError(f"{path}: not a sidecar written by sscd-vec, or truncated") from error
    if form != FORMAT:
        raise IndexFileError(
            f"{path}: expected sidecar format {FORMAT}, got {form!r}; "
            "open it with the version of sscd-vec that wrote it"
        )
    if size < end:
        raise IndexFileError(f"{path}: truncated, expected {end} bytes, got {size}")
    known = {field.name: field.type for field in fields(Settings)}
    wrong = [name for name in known.keys() & about.keys() if type(about[name]) is not known[name]]
    try:
        settings = Settings(**{name: about[name] for name in known.keys() & about.keys()})
    except TypeError as error:
        raise IndexFileError(f"{path}: damaged ({error})") from error
    if wrong or settings.metric not in ("ip", "l2"):
        raise IndexFileError(f"{path}: damaged (not a setting: {wrong or settings.metric})")
    return settings, entries, 8 + length


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
