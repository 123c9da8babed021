"""Vectors and their rows, kept in step: a FAISS index, its ids and metadata.

Row ``i`` of the FAISS index is row ``i`` of the table. Everything here is about rows; descriptors
and scores are the business of ``FaissIndex``.
"""

import logging
from collections.abc import Iterator
from typing import Any, Literal, cast

import faiss
import numpy as np

from sscd_vec.adapters.arguments import Batch, Float32, Ids, IdType, as_ids, padded
from sscd_vec.adapters.faiss import types
from sscd_vec.adapters.faiss.files import IndexFile
from sscd_vec.adapters.faiss.rows import RowTable
from sscd_vec.adapters.faiss.settings import IndexConflict, IndexFileError, Settings
from sscd_vec.adapters.plain import require_unit
from sscd_vec.adapters.products import ready_threads
from sscd_vec.locks import ReadersWriterLock
from sscd_vec.normalize import Normalizer

FaissMetric = Literal["ip", "l2"]

METRICS: dict[FaissMetric, int] = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
SAMPLED = 1000  # vectors of an adopted index that are looked at
FEWEST_DEAD = 1000  # below this, tombstones cost less than a compaction

logger = logging.getLogger(__name__)


class Storage:
    """One FAISS index and the table of its rows.

    Who reads holds ``lock.reading()``. Changes take ``lock.writing()`` themselves, block by block,
    so that searches get their turn; only one thread may be changing.

    Attributes:
        index: The FAISS index; its rows include dead ones until ``compact``.
        table: Ids and metadata by row.
        factory: FAISS factory string the index was made with.
        metric: ``"ip"`` or ``"l2"``.
        plain: Whether it was adopted and holds plain descriptors.
        generation: How often it was saved.
        read_only: Whether it is mapped from a file.
        lock: Many readers or one writer.
        changes: How often the FAISS index has changed, for those who keep a copy of it.
        unsaved: Whether rows were added or removed since it was opened or saved.
    """

    def __init__(
        self,
        index: faiss.Index,
        table: RowTable,
        factory: str,
        metric: FaissMetric,
        *,
        plain: bool = False,
        generation: int = 0,
        read_only: bool = False,
    ) -> None:
        """Take an index and its table."""
        self.index, self.table, self.factory, self.metric = index, table, factory, metric
        self.plain, self.generation = plain, generation
        self.lock = ReadersWriterLock()
        self.changes = 0
        self.unsaved = False
        self.read_only = read_only
        self._stuck = False  # dead rows cannot be taken out

    @classmethod
    def new(cls, dim: int, factory: str, metric: FaissMetric) -> "Storage":
        """An empty one for vectors of ``dim`` dimensions, which are padded as the factory needs.

        Raises:
            ValueError: If the metric is unknown or FAISS refuses the factory.
        """
        if metric not in METRICS:
            raise ValueError(
                f"metric: expected 'ip' or 'l2', got {metric!r} (stored vectors all have the same "
                "length, so 'ip' orders exactly as cosine does)"
            )
        return cls(types.new_index(dim, factory, METRICS[metric]), RowTable(), factory, metric)

    @classmethod
    def open(cls, file: IndexFile, normalizer: Normalizer, *, read_only: bool) -> "Storage":
        """Read what ``save`` wrote; see ``FaissIndex.open`` for what may be wrong with it."""
        settings, table, index = file.read(normalizer)
        return cls(
            index,
            table,
            settings.factory,
            cast(FaissMetric, settings.metric),
            plain=settings.plain,
            generation=settings.generation,
            read_only=read_only,
        )

    def opened_again(self, file: IndexFile, normalizer: Normalizer) -> "Storage":
        """What another process has saved in place of this.

        Raises:
            IndexConflict: If rows were added or removed here that are not saved.
            IndexFileError: If the file is damaged now, or another kind of index.
        """
        if self.unsaved:
            raise IndexConflict(
                f"{file.path}: another process has saved it while rows were added or removed here; "
                "open it again and repeat the changes"
            )
        new = Storage.open(file, normalizer, read_only=self.read_only)
        if (new.metric, new.plain) != (self.metric, self.plain):
            raise IndexFileError(f"{file.path}: another kind of index lies there now")
        return new

    @classmethod
    def adopt(cls, index: faiss.Index, ids: Ids | None, metadata: list[str] | None) -> "Storage":
        """Someone else's index of plain descriptors, with one id per row.

        Raises:
            ValueError: If it does not have as many rows as ids, has them twice, or gives no scores.
        """
        inner, ids = types.without_id_map(index, ids)
        metric = next((m for m, number in METRICS.items() if number == inner.metric_type), None)
        factory = type(types.innermost(inner)).__name__
        if metric is None:
            raise ValueError(f"adopt: expected inner products or L2, got {factory} of another kind")
        problem = types.why_unscorable(inner, factory, METRICS[metric])
        if problem:
            raise ValueError(f"adopt: {factory} {problem}")
        plain, id_type = as_ids(ids, None)
        counts = len(plain), len(set(plain)), len(plain if metadata is None else metadata)
        if set(counts) != {int(inner.ntotal)}:
            raise ValueError(
                f"adopt: expected {inner.ntotal} different ids, one per row, and as many metadata "
                f"if any, got {counts[0]} ids ({counts[1]} different) and {counts[2]} metadata"
            )
        if types.keeps_vectors(inner):
            with types.findable_rows(inner):
                sample = types.stored_vectors(inner, 0, min(SAMPLED, int(inner.ntotal)))
            require_unit(sample, f"this {factory}")
        table = RowTable()
        if id_type is not None:
            table.append(plain, metadata, id_type, new=True)
        return cls(inner, table, factory, metric, plain=True)

    def save(self, file: IndexFile, reference_fingerprint: str) -> None:
        """Write index and sidecar; a crash at any moment leaves the previous pair or this one.

        Raises:
            IndexConflict: If another process has saved something else there.
        """
        self.require_writable()
        if file.path.is_dir():
            raise IsADirectoryError(f"{file.path}: expected the path of a file, got a folder")
        if self.table.dead and types.can_remove(self.index):
            self.compact()
        if self.index.ntotal != len(self.table):
            raise RuntimeError(
                f"save: {self.index.ntotal} vectors but {len(self.table)} ids; the FAISS index "
                "was changed from outside. Nothing was written"
            )
        file.path.parent.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            reference_fingerprint,
            self.factory,
            self.metric,
            int(self.index.d),
            int(self.index.ntotal),
            self.generation + 1,
            self.plain,
        )
        with self.lock.reading():  # searches go on; only changes have to wait
            file.write(self.index, settings, self.table.arrays())
        self.generation += 1

    # ------------------------------------------------------------------ rows

    def __len__(self) -> int:
        """Number of living rows."""
        return len(self.table) - len(self.table.dead)

    def train(self, vectors: Float32) -> None:
        """Train lists and quantizers.

        Raises:
            ValueError: If FAISS cannot train on so few, or if it gives no scores after training.
        """
        self.require_writable()
        ready_threads()
        with self.lock.writing():
            self.changes += 1
            if self.index.ntotal:
                raise RuntimeError("train: expected an empty index; make a new one to train it")
            try:
                self.index.train(padded(vectors, self.index.d))
            except RuntimeError as error:
                raise ValueError(
                    f"train: FAISS cannot train {self.factory} on {len(vectors)} descriptors; give "
                    f"more to train(descriptors), or use fewer lists ({error})"
                ) from error
            problem = types.why_unscorable(self.index, self.factory, METRICS[self.metric])
            if problem:
                self.index.is_trained = False  # or the next add would take it as it is
                raise ValueError(
                    f"train: {self.factory!r}, trained on {len(vectors)} descriptors, {problem}"
                )

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more, so that flat storage grows once and not block by block."""
        with self.lock.writing():
            types.reserve(self.index, rows)

    def append(
        self,
        ids: list[Any],
        vectors: Float32,
        metadata: list[str] | None,
        id_type: IdType,
        new: bool,
    ) -> None:
        """Append rows; older rows with the same ids become dead (none, if all are ``new``).

        Raises:
            RuntimeError: If FAISS refuses them; the rows before stay as they are.
        """
        ready_threads()
        with self.lock.writing():
            self.changes += 1
            self.unsaved = True
            try:
                self.index.add(padded(vectors, self.index.d))
            except RuntimeError as error:
                if not len(self.table):
                    self.index.reset()  # a graph that could not be built has its vectors already
                raise RuntimeError(
                    f"add: FAISS cannot add {len(ids)} rows to {self.factory} with "
                    f"{len(self.table)} ({error}); NSG takes all of its rows, more than 100, in "
                    "one add of at most 65 536: use HNSW where they come bit by bit"
                ) from error
            self.table.append(ids, metadata, id_type, new)

    def remove(self, ids: list[Any]) -> int:
        """Mark rows as dead; return how many there were."""
        self.require_writable()
        with self.lock.writing():
            removed = self.table.remove(ids)
            self.unsaved = self.unsaved or removed > 0
        return removed

    def compact(self) -> int:
        """Take dead rows out, in place where the type can; return how many there were."""
        self.require_writable()
        ready_threads()
        with self.lock.writing():
            dead = len(self.table.dead)
            if dead:
                self.changes += 1
                self.index = types.without_dead(self.index, self.table.alive())
                self.table = self.table.compacted()
        return dead

    def compact_if_due(self, share: float) -> None:
        """Compact if more than this share of the rows is dead and the type lets them go."""
        dead = len(self.table.dead)
        if self._stuck or dead <= max(FEWEST_DEAD, share * len(self.table)):
            return
        logger.info("compacting %s: %d dead rows", self.factory, dead)
        try:
            self.compact()
        except RuntimeError as error:
            self._stuck = True
            logger.warning("%s", error)

    def batches(self, rows: int) -> Iterator[Batch]:
        """Ids, vectors and metadata of living rows, in batches."""
        for begin in range(0, self.index.ntotal, rows):
            with self.lock.reading():
                count = min(rows, self.index.ntotal - begin)
                living = begin + np.flatnonzero(self.table.alive()[begin : begin + count])
                with types.findable_rows(self.index):
                    vectors = types.stored_vectors(self.index, begin, count)[living - begin]
                ids, metadata = self.table.at(living)
            yield ids, vectors, metadata

    def require_writable(self) -> None:
        """Refuse a change of what is mapped from a file."""
        if self.read_only:
            raise RuntimeError("this index is mapped read-only; open it without mmap to change it")
