"""``FaissIndex``: the verbs.

Queries and references need different transforms, which no FAISS pre-transform can do, so the
normalizer works here and what is written is a plain FAISS file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.adapters.arguments import (
    Batch,
    Id,
    Ids,
    as_ids,
    as_k,
    as_rows,
    is_id,
    require_descriptors,
    resolve_threshold,
    unpack,
)
from sscd_vec.adapters.columns import RowTable
from sscd_vec.adapters.faiss import layout
from sscd_vec.adapters.faiss.gpu import gpus
from sscd_vec.adapters.faiss.products import by_faiss
from sscd_vec.adapters.faiss.searcher import Found, Searcher
from sscd_vec.adapters.faiss.store import FaissMetric, Store
from sscd_vec.adapters.matches import Matches, Metadata, concatenate, no_matches
from sscd_vec.normalize import Normalizer

Device = Literal["auto", "cpu", "gpu"]
Threshold = float | Literal["calibrated"]
Float32 = NDArray[np.float32]

QUERY_BLOCK = 1024  # queries searched at a time in a range search
SEARCH_BLOCK = 16_384  # and in a search for k, whose results are of a known size


class FaissIndex:
    """A FAISS index of references: descriptors in, calibrated matches out.

    One process writes; any number may open what it saved. Any number of threads may search at once,
    but not while one of them changes the index.

    Args:
        normalizer: Turns descriptors into vectors and what FAISS returns into scores.
        factory: Any FAISS factory string. Vectors are zero-padded to a dimension it accepts.
        metric: ``"ip"`` or ``"l2"``; the scores are the same.
        parameters: Search-time parameters as FAISS names them, e.g. ``{"nprobe": 32}``. By default
            16 lists are probed, graphs searched with an efSearch of 64, and 8 times as many
            candidates refined (``k_factor_rf``) as are asked for.
        device: ``"auto"`` searches on a GPU if FAISS sees one that takes the index, ``"gpu"`` on
            the first or not at all.
        compact_at: Share of dead rows at which the index compacts itself.
    """

    _store: Store
    _searcher: Searcher

    def __init__(
        self,
        normalizer: Normalizer,
        factory: str = "Flat",
        metric: FaissMetric = "ip",
        *,
        parameters: Mapping[str, float] | None = None,
        device: Device = "auto",
        compact_at: float = 0.25,
    ) -> None:
        """Make an empty index; ``open`` reads one."""
        self._take(Store.new(normalizer.lifted_dim, factory, metric), normalizer)
        usual = layout.search_parameters(self._store.index)
        self._configure(usual | dict(parameters or {}), device, compact_at)

    @classmethod
    def open(
        cls,
        path: str | Path,
        normalizer: Normalizer,
        *,
        mmap: bool = False,
        parameters: Mapping[str, float] | None = None,
        device: Device = "auto",
        compact_at: float = 0.25,
    ) -> "FaissIndex":
        """Open what ``save`` wrote.

        Args:
            path: The FAISS file; its sidecar lies beside it.
            normalizer: Must have the reference fingerprint the index was built with.
            mmap: Map both files read-only instead of reading them: instant, shared between
                processes, for searching only. Of the index file only both ends are verified then.
            parameters: As for a new index; by default what it was saved with.
            device: As for a new index; a mapped index stays on the CPU unless told ``"gpu"``.
            compact_at: As for a new index.

        Raises:
            FileNotFoundError: If there is no such file.
            IndexFileError: If the files are truncated, foreign, altered or of two generations.
            FingerprintMismatch: If the normalizer is not the one the index was built with.
        """
        opened = cls.__new__(cls)
        opened._take(Store.open(Path(path), normalizer, mmap), normalizer)
        opened._configure(parameters, "cpu" if mmap and device == "auto" else device, compact_at)
        return opened

    def save(self, path: str | Path) -> None:
        """Write the FAISS file and its sidecar; when it returns, all rows are on disk.

        A crash at any moment leaves the previous pair or this one.
        """
        self._store.save(Path(path), self.normalizer.reference_fingerprint)

    # ------------------------------------------------------------------ adding and removing

    def train(self, descriptors: ArrayLike) -> Self:
        """Train lists and quantizers; without it, the first ``add`` trains on the background.

        Raises:
            ValueError: If FAISS cannot train on so few.
        """
        self._store.train(self._by_faiss.references(descriptors))
        return self

    def add(
        self,
        ids: Ids | Id,
        descriptors: ArrayLike,
        metadata: Sequence[Metadata | None] | Metadata | None = None,
    ) -> None:
        """Add references; an id that is already there is replaced. ``save`` puts them on disk.

        All ids, descriptors and metadata of a call are checked before its first row is stored.

        Args:
            ids: ``n`` strings or ``n`` integers; of a repeated id the last row wins.
            descriptors: ``(n, dim_in)`` as the encoder gives them.
            metadata: One JSON object or None per row.
        """
        self._store.require_writable()
        rows, id_type = as_rows(ids, descriptors, metadata, self._store.table.id_type)
        if id_type is None or not rows.ids:
            return
        texts = RowTable.encode(rows.metadata)
        new = not len(self._store.table)  # the ids of a call do not repeat
        at_once = layout.added_at_once(self._store.index)
        if len(rows.ids) > at_once:
            require_descriptors(rows, self._by_faiss)
            layout.reserve(self._store.index, len(rows.ids))
        for begin in range(0, len(rows.ids), at_once):
            part = slice(begin, begin + at_once)
            vectors = self._by_faiss.references(rows.descriptors[part])
            if not self._store.index.is_trained:
                self._train_on_background()
            self._store.append(rows.ids[part], vectors, texts and texts[part], id_type, new)
        self._store.compact_if_due(self._compact_at)

    def add_batches(self, batches: Iterable[Batch]) -> int:
        """Add ``(ids, descriptors[, metadata])`` batches from any iterable, one at a time.

        Returns:
            Rows taken from the batches.
        """
        count = 0
        for ids, descriptors, metadata in unpack(batches):
            self.add(ids, descriptors, metadata)
            count += len(ids)
        return count

    def remove(self, ids: Ids | Id) -> int:
        """Remove ids; those that are not there are ignored.

        They are found no more at once. Their vectors leave the index when it is compacted: by
        itself at ``compact_at``, at ``save`` if the type can remove, or by ``compact``.

        Returns:
            How many were there.
        """
        self._store.require_writable()
        table = self._store.table
        removed = table.remove(as_ids(ids, table.id_type)[0])
        self._store.compact_if_due(self._compact_at)
        return removed

    def compact(self) -> int:
        """Take dead rows out of the FAISS index: in place where the type can, else by rebuilding.

        Returns:
            Rows taken out.
        """
        return self._store.compact()

    def __len__(self) -> int:
        """Number of references."""
        return len(self._store)

    def __contains__(self, id: object) -> bool:
        """Whether a reference with this id is there."""
        return is_id(id) and id in self._store.table.row_of

    # ------------------------------------------------------------------ searching

    def search(
        self, descriptors: ArrayLike, k: int = 10, threshold: Threshold | None = None
    ) -> Matches:
        """The ``k`` best references of each query.

        Args:
            descriptors: ``(n, dim_in)`` queries.
            k: At most so many per query.
            threshold: Only scores of at least this; ``"calibrated"`` takes the normalizer's.
        """
        k = as_k(k)
        lowest = None if threshold is None else resolve_threshold(threshold, self.normalizer)
        queries = _as_queries(descriptors)
        parts = []
        for begin in range(0, max(len(queries), 1), SEARCH_BLOCK):
            vectors = self._queries(queries[begin : begin + SEARCH_BLOCK])
            if not len(self) or not len(vectors):
                parts.append(no_matches(len(vectors)))
                continue
            part = self._matches(len(vectors), self._searcher.nearest(vectors, k))
            parts.append(part if lowest is None else part.above(lowest))
        return concatenate(parts)

    def range_search(self, descriptors: ArrayLike, threshold: Threshold = "calibrated") -> Matches:
        """All references that score at least ``threshold``; ``complete`` says if surely all."""
        return concatenate([part for _, part in self.iterate_range(descriptors, threshold)])

    def iterate_range(
        self,
        descriptors: ArrayLike,
        threshold: Threshold = "calibrated",
        *,
        block: int = QUERY_BLOCK,
    ) -> Iterator[tuple[int, Matches]]:
        """``range_search`` in blocks of queries, for results too big for memory.

        Returns:
            Pairs: the number of the first query of a block, and the matches of the block.
        """
        lowest = resolve_threshold(threshold, self.normalizer)
        return self._ranges(_as_queries(descriptors), lowest, as_k(block, "block"))

    # ------------------------------------------------------------------ GPU

    def to_gpu(self, device: int = 0) -> Self:
        """Search on a GPU from now on. Writes stay on the CPU index, copied over when needed.

        Raises:
            RuntimeError: If FAISS has no such GPU or cannot put this index there.
        """
        if not 0 <= device < gpus():
            raise RuntimeError(
                f"to_gpu: expected GPU {device}, but FAISS sees {gpus()} GPUs (compiled with "
                f"{faiss.get_compile_options().strip()}); see `sscd-vec doctor`"
            )
        if not layout.fits_gpu(self._store.index):
            raise RuntimeError(
                f"to_gpu: FAISS keeps Flat, IVF-Flat, IVF-PQ and IVF-SQ on a GPU, not "
                f"{self.factory}; stay on the CPU or build another type"
            )
        self._searcher.use_gpu(device)
        return self

    def to_cpu(self) -> Self:
        """Search on the CPU from now on."""
        self._searcher.use_cpu()
        return self

    # ------------------------------------------------------------------ the rest

    @property
    def normalizer(self) -> Normalizer:
        """Turns descriptors into vectors; one with the same reference side may take its place."""
        return self._normalizer

    @normalizer.setter
    def normalizer(self, normalizer: Normalizer) -> None:
        self._by_faiss = by_faiss(normalizer)
        self._normalizer = normalizer

    @property
    def index(self) -> faiss.Index:
        """The FAISS index itself (its rows include dead ones until ``compact``)."""
        return self._store.index

    @property
    def factory(self) -> str:
        """FAISS factory string the index was made with."""
        return self._store.factory

    @property
    def metric(self) -> FaissMetric:
        """``"ip"`` or ``"l2"``."""
        return self._store.metric

    def __repr__(self) -> str:
        """Kind and size."""
        return f"FaissIndex({self.factory!r}, metric={self.metric!r}, {len(self)} references)"

    def _take(self, store: Store, normalizer: Normalizer) -> None:
        self._store, self.normalizer, self._searcher = store, normalizer, Searcher(store)

    def _configure(
        self, parameters: Mapping[str, float] | None, device: Device, compact_at: float
    ) -> None:
        if device not in get_args(Device):
            raise ValueError(f"device: expected one of {get_args(Device)}, got {device!r}")
        if not compact_at > 0:
            raise ValueError(f"compact_at: expected a share above 0 (1: never), got {compact_at}")
        self._compact_at = compact_at
        self.parameters = dict(parameters or {})
        space = faiss.ParameterSpace()
        for name, value in self.parameters.items():
            try:
                space.set_index_parameter(self._store.index, name, value)
            except RuntimeError as error:
                raise ValueError(f"parameters: {self.factory} does not know {name!r}") from error
        if device == "gpu":
            self.to_gpu()
        elif device == "auto" and gpus() and layout.fits_gpu(self._store.index):
            self._searcher.use_gpu(0, or_cpu=True)

    def _queries(self, descriptors: NDArray[Any]) -> Float32:
        if not len(descriptors):
            return np.empty((0, self._store.index.d), dtype=np.float32)
        vectors = self._by_faiss.queries(descriptors)
        return layout.pad(vectors, self._store.index.d)

    def _ranges(
        self, queries: NDArray[Any], lowest: float, block: int
    ) -> Iterator[tuple[int, Matches]]:
        slack = 1e-5 * (1 + abs(lowest))  # FAISS compares strictly and in float32
        bound = self.normalizer.to_metric(lowest - slack, self.metric)
        for begin in range(0, max(len(queries), 1), block):
            vectors = self._queries(queries[begin : begin + block])
            if not len(self) or not len(vectors):
                yield begin, no_matches(len(vectors))
                continue
            query, values, rows = self._searcher.within(vectors, bound)
            order = np.lexsort((-values if self.metric == "ip" else values, query))
            found = query[order], values[order], rows[order]
            yield begin, self._matches(len(vectors), found).above(lowest)

    def _matches(self, queries: int, found: Found) -> Matches:
        query, values, rows = found
        scores = self.normalizer.from_metric(values, self.metric).astype(np.float32)
        offsets = np.searchsorted(query, np.arange(queries + 1))  # they come query after query
        return Matches(
            self._store.table.ids_at(rows),
            scores,
            offsets,
            self._store.table.metadata_at(rows),
            None
            if layout.is_exact(self._store.index)
            else f"{self.factory} is approximate and may miss references",
        )

    def _train_on_background(self) -> None:
        background = self.normalizer.background
        if background is None:
            raise ValueError(
                f"add: {self.factory} must be trained, and this normalizer keeps no background to "
                "train it on; call train(descriptors) first"
            )
        self._store.train(self.normalizer.lift.references(background))


def _as_queries(descriptors: ArrayLike) -> NDArray[Any]:
    """Queries by row: a single descriptor is one of them, an empty list none."""
    array = np.asarray(descriptors)
    return np.empty((0, 0)) if array.shape == (0,) else np.atleast_2d(array)
