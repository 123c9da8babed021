"""Descriptors in Parquet files: written by ``sscd-vec encode``, read by everything else.

A row is an image: ``id``; ``descriptor``, a list of float32 or float16, null if the image could not
be read; ``error``, why it could not, else null; and where the image lies: ``path``, ``member``
(inside a tar), ``offset``, ``size``, ``modified``. The metadata of the file (key ``sscd_vec``)
names the encoder, so that descriptors of two encoders are never mixed.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from sscd_vec.files import ImageFile, PathLike, printable_path, staging

Float32 = NDArray[np.float32]
Precision = Literal["float32", "float16"]
Value = TypeVar("Value", str, int)

ENDING = ".parquet"
KEY = b"sscd_vec"
FORMAT = 1
BATCH = 8192  # rows read at a time
_PLACE = ("path", "member", "offset", "size", "modified")


@dataclass(frozen=True)
class ShardInfo:
    """What the metadata of a file says.

    Attributes:
        encoder: Fingerprint of the encoder.
        dim: Size of a descriptor.
        source: What was encoded: a tar, a Parquet file, or a part of a folder.
        state: Changes when the source does.
        format: Of the file.
    """

    encoder: str
    dim: int
    source: str = ""
    state: str = ""
    format: int = FORMAT


@dataclass(frozen=True, eq=False)
class ShardRows:
    """Some rows of a file.

    Attributes:
        ids: Their ids, ``str`` or ``int``.
        descriptors: ``(n, d)`` float32; NaN where there is none.
        errors: Why there is none; '' where there is one.
        files: Where each image lies; None if that is not known.
    """

    ids: list[Any]
    descriptors: Float32
    errors: list[str]
    files: list[ImageFile | None]

    def readable(self) -> "ShardRows":
        """Only the rows that have a descriptor."""
        good = np.flatnonzero(~np.isnan(self.descriptors).any(1)).tolist()
        return ShardRows(
            [self.ids[row] for row in good],
            self.descriptors[good],
            [""] * len(good),
            [self.files[row] for row in good],
        )


def arrow(needed_for: str = "Parquet files", extra: str = "parquet") -> tuple[Any, Any]:
    """The modules ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        ImportError: Naming the extra that installs them.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{needed_for} need pyarrow: pip install 'sscd-vec[{extra}]'") from error
    return pyarrow, pyarrow.parquet


# ---------------------------------------------------------------------- writing


class ShardWriter:
    """Writes one file, part by part; it takes its name when the ``with`` block ends.

    An exception inside the block leaves whatever was at ``path`` before.
    """

    def __init__(self, path: PathLike, info: ShardInfo, precision: Precision = "float32") -> None:
        """Say where and what; the file is opened by the ``with`` block."""
        if precision not in get_args(Precision):
            raise ValueError(f"precision: expected one of {get_args(Precision)}, got {precision!r}")
        self._path, self._info, self._precision = Path(path), info, precision
        self._arrow, self._parquet = arrow()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Open a staged file."""
        pa = self._arrow
        kind = pa.list_(pa.float16() if self._precision == "float16" else pa.float32(),
                        self._info.dim)  # fmt: skip
        texts = [(name, pa.string()) for name in ("error", "path", "member")]
        numbers = [(name, pa.int64()) for name in ("offset", "size", "modified")]
        fields = [("id", pa.string()), ("descriptor", kind), *texts, *numbers]
        metadata = {KEY: json.dumps(asdict(self._info)).encode()}
        self._schema = pa.schema(fields, metadata=metadata)
        staged = self._open.enter_context(staging(self._path))
        # Descriptors are noise: a dictionary of them costs time and saves nothing.
        named = ["id", "error", "path", "member"]
        writer = self._parquet.ParquetWriter(staged, self._schema, use_dictionary=named)
        self._writer: Any = self._open.enter_context(writer)
        return self

    def write(self, rows: ShardRows) -> None:
        """Append rows; each call is a row group."""
        pa = self._arrow
        descriptors = np.asarray(rows.descriptors, self._precision)
        missing = np.isnan(descriptors).any(1)
        values = pa.array(np.where(missing[:, None], 0, descriptors).ravel())
        places = [_place(file) for file in rows.files]
        columns = [
            pa.array([str(each) for each in rows.ids], pa.string()),
            pa.FixedSizeListArray.from_arrays(
                values, type=self._schema.field("descriptor").type, mask=pa.array(missing)
            ),
            pa.array([error or None for error in rows.errors], pa.string()),
            *(
                pa.array([place[number] for place in places], self._schema.field(name).type)
                for number, name in enumerate(_PLACE)
            ),
        ]
        self._writer.write_table(pa.table(columns, schema=self._schema))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close and rename it, or remove it after an exception."""
        self._open.__exit__(kind, error, trace)


def _place(file: ImageFile | None) -> tuple[str | int | None, ...]:
    if file is None:
        return (None,) * len(_PLACE)
    try:
        path = os.fsencode(file.path).decode()
    except UnicodeDecodeError:  # no text names this file
        return (None,) * len(_PLACE)
    return path, file.member, file.offset, file.size, file.modified


# ---------------------------------------------------------------------- reading


class DescriptorFiles:
    """Descriptors in one or several Parquet files, read a batch at a time.

        index.add_batches(DescriptorFiles("descriptors/").batches())

    Files of other programs are read too: they need the columns ``id`` and ``descriptor``.

    Args:
        places: Parquet files, or folders of them.
        encoder: Fingerprint they must have; None takes any, as long as all have the same.

    Raises:
        FileNotFoundError: There is no such file, or none in a folder.
        ValueError: A file is not whole, lacks a column, or was made by another encoder.
    """

    def __init__(
        self, places: PathLike | Iterable[PathLike], *, encoder: str | None = None
    ) -> None:
        """Read what the files say about themselves."""
        given = [places] if isinstance(places, str | os.PathLike) else places
        self.paths = [path for place in map(Path, given) for path in _files_of(place)]
        self.dim, self.rows, found = 0, 0, ""
        for path in self.paths:
            with _opened(path) as file:
                info = _described(path, file.schema_arrow)
                self.rows += int(file.metadata.num_rows)
            found = _same(path, "encoder", info.encoder, found or encoder or "")
            self.dim = _same(path, "dimensions", info.dim, self.dim)
        self.encoder = found

    def parts(self, rows: int = BATCH) -> Iterator[ShardRows]:
        """All rows, also those of images that could not be read."""
        for path in self.paths:
            with _opened(path) as file:
                wanted = [n for n in file.schema_arrow.names if n in ("id", *_OURS)]
                for batch in file.iter_batches(rows, columns=wanted):
                    yield _rows(path, batch, self.dim)

    def batches(self, rows: int = BATCH) -> Iterator[tuple[list[Any], Float32]]:
        """Ids and descriptors, as ``Index.add_batches`` takes them."""
        for part in self.parts(rows):
            good = part.readable()
            if good.ids:
                yield good.ids, good.descriptors

    def array(self) -> Float32:
        """All descriptors at once, ``(n, d)``."""
        parts = [descriptors for _, descriptors in self.batches()]
        return np.concatenate(parts) if parts else np.empty((0, self.dim), np.float32)

    def sample(self, count: int, seed: int = 0) -> Float32:
        """Descriptors of about ``count`` rows, from runs of rows spread over all files."""
        if count >= self.rows:
            return self.array()
        rng, parts = np.random.default_rng(seed), []
        for _, descriptors in self.batches():
            share = len(descriptors) * count / self.rows
            take = min(len(descriptors), int(share) + (rng.random() < share % 1))
            parts.append(descriptors[rng.choice(len(descriptors), take, replace=False)])
        return np.concatenate(parts) if parts else np.empty((0, self.dim), np.float32)

    @cached_property
    def failures(self) -> list[tuple[str, str]]:
        """Id and reason of every image that could not be read."""
        return [
            (str(name), error or "it has no descriptor")
            for part in self.parts()
            for name, error, row in zip(part.ids, part.errors, part.descriptors, strict=True)
            if error or np.isnan(row[0])
        ]


_OURS = ("descriptor", "error", *_PLACE)


def holds_descriptors(path: PathLike) -> bool:
    """Whether this is a Parquet file of descriptors, or a folder that has one."""
    place = Path(path)
    if place.is_dir():
        first = next(iter(sorted(place.glob(f"*{ENDING}"))), None)
        return first is not None and holds_descriptors(first)
    if place.suffix.lower() != ENDING or not place.is_file():
        return False
    with _opened(place) as file:
        return "descriptor" in file.schema_arrow.names


def split_places(places: Iterable[PathLike]) -> tuple[list[PathLike], list[PathLike]]:
    """Places of images, and those that hold descriptors already."""
    images: list[PathLike] = []
    described: list[PathLike] = []
    for place in places:
        (described if holds_descriptors(place) else images).append(place)
    return images, described


def read_info(path: Path) -> ShardInfo | None:
    """What a file says about itself; None if it is not there or cannot be read."""
    try:
        with _opened(path) as file:
            return _described(path, file.schema_arrow)
    except (OSError, ValueError):
        return None


def _files_of(place: Path) -> list[Path]:
    found = sorted(place.glob(f"*{ENDING}")) if place.is_dir() else [place]
    if not found or not found[0].exists():
        raise FileNotFoundError(
            f"{printable_path(place)}: no Parquet files of descriptors; `sscd-vec encode` makes "
            "them"
        )
    return found


def _opened(path: Path) -> AbstractContextManager[Any]:
    pa, parquet = arrow()
    try:
        opened: AbstractContextManager[Any] = parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{printable_path(path)}: not a whole Parquet file ({error}); delete it and encode "
            "again, which goes on with what is missing"
        ) from error
    return opened


def _described(path: Path, schema: Any) -> ShardInfo:  # noqa: ANN401 - pyarrow has no types
    missing = [name for name in ("id", "descriptor") if name not in schema.names]
    if missing:
        raise ValueError(
            f"{printable_path(path)}: expected the columns id and descriptor, got {schema.names}; "
            "files of images are encoded with `sscd-vec encode`"
        )
    about = (schema.metadata or {}).get(KEY)
    if about is not None:
        fields: dict[str, Any] = json.loads(about)
        if fields.get("format") != FORMAT:
            raise ValueError(
                f"{printable_path(path)}: expected format {FORMAT}, got {fields.get('format')!r}; "
                "read it with the version of sscd-vec that wrote it"
            )
        return ShardInfo(**fields)
    return ShardInfo("", getattr(schema.field("descriptor").type, "list_size", 0))


def _same(path: Path, what: str, found: Value, wanted: Value) -> Value:
    """What all files agree on; '' and 0 are unknown."""
    if found and wanted and found != wanted:
        raise ValueError(
            f"{printable_path(path)}: its {what} is {found}, expected {wanted}; keep descriptors "
            "of different encoders in different folders"
        )
    return found or wanted


def _rows(path: Path, batch: Any, dim: int) -> ShardRows:  # noqa: ANN401
    column = batch.column("descriptor")
    column = getattr(column, "storage", column)  # of an extension type, such as Ray's tensors
    valid = np.asarray(column.is_valid())
    values = np.asarray(column.drop_null().flatten(), np.float32)
    known = int(valid.sum())
    dim = dim or (len(values) // known if known else 0)
    if len(values) != known * dim:
        raise ValueError(
            f"{printable_path(path)}: expected descriptors of {dim} numbers, got {len(values)} "
            f"numbers in {known} rows"
        )
    descriptors = np.full((len(valid), dim), np.nan, np.float32)
    descriptors[valid] = values.reshape(-1, dim)
    names = batch.schema.names
    errors = batch.column("error").to_pylist() if "error" in names else [None] * len(valid)
    return ShardRows(
        batch.column("id").to_pylist(), descriptors, [e or "" for e in errors], _files(batch)
    )


def _files(batch: Any) -> list[ImageFile | None]:  # noqa: ANN401
    if not set(_PLACE) <= set(batch.schema.names):
        return [None] * batch.num_rows
    columns: Sequence[list[Any]] = [batch.column(name).to_pylist() for name in _PLACE]
    return [
        None if path is None else ImageFile(Path(path), size, modified, member, offset)
        for path, member, offset, size, modified in zip(*columns, strict=True)
    ]
