"""What callers hand to an index: checked once, the same way for every backend.

Ids are all ``str`` or all ``int``. Of an id repeated in one ``add`` the last row wins, as if the
rows had been added one by one. Metadata is one JSON object (or None) per row.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.adapters.matches import Metadata
from sscd_vec.normalize import FingerprintMismatch, Normalizer

Id = str | int
Ids = Sequence[str] | Sequence[int] | NDArray[Any]
IdType = Literal["str", "int"]
Batch = tuple[Ids, ArrayLike] | tuple[Ids, ArrayLike, Sequence[Metadata | None] | None]

Float32 = NDArray[np.float32]
Threshold = float | Literal["calibrated"]

INT64 = np.iinfo(np.int64)
LONGEST_ID = 65_535  # bytes: what a Milvus VARCHAR can hold at most
LARGEST_THRESHOLD = 1e30  # far beyond any score, and still a float32 after conversion to L2


class Rows(NamedTuple):
    """Rows to add, checked: ids without repetition, and the rows of the input they stand for.

    Attributes:
        ids: Plain ``str`` or ``int`` objects.
        descriptors: ``(n, d)`` array, not yet transformed.
        metadata: One mapping or None per row, or None.
    """

    ids: list[Any]
    descriptors: NDArray[Any]
    metadata: list[Metadata | None] | None


class Wanted(NamedTuple):
    """What a search asks for besides vectors.

    Attributes:
        filter: Expression over metadata; empty for none.
        metadata: Whether to return metadata.
    """

    filter: str = ""
    metadata: bool = True


def as_ids(ids: Ids | Id, wanted: IdType | None) -> tuple[list[Any], IdType | None]:
    """Return plain Python ids and their type.

    Args:
        ids: A sequence or array of ids, or a single one.
        wanted: The type the index already holds, if any.

    Raises:
        TypeError: If ids are neither all ``str`` nor all ``int``, or not of the wanted type.
        ValueError: If an id is empty, too long, not Unicode text, or not within int64.
    """
    plain: list[Any]
    if isinstance(ids, np.ndarray) and ids.ndim == 0:
        ids = ids.item()
    if isinstance(ids, str | int | np.integer | np.str_):
        plain = [ids.item() if isinstance(ids, np.generic) else ids]
    elif isinstance(ids, bytes | bytearray) or not isinstance(ids, Iterable):
        raise TypeError(
            f"ids: expected a str, an int, or a sequence of either, got {type(ids).__name__}"
        )
    else:
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    kinds = set(map(type, plain))
    if any(issubclass(kind, np.generic) for kind in kinds):
        plain = [i.item() if isinstance(i, np.generic) else i for i in plain]
        kinds = set(map(type, plain))
    if not kinds:
        return plain, wanted
    if kinds == {str}:
        found: IdType = "str"
        if "" in plain:
            raise ValueError("ids: expected non-empty strings, got ''")
        require_id_length(plain, LONGEST_ID)
    elif kinds == {int}:
        found = "int"
        if min(plain) < INT64.min or max(plain) > INT64.max:
            raise ValueError("ids: expected integers within int64; use strings for longer ones")
    else:
        names = sorted(kind.__name__ for kind in kinds)
        raise TypeError(f"ids: expected all str or all int, got {', '.join(names)}")
    if wanted is not None and found != wanted:
        raise TypeError(
            f"ids: this index holds {wanted} ids, got {found}; convert them (an index never mixes)"
        )
    return plain, found


def require_id_length(ids: Sequence[str], limit: int) -> None:
    """Refuse string ids of more than ``limit`` bytes of UTF-8, or that have no UTF-8 at all.

    Raises:
        ValueError: Naming one such id.
    """
    try:
        "".join(ids).encode()  # all at once: one call per id would take longer than the rest
    except UnicodeEncodeError:
        raise ValueError(
            f"ids: expected Unicode text, got {next(i for i in ids if not _is_text(i))!r} (a file "
            "name that is not UTF-8?); use os.fsencode(name).decode(errors='backslashreplace')"
        ) from None
    longest = max(ids, key=len)
    if len(longest) * 4 <= limit:
        return
    size, worst = max((len(i.encode()), i) for i in ids)
    if size > limit:
        raise ValueError(
            f"ids: expected at most {limit} bytes, got {size} in {worst[:40]!r}…; use a hash of it "
            "as id and keep the long name in the metadata"
        )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_rows(
    ids: Ids | Id,
    descriptors: ArrayLike,
    metadata: Sequence[Metadata | None] | Metadata | None,
    wanted: IdType | None,
) -> tuple[Rows, IdType | None]:
    """Check one ``add`` and drop all but the last row of a repeated id."""
    plain, found = as_ids(ids, wanted)
    array = np.asarray(descriptors)
    if array.ndim == 0:
        raise TypeError(
            f"add: expected (n, d) descriptors, got {type(descriptors).__name__}; add_batches "
            "takes generators"
        )
    if array.ndim == 1 and len(plain) == 1:
        array = array[None]
    if array.ndim != 2 and (plain or array.size):
        raise ValueError(
            f"add: expected (n, d) descriptors, one row for each id, got shape {array.shape} for "
            f"{len(plain)} ids; a single (d,) descriptor goes with a single id"
        )
    if len(array) != len(plain):
        raise ValueError(
            f"add: expected as many descriptors as ids, got {len(array)} for {len(plain)} ids"
        )
    rows: list[Metadata | None] | None = None
    if metadata is not None:
        rows = [metadata] if isinstance(metadata, dict) else list(metadata)
        if len(rows) != len(plain):
            raise ValueError(
                f"add: expected as many metadata as ids, got {len(rows)} for {len(plain)} ids"
            )
        for row in rows:
            if row is not None and not isinstance(row, dict):
                raise TypeError(f"metadata: expected a dict or None, got {type(row).__name__}")
    if len(set(plain)) < len(plain):
        keep = sorted(dict(zip(plain, range(len(plain)), strict=True)).values())
        plain = [plain[i] for i in keep]
        array = array[keep]
        rows = None if rows is None else [rows[i] for i in keep]
    return Rows(plain, array, rows), found


def unpack(batches: Iterable[Batch]) -> Iterator[tuple[Ids, ArrayLike, Any]]:
    """``(ids, descriptors)`` or ``(ids, descriptors, metadata)`` batches as triples."""
    for batch in batches:
        if len(batch) == 2:
            yield _countable(batch[0]), batch[1], None
        elif len(batch) == 3:
            yield _countable(batch[0]), batch[1], batch[2]
        else:
            raise ValueError(
                f"batch: expected (ids, descriptors) or (ids, descriptors, metadata), got "
                f"{len(batch)} items"
            )


def _countable(ids: Ids) -> Ids:
    """Ids that have a length: a single one and those of an iterator as a list."""
    if isinstance(ids, str | int | np.integer):
        return [ids]
    return list(ids) if isinstance(ids, Iterator) else ids


def is_id(id: object) -> bool:
    """Whether this could be an id at all: a ``str`` or an integer, numpy's included."""
    return isinstance(id, str | int | np.integer) and not isinstance(id, bool)


def check_fingerprint(stored: str, normalizer: Normalizer, where: str) -> None:
    """Refuse a normalizer whose reference side is not the one the index was built with.

    Raises:
        FingerprintMismatch: Naming both.
    """
    if stored != normalizer.reference_fingerprint:
        raise FingerprintMismatch(
            f"{where} was built with reference fingerprint {stored}, but this normalizer has "
            f"{normalizer.reference_fingerprint}: another encoder, whitening or layout. Load the "
            "normalizer it was built with, or build a new index (query-side changes - background, "
            "beta, thresholds - never need one)"
        )


def to_json(metadata: Metadata) -> str:
    """Metadata of one row as JSON.

    Raises:
        TypeError: If a name is not a string, or JSON cannot hold a value.
        ValueError: If a number is not finite, or text is not Unicode.
    """
    try:
        text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()  # half a surrogate pair cannot be encoded: say so now, not when it is saved
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"metadata: expected what JSON can hold, got {metadata!r} ({error}); convert it first"
        ) from error
    _require_names(metadata)
    return text


def _require_names(value: object) -> None:
    """Refuse names that are not strings, at any depth: JSON would turn them into strings."""
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"metadata: expected names that are strings, got {list(value)}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, dict | list | tuple):
                _require_names(each)


def padded(vectors: Float32, dim: int) -> Float32:
    """Vectors with zeros appended up to ``dim``, which change no inner product or distance."""
    missing = dim - vectors.shape[1]
    return np.pad(vectors, ((0, 0), (0, missing))) if missing else vectors
