"""Saving a FAISS file and its sidecar so that a crash leaves the old pair or the new one.

The new index and the new sidecar are written beside the old pair under ``.new`` names, forced to
disk and read back; then the index is renamed over the old one (from here on the new pair counts),
then the sidecar. Opening takes whichever sidecar names the index file that is there, so a crash
between the two renames changes nothing; the next save does the second one first, because it writes
where that sidecar lies.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from safetensors.numpy import save as to_safetensors

from sscd_vec.adapters.columns import Arrays
from sscd_vec.adapters.locking import locked
from sscd_vec.adapters.sidecar import (
    KEY,
    IndexFileError,
    Sidecar,
    aside,
    content_digest,
    ends_digest,
    find_sidecar,
    sidecar_path,
)

logger = logging.getLogger(__name__)


class Write(Protocol):
    """Write an index to an open file, telling a digest each byte on the way."""

    def __call__(self, file: BinaryIO, digest: Callable[[bytes], None]) -> None:
        """Write it."""


def save_pair(path: Path, write: Write, about: dict[str, Any], arrays: Arrays) -> Sidecar:
    """Save an index and its sidecar together; return the sidecar written.

    Args:
        path: The index file.
        write: Writes the index.
        about: Fields of ``Sidecar`` up to ``generation``.
        arrays: Ids and metadata.
    """
    with locked(path.parent):
        _finish(path)
        new_index, new_sidecar = aside(path), aside(sidecar_path(path))
        try:
            digest = _write_index(new_index, write)
            sidecar = Sidecar(
                **about,
                size=new_index.stat().st_size,
                sha256=digest,
                ends=ends_digest(new_index),
                content=content_digest(arrays),
            )
            _write_sidecar(new_sidecar, sidecar, arrays)
        except Exception:
            for each in (new_index, new_sidecar):  # a full disk must not stay full
                each.unlink(missing_ok=True)
            raise
        # Each step is on disk before the next: a power cut must not keep the second rename only.
        _force_folder(path.parent)
        os.replace(new_index, path)
        _force_folder(path.parent)
        os.replace(new_sidecar, sidecar_path(path))
        _force_folder(path.parent)
    return sidecar


def finish_save(path: Path) -> None:
    """Do the last rename of a save that was killed before it, if that is possible just now.

    Nothing depends on it: a process that is saving does it itself, and who may only read opens the
    pair as it is.
    """
    try:
        with locked(path.parent, wait=False):
            _finish(path)
    except OSError as error:
        logger.info(
            "%s: its sidecar keeps its name %s (%s)", path, aside(sidecar_path(path)), error
        )


def _finish(path: Path) -> None:
    """The same for who has the lock; a sidecar whose index was never renamed stays aside."""
    pending = aside(sidecar_path(path))
    if not pending.is_file():
        return
    try:
        found = find_sidecar(path, whole=False)
    except (FileNotFoundError, IndexFileError):
        return
    if found == pending:
        os.replace(pending, sidecar_path(path))
        _force_folder(path.parent)


def _write_index(path: Path, write: Write) -> str:
    """Write an index and read it back; return its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        write(file, digest.update)
        _force(file)
    _verify(path, digest.hexdigest())
    return digest.hexdigest()


def _write_sidecar(path: Path, sidecar: Sidecar, arrays: Arrays) -> None:
    raw = to_safetensors(arrays, metadata={KEY: json.dumps(asdict(sidecar))})
    with path.open("wb") as file:
        file.write(raw)
        _force(file)
    _verify(path, hashlib.sha256(raw).hexdigest())


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
