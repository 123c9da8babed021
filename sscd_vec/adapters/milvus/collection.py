"""``MilvusCollection``: the verbs."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.adapters.arguments import (
    LONGEST_ID,
    Batch,
    Id,
    Ids,
    IdType,
    as_ids,
    as_k,
    as_rows,
    is_id,
    require_descriptors,
    resolve_threshold,
    unpack,
)
from sscd_vec.adapters.matches import Matches, Metadata, no_matches
from sscd_vec.adapters.milvus import bulk
from sscd_vec.adapters.milvus.address import Address
from sscd_vec.adapters.milvus.connection import Connection
from sscd_vec.adapters.milvus.finder import Finder, joined
from sscd_vec.adapters.milvus.paging import SERVER_LIMIT, Page
from sscd_vec.adapters.milvus.rows import padded, requests
from sscd_vec.adapters.milvus.settings import Params, Settings, require_metric
from sscd_vec.adapters.milvus.table import DEFAULT_PARTITION, Table
from sscd_vec.adapters.milvus.threads import quiet_blas
from sscd_vec.normalize import Metric, Normalizer

Threshold = float | Literal["calibrated"]
Float32 = NDArray[np.float32]

logger = logging.getLogger(__name__)


class MilvusCollection:
    """References in a Milvus collection: descriptors in, calibrated matches out.

    The collection is made at the first ``add`` (its key is a VARCHAR or INT64, as the ids are) and
    remembers which normalizer its vectors came from. When ``add`` returns, its rows are kept by
    Milvus and every later search sees them.

    Args:
        uri: Path of a Milvus Lite file (``photos.db``), or ``http://host:19530``.
        name: Name of the collection.
        normalizer: Turns descriptors into vectors and what Milvus returns into scores.
        metric: ``"ip"`` (for a new collection, unless said otherwise), ``"l2"`` or ``"cosine"``;
            the scores are the same.
        index_type: ``"FLAT"`` (for a new collection, unless said otherwise), ``"HNSW"``,
            ``"IVF_FLAT"``, ``"AUTOINDEX"``, … as Milvus names them.
        index_params: Build parameters, e.g. ``{"M": 32}``.
        search_params: Search parameters, e.g. ``{"ef": 256}``.
        partition: All verbs keep to this partition: one per tenant. Made when first written to.
        token: ``"user:password"`` or an API key. Never shown; nor is a password in ``uri``.
        user: Instead of a token, with ``password``.
        password: Instead of a token, with ``user``.
        db_name: Database on the server.
        timeout: Seconds for one call.
        retry_for: Seconds to keep trying, with back-off, while a server is away.
        consistency: Consistency level of reads; ``"Strong"`` sees every acknowledged write.
        id_length: Longest string id in bytes, for a new collection.
        options: Passed to ``pymilvus.MilvusClient``: ``secure``, ``server_pem_path``,
            ``ca_pem_path``, ``client_pem_path``, ``client_key_path``, ``server_name``, …

    Raises:
        FingerprintMismatch: If the collection was built with another normalizer.
        ForeignCollection: If the collection is not one of ours.
        MilvusError: If Milvus cannot be reached, or a Lite file is open in another process.
    """

    def __init__(
        self,
        uri: str | Path,
        name: str,
        normalizer: Normalizer,
        *,
        metric: Metric | None = None,
        index_type: str | None = None,
        index_params: Params | None = None,
        search_params: Params | None = None,
        partition: str | None = None,
        token: str = "",
        user: str = "",
        password: str = "",
        db_name: str = "",
        timeout: float = 60.0,
        retry_for: float = 120.0,
        consistency: str = "Strong",
        id_length: int = 512,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Connect; open the collection if it exists."""
        require_metric(metric)
        if not 1 <= id_length <= LONGEST_ID:
            raise ValueError(f"id_length: expected 1 to {LONGEST_ID} bytes, got {id_length}")
        address = Address.parse(uri, token=token, user=user, password=password, db_name=db_name)
        self.name, self.normalizer = name, normalizer
        self._search_params = dict(search_params or {})
        connection = Connection(address, timeout, retry_for, options or {})
        try:
            self._table = Table(
                connection,
                name,
                partition or DEFAULT_PARTITION,
                normalizer,
                metric=metric,
                index_type=index_type,
                index_params=index_params,
                consistency=consistency,
                id_length=id_length,
            )
        except BaseException:
            connection.close()  # nobody else could
            raise

    # ------------------------------------------------------------------ adding and removing

    def add(
        self,
        ids: Ids | Id,
        descriptors: ArrayLike,
        metadata: Sequence[Metadata | None] | Metadata | None = None,
    ) -> None:
        """Add references; an id that is already there is replaced, metadata and all.

        All ids, descriptors and metadata of a call are checked before its first row is sent. Many
        rows are sent in requests of some 16 MB: if the server refuses one, those before it stay.

        Args:
            ids: ``n`` strings or ``n`` integers; of a repeated id the last row wins.
            descriptors: ``(n, dim_in)`` as the encoder gives them.
            metadata: One JSON object or None per row; its names can be used in filters.
        """
        self._table.readable()  # if another process made it, it also decided what ids are
        rows, id_type = as_rows(ids, descriptors, metadata, self._table.id_type)
        if id_type is None or not rows.ids:
            return
        settings = self._table.planned(id_type)
        self._table.check_ids(rows.ids, settings)
        self._table.check_tenant(rows.ids)
        require_descriptors(rows, self.normalizer)
        # Lite's upsert merges old metadata into the new row; its insert replaces the row.
        verb = "insert" if self.is_lite else "upsert"
        for request in requests(rows, self.normalizer, settings.dim):
            self._table.ready(id_type)  # not before: rows that are refused make no collection
            self._table.call(verb, data=request, partition_name=self._table.partition)
            self._table.unflushed += len(request)

    def add_batches(self, batches: Iterable[Batch]) -> int:
        """Add ``(ids, descriptors[, metadata])`` batches from any iterable, one at a time.

        Returns:
            Rows taken from the batches.
        """
        count = 0
        for ids, descriptors, metadata in unpack(batches):
            self.add(ids, descriptors, metadata)
            count += len(ids)
        self.flush()
        return count

    def remove(self, ids: Ids | Id) -> int:
        """Remove ids; those that are not there are ignored.

        Returns:
            How many were there.
        """
        readable = self._table.readable()
        plain = list(dict.fromkeys(as_ids(ids, self._table.id_type)[0]))
        if not plain or not readable:
            return 0
        present = self._table.present(plain)
        self._table.delete(present)
        return len(present)

    def flush(self) -> None:
        """Let Milvus seal and index what was added; ``add_batches`` does it at its end."""
        self._table.flush()

    def write_bulk_files(
        self,
        batches: Iterable[Batch],
        folder: str | Path,
        *,
        file_type: bulk.FileType = "parquet",
        id_type: IdType | None = None,
        chunk_bytes: int = bulk.CHUNK_BYTES,
    ) -> list[list[str]]:
        """Write batches as files for Milvus's bulk import, for loads too big to send.

        Nothing is sent and ids are not checked against the collection: the import appends. The
        collection is made if it does not exist, so that the import finds it.

        Returns:
            The files of each import task. Put them where the server reads its storage, then hand
            each list to Milvus's import (``pymilvus.bulk_writer.bulk_import``).
        """
        bulk.require_file_type(file_type)
        self._table.readable()
        triples = unpack(batches)
        first = next((triple for triple in triples if len(triple[0])), None)
        if first is None:
            return []
        found = as_ids(first[0], id_type or self._table.id_type)[1]
        settings = self._table.ready(found or "str")
        schema = settings.schema(self._table.id_length)
        with bulk.BulkFiles(schema, Path(folder), file_type, chunk_bytes) as files:
            for ids, descriptors, metadata in chain([first], triples):
                rows, _ = as_rows(ids, descriptors, metadata, settings.id_type)
                self._table.check_ids(rows.ids, settings)
                files.append(rows, self.normalizer, settings.dim)
        return files.files

    def __len__(self) -> int:
        """Number of references (in this partition)."""
        return self._table.count()

    def present(self, ids: Ids) -> set[Any]:
        """Which of these ids are there (in this partition): one query for thousands of them."""
        readable = self._table.readable()
        plain = as_ids(ids, self._table.id_type)[0]
        return self._table.present(plain) if plain and readable else set()

    def __contains__(self, id: object) -> bool:
        """Whether a reference with this id is there (in this partition)."""
        if not is_id(id) or not self._table.readable():
            return False
        try:
            plain, _ = as_ids(cast(Id, id), self._table.id_type)
        except (TypeError, ValueError):  # empty, beyond int64, …: add would not have taken it
            return False
        return bool(self._table.present(plain))

    # ------------------------------------------------------------------ searching

    def search(
        self,
        descriptors: ArrayLike,
        k: int = 10,
        threshold: Threshold | None = None,
        *,
        filter: str = "",
        metadata: bool = True,
    ) -> Matches:
        """The ``k`` best references of each query.

        Args:
            descriptors: ``(n, dim_in)`` queries.
            k: At most so many per query.
            threshold: Only scores of at least this; ``"calibrated"`` takes the normalizer's.
            filter: Milvus expression over metadata, e.g. ``'year > 2020 and label == "cat"'``.
            metadata: Whether to fetch metadata.
        """
        k = as_k(k)
        lowest = None if threshold is None else resolve_threshold(threshold, self.normalizer)
        readable = self._table.readable()
        vectors = self._queries(descriptors)
        if not len(vectors) or not readable:
            return no_matches(len(vectors))
        cut = None
        if k > SERVER_LIMIT and not self.is_lite:
            k, cut = SERVER_LIMIT, f"a server returns at most {SERVER_LIMIT} per query"
            logger.warning("search: %s; use range_search for all of them", cut)
        elif k > 1000:
            k = min(k, max(len(self), 1))
        finder = self._finder(filter, metadata)
        matches = finder.matches(finder.top(vectors, k), cut)
        return matches if lowest is None else matches.above(lowest)

    def range_search(
        self,
        descriptors: ArrayLike,
        threshold: Threshold = "calibrated",
        *,
        filter: str = "",
        metadata: bool = True,
    ) -> Matches:
        """All references that score at least ``threshold``; ``complete`` says if surely all."""
        lowest = resolve_threshold(threshold, self.normalizer)
        readable = self._table.readable()
        finder = self._finder(filter, metadata)
        vectors = self._queries(descriptors)
        if not len(vectors) or not readable:
            return no_matches(len(vectors))
        pages: list[list[Page]] = [[] for _ in vectors]
        for query, page in finder.within(vectors, self._radius(lowest)):
            pages[query].append(page)
        return finder.matches(list(map(joined, pages))).above(lowest)

    def iterate_range(
        self,
        descriptors: ArrayLike,
        threshold: Threshold = "calibrated",
        *,
        filter: str = "",
        metadata: bool = True,
    ) -> Iterator[tuple[int, Matches]]:
        """``range_search`` page by page, for results too big for memory.

        Returns:
            Pairs: the number of a query and some of its matches; a query may come several times in
            a row, with ever lower scores.
        """
        lowest = resolve_threshold(threshold, self.normalizer)
        readable = self._table.readable()
        finder = self._finder(filter, metadata)
        vectors = self._queries(descriptors)
        if not len(vectors) or not readable:
            return iter(())
        pages = finder.within(vectors, self._radius(lowest))
        return ((query, finder.matches([page]).above(lowest)) for query, page in pages)

    # ------------------------------------------------------------------ the rest

    @property
    def is_lite(self) -> bool:
        """Whether this is a Milvus Lite file."""
        return self._table.is_lite

    @property
    def settings(self) -> Settings | None:
        """What the collection was made with; None before it is made."""
        return self._table.settings

    def drop(self) -> None:
        """Delete the whole collection, all partitions of it."""
        self._table.drop()

    def close(self) -> None:
        """Flush and disconnect; with the last one here, a Lite file is free for other processes.

        A closed collection refuses every verb; closing it again does nothing.
        """
        if self._table.connection.closed:
            return
        try:
            self.flush()
        finally:
            self._table.connection.close()

    def __enter__(self) -> Self:
        """Nothing to do: it is open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Place and name; no credentials."""
        table = self._table
        where = f"{table.connection.address.uri!r}, {self.name!r}"
        return f"MilvusCollection({where}, partition={table.partition!r})"

    def _finder(self, filter: str, metadata: bool) -> Finder:
        self._table.flush_if_slow()
        return Finder(self._table, self.normalizer, self._search_params, filter, metadata)

    def _radius(self, lowest: float) -> float:
        slack = 1e-5 * (1 + abs(lowest))  # Milvus compares strictly and in float32
        return self.normalizer.to_metric(lowest - slack, self._table.opened().metric)

    def _queries(self, descriptors: ArrayLike) -> Float32:
        """Vectors as wide as the stored ones: to be asked for once the table is ``readable``."""
        array: NDArray[Any] = np.atleast_2d(np.asarray(descriptors))
        settings = self._table.settings
        dim = self.normalizer.lifted_dim if settings is None else settings.dim
        if array.size == 0:
            return np.empty((0, dim), dtype=np.float32)
        with quiet_blas(len(array)):
            vectors = self.normalizer.queries(array)
        return padded(vectors, dim)
