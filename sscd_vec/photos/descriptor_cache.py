"""Descriptors of files already encoded, so that no photo is encoded twice.

One SQLite file per encoder fingerprint (and tile layout), keyed by path, size and time of change.
Every batch is committed as it is encoded: an interrupted run goes on where it stopped, and a
folder that was deduplicated is indexed without encoding it again. Files that could not be read are
not remembered: a permission or a plugin may come without the file changing.
"""

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sscd_vec.photos.folder import ImageFile

Float32 = NDArray[np.float32]
FORMAT = 2


class DescriptorCache:
    """Descriptors by file. Use as a context manager, or ``close`` it.

    Attributes:
        path: The SQLite file, or None for one in memory.
    """

    def __init__(self, path: Path | None) -> None:
        """Open or create a cache; None keeps it in memory only."""
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path or ":memory:", timeout=30)
        self._db.execute("PRAGMA journal_mode=WAL")
        if self._db.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            self._db.execute("DROP TABLE IF EXISTS descriptors")  # of another format: made anew
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS descriptors (path BLOB PRIMARY KEY, size INTEGER, "
            "modified INTEGER, vectors BLOB, dim INTEGER) WITHOUT ROWID"
        )
        self._db.execute(f"PRAGMA user_version={FORMAT}")

    def get(self, file: ImageFile) -> Float32 | None:
        """The ``(n, d)`` descriptors of a file, or None if they are not known."""
        row = self._db.execute(
            "SELECT vectors, dim FROM descriptors WHERE path=? AND size=? AND modified=?",
            (os.fsencode(file.path), file.size, file.modified),
        ).fetchone()
        if row is None:
            return None
        vectors, dim = row
        return np.frombuffer(vectors, np.float32).reshape(-1, dim).copy()

    def put(self, files: Sequence[ImageFile], values: Iterable[Float32]) -> None:
        """Keep descriptors ``(n, d)`` and commit them."""
        rows: list[tuple[object, ...]] = []
        for file, value in zip(files, values, strict=True):
            array = np.ascontiguousarray(np.atleast_2d(value), np.float32)
            key = (os.fsencode(file.path), file.size, file.modified)
            rows.append((*key, array.tobytes(), array.shape[1]))
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO descriptors VALUES (?,?,?,?,?)", rows)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()
