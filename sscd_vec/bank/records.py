"""Which images a bank holds, in one SQLite file: files, their state, decisions, and the journal.

The index and this file cannot change in one step, so every change is announced here first. A
*journal* row says what is about to be written to the index and which generation of the index will
hold it. After a crash the generation tells whether the index has it: then the rows count, else
they never happened.

Clients of the server name an image by ``key``, a number that means nothing outside this table, so
that no path ever comes from them.
"""

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sscd_vec.bank.location import BankError
from sscd_vec.files import ImageFile

FORMAT = 2
LOST = -1  # size of an image whose vectors the index does not have
_COLUMNS = "id, digest, vectors, size, modified, path, member, offset"
_TABLES = """
CREATE TABLE IF NOT EXISTS images (key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,
    digest TEXT NOT NULL, vectors INTEGER NOT NULL, size INTEGER NOT NULL,
    modified INTEGER NOT NULL, path BLOB, member TEXT NOT NULL, offset INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS journal (id TEXT PRIMARY KEY, digest TEXT, vectors INTEGER, size INTEGER,
    modified INTEGER, path BLOB, member TEXT, offset INTEGER, generation INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decisions (first TEXT NOT NULL, second TEXT NOT NULL,
    is_copy INTEGER NOT NULL, decided REAL NOT NULL, PRIMARY KEY (first, second)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class BankImage:
    """One image of a bank.

    Attributes:
        id: Its id in the index.
        digest: SHA-256 of its encoded bytes or pixels.
        vectors: How many vectors (views) it has in the index.
        file: Its file, as it was when it was added; None if it came without one.
        is_lost: Whether the index does not have its vectors: the next ``add`` adds it again.
        key: Its number; 0 before it has one.
    """

    id: str
    digest: str
    vectors: int
    file: ImageFile | None = None
    is_lost: bool = False
    key: int = 0


class Records:
    """The file; every call is a transaction, from any thread."""

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        """Open it, or create it unless ``read_only``; without a path, in memory.

        Raises:
            BankError: The file is damaged or of another version.
        """
        self._path, self._lock = path, threading.Lock()
        # Immutable: SQLite writes nothing at all, not even to read after a crash.
        source = ":memory:" if path is None else str(path)
        if path is not None and read_only:
            source = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with self._reporting_damage():
            self._db = sqlite3.connect(source, timeout=30, check_same_thread=False, uri=read_only)
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, FORMAT):
                raise BankError(
                    f"{path}: expected format {FORMAT}, got {found}; open the bank with the "
                    "version of sscd-vec that made it"
                )
            if not read_only:
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(_TABLES)
                self._db.execute(f"PRAGMA user_version={FORMAT}")

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """How many images the index holds."""
        return int(self._value("SELECT count(*) FROM images WHERE size>=0"))

    @property
    def vectors(self) -> int:
        """How many vectors the index should hold."""
        return int(self._value("SELECT coalesce(sum(vectors), 0) FROM images WHERE size>=0"))

    @property
    def lost(self) -> int:
        """How many images are known whose vectors the index does not have."""
        return int(self._value("SELECT count(*) FROM images WHERE size<0"))

    @property
    def generation(self) -> int:
        """Generation of the index these records belong to."""
        found = self._rows("SELECT value FROM facts WHERE name='generation'", ())
        return int(found[0][0]) if found else 0

    def by_key(self, key: int) -> BankImage | None:
        """The image of that number."""
        return self._one("key=?", key) if 0 < key < 2**63 else None

    def by_id(self, name: str) -> BankImage | None:
        """The image of that id."""
        return self._one("id=?", name)

    def all(self) -> list[BankImage]:
        """All images, in order of adding."""
        return self._many("1 ORDER BY key", ())

    def page(self, offset: int, limit: int, text: str = "") -> tuple[int, list[BankImage]]:
        """How many images have ``text`` in their id, and some of them in order of adding."""
        pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        where = "id LIKE ? ESCAPE '\\'"
        total = self._rows(f"SELECT count(*) FROM images WHERE {where}", (pattern,))[0][0]
        found = self._many(f"{where} ORDER BY key LIMIT ? OFFSET ?", (pattern, limit, offset))
        return int(total), found

    def announced(self) -> list[tuple[BankImage, int]]:
        """What was announced and not confirmed, with the generation that would hold it."""
        rows = self._rows(f"SELECT {_COLUMNS}, generation FROM journal", ())
        return [(_image(row[:-1]), row[-1]) for row in rows]

    # ------------------------------------------------------------------ writing

    def announce(self, images: Sequence[BankImage], generation: int) -> None:
        """Say what the index's next generation will hold, before it is written."""
        with self._transaction() as db:
            db.executemany(
                f"INSERT OR REPLACE INTO journal ({_COLUMNS}, generation) "
                "VALUES (?,?,?,?,?,?,?,?,?)",
                [(*_values(image), generation) for image in images],
            )

    def confirm(self, generation: int) -> None:
        """What was announced is in the index now; a known id keeps its key."""
        with self._transaction() as db:
            kept = ", ".join(f"{name}=excluded.{name}" for name in _COLUMNS.split(", ")[1:])
            db.execute(
                f"INSERT INTO images ({_COLUMNS}) SELECT {_COLUMNS} FROM journal WHERE 1 "
                f"ON CONFLICT (id) DO UPDATE SET {kept}"
            )
            db.execute("DELETE FROM journal")
            self._note(db, generation)

    def discard(self, generation: int) -> None:
        """What was announced never reached the index."""
        with self._transaction() as db:
            db.execute("DELETE FROM journal")
            self._note(db, generation)

    def remove(self, ids: Iterable[str], generation: int) -> None:
        """Forget images that the index no longer holds."""
        with self._transaction() as db:
            db.executemany("DELETE FROM images WHERE id=?", [(name,) for name in ids])
            self._note(db, generation)

    def mark_lost(self, ids: Iterable[str], generation: int) -> None:
        """Remember that the index does not have these; the next ``add`` adds them again."""
        with self._transaction() as db:
            db.executemany(f"UPDATE images SET size={LOST} WHERE id=?", [(i,) for i in ids])
            self._note(db, generation)

    def decide(self, first: str, second: str, is_copy: bool, when: float) -> None:
        """Remember a person's decision about two images, by their digests."""
        pair = sorted((first, second))
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO decisions VALUES (?,?,?,?)", (*pair, int(is_copy), when)
            )

    def decisions(self) -> dict[tuple[str, str], bool]:
        """All decisions, by the sorted pair of digests."""
        rows = self._rows("SELECT first, second, is_copy FROM decisions", ())
        return {(first, second): bool(is_copy) for first, second, is_copy in rows}

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # ------------------------------------------------------------------ the file

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._reporting_damage(), self._db:
            yield self._db

    @staticmethod
    def _note(db: sqlite3.Connection, generation: int) -> None:
        db.execute("INSERT OR REPLACE INTO facts VALUES ('generation', ?)", (generation,))

    def _one(self, where: str, value: int | str) -> BankImage | None:
        found = self._many(where, (value,))
        return found[0] if found else None

    def _many(self, where: str, values: tuple[object, ...]) -> list[BankImage]:
        rows = self._rows(f"SELECT {_COLUMNS}, key FROM images WHERE {where}", values)
        return [_image(row[:-1], row[-1]) for row in rows]

    def _value(self, query: str) -> int:
        return int(self._rows(query, ())[0][0])

    def _rows(self, query: str, values: tuple[object, ...]) -> list[Any]:
        with self._lock, self._reporting_damage():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _reporting_damage(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise BankError(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise BankError(
                f"{self._path} is damaged ({error}); restore it from a copy, or delete it and "
                "index the images again"
            ) from error


def _values(image: BankImage) -> tuple[object, ...]:
    if image.file is None:
        return image.id, image.digest, image.vectors, 0, 0, None, "", 0
    file = image.file
    place = os.fsencode(file.path), file.member, file.offset
    return image.id, image.digest, image.vectors, file.size, file.modified, *place


def _image(row: Sequence[Any], key: int = 0) -> BankImage:
    name, digest, vectors, size, modified, path, member, offset = row
    file = None
    if path is not None:
        file = ImageFile(Path(os.fsdecode(path)), size, modified, member, offset)
    return BankImage(name, digest, vectors, file, size == LOST, key)
