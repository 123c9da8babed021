"""A partition of a Milvus collection: made, opened, loaded, filled, flushed, counted, emptied."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from sscd_vec.adapters.arguments import INT64, Batch, IdType, require_id_length
from sscd_vec.adapters.matches import Metadata
from sscd_vec.adapters.milvus.address import require_folder_name
from sscd_vec.adapters.milvus.connection import Connection, MilvusError
from sscd_vec.adapters.milvus.rows import Part, in_expression, key_blocks
from sscd_vec.adapters.milvus.settings import (
    SINCE,
    VECTOR,
    Params,
    Settings,
    VectorType,
    longest_id,
)
from sscd_vec.normalize import Metric, Normalizer

DEFAULT_PARTITION = "_default"
LITE_UNFLUSHED = 1000  # rows Lite may walk in Python before a search is worth a flush
METADATA_KEYS = 512  # ids whose metadata, of 64 KB at most on a server, fit into one message
# A server (2.3) cannot read the one in a filter, and finds nothing for the other.
UNFINDABLE = (int(INT64.min), int(INT64.max))
IMPORT_PAUSE = 0.2  # seconds between two looks at an import
INDEX_SECONDS = 5.0  # for another process to give the collection it has just made its index


class Storage:
    """One partition of one collection. It is made when first written to.

    Args:
        connection: To the server or Lite file.
        name: Of the collection.
        partition: Of the collection.
        normalizer: Whose reference fingerprint the collection must have.
        metric: Wanted metric, or None to take what is there.
        index_type: Wanted index, or None to take what is there.
        index_params: Build parameters for a new collection.
        consistency: Consistency level of reads.
        id_length: Longest string id in bytes, for a new collection.
        adopted: Settings of a collection that someone else made.

    Attributes:
        settings: What the collection was made with; None before it is made.
        wanted_metric: Of the collection, should it have to be made.
        unflushed: Rows sent since the last flush.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        partition: str,
        normalizer: Normalizer,
        *,
        metric: Metric | None = None,
        index_type: str | None = None,
        index_params: Params | None = None,
        vector_type: VectorType | None = None,
        consistency: str = "Strong",
        id_length: int = 512,
        adopted: Settings | None = None,
    ) -> None:
        """Open the collection if it exists.

        Raises:
            ValueError: If Lite could not keep a partition of this name.
        """
        if connection.is_lite:
            require_folder_name(partition)
        self.connection, self.name, self.partition = connection, name, partition
        self.settings: Settings | None = None
        self.consistency, self.id_length = consistency, id_length
        self.unflushed = 0
        self._normalizer = normalizer
        self.wanted_metric: Metric = metric or "ip"
        self._wanted = metric, index_type, index_params, vector_type
        self._adopted = adopted
        self._partition_exists = False
        if self.call("has_collection"):
            self._open()

    @property
    def is_lite(self) -> bool:
        """Whether this is a Milvus Lite file."""
        return self.connection.is_lite

    @property
    def id_type(self) -> IdType | None:
        """Type of the key, once the collection exists."""
        return None if self.settings is None else self.settings.id_type

    def call(self, verb: str, **kwargs: object) -> Any:  # noqa: ANN401
        """Call the client about this collection."""
        return self.connection.call(verb, collection_name=self.name, **kwargs)

    def query(self, **kwargs: object) -> Any:  # noqa: ANN401
        """Query with the consistency asked for."""
        return self.call("query", consistency_level=self.consistency, **kwargs)

    def opened(self) -> Settings:
        """The settings of a collection that exists.

        Raises:
            MilvusError: If it does not.
        """
        if self.settings is None:
            raise MilvusError(f"collection {self.name!r} does not exist yet; add something first")
        return self.settings

    def readable(self) -> bool:
        """Whether there are the collection and our partition of it, whoever made them."""
        if self.settings is None and self.call("has_collection"):
            self._open()
        if self.settings is not None and not self._partition_exists:
            found = self.call("has_partition", partition_name=self.partition)
            self._partition_exists = bool(found)
        return self.settings is not None and self._partition_exists

    def planned(self, id_type: IdType) -> Settings:
        """The settings of the collection, or those it would be made with."""
        if self.settings is not None:
            return self.settings
        _, index_type, params, vector_type = self._wanted
        settings = Settings.choose(
            self._normalizer,
            self.wanted_metric,
            index_type or "FLAT",
            params,
            id_type,
            vector_type or "float32",
        )
        if self.is_lite:
            settings.check_lite()
        elif {settings.index_type, settings.vector_type} & SINCE.keys():
            settings.check_server(str(self.connection.call("get_server_version")))
        return settings

    def ready(self, id_type: IdType) -> Settings:
        """Make the collection and the partition if they are not there."""
        if not self.readable():
            if self.settings is None:
                self._create(id_type)
            if self.partition != DEFAULT_PARTITION:
                self._create_partition()
                self.call("load_collection")
            self._partition_exists = True
        return self.opened()

    def count(self) -> int:
        """Rows in the partition."""
        if not self.readable():
            return 0
        # Lite counts all partitions unless it has a filter to evaluate.
        alone = not self.is_lite or self.call("list_partitions") == [DEFAULT_PARTITION]
        rows = self.query(
            filter="" if alone else self._everything,
            output_fields=["count(*)"],
            partition_names=[self.partition],
        )
        return int(rows[0]["count(*)"])

    def present(self, ids: Sequence[Any], partitions: list[str] | None = None) -> set[Any]:
        """Which of these ids are there."""
        key, found = self.opened().id_field, set[Any]()
        for some in key_blocks([i for i in ids if i not in UNFINDABLE]):
            rows = self.query(
                filter=in_expression(some, key),
                output_fields=[key],
                partition_names=partitions or [self.partition],
            )
            found.update(row[key] for row in rows)
        return found

    def metadata(self, ids: Sequence[Any]) -> dict[Any, Metadata | None]:
        """Metadata of these ids, of those that are there, in answers that a server can send."""
        settings, found = self.opened(), dict[Any, Metadata | None]()
        for some in key_blocks(ids, METADATA_KEYS):
            rows = self.query(
                filter=in_expression(some, settings.id_field),
                output_fields=[*settings.metadata_fields],
                partition_names=[self.partition],
            )
            for row in rows:
                key = row.pop(settings.id_field)
                found[key] = row or None
        return found

    def batches(self, rows: int) -> Iterator[Batch]:
        """Ids, vectors and metadata of all rows of the partition, in batches."""
        settings = self.opened()
        pages = self.call(
            "query_iterator",
            batch_size=rows,
            output_fields=[settings.id_field, settings.vector_field, *settings.metadata_fields],
            partition_names=[self.partition],
            consistency_level=self.consistency,
        )
        while found := pages.next():
            ids = [row.pop(settings.id_field) for row in found]
            vectors = settings.decoded([row.pop(settings.vector_field) for row in found])
            yield ids, vectors, [row or None for row in found]
        pages.close()

    def put(self, part: Part) -> None:
        """Insert rows, or replace those that are there."""
        settings = self.opened()
        if settings.makes_ids:
            raise MilvusError(
                f"collection {self.name!r} makes up its ids (auto_id), so nothing can be added "
                "under an id of one's own; migrate it to a new collection"
            )
        # Lite's upsert merges old metadata into the new row; its insert replaces the row.
        verb = "insert" if self.is_lite else "upsert"
        self.call(verb, data=part.entities(settings), partition_name=self.partition)
        self.unflushed += len(part.ids)

    def import_files(self, groups: Sequence[Sequence[str]], timeout: float) -> int:
        """Start an import of each group and follow all of them to their end."""
        if self.is_lite:
            raise MilvusError("import_files: Milvus Lite imports no files; add the batches instead")
        server = self.connection.client._get_connection()
        where = "" if self.partition == DEFAULT_PARTITION else self.partition
        tasks = [server.do_bulk_insert(self.name, where, [*files]) for files in groups]
        deadline, rows = time.monotonic() + timeout, 0
        for task, files in zip(tasks, groups, strict=True):
            while (state := server.get_bulk_insert_state(task)).state_name != "Completed":
                failed = "ailed" in state.state_name
                if failed or time.monotonic() > deadline:
                    why = state.failed_reason if failed else f"not done after {timeout:.0f} s"
                    raise MilvusError(f"import_files: {', '.join(files)}: {why}")
                time.sleep(IMPORT_PAUSE)
            rows += int(state.row_count)
        self.unflushed += rows
        return rows

    def delete(self, ids: set[Any]) -> None:
        """Delete rows that are there."""
        key = self.opened().id_field
        for some in key_blocks(sorted(ids)):
            self.call("delete", filter=in_expression(some, key), partition_name=self.partition)

    def check_ids(self, ids: Sequence[Any], settings: Settings) -> None:
        """Refuse ids that the collection, or the one to be made, could not give back.

        Raises:
            ValueError: Naming one; ``id_length`` is for new collections.
        """
        if settings.id_type == "int" and any(i in ids for i in UNFINDABLE):
            raise ValueError(
                f"ids: expected integers between {INT64.min + 1} and {INT64.max - 1}, got one "
                "outside: Milvus would not find it again; use another, or strings"
            )
        if settings.id_type == "str" and ids:
            try:
                require_id_length(ids, self.id_length)
            except ValueError as error:
                raise ValueError(
                    f"{error}, or make another collection with a larger id_length"
                ) from None

    def check_tenant(self, ids: list[Any]) -> None:
        """Refuse to take ids from another partition: Lite keeps one row per id over all of them.

        On a server each partition has its own rows, and ids may repeat between tenants.

        Raises:
            ValueError: Naming one such id.
        """
        if not self.is_lite or self.settings is None:
            return
        others = [p for p in self.call("list_partitions") if p != self.partition]
        taken = self.present(ids, others) if others else set()
        if taken:
            raise ValueError(
                f"add: {len(taken)} ids (such as {min(taken)!r}) belong to another partition of "
                f"{self.name!r}, and Milvus Lite keeps one row per id in all partitions. Put the "
                "tenant into the id, use one collection per tenant, or a server"
            )

    def flush(self) -> bool:
        """Let Milvus seal and index what was added; return whether there was anything."""
        if self.settings is None or not self.unflushed:
            return False
        self.call("flush")
        self.unflushed = 0
        return True

    def searchable(self) -> Settings | None:
        """The settings of a collection that can be searched; None if there is nothing to search.

        Lite walks unflushed rows in Python, fifty times slower: many are flushed first.
        """
        if not self.readable():
            return None
        if self.is_lite and self.unflushed >= LITE_UNFLUSHED:
            self.flush()
        return self.settings

    def drop(self) -> None:
        """Delete the collection, all partitions of it."""
        self.call("drop_collection")
        self.settings, self._partition_exists, self.unflushed = None, False, 0

    @property
    def _everything(self) -> str:
        key = self.opened().id_field
        return f'{key} != ""' if self.id_type == "str" else f"{key} >= {INT64.min}"

    def _open(self) -> None:
        description = self.call("describe_collection")
        settings = self._adopted
        if settings is None:
            settings = Settings.read(description, self.name)
            metric, index_type, _, vector_type = self._wanted
            settings.check(self._normalizer, metric, index_type, vector_type, self.name)
        try:
            self.call("load_collection")  # a reopened Lite collection is not loaded
        except MilvusError:
            if not self._gets_index():  # else another process has just made the collection
                raise
            self.call("load_collection")
        self.settings = settings
        self.id_length = longest_id(description, settings.id_field, self.id_length)
        self.unflushed = LITE_UNFLUSHED if self.is_lite else 0  # unknown: what the log replayed

    def _create(self, id_type: IdType) -> None:
        settings = self.planned(id_type)
        try:
            self.call(
                "create_collection",
                schema=settings.schema(self.id_length),
                index_params=settings.index_params(self.is_lite),
                consistency_level=self.consistency,
                properties=settings.properties,
            )
        except MilvusError:
            if not self.call("has_collection"):
                raise
            if not self._gets_index():
                # Made, but Milvus refused the index: the collection could never be opened.
                self.call("drop_collection")
                raise
        self._open()  # ours, or that of a process that was faster
        self.unflushed = 0

    def _gets_index(self) -> bool:
        """Whether the collection has an index, or gets one from a process that is making it."""
        deadline = time.monotonic() + INDEX_SECONDS
        while not self.call("list_indexes", field_name=VECTOR):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _create_partition(self) -> None:
        try:
            self.call("create_partition", partition_name=self.partition)
        except MilvusError:
            if not self.call("has_partition", partition_name=self.partition):
                raise  # else someone was faster


def foreign_settings(
    connection: Connection, name: str, id_field: str, vector_field: str
) -> Settings:
    """The settings of someone else's collection.

    Raises:
        ForeignCollection: If its fields or its metric cannot be used.
        MilvusError: If there is no such collection.
    """
    description = connection.call("describe_collection", collection_name=name)
    names = connection.call("list_indexes", collection_name=name, field_name=vector_field)
    index = {}
    if names:
        index = connection.call("describe_index", collection_name=name, index_name=names[0])
    return Settings.adopt(description, index, id_field, vector_field)
