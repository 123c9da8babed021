"""A FAISS index on disk: the plain file and its sidecar, read and written as a pair."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import faiss

from sscd_vec.adapters.arguments import check_fingerprint
from sscd_vec.adapters.columns import RowTable
from sscd_vec.adapters.locking import locked
from sscd_vec.adapters.saving import Write, finish_save
from sscd_vec.adapters.sidecar import (
    IndexFileError,
    Sidecar,
    find_sidecar,
    read_sidecar,
    sidecar_path,
    states,
)
from sscd_vec.normalize import Normalizer

Pair = tuple[Sidecar, RowTable, faiss.Index]

ATTEMPTS = 10  # to read between two saves, before savers are kept out


def writer(index: faiss.Index) -> Write:
    """Write ``index`` to a file as ``faiss.write_index`` does, hashing on the way."""

    def write(file: BinaryIO, digest: Callable[[bytes], None]) -> None:
        def chunk(data: bytes) -> int:
            digest(data)
            return file.write(data)

        # Made by SWIG at run time, so a type checker cannot see it.
        callback = getattr(faiss, "PyCallbackIOWriter")(chunk, 1 << 20)  # noqa: B009
        faiss.write_index(index, callback)

    return write


def read_pair(path: Path, normalizer: Normalizer, mmap: bool) -> Pair:
    """Read index and sidecar of one generation, even while another process saves the next.

    Raises:
        FileNotFoundError: If there is no such file.
        IndexFileError: If the files are truncated, foreign, altered or of two generations.
        FingerprintMismatch: If the normalizer is not the one the index was built with.
    """
    for _ in range(ATTEMPTS):
        before = states(path)
        try:
            found, pair = _read_once(path, normalizer, mmap)
        except (FileNotFoundError, IndexFileError):
            if states(path) == before:
                raise
            continue
        after = states(path)
        if before[path] == after[path] and before[found] == after[found]:
            break
    else:
        with locked(path.parent, shared=True):
            found, pair = _read_once(path, normalizer, mmap)
    if not mmap and found != sidecar_path(path):
        finish_save(path)
    return pair


def _read_once(path: Path, normalizer: Normalizer, mmap: bool) -> tuple[Path, Pair]:
    found = find_sidecar(path, whole=not mmap)
    about, arrays = read_sidecar(found, mmap)
    check_fingerprint(about.reference_fingerprint, normalizer, str(path))
    try:
        table = RowTable.from_arrays(arrays)
    except KeyError as error:
        raise IndexFileError(f"{found}: damaged (its array {error} is missing)") from error
    index = _read_index(path, mmap, about.factory)
    if (index.ntotal, index.d, len(table)) != (about.rows, about.dim, about.rows):
        raise IndexFileError(
            f"{path}: expected {about.rows} vectors of {about.dim} dimensions as its sidecar says, "
            f"got {index.ntotal} of {index.d} with {len(table)} ids"
        )
    return found, (about, table, index)


def _read_index(path: Path, mmap: bool, factory: str) -> faiss.Index:
    if not mmap:
        try:
            return faiss.read_index(str(path))
        except RuntimeError as error:
            raise IndexFileError(f"{path}: FAISS cannot read it ({error})") from error
    # Two ways to map in FAISS: one for inverted lists, though not of every layout, and a newer one
    # for flat and graph storage, which at least reads those.
    ways = ("IO_FLAG_MMAP", "IO_FLAG_MMAP_IFC") if "IVF" in factory else ("IO_FLAG_MMAP_IFC",)
    refusals = []
    for way in ways:
        try:
            flags = faiss.IO_FLAG_READ_ONLY | getattr(faiss, way, 0)
            return faiss.read_index(str(path), flags)
        except RuntimeError as error:
            refusals.append(str(error))
    raise IndexFileError(
        f"{path}: FAISS cannot map it ({'; '.join(refusals)}); open it without mmap, which reads "
        "and verifies all of it"
    )
