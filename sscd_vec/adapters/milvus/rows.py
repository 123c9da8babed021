"""Rows for Milvus: transformed, cut into requests a server accepts, or written to import files."""

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.arguments import INT64, Float32, Rows, padded, to_json
from sscd_vec.adapters.matches import Metadata
from sscd_vec.adapters.milvus.settings import ID, Settings
from sscd_vec.files import writing
from sscd_vec.shards import arrow

FileType = Literal["parquet", "json"]

LARGEST_INTEGER = 2**64 - 1  # what pymilvus can write as JSON, as is INT64.min
REQUEST_BYTES = 16 << 20  # a quarter of the 64 MB a server accepts per message by default
ROW_BYTES = 64  # of framing, generously
LARGEST_ROW = 60 << 20
KEYS = 4096  # ids per filter expression
KEY_BYTES = 8 << 20  # and bytes
CHUNK_BYTES = 128 << 20  # of an import file
GROUP_BYTES = 32 << 20  # of a Parquet file that the server reads at a time

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


class Part(NamedTuple):
    """Some rows, transformed.

    Attributes:
        ids: Their ids.
        vectors: ``(n, dim)`` as they are stored.
        metadata: One mapping or None per row, or None.
        size: Bytes, more or less.
    """

    ids: list[Any]
    vectors: Float32
    metadata: list[Metadata | None] | None
    size: int

    def entities(self, settings: Settings) -> list[dict[str, Any]]:
        """The rows as Milvus takes them."""
        key, vector = settings.id_field, settings.vector_field
        pairs = zip(self.ids, self.vectors.astype(settings.dtype, copy=False), strict=True)
        if self.metadata is None:
            return [{key: i, vector: row} for i, row in pairs]
        return [
            {key: i, vector: row, **(more or {})}
            for (i, row), more in zip(pairs, self.metadata, strict=True)
        ]


def parts(
    rows: Rows, references: Callable[[NDArray[Any]], Float32], settings: Settings
) -> Iterator[Part]:
    """Rows in parts that stay under the message limit, transformed one part at a time.

    Raises:
        ValueError: If a row alone is too large, or metadata uses a reserved name.
    """
    sizes = _sizes(rows, settings)
    begin = 0
    while begin < len(rows.ids):
        total = np.cumsum(sizes[begin : begin + REQUEST_BYTES // (4 * settings.dim) + 1])
        count = max(1, int(np.searchsorted(total, REQUEST_BYTES, side="right")))
        part = slice(begin, begin + count)
        yield Part(
            rows.ids[part],
            padded(references(rows.descriptors[part]), settings.dim),
            None if rows.metadata is None else rows.metadata[part],
            int(total[count - 1]),
        )
        begin += count


def in_expression(ids: Sequence[Any], field: str = ID) -> str:
    """A filter for rows with these ids."""
    return f"{field} in [{', '.join(map(_quoted, ids))}]"


def between(low: Any, high: Any, field: str = ID) -> str:  # noqa: ANN401
    """A filter for rows with ids from ``low`` to before ``high``; None is no bound."""
    bounds = [f"{field} >= {_quoted(low)}"] if low is not None else []
    bounds += [f"{field} < {_quoted(high)}"] if high is not None else []
    return " and ".join(bounds)


def key_blocks(ids: Sequence[Any], most: int = KEYS) -> Iterator[Sequence[Any]]:
    """Ids in parts that fit into one filter expression each."""
    longest = max((len(i) for i in ids if isinstance(i, str)), default=20)
    size = max(1, min(most, KEY_BYTES // (4 * longest)))
    for begin in range(0, len(ids), size):
        yield ids[begin : begin + size]


def _quoted(id: Any) -> str:  # noqa: ANN401
    """As Milvus reads it, not JSON: Lite knows no escapes by number; both take others bare."""
    return f'"{id.translate(_ESCAPES)}"' if isinstance(id, str) else str(id)


def _sizes(rows: Rows, settings: Settings) -> NDArray[np.int64]:
    """Bytes of each row, more or less."""
    sizes = np.full(len(rows.ids), 4 * settings.dim + ROW_BYTES, dtype=np.int64)
    if rows.ids and isinstance(rows.ids[0], str):
        sizes += np.fromiter(map(len, rows.ids), dtype=np.int64, count=len(rows.ids))
    if rows.metadata is not None:
        reserved = {settings.id_field, settings.vector_field}
        sizes += np.array([_json_size(more, reserved) for more in rows.metadata], dtype=np.int64)
        if len(sizes) and sizes.max() > LARGEST_ROW:
            worst = rows.ids[int(sizes.argmax())]
            raise ValueError(
                f"metadata: expected at most {LARGEST_ROW >> 20} MiB per row, got "
                f"{int(sizes.max()) >> 20} MiB for id {worst!r}; keep large data elsewhere"
            )
    return sizes


def _json_size(metadata: Metadata | None, reserved: set[str]) -> int:
    if not metadata:
        return 0
    size = len(to_json(metadata).encode())
    _require_short_integers(metadata)
    taken = [name for name in metadata if name in reserved or name.startswith("$")]
    if taken:
        raise ValueError(
            f"metadata: the names {sorted(taken)} are taken by the collection; rename them"
        )
    return size


def _require_short_integers(value: object) -> None:
    """Refuse integers that pymilvus cannot write as JSON: it would only say that types differ.

    Raises:
        ValueError: Showing one.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            _require_short_integers(each)
    elif isinstance(value, int) and not INT64.min <= value <= LARGEST_INTEGER:
        raise ValueError(
            f"metadata: expected integers of 64 bits, got {value}; keep longer ones as strings"
        )


# ---------------------------------------------------------------------- import files


class BulkFiles:
    """Writes files of about ``chunk_bytes`` each for Milvus's bulk import, in a new folder.

    Attributes:
        files: The files written so far, grouped as Milvus imports them.
    """

    def __init__(
        self, settings: Settings, folder: Path, file_type: FileType, chunk_bytes: int
    ) -> None:
        """Choose a new folder below ``folder``.

        Raises:
            ImportError: Naming the extra that Parquet files need.
        """
        self._write = {"parquet": _write_parquet, "json": _write_json}[file_type]
        if file_type == "parquet":
            arrow(extra="milvus-bulk")
        self._settings, self._file_type, self._chunk_bytes = settings, file_type, chunk_bytes
        self._folder = folder / str(uuid.uuid4())
        self._waiting: list[Part] = []
        self.files: list[list[str]] = []

    def append(self, part: Part) -> None:
        """Append rows."""
        self._waiting.append(part)
        if sum(each.size for each in self._waiting) >= self._chunk_bytes:
            self._finish()

    def _finish(self) -> None:
        if not self._waiting:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{len(self.files) + 1}.{self._file_type}"
        self._write(path, self._waiting, self._settings)
        self.files.append([str(path)])
        self._waiting = []

    def __enter__(self) -> Self:
        """Nothing to do: it is open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is left, unless something went wrong."""
        if kind is None:
            self._finish()


def require_file_type(file_type: FileType) -> None:
    """Refuse what is not a type of file.

    Raises:
        ValueError: Naming those there are.
    """
    if file_type not in get_args(FileType):
        raise ValueError(f"file_type: expected one of {get_args(FileType)}, got {file_type!r}")


def _write_parquet(path: Path, parts: list[Part], settings: Settings) -> None:
    """Columns as Milvus's importer expects them: key, list of floats, metadata as JSON text."""
    pa, parquet = arrow()
    names = [settings.id_field, settings.vector_field, "$meta"]
    kinds = [
        pa.string() if settings.id_type == "str" else pa.int64(),
        pa.list_(pa.float32()),
        pa.string(),
    ]
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    group = max(1, GROUP_BYTES * sum(len(p.ids) for p in parts) // sum(p.size for p in parts))
    with writing(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for part in parts:
            offsets = np.arange(len(part.ids) + 1, dtype=np.int32) * settings.dim
            columns = [
                pa.array(part.ids, kinds[0]),
                pa.ListArray.from_arrays(offsets, pa.array(part.vectors.ravel())),
                pa.array(_metadata_texts(part), kinds[2]),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=group)


def _write_json(path: Path, parts: list[Part], settings: Settings) -> None:
    """``{"rows": [{key, vector, $meta}, ...]}``, a row per line."""
    key, vector = settings.id_field, settings.vector_field
    with writing(path) as file:
        separator = b'{"rows": [\n'
        for part in parts:
            for i, row, text in zip(part.ids, part.vectors, _metadata_texts(part), strict=True):
                line = json.dumps({key: i, vector: row.tolist()})
                file.write(separator + f'{line[:-1]}, "$meta": {text}}}'.encode())
                separator = b",\n"
        file.write(b"\n]}\n")


def _metadata_texts(part: Part) -> list[str]:
    if part.metadata is None:
        return ["{}"] * len(part.ids)
    return [to_json(more) if more else "{}" for more in part.metadata]
