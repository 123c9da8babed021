"""Kept features of many images: one data file that is memory-mapped, one SQLite table of places.

``NAME`` holds the table; ``NAME.1``, ``NAME.2``, … the data, one of which is current. Bytes are
appended and forced to disk before the table names them, so a crash leaves the images that were
there and at worst some bytes nobody names, which the next write overwrites. Removing or replacing
an image leaves a hole; ``compact`` writes the next data file without holes.
"""

import contextlib
import glob
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from sscd_vec.files import PathLike, printable_path, sync_folder
from sscd_vec.locks import locked
from sscd_vec.verify.features import Features, FeaturesError

FORMAT = 1
WAIT = 30.0  # seconds for another process's transaction


class FeatureStoreError(ValueError):
    """A store that is something else, or damaged."""


class FeatureStore:
    """Features by id, on disk. One process writes at a time, others may read meanwhile.

    Attributes:
        path: The table; data files lie beside it.
    """

    def __init__(self, path: PathLike, *, read_only: bool = False) -> None:
        """Open a store, or make an empty one unless ``read_only``.

        Raises:
            FeatureStoreError: The file is not a store, or one of a newer format.
        """
        self.path, self._read_only = Path(path), read_only
        self._map: NDArray[np.uint8] | None = None
        self._mapped = Path()
        try:
            source = str(self.path)
            if read_only:  # immutable: SQLite writes nothing at all, not even beside the file
                source = f"{self.path.resolve().as_uri()}?mode=ro&immutable=1"
            self._db = sqlite3.connect(
                source, timeout=WAIT, isolation_level=None, check_same_thread=False, uri=read_only
            )
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise FeatureStoreError(
                f"{printable_path(path)}: not a store of local features ({error}); "
                "choose another name, or delete it and index again"
            ) from error

    # ------------------------------------------------------------------ changing it

    def put(self, features: Mapping[str, Features]) -> None:
        """Keep the features of images, replacing what was kept under these ids; safe on return."""
        with self._writing():
            data, place = self._current()
            data.touch()
            rows = []
            with data.open("r+b") as file:
                file.truncate(place)  # what a killed process wrote and never named
                file.seek(place)
                for name, one in features.items():
                    blob = one.to_bytes()
                    file.write(blob)
                    rows.append((name, place, len(blob), zlib.crc32(blob)))
                    place += len(blob)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(data.parent)
            self._db.executemany("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?)", rows)
            self._db.execute("UPDATE state SET written=?", (place,))

    def remove(self, ids: list[str]) -> None:
        """Forget images; ids that are not there are ignored."""
        with self._writing():
            self._db.executemany("DELETE FROM places WHERE id=?", [(name,) for name in ids])

    def compact(self) -> None:
        """Free the space of removed and replaced images."""
        with self._writing():
            old, _ = self._current()
            self._db.execute("UPDATE state SET generation = generation + 1")
            new, _ = self._current()
            place = 0
            with new.open("wb") as file:
                for name, start, length in self._db.execute(
                    "SELECT id, start, length FROM places ORDER BY start"
                ).fetchall():
                    file.write(self._bytes(old, start, length))
                    self._db.execute("UPDATE places SET start=? WHERE id=?", (place, name))
                    place += length
                file.flush()
                os.fsync(file.fileno())
            sync_folder(new.parent)
            self._db.execute("UPDATE state SET written=?", (place,))
        self._map = None
        for data in self.path.parent.glob(f"{glob.escape(self.path.name)}.[0-9]*"):
            if data != new:
                with contextlib.suppress(OSError):  # where a mapped file cannot be deleted
                    data.unlink()

    # ------------------------------------------------------------------ asking it

    def get(self, name: str) -> Features | None:
        """The features kept under an id, as a view of the mapped file; None if there are none.

        Raises:
            FeatureStoreError: The bytes on disk are not those that were written.
        """
        found = self._look_up(name)
        if found is None:
            return None
        data, start, length, crc = found
        try:
            blob = self._bytes(data, start, length)
        except FileNotFoundError:  # compacted by another process just now
            return self.get(name) if self._look_up(name) != found else self._refuse(data, "missing")
        if zlib.crc32(blob) != crc:
            return self._refuse(data, f"the features of {name} have another checksum")
        try:
            return Features.from_bytes(blob)
        except FeaturesError as error:
            return self._refuse(data, f"{name}: {error}")

    def ids(self) -> Iterator[str]:
        """Ids of the images kept, in order."""
        for (name,) in self._db.execute("SELECT id FROM places ORDER BY id"):
            yield name

    def __contains__(self, name: str) -> bool:
        """Whether an image is kept."""
        found = self._db.execute("SELECT 1 FROM places WHERE id=?", (name,)).fetchone()
        return found is not None

    def __len__(self) -> int:
        """Number of images."""
        return int(self._db.execute("SELECT COUNT(*) FROM places").fetchone()[0])

    def close(self) -> None:
        """Close the files; views of the mapped file stay valid."""
        self._map = None
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
        """Close it."""
        self.close()

    # ------------------------------------------------------------------ files

    def _prepare(self) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (FORMAT, FORMAT if self._read_only else 0):
            raise FeatureStoreError(
                f"{printable_path(self.path)}: expected format {FORMAT}, got {found}; "
                "a store of a newer sscd-vec needs that version"
            )
        if self._read_only:
            return
        self._db.execute("PRAGMA synchronous=FULL")
        if found == FORMAT:
            return
        with self._writing():
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS places (id TEXT PRIMARY KEY, start INTEGER NOT NULL, "
                "length INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS state (generation INTEGER NOT NULL, "
                "written INTEGER NOT NULL)"
            )
            self._db.execute("INSERT INTO state SELECT 1, 0 WHERE NOT EXISTS (SELECT 1 FROM state)")
            self._db.execute(f"PRAGMA user_version={FORMAT}")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction of one process; if it does not end, none of it counts."""
        with locked(self.path.with_name(self.path.name + ".lock"), purpose="keep local features"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _current(self) -> tuple[Path, int]:
        """The data file, and how much of it counts."""
        generation, written = self._db.execute("SELECT generation, written FROM state").fetchone()
        return self._data_file(generation), int(written)

    def _data_file(self, generation: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{generation}")

    def _look_up(self, name: str) -> tuple[Path, int, int, int] | None:
        # One statement, so that the place and the number of the data file belong together.
        row = self._db.execute(
            "SELECT generation, start, length, crc FROM places, state WHERE id=?", (name,)
        ).fetchone()
        return None if row is None else (self._data_file(row[0]), row[1], row[2], row[3])

    def _bytes(self, data: Path, start: int, length: int) -> memoryview:
        """A part of the data file, mapped again when the file has grown or changed."""
        held = self._map
        if held is None or self._mapped != data or start + length > len(held):
            if data.stat().st_size < start + length:
                self._refuse(data, f"it ends before byte {start + length}")
            held = np.memmap(data, np.uint8, "r")
            self._map, self._mapped = held, data
        return held[start : start + length].data

    def _refuse(self, data: Path, reason: str) -> NoReturn:
        raise FeatureStoreError(
            f"{printable_path(data)} is damaged ({reason}); delete it and "
            f"{printable_path(self.path)}, and index again"
        )
