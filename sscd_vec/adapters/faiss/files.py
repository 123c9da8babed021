"""A FAISS index on disk: the plain file and its sidecar, read and written as a pair."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import faiss

from sscd_vec.adapters.arguments import check_fingerprint
from sscd_vec.adapters.columns import RowTable
from sscd_vec.adapters.sidecar import (
    IndexFileError,
    Sidecar,
    Write,
    find_sidecar,
    finish_save,
    read_sidecar,
)
from sscd_vec.normalize import Normalizer

ATTEMPTS = 5


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


def read_pair(
    path: Path, normalizer: Normalizer, mmap: bool
) -> tuple[Sidecar, RowTable, faiss.Index]:
    """Read index and sidecar of one generation, even while another process saves the next.

    Raises:
        FileNotFoundError: If there is no such file.
        IndexFileError: If the files are truncated, foreign, altered or of two generations.
        FingerprintMismatch: If the normalizer is not the one the index was built with.
    """
    for attempt in range(ATTEMPTS):
        inode = _inode(path)
        try:
            about, table, index = _read_once(path, normalizer, mmap)
        except (FileNotFoundError, IndexFileError):
            if attempt == ATTEMPTS - 1 or _inode(path) in (inode, None):
                raise
            continue
        if _inode(path) == inode:
            break
    if (index.ntotal, index.d, len(table)) != (about.rows, about.dim, about.rows):
        raise IndexFileError(
            f"{path}: expected {about.rows} vectors of {about.dim} dimensions as its sidecar says, "
            f"got {index.ntotal} of {index.d} with {len(table)} ids"
        )
    return about, table, index


def _read_once(
    path: Path, normalizer: Normalizer, mmap: bool
) -> tuple[Sidecar, RowTable, faiss.Index]:
    found = find_sidecar(path, whole=not mmap)
    about, arrays = read_sidecar(found, mmap)
    check_fingerprint(about.reference_fingerprint, normalizer, str(path))
    try:
        index = faiss.read_index(str(path), _flags(mmap, about.factory))
    except RuntimeError as error:
        raise IndexFileError(f"{path}: FAISS cannot read it ({error})") from error
    if not mmap:
        finish_save(path, found)
    return about, RowTable.from_arrays(arrays), index


def _flags(mmap: bool, factory: str) -> int:
    if not mmap:
        return 0
    # Two ways to map in FAISS: one for inverted lists, a newer one for flat and graph storage.
    way = "IO_FLAG_MMAP" if "IVF" in factory else "IO_FLAG_MMAP_IFC"
    return int(faiss.IO_FLAG_READ_ONLY | getattr(faiss, way, 0))


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None
