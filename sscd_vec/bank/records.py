"""Which images a bank holds, in one SQLite file: files, their state, decisions, and the journal.

The index and this file cannot change in one step, so every change is announced here first. A
*journal* row says what is about to be written to the index and which generation of the index will
hold it. After a crash the generation tells whether the index has it: then the rows count, else
they never happened.

Clients of the server name an image by ``key``, a number that means nothing outside this table, so
that no path ever comes from them.
"""

import errno
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sscd_vec.bank.decisions import Decision, Decisions
from sscd_vec.bank.location import BankError
from sscd_vec.bank.views import MOST_TILES, crop_count
from sscd_vec.files import ImageFile

FORMAT = 2
MOST_VECTORS = crop_count(MOST_TILES)
LOST = -1  # size of an image whose vectors the index does not have
_COLUMNS = "id, digest, vectors, size, modified, path, member, offset, outside"
_TABLES = """
CREATE TABLE IF NOT EXISTS images (key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,
    digest TEXT NOT NULL, vectors INTEGER NOT NULL, size INTEGER NOT NULL,
    modified INTEGER NOT NULL, path BLOB, member TEXT NOT NULL, offset INTEGER NOT NULL,
    outside INTEGER);
CREATE TABLE IF NOT EXISTS journal (id TEXT PRIMARY KEY, digest TEXT, vectors INTEGER, size INTEGER,
    modified INTEGER, path BLOB, member TEXT, offset INTEGER, outside INTEGER, generation INTEGER)
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decisions (first TEXT NOT NULL, second TEXT NOT NULL,
    is_copy INTEGER NOT NULL, decided REAL NOT NULL, PRIMARY KEY (first, second)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS kept (digest TEXT PRIMARY KEY, decided REAL NOT NULL) WITHOUT ROWID;
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
        outside: Whether it lies outside what the normalizer knows; None if it was not examined.
    """

    id: str
    digest: str
    vectors: int
    file: ImageFile | None = None
    is_lost: bool = False
    key: int = 0
    outside: bool | None = None


class Records:
    """The file; every call is a transaction, from any thread."""

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        """Open it, or create it unless ``read_only``; without a path, in memory.

        Raises:
            BankError: The file is damaged or of another version.
        """
        self._path, self._lock = path, threading.Lock()
        with self._reporting_damage():
            self._db = _connect(path, read_only)
            self._db.execute("PRAGMA trusted_schema=OFF")  # the file may be a stranger's
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

    def digests_in_use(self, digests: Iterable[str]) -> set[str]:
        """Those of these digests that an image still has."""
        asked = set(digests)
        found = self._rows("SELECT DISTINCT digest FROM images", ()) if asked else []
        return asked.intersection(digest for (digest,) in found)

    def file_names(self) -> set[str]:
        """Names, without folders, of all files that an image or the journal names."""
        rows = self._rows("SELECT path FROM images UNION SELECT path FROM journal", ())
        return {os.path.basename(os.fsdecode(path)) for (path,) in rows if path is not None}

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
                "VALUES (?,?,?,?,?,?,?,?,?,?)",
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

    def decide(self, decisions: Decisions, when: float) -> None:
        """Remember what a person decided; a new decision about a pair replaces the old one."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO decisions VALUES (?,?,?,?)",
                [(*one.pair, int(one.is_copy), when) for one in decisions],
            )
            db.executemany(
                "INSERT OR REPLACE INTO kept VALUES (?,?)", [(one, when) for one in decisions.kept]
            )

    def decisions(self, about: str | None = None) -> Decisions:
        """All decisions, or those about the image with this digest."""
        where = "" if about is None else " WHERE ? IN (first, second)"
        rows = self._rows(
            f"SELECT first, second, is_copy FROM decisions{where}",
            () if about is None else (about,),
        )
        made = Decisions()
        made.add(
            Decision(str(first), str(second), bool(is_copy)) for first, second, is_copy in rows
        )
        if about is None:
            made.kept = {str(digest) for (digest,) in self._rows("SELECT digest FROM kept", ())}
        return made

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
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path)) from error
            raise BankError(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise BankError(
                f"{self._path} is damaged ({error}); restore it from a copy, or delete it and "
                "index the images again"
            ) from error


def _values(image: BankImage) -> tuple[object, ...]:
    known = image.id, image.digest, image.vectors
    if image.file is None:
        return *known, 0, 0, None, "", 0, image.outside
    file = image.file
    place = os.fsencode(file.path), file.member, file.offset
    return *known, file.size, file.modified, *place, image.outside


def _image(row: Sequence[Any], key: int = 0) -> BankImage:
    """A row as an image; SQLite itself lets a stranger put anything into any column."""
    name, digest, vectors, size, modified, path, member, offset, outside = row
    texts, numbers = (name, digest, member), (vectors, size, modified, offset)
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(isinstance(number, int) for number in numbers)
        or not isinstance(path, bytes | None)
        or outside not in (None, 0, 1)
        or not 1 <= vectors <= MOST_VECTORS
    ):
        raise BankError(f"the record of image {key} is damaged; restore the records from a copy")
    file = None
    if path is not None:
        file = ImageFile(Path(os.fsdecode(path)), size, modified, member, offset)
    flag = None if outside is None else bool(outside)
    return BankImage(name, digest, vectors, file, size == LOST, key, flag)


def _connect(path: Path | None, read_only: bool) -> sqlite3.Connection:
    source = ":memory:" if path is None else str(path)
    if path is None or not read_only:
        return sqlite3.connect(source, timeout=30, check_same_thread=False)
    address = path.resolve().as_uri() + "?mode=ro"
    database = sqlite3.connect(address, timeout=30, check_same_thread=False, uri=True)
    try:
        database.execute("SELECT count(*) FROM images").fetchone()
        return database
    except sqlite3.OperationalError:
        # A write was interrupted, and to undo it is not allowed here: read the file as it is.
        database.close()
        address += "&immutable=1"
        return sqlite3.connect(address, timeout=30, check_same_thread=False, uri=True)
