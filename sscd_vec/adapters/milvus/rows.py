"""Rows for Milvus: built, measured, and cut into requests a server accepts."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.arguments import INT64, Rows, require_names
from sscd_vec.adapters.milvus.settings import ID, RESERVED, VECTOR
from sscd_vec.adapters.milvus.threads import one_blas_thread
from sscd_vec.normalize import Normalizer

LARGEST_INTEGER = 2**64 - 1  # what pymilvus can write as JSON, as is INT64.min
REQUEST_BYTES = 16 << 20  # a quarter of the 64 MB a server accepts per message by default
ROW_BYTES = 64  # of framing, generously
LARGEST_ROW = 60 << 20

Row = dict[str, Any]

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def requests(rows: Rows, normalizer: Normalizer, dim: int) -> Iterator[list[Row]]:
    """Rows to upsert, in lists that stay under the message limit; transformed one list at a time.

    Raises:
        ValueError: If a row alone is too large, or metadata uses a reserved name.
    """
    sizes = _sizes(rows, dim)
    begin = 0
    while begin < len(rows.ids):
        total = np.cumsum(sizes[begin : begin + REQUEST_BYTES // (4 * dim) + 1])
        count = max(1, int(np.searchsorted(total, REQUEST_BYTES, side="right")))
        part = slice(begin, begin + count)
        with one_blas_thread():
            vectors = padded(normalizer.references(rows.descriptors[part]), dim)
        yield _build(rows, part, vectors)
        begin += count


def padded(vectors: NDArray[np.float32], dim: int) -> NDArray[np.float32]:
    """Vectors with zeros appended up to ``dim``."""
    missing = dim - vectors.shape[1]
    return np.pad(vectors, ((0, 0), (0, missing))) if missing else vectors


def in_expression(ids: Sequence[Any]) -> str:
    """A filter for rows with these ids."""
    return f"{ID} in [{', '.join(map(_quoted, ids))}]"


def between(low: Any, high: Any) -> str:  # noqa: ANN401
    """A filter for rows with ids from ``low`` to before ``high``; None is no bound."""
    bounds = [f"{ID} >= {_quoted(low)}"] if low is not None else []
    bounds += [f"{ID} < {_quoted(high)}"] if high is not None else []
    return " and ".join(bounds)


def _quoted(id: Any) -> str:  # noqa: ANN401
    """As Milvus reads it, not JSON: Lite knows no escapes by number; both take others bare."""
    return f'"{id.translate(_ESCAPES)}"' if isinstance(id, str) else str(id)


def _build(rows: Rows, part: slice, vectors: NDArray[np.float32]) -> list[Row]:
    ids = rows.ids[part]
    if rows.metadata is None:
        return [{ID: i, VECTOR: vector} for i, vector in zip(ids, vectors, strict=True)]
    return [
        {ID: i, VECTOR: vector, **(more or {})}
        for i, vector, more in zip(ids, vectors, rows.metadata[part], strict=True)
    ]


def _sizes(rows: Rows, dim: int) -> NDArray[np.int64]:
    """Bytes of each row, more or less."""
    sizes = np.full(len(rows.ids), 4 * dim + ROW_BYTES, dtype=np.int64)
    if rows.ids and isinstance(rows.ids[0], str):
        sizes += np.fromiter(map(len, rows.ids), dtype=np.int64, count=len(rows.ids))
    if rows.metadata is not None:
        sizes += np.array([_json_size(more) for more in rows.metadata], dtype=np.int64)
        if len(sizes) and sizes.max() > LARGEST_ROW:
            worst = rows.ids[int(sizes.argmax())]
            raise ValueError(
                f"metadata: expected at most {LARGEST_ROW >> 20} MiB per row, got "
                f"{int(sizes.max()) >> 20} MiB for id {worst!r}; keep large data elsewhere"
            )
    return sizes


def _json_size(metadata: Row | None) -> int:
    if not metadata:
        return 0
    try:
        size = len(json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"metadata: expected what JSON can hold, got {metadata!r} ({error}); convert it first"
        ) from error
    require_names(metadata)
    _require_short_integers(metadata)
    taken = RESERVED & metadata.keys()
    hidden = [name for name in metadata if name.startswith("$")]
    if taken or hidden:
        raise ValueError(
            f"metadata: the names {sorted(taken) or hidden} are taken by the collection; rename"
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
