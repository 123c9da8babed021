"""Files for Milvus's bulk import, written by pymilvus's ``LocalBulkWriter``."""

from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from numpy.typing import ArrayLike
from pymilvus import CollectionSchema

from sscd_vec.adapters.arguments import Ids, as_rows
from sscd_vec.adapters.milvus.rows import requests
from sscd_vec.adapters.milvus.settings import VECTOR, Settings
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

    def append(
        self, triple: tuple[Ids, ArrayLike, Any], normalizer: Normalizer, settings: Settings
    ) -> None:
        """Append one batch."""
        rows, _ = as_rows(*triple, settings.id_type)
        for request in requests(rows, normalizer, settings.dim):
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
