"""Files for Milvus's bulk import, written by pymilvus's ``LocalBulkWriter``."""

from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from pymilvus import CollectionSchema

from sscd_vec.adapters.arguments import Rows
from sscd_vec.adapters.milvus.rows import requests
from sscd_vec.adapters.milvus.settings import VECTOR
from sscd_vec.normalize import Normalizer

FileType = Literal["parquet", "json"]
CHUNK_BYTES = 128 << 20


class BulkFiles:
    """Writes rows into files of about ``chunk_bytes`` each, in a new folder below ``folder``."""

    def __init__(
        self, schema: CollectionSchema, folder: Path, file_type: FileType, chunk_bytes: int
    ) -> None:
        """Open the writer.

        Raises:
            ImportError: Naming the extra that pymilvus's writer needs.
        """
        try:
            from pymilvus.bulk_writer import BulkFileType, LocalBulkWriter
        except ImportError as error:
            raise ImportError(
                "bulk files need pymilvus's writer: pip install 'sscd-vec[milvus-bulk]'"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        kinds = {"parquet": BulkFileType.PARQUET, "json": BulkFileType.JSON}
        self._writer = LocalBulkWriter(schema, str(folder), chunk_bytes, kinds[file_type])

    def append(self, rows: Rows, normalizer: Normalizer, dim: int) -> None:
        """Append one batch."""
        for request in requests(rows, normalizer, dim):
            for row in request:
                self._writer.append_row({**row, VECTOR: row[VECTOR].tolist()})

    @property
    def files(self) -> list[list[str]]:
        """The files written so far, grouped as Milvus imports them."""
        return [[str(name) for name in group] for group in self._writer.batch_files]

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
            self._writer.commit()


def require_file_type(file_type: FileType) -> None:
    """Refuse what is no type of file.

    Raises:
        ValueError: Naming those there are.
    """
    if file_type not in get_args(FileType):
        raise ValueError(f"file_type: expected one of {get_args(FileType)}, got {file_type!r}")
