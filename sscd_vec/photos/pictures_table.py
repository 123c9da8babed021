"""Which pictures a bank holds: file, state when it was added, and a number to name it by.

Clients of the server name a picture by ``key``, a number that means nothing outside this table, so
that no path ever comes from them.
"""

import os
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sscd_vec.photos.folder import ImageFile

FORMAT = 1
_COLUMNS = "key, id, path, size, modified, vectors"


@dataclass(frozen=True)
class BankPicture:
    """One picture of a bank.

    Attributes:
        key: Its number.
        id: Its id in the index.
        path: Its file.
        size: Bytes when it was added.
        modified: Time of change when it was added, nanoseconds.
        vectors: How many vectors (crops) it has in the index.
    """

    key: int
    id: str
    path: Path
    size: int
    modified: int
    vectors: int


class PicturesTable:
    """The table, in one SQLite file; every call is a transaction, from any thread."""

    def __init__(self, path: Path) -> None:
        """Open or create it."""
        self._db = sqlite3.connect(path, timeout=30, check_same_thread=False)
        self._lock = threading.Lock()
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS pictures (key INTEGER PRIMARY KEY AUTOINCREMENT, "
            "id TEXT UNIQUE NOT NULL, path BLOB NOT NULL, size INTEGER, modified INTEGER, "
            "vectors INTEGER)"
        )
        self._db.execute(f"PRAGMA user_version={FORMAT}")

    def __len__(self) -> int:
        """How many pictures."""
        with self._lock:
            return int(self._db.execute("SELECT count(*) FROM pictures").fetchone()[0])

    def put(self, rows: Iterable[tuple[ImageFile, int]], ids: Iterable[str] | None = None) -> None:
        """Record files and their number of vectors; a known id keeps its key."""
        rows = list(rows)
        names = list(ids) if ids is not None else [file.id for file, _ in rows]
        with self._lock, self._db:
            self._db.executemany(
                "INSERT INTO pictures (id, path, size, modified, vectors) VALUES (?,?,?,?,?) "
                "ON CONFLICT (id) DO UPDATE SET path=excluded.path, size=excluded.size, "
                "modified=excluded.modified, vectors=excluded.vectors",
                [
                    (name, os.fsencode(file.path), file.size, file.modified, vectors)
                    for name, (file, vectors) in zip(names, rows, strict=True)
                ],
            )

    def remove(self, ids: Iterable[str]) -> None:
        """Forget pictures."""
        with self._lock, self._db:
            self._db.executemany("DELETE FROM pictures WHERE id=?", [(name,) for name in ids])

    def by_key(self, key: int) -> BankPicture | None:
        """The picture of that number."""
        return self._one("key=?", key)

    def by_id(self, name: str) -> BankPicture | None:
        """The picture of that id."""
        return self._one("id=?", name)

    def states(self) -> dict[bytes, BankPicture]:
        """All pictures by the bytes of their path."""
        return {os.fsencode(picture.path): picture for picture in self._many("1", ())}

    def page(self, offset: int, limit: int, text: str = "") -> tuple[int, list[BankPicture]]:
        """How many pictures have ``text`` in their id, and some of them in order of adding."""
        pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        with self._lock:
            total = self._db.execute(
                "SELECT count(*) FROM pictures WHERE id LIKE ? ESCAPE '\\'", (pattern,)
            ).fetchone()[0]
        where = "id LIKE ? ESCAPE '\\' ORDER BY key LIMIT ? OFFSET ?"
        return int(total), self._many(where, (pattern, limit, offset))

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _one(self, where: str, value: int | str) -> BankPicture | None:
        found = self._many(where, (value,))
        return found[0] if found else None

    def _many(self, where: str, values: tuple[object, ...]) -> list[BankPicture]:
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM pictures WHERE {where}", values
            ).fetchall()
        return [BankPicture(k, i, Path(os.fsdecode(p)), s, m, v) for k, i, p, s, m, v in rows]


def file_state(path: Path) -> ImageFile:
    """A file as it is now."""
    status = path.stat()
    return ImageFile(path, status.st_size, status.st_mtime_ns)
