"""Ids and metadata by row, which FAISS does not keep: it knows row numbers only.

Columns come from arrays (possibly mapped from a file, so that opening ten million rows costs
nothing) and grow behind them. Readers may share them: what a reader computes and keeps is stored in
one step.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.arguments import IdType, to_json
from sscd_vec.adapters.matches import Metadata

Arrays = dict[str, NDArray[Any]]

_CHECKED = 1 << 16  # strings decoded at a time


class StringColumn:
    """Strings by row: UTF-8 bytes and offsets, plus a list of those appended since."""

    def __init__(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        """Take ``(bytes,)`` data and ``(rows + 1,)`` offsets into it."""
        self._data, self._offsets = data, offsets
        self._tail: list[str] = []

    @classmethod
    def empty(cls) -> "StringColumn":
        """A column without rows."""
        return cls(np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._offsets) - 1 + len(self._tail)

    def extend(self, values: Iterable[str]) -> None:
        """Append rows."""
        self._tail.extend(values)

    def take(self, rows: NDArray[np.int64]) -> list[str]:
        """The strings of some rows."""
        stored = len(self._offsets) - 1
        if stored == 0:
            return list(map(self._tail.__getitem__, rows.tolist()))
        begins = self._offsets[np.minimum(rows, stored)].tolist()
        ends = self._offsets[np.minimum(rows + 1, stored)].tolist()
        return [
            self._tail[row - stored] if row >= stored else self._data[b:e].tobytes().decode()
            for row, b, e in zip(rows.tolist(), begins, ends, strict=True)
        ]

    def tolist(self) -> list[str]:
        """All strings, without a slice per row for the stored ones."""
        data, offsets = self._data.tobytes(), self._offsets.tolist()
        stored = [data[b:e].decode() for b, e in zip(offsets[:-1], offsets[1:], strict=True)]
        return stored + self._tail

    def check(self, rows: int) -> None:
        """Refuse stored strings that are not ``rows`` pieces of UTF-8.

        Raises:
            ValueError: Saying what is wrong.
        """
        offsets, data = self._offsets, self._data
        if offsets.dtype.str + data.dtype.str != "<i8|u1" or offsets.shape != (rows + 1,):
            raise ValueError(f"expected {rows} strings, got offsets of shape {offsets.shape}")
        if offsets[0] != 0 or offsets[-1] != len(data) or (offsets[1:] < offsets[:-1]).any():
            raise ValueError("its strings overlap, or do not fill what is there")
        if ((data[offsets[:-1][np.diff(offsets) > 0]] & 0xC0) == 0x80).any():
            raise ValueError("a string begins within a character")
        for begin in range(0, rows, _CHECKED):
            end = min(begin + _CHECKED, rows)
            data[offsets[begin] : offsets[end]].tobytes().decode()

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """``(data, offsets)`` of all rows, as the constructor takes them."""
        encoded = [value.encode() for value in self._tail]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        offsets = np.concatenate([self._offsets, self._offsets[-1] + np.cumsum(lengths)])
        data = np.concatenate([self._data, np.frombuffer(b"".join(encoded), dtype=np.uint8)])
        return data, offsets.astype(np.int64)

    def compacted(self, alive: NDArray[np.bool_]) -> "StringColumn":
        """The same without the rows where ``alive`` is false."""
        column = StringColumn.empty()
        column.extend(self.take(np.flatnonzero(alive)))
        return column


class IntColumn:
    """Integers by row: an array with room for more behind them."""

    def __init__(self, values: NDArray[np.int64]) -> None:
        """Take the ``(rows,)`` values."""
        self._room = self._values = values

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._values)

    def extend(self, values: Iterable[int]) -> None:
        """Append rows."""
        added = np.fromiter(values, dtype=np.int64)
        begin, end = len(self._values), len(self._values) + len(added)
        if end > len(self._room):  # by half again, so that many small additions copy little
            room = np.empty(max(end, begin + begin // 2), dtype=np.int64)
            room[:begin] = self._values
            self._room = room
        self._room[begin:end] = added
        self._values = self._room[:end]

    def array(self) -> NDArray[np.int64]:
        """All values; not to be written to."""
        return self._values


class RowTable:
    """Which id and metadata each row of an index has, and which rows are dead.

    Removing or replacing an id leaves a dead row (a tombstone) until the index is compacted.

    Attributes:
        id_type: Type of the ids; None as long as there are none.
        dead: Numbers of the dead rows.
    """

    def __init__(
        self,
        id_type: IdType | None = None,
        ids: StringColumn | IntColumn | None = None,
        metadata: StringColumn | None = None,
        dead: NDArray[np.int64] | None = None,
    ) -> None:
        """Start empty, or from columns."""
        self.id_type = id_type
        self._ids = ids
        self._metadata = metadata
        self.dead: set[int] = set() if dead is None else set(dead.tolist())
        self._row_of: dict[str | int, int] | None = None
        self._alive: NDArray[np.bool_] | None = None  # until the next change

    def __len__(self) -> int:
        """Number of rows, dead ones included."""
        return 0 if self._ids is None else len(self._ids)

    @property
    def row_of(self) -> dict[str | int, int]:
        """Living rows by id; made when first needed, because searching does not need it."""
        row_of = self._row_of
        if row_of is None:
            ids: list[Any] = []
            if isinstance(self._ids, IntColumn):
                ids = self._ids.array().tolist()
            elif self._ids is not None:
                ids = self._ids.tolist()
            if self.dead:
                row_of = {i: row for row, i in enumerate(ids) if row not in self.dead}
            else:
                row_of = dict(zip(ids, range(len(ids)), strict=True))
            self._row_of = row_of  # whole: another thread may be asking
        return row_of

    def append(
        self, ids: list[Any], metadata: list[str] | None, id_type: IdType, new: bool = False
    ) -> None:
        """Append rows; older rows with the same ids become dead.

        The ids must not repeat among themselves. If the caller knows that they are ``new`` to the
        table, ``row_of`` is not needed.
        """
        begin = len(self)
        row_of = self.row_of if begin and not new else None
        self._alive = None
        if self._ids is None:
            self.id_type = id_type
            empty = np.empty(0, dtype=np.int64)
            self._ids = IntColumn(empty) if id_type == "int" else StringColumn.empty()
        if row_of and not row_of.keys().isdisjoint(ids):
            self.dead.update(row_of[i] for i in ids if i in row_of)
        if metadata is not None and self._metadata is None:
            self._metadata = StringColumn.empty()
            self._metadata.extend([""] * begin)
        if self._metadata is not None:
            self._metadata.extend([""] * len(ids) if metadata is None else metadata)
        self._ids.extend(ids)
        if row_of is None:
            self._row_of = None
        else:
            row_of.update(zip(ids, range(begin, begin + len(ids)), strict=True))

    def remove(self, ids: list[Any]) -> int:
        """Mark the rows of these ids as dead and count them; unknown ids are ignored."""
        rows = [row for row in (self.row_of.pop(i, None) for i in ids) if row is not None]
        self.dead.update(rows)
        self._alive = None
        return len(rows)

    def alive(self) -> NDArray[np.bool_]:
        """``(rows,)`` whether each row is alive; not to be written to."""
        mask = self._alive
        if mask is None:
            mask = np.ones(len(self), dtype=np.bool_)
            mask[np.fromiter(self.dead, dtype=np.int64, count=len(self.dead))] = False
            self._alive = mask
        return mask

    def at(
        self, rows: NDArray[np.int64], metadata: bool = True
    ) -> tuple[NDArray[Any], list[Metadata | None] | None]:
        """Ids (int64, or object for strings) and metadata of some rows; None if there is none."""
        more: list[Metadata | None] | None = None
        if metadata and self._metadata is not None:
            more = [json.loads(text) if text else None for text in self._metadata.take(rows)]
        if isinstance(self._ids, IntColumn):
            return self._ids.array()[rows], more
        strings = [] if self._ids is None else self._ids.take(rows)
        return np.fromiter(strings, dtype=object, count=len(strings)), more

    def compacted(self) -> "RowTable":
        """The same without dead rows."""
        alive = self.alive()
        ids = self._ids
        if isinstance(ids, IntColumn):
            ids = IntColumn(ids.array()[alive])
        elif ids is not None:
            ids = ids.compacted(alive)
        metadata = None if self._metadata is None else self._metadata.compacted(alive)
        return RowTable(self.id_type, ids, metadata)

    @classmethod
    def joined(cls, tables: Sequence["RowTable"]) -> "RowTable":
        """The rows of several tables, one after the other.

        Raises:
            ValueError: If their ids are of two types, or one is in two of them.
        """
        tables = [table for table in tables if len(table)]
        kinds = {table.id_type for table in tables}
        if len(kinds) > 1:
            raise ValueError(f"ids: expected all str or all int, got {sorted(map(str, kinds))}")
        keys = [np.array([hash(i) for i in table.row_of], np.int64) for table in tables]
        for table in tables:
            table._row_of = None  # of millions: made again if anybody asks
        if keys and len(np.unique(np.concatenate(keys))) < sum(map(len, keys)):
            raise ValueError("ids: expected every id in one part only, got one in two of them")
        parts = [table.arrays() for table in tables]
        starts = np.cumsum([0, *map(len, tables)]).tolist()
        names = sorted({name for part in parts for name in part})
        if any("metadata.data" in name for name in names):
            for table, part in zip(tables, parts, strict=True):
                part.setdefault("metadata.data", np.empty(0, np.uint8))
                part.setdefault("metadata.offsets", np.zeros(len(table) + 1, np.int64))
        made = {name: _stacked([part[name] for part in parts], name, starts) for name in names}
        return cls.from_arrays(made)

    def arrays(self) -> Arrays:
        """Everything, as arrays for a file."""
        arrays: Arrays = {"dead": np.array(sorted(self.dead), dtype=np.int64)}
        if isinstance(self._ids, IntColumn):
            arrays["ids.int"] = np.ascontiguousarray(self._ids.array())
        elif self._ids is not None:
            arrays["ids.data"], arrays["ids.offsets"] = self._ids.arrays()
        if self._metadata is not None:
            arrays["metadata.data"], arrays["metadata.offsets"] = self._metadata.arrays()
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "RowTable":
        """Read what ``arrays`` gave."""
        metadata = None
        if "metadata.data" in arrays:
            metadata = StringColumn(arrays["metadata.data"], arrays["metadata.offsets"])
        if "ids.int" in arrays:
            return cls("int", IntColumn(arrays["ids.int"]), metadata, arrays["dead"])
        if "ids.data" in arrays:
            ids = StringColumn(arrays["ids.data"], arrays["ids.offsets"])
            return cls("str", ids, metadata, arrays["dead"])
        return cls()

    def check(self) -> None:
        """Refuse columns from a file that do not belong together.

        Raises:
            ValueError: Saying what is wrong.
        """
        rows = len(self)
        if isinstance(self._ids, StringColumn):
            self._ids.check(rows)
        elif isinstance(self._ids, IntColumn) and self._ids.array().dtype != np.int64:
            raise ValueError("its integer ids are not int64")
        if self._metadata is not None:
            self._metadata.check(rows)
        if self.dead and not (0 <= min(self.dead) and max(self.dead) < rows):
            raise ValueError("rows are dead that do not exist")


def _stacked(arrays: list[NDArray[Any]], name: str, starts: list[int]) -> NDArray[Any]:
    """Arrays of several tables as one; offsets go on counting, row numbers too."""
    if name == "dead":
        arrays = [array + start for array, start in zip(arrays, starts[:-1], strict=True)]
    elif name.endswith("offsets"):
        ends = np.cumsum([0, *(int(array[-1]) for array in arrays)])
        arrays = [a[:-1] + e for a, e in zip(arrays, ends[:-1], strict=True)] + [ends[-1:]]
    return np.concatenate(arrays)


def encoded(metadata: list[Metadata | None] | None) -> list[str] | None:
    """Metadata as ``RowTable.append`` takes it.

    Raises:
        TypeError: If a name is not a string, or JSON cannot hold a value.
        ValueError: If a number is not finite, or text is not Unicode.
    """
    if metadata is None or not any(metadata):
        return None
    return [to_json(row) if row else "" for row in metadata]
