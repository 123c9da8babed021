"""``MilvusCollection``: a Milvus Lite file, server or cluster behind the verbs of ``Index``."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import MilvusClient

from sscd_vec.adapters.arguments import (
    LONGEST_ID,
    Batch,
    Float32,
    IdType,
    Rows,
    Wanted,
    as_ids,
    as_rows,
    unpack,
)
from sscd_vec.adapters.index import STORED_BLOCK, Index
from sscd_vec.adapters.matches import Matches, no_matches
from sscd_vec.adapters.milvus import rows as milvus_rows
from sscd_vec.adapters.milvus.address import Address
from sscd_vec.adapters.milvus.connection import Connection, closed_on_error
from sscd_vec.adapters.milvus.search import SERVER_LIMIT, Searcher
from sscd_vec.adapters.milvus.settings import (
    Params,
    Settings,
    VectorType,
    require_metric,
    require_vector_type,
)
from sscd_vec.adapters.milvus.storage import DEFAULT_PARTITION, Storage, foreign_settings
from sscd_vec.adapters.plain import require_plain, require_unit
from sscd_vec.normalize import Metric, Normalizer

SAMPLED = 100  # vectors of an adopted collection that are looked at
COUNTED_K = 1000  # above this, k is cut to the number of references, which costs a request

logger = logging.getLogger(__name__)


class MilvusCollection(Index):
    """References in a Milvus collection: descriptors in, calibrated matches out.

    The collection is made at the first ``add`` (its key is a VARCHAR or INT64, as the ids are) and
    remembers which normalizer its vectors came from. When ``add`` returns, its rows are kept by
    Milvus and every later search sees them; ``commit`` lets Milvus seal and index them.

    Args:
        uri: Path of a Milvus Lite file (``images.db``), or ``http://host:19530``.
        name: Name of the collection.
        normalizer: Turns descriptors into vectors and what Milvus returns into scores.
        metric: ``"ip"`` (for a new collection, unless said otherwise), ``"l2"`` or ``"cosine"``;
            the scores are the same.
        index_type: ``"FLAT"`` (for a new collection, unless said otherwise), ``"HNSW"``,
            ``"IVF_FLAT"``, ``"AUTOINDEX"``, … as Milvus names them.
        index_params: Build parameters, e.g. ``{"M": 32}``.
        search_params: Search parameters, e.g. ``{"ef": 256}``.
        vector_type: ``"float32"`` (for a new collection, unless said otherwise), ``"float16"`` or
            ``"bfloat16"``, which take half the memory and need Milvus 2.4.
        partition: All verbs keep to this partition: one per tenant. Made when first written to.
        token: ``"user:password"`` or an API key. Never shown; nor is a password in ``uri``.
        user: Instead of a token, with ``password``.
        password: Instead of a token, with ``user``.
        db_name: Database on the server.
        timeout: Seconds for one call.
        retry_for: Seconds to keep trying, with back-off, while a server does not answer.
        consistency: Consistency level of reads; ``"Strong"`` sees every acknowledged write.
        id_length: Longest string id in bytes, for a new collection.
        options: Passed to ``pymilvus.MilvusClient``: ``secure``, ``server_pem_path``,
            ``ca_pem_path``, ``client_pem_path``, ``client_key_path``, ``server_name``, …

    Raises:
        FingerprintMismatch: If the collection was built with another normalizer.
        ForeignCollection: If the collection is not one of ours; ``adopt`` takes those.
        MilvusError: If Milvus cannot be reached, or a Lite file is open in another process.
    """

    _takes_filters = True
    _leaves_cores = True

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
        vector_type: VectorType | None = None,
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
        require_vector_type(vector_type)
        if not 1 <= id_length <= LONGEST_ID:
            raise ValueError(f"id_length: expected 1 to {LONGEST_ID} bytes, got {id_length}")
        address = Address.parse(uri, token=token, user=user, password=password, db_name=db_name)
        self._begin(
            Connection(address, timeout, retry_for, options or {}),
            name,
            partition,
            normalizer,
            search_params,
            metric=metric,
            index_type=index_type,
            index_params=index_params,
            vector_type=vector_type,
            consistency=consistency,
            id_length=id_length,
        )

    @classmethod
    def adopt(
        cls,
        client: MilvusClient | str | Path,
        collection: str,
        id_field: str = "id",
        vector_field: str = "vector",
        normalizer: Normalizer | None = None,
        *,
        search_params: Params | None = None,
        partition: str | None = None,
        token: str = "",
        timeout: float = 60.0,
        retry_for: float = 120.0,
        consistency: str = "Strong",
        options: Mapping[str, object] | None = None,
    ) -> "MilvusCollection":
        """Search an existing collection of plain unit descriptors, as it is.

        Nothing is rewritten: biases are subtracted on the query side. All other fields are its
        metadata. A normalizer that whitens needs other vectors; ``MilvusCollection(uri, "new",
        normalizer).migrate(MilvusCollection.adopt(uri, "old"))`` makes them.

        Args:
            client: A connected client, which stays yours, or a URI as for a new collection.
            collection: Its name.
            id_field: Name of its primary key.
            vector_field: Name of its vectors.
            normalizer: Fitted with ``whitening=None``; by default cosine scores.
            search_params: As for a new collection, like all that follow.
            partition: Keep to this partition.
            token: With a URI.
            timeout: Seconds for one call.
            retry_for: Seconds to keep trying.
            consistency: Consistency level of reads.
            options: With a URI, passed to ``pymilvus.MilvusClient``.

        Raises:
            ForeignCollection: If its fields or its metric cannot be used.
            MilvusError: If there is no such collection.
            ValueError: If vectors would have to be rewritten, or are not unit descriptors.
        """
        if isinstance(client, str | Path):
            address, given = Address.parse(client, token=token), None
        else:
            address, given = Address("the given client"), client
        connection = Connection(address, timeout, retry_for, options or {}, given)
        adopted = cls.__new__(cls)
        with closed_on_error(connection):
            settings = foreign_settings(connection, collection, id_field, vector_field)
            rules = Normalizer.identity(settings.dim) if normalizer is None else normalizer
            require_plain(rules, settings.dim, f"collection {collection!r}")
            adopted._begin(
                connection,
                collection,
                partition,
                rules,
                search_params,
                consistency=consistency,
                adopted=settings,
            )
            if settings.metric != "cosine":
                for _, vectors, *_ in adopted._storage.batches(SAMPLED):
                    require_unit(np.asarray(vectors), f"collection {collection!r}")
                    break
        return adopted

    def _begin(
        self,
        connection: Connection,
        name: str,
        partition: str | None,
        normalizer: Normalizer,
        search_params: Params | None,
        **wanted: Any,  # noqa: ANN401  (what Storage takes)
    ) -> None:
        super().__init__(normalizer)
        self.name = name
        self._search_params = dict(search_params or {})
        self._generation = 0
        with closed_on_error(connection):
            place = partition or DEFAULT_PARTITION
            self._storage = Storage(connection, name, place, normalizer, **wanted)
        self._plain = "adopted" in wanted

    # ------------------------------------------------------------------ rows

    def add_batches(self, batches: Iterable[Batch]) -> int:
        """Add ``(ids, descriptors[, metadata])`` batches, one at a time, and commit.

        Returns:
            Rows taken from the batches.
        """
        count = super().add_batches(batches)
        self.commit()
        return count

    def __len__(self) -> int:
        """Number of references (in this partition)."""
        return self._storage.count()

    def _id_type(self) -> IdType | None:
        self._storage.readable()  # if another process made it, it also decided what ids are
        return self._storage.id_type

    def _add(self, rows: Rows, id_type: IdType) -> None:
        storage = self._storage
        settings = storage.planned(id_type)
        storage.check_ids(rows.ids, settings)
        storage.check_tenant(rows.ids)
        for part in milvus_rows.parts(rows, self._references, settings):
            storage.ready(id_type)  # not before: rows that are refused make no collection
            storage.put(part)

    def _remove(self, ids: list[Any]) -> int:
        present = self._present(ids)
        if present:
            self._storage.delete(present)
        return len(present)

    def _present(self, ids: list[Any]) -> set[Any]:
        return self._storage.present(ids) if self._storage.readable() else set()

    def _stored(self) -> Iterator[Batch]:
        return self._storage.batches(STORED_BLOCK)

    def write_bulk_files(
        self,
        batches: Iterable[Batch],
        folder: str | Path,
        *,
        file_type: milvus_rows.FileType = "parquet",
        id_type: IdType | None = None,
        chunk_bytes: int = milvus_rows.CHUNK_BYTES,
    ) -> list[list[str]]:
        """Write batches as files for Milvus's bulk import, for loads too big to send.

        Nothing is sent and ids are not checked against the collection: the import appends. The
        collection is made if it does not exist, so that the import finds it.

        Returns:
            The files of each import task. Put them where the server reads its storage, then give
            their names there to ``import_files``.
        """
        milvus_rows.require_file_type(file_type)
        if self._plain:
            raise ValueError("write_bulk_files: expected a collection of ours, not an adopted one")
        triples = unpack(batches)
        first = next((triple for triple in triples if len(triple[0])), None)
        if first is None:
            return []
        found = as_ids(first[0], id_type or self._id_type())[1]
        settings = self._storage.ready(found or "str")
        if settings.vector_type != "float32":
            raise ValueError(
                f"write_bulk_files: expected a collection of float32, got {settings.vector_type}; "
                "add the batches instead"
            )
        with milvus_rows.BulkFiles(settings, Path(folder), file_type, chunk_bytes) as files:
            for ids, descriptors, metadata in chain([first], triples):
                rows, _ = as_rows(ids, descriptors, metadata, settings.id_type)
                self._storage.check_ids(rows.ids, settings)
                for part in milvus_rows.parts(rows, self._references, settings):
                    files.append(part)
        return files.files

    def import_files(self, files: Sequence[Sequence[str]], *, timeout: float = 3600.0) -> int:
        """Let the server import what ``write_bulk_files`` wrote, and wait until it is there.

        Args:
            files: The files of each task, as the server's storage names them.
            timeout: Seconds for all of them.

        Returns:
            Rows imported.

        Raises:
            MilvusError: If the server refuses a file or is not done in time, with its reason.
        """
        self._storage.readable()
        self._storage.opened()
        rows = self._storage.import_files(files, timeout)
        self.commit()
        return rows

    # ------------------------------------------------------------------ searching

    def _nearest(self, vectors: Float32, k: int, wanted: Wanted) -> Matches:
        settings = self._storage.searchable()
        if settings is None:
            return no_matches(len(vectors))
        cut = None
        if k > SERVER_LIMIT and not self.is_lite:
            k, cut = SERVER_LIMIT, f"a server returns at most {SERVER_LIMIT} per query"
            logger.warning("search: %s; use range_search for all of them", cut)
        elif k > COUNTED_K:
            k = min(k, max(len(self), 1))
        searcher = Searcher(self._storage, settings, self._search_params, wanted)
        return searcher.nearest(vectors, k, cut)

    def _within(self, vectors: Float32, bound: float, wanted: Wanted) -> Matches:
        settings = self._storage.searchable()
        if settings is None:
            return no_matches(len(vectors))
        searcher = Searcher(self._storage, settings, self._search_params, wanted)
        return searcher.within(vectors, bound)

    # ------------------------------------------------------------------ the rest

    def commit(self) -> None:
        """Let Milvus seal and index what was added; ``add_batches`` does it at its end."""
        if self._storage.flush():
            self._generation += 1

    @property
    def generation(self) -> int:
        """How often this object has committed something; Milvus itself keeps no such number."""
        return self._generation

    @property
    def metric(self) -> Metric:
        """``"ip"``, ``"l2"`` or ``"cosine"``; the scores are the same."""
        storage = self._storage
        if storage.settings is None:
            storage.readable()  # another process may have made it, with another metric
        return storage.wanted_metric if storage.settings is None else storage.settings.metric

    @property
    def is_lite(self) -> bool:
        """Whether this is a Milvus Lite file."""
        return self._storage.is_lite

    @property
    def settings(self) -> Settings | None:
        """What the collection was made with; None before it is made."""
        return self._storage.settings

    def drop(self) -> None:
        """Delete the whole collection, all partitions of it."""
        self._storage.drop()

    def _close(self, commit: bool) -> None:
        """Disconnect; with the last one here, a Lite file is free for other processes."""
        connection = self._storage.connection
        if connection.closed:
            return
        try:
            if commit:
                self.commit()
        finally:
            connection.close()

    def __repr__(self) -> str:
        """Place and name; no credentials."""
        storage = self._storage
        where = f"{storage.connection.address.uri!r}, {self.name!r}"
        return f"MilvusCollection({where}, partition={storage.partition!r})"
