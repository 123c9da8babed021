"""A FAISS index on disk: file and sidecar, saved and opened as a pair.

The new index and the new sidecar are written beside the old pair under staging names, forced to
disk and read back; then the index is renamed over the old one (from here on the new pair counts),
then the sidecar. Opening takes whichever sidecar names the index file that is there, so a crash
between the two renames changes nothing; the next save does the second one first, because it writes
where that sidecar lies.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import faiss

from sscd_vec.adapters.arguments import check_fingerprint
from sscd_vec.adapters.faiss import inspection
from sscd_vec.adapters.faiss.rows import Arrays, RowTable
from sscd_vec.adapters.faiss.settings import (
    IndexConflict,
    IndexFileError,
    Settings,
    States,
    content_digest,
    ends_digest,
    find_sidecar,
    read_header,
    read_sidecar,
    sidecar_path,
    states,
)
from sscd_vec.files import file_sha256, staging_path, sync_folder
from sscd_vec.locks import locked
from sscd_vec.normalize import Normalizer

ATTEMPTS = 10  # to read between two saves, before savers are kept out

logger = logging.getLogger(__name__)


class Pair(NamedTuple):
    """An index file and its sidecar, read."""

    settings: Settings
    rows: RowTable
    vectors: faiss.Index


class IndexFile:
    """A place on disk, and what this process knows to lie there.

    Attributes:
        path: The index file; its sidecar lies beside it.
    """

    def __init__(
        self, path: Path, *, mmap: bool = False, trusted: bool = False, overwrite: bool = False
    ) -> None:
        """Remember the place; nothing is read yet.

        Args:
            path: The index file.
            mmap: Map it when it is read.
            trusted: Let no child process read it first.
            overwrite: Write over whatever lies there.
        """
        self.path = path
        self._mmap, self._trusted, self._overwrite = mmap, trusted, overwrite
        self._known: Settings | None = None
        self._seen: States = {}

    @property
    def was_saved(self) -> bool:
        """Whether this process has read or written it."""
        return self._known is not None

    def read(self, normalizer: Normalizer) -> Pair:
        """Read or map it; see ``FaissIndex.open`` for what may be wrong with it."""
        pair, self._seen = read_pair(self.path, normalizer, self._mmap, self._trusted)
        self._known = pair.settings
        return pair

    def write(self, index: faiss.Index, settings: Settings, arrays: Arrays) -> None:
        """Save index and sidecar over what is known to lie there.

        Raises:
            IndexConflict: If another process has saved something else there.
        """
        check = None if self._overwrite else self._require_known
        self._known, self._seen = save_pair(self.path, index, settings, arrays, check)

    def has_changed(self) -> bool:
        """Whether another process has saved there since; costs a look at three files' times."""
        if self._known is None or (seen := states(self.path)) == self._seen:
            return False
        found = saved_settings(self.path)
        if found is None or found.sha256 != self._known.sha256:
            return True
        self._seen = seen  # the same, renamed
        return False

    def _require_known(self) -> None:
        found = saved_settings(self.path)
        if found is not None and (self._known is None or found.sha256 != self._known.sha256):
            before = "made" if self._known is None else f"at generation {self._known.generation}"
            raise IndexConflict(
                f"{self.path}: another process has saved generation {found.generation} there since "
                f"this index was {before}; saving would lose its rows. Open it again and repeat "
                "the changes. Nothing was written"
            )


# ---------------------------------------------------------------------- saving


def save_pair(
    path: Path,
    index: faiss.Index,
    settings: Settings,
    arrays: Arrays,
    check: Callable[[], None] | None = None,
) -> tuple[Settings, States]:
    """Save an index and its sidecar together; return the settings written and their files' states.

    Args:
        path: The index file.
        index: The index.
        settings: What to say about it; its size and hashes are filled in.
        arrays: Ids and metadata.
        check: Called before anything is written, while no other process can save.
    """
    with locked(path.parent):
        _finish(path)
        if check is not None:
            check()
        new_index, new_sidecar = staging_path(path), staging_path(sidecar_path(path))
        try:
            digest = _write_index(new_index, index)
            settings = replace(
                settings,
                size=new_index.stat().st_size,
                sha256=digest,
                ends=ends_digest(new_index),
                content=content_digest(arrays),
            )
            _write_sidecar(new_sidecar, settings.to_sidecar(arrays))
        except Exception:
            for each in (new_index, new_sidecar):  # a full disk must not stay full
                each.unlink(missing_ok=True)
            raise
        # Each step is on disk before the next: a power cut must not keep the second rename only.
        sync_folder(path.parent)
        os.replace(new_index, path)
        sync_folder(path.parent)
        os.replace(new_sidecar, sidecar_path(path))
        sync_folder(path.parent)
        seen = states(path)
    inspection.remember(path, seen)
    return settings, seen


def saved_settings(path: Path) -> Settings | None:
    """The settings of what lies at a path, without verifying it; None if nothing does."""
    try:
        return read_header(find_sidecar(path, whole=False))[0]
    except (FileNotFoundError, IndexFileError):
        return None


def finish_save(path: Path) -> None:
    """Do the last rename of a save that was killed before it, if that is possible just now.

    Nothing depends on it: a process that is saving does it itself, and a process without write
    permission opens the pair as it is.
    """
    try:
        with locked(path.parent, wait=False):
            _finish(path)
    except OSError as error:
        logger.info("%s: its sidecar keeps its staging name (%s)", path, error)


def _finish(path: Path) -> None:
    """Like ``finish_save``; the caller holds the lock. Leaves an orphaned sidecar untouched."""
    pending = staging_path(sidecar_path(path))
    if not pending.is_file():
        return
    try:
        found = find_sidecar(path, whole=False)
    except (FileNotFoundError, IndexFileError):
        return
    if found == pending:
        os.replace(pending, sidecar_path(path))
        sync_folder(path.parent)


def _write_index(path: Path, index: faiss.Index) -> str:
    """Write an index as ``faiss.write_index`` does and read it back; return its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def chunk(data: bytes) -> int:
            digest.update(data)
            return file.write(data)

        # Made by SWIG at run time, so a type checker cannot see it.
        writer = getattr(faiss, "PyCallbackIOWriter")(chunk, 1 << 20)  # noqa: B009
        faiss.write_index(index, writer)
        _force(file)
    _verify(path, digest.hexdigest())
    return digest.hexdigest()


def _write_sidecar(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        _force(file)
    _verify(path, hashlib.sha256(content).hexdigest())


def _verify(path: Path, expected: str) -> None:
    if file_sha256(path) != expected:
        raise OSError(f"{path}: what was read back is not what was written; check the disk")


def _force(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


# ---------------------------------------------------------------------- opening


def read_pair(path: Path, normalizer: Normalizer, mmap: bool, trusted: bool) -> tuple[Pair, States]:
    """Read index and sidecar of one generation, even while another process saves the next.

    Raises:
        FileNotFoundError: If there is no such file.
        IndexFileError: If the files are truncated, foreign, altered or of two generations.
        FingerprintMismatch: If the normalizer is not the one the index was built with.
    """
    for _ in range(ATTEMPTS):
        before = states(path)
        try:
            found, pair = _read_once(path, normalizer, mmap, trusted)
        except (FileNotFoundError, IndexFileError):
            if states(path) == before:
                raise
            continue
        after = states(path)
        if before[path] == after[path] and before[found] == after[found]:
            break
    else:
        with locked(path.parent, shared=True):
            found, pair = _read_once(path, normalizer, mmap, trusted)
            after = states(path)
    if found == sidecar_path(path):
        inspection.remember(path, after)
    elif not mmap:
        finish_save(path)
    return pair, after


def _read_once(path: Path, normalizer: Normalizer, mmap: bool, trusted: bool) -> tuple[Path, Pair]:
    known = inspection.is_known(path)
    found = find_sidecar(path, whole=not (mmap and known))
    settings, arrays = read_sidecar(found, mmap, verified=mmap and known)
    check_fingerprint(settings.reference_fingerprint, normalizer, str(path))
    try:
        rows = RowTable.from_arrays(arrays)
        if not known:
            rows.check()
    except (KeyError, ValueError) as error:
        raise IndexFileError(f"{found}: damaged ({error})") from error
    if not known and not trusted:
        inspection.inspect(path, settings, mmap)
    index = read_index(path, mmap, settings.factory)
    if (index.ntotal, index.d, len(rows)) != (settings.rows, settings.dim, settings.rows):
        raise IndexFileError(
            f"{path}: expected {settings.rows} vectors of {settings.dim} dimensions as its sidecar "
            f"says, got {index.ntotal} of {index.d} with {len(rows)} ids"
        )
    return found, Pair(settings, rows, index)


def read_index(path: Path, mmap: bool, factory: str) -> faiss.Index:
    """Read an index file, or map it.

    Raises:
        IndexFileError: If FAISS refuses.
    """
    if not mmap:
        try:
            return faiss.read_index(str(path))
        except (RuntimeError, MemoryError) as error:
            raise IndexFileError(f"{path}: FAISS cannot read it ({error})") from error
    # Two ways to map in FAISS: one for inverted lists, though not of every layout, and a newer one
    # for flat and graph storage, which at least reads those. The first would read what refines.
    ways = ("IO_FLAG_MMAP", "IO_FLAG_MMAP_IFC") if "IVF" in factory else ("IO_FLAG_MMAP_IFC",)
    ways = ways[::-1] if "Refine" in factory else ways
    refusals = []
    for way in ways:
        try:
            flags = faiss.IO_FLAG_READ_ONLY | getattr(faiss, way, 0)
            return faiss.read_index(str(path), flags)
        except (RuntimeError, MemoryError) as error:
            refusals.append(str(error))
    raise IndexFileError(
        f"{path}: FAISS cannot map it ({'; '.join(refusals)}); open it without mmap, which reads "
        "all of it"
    )
