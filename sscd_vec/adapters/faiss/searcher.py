"""Searching a FAISS index, on the CPU or from a copy on a GPU: values and row numbers."""

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.faiss import layout
from sscd_vec.adapters.faiss.gpu import GpuCopy
from sscd_vec.adapters.faiss.products import comparing
from sscd_vec.adapters.faiss.store import Store

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Found = tuple[Int64, Float32, Int64]  # query, value and row of each hit

FIRST_K = 64
LARGEST_RESULT = 1 << 25  # values of one search of a few queries for many rows: some 400 MB


class Searcher:
    """Top-k and range search of one index, with its dead rows left out.

    A GPU holds a copy; what a GPU cannot do (k above 2048) the index on the CPU does.
    """

    def __init__(self, store: Store) -> None:
        """Search what is in ``store``, on the CPU until told otherwise."""
        self._store = store
        self._gpu: GpuCopy | None = None

    def use_gpu(self, device: int, *, or_cpu: bool = False) -> None:
        """Search on this GPU from now on, or if it refuses, raise or stay on the CPU."""
        self._gpu = GpuCopy(self._store, device, or_cpu=or_cpu)

    def use_cpu(self) -> None:
        """Search on the CPU from now on."""
        self._gpu = None

    def nearest(self, vectors: Float32, k: int) -> Found:
        """The ``k`` best living rows of each vector, best first."""
        total, alive = self._index.ntotal, self._store.alive()
        if alive is None:
            values, rows = self._top(vectors, min(k, total))
            return _flat(values, rows, rows >= 0)
        k = min(k, len(self._store))
        dead = total - len(self._store)
        fetch = min(total, k + int(2 * k * dead / total) + 8)
        found, rest = self._living(vectors, np.arange(len(vectors)), alive, k, fetch)
        parts = [found]
        # A query near many dead rows goes on alone: the others have their answer.
        chosen = layout.living_only(self._index, alive) if len(rest) else None
        if chosen is not None:
            values, rows = self._index.search(vectors[rest], k, params=chosen)
            query, value, row = _flat(values, rows, rows >= 0)
            parts.append((rest[query], value, row))
            rest = rest[:0]
        while len(rest):
            fetch = min(total, 2 * fetch)
            unfinished = []
            at_once = max(1, LARGEST_RESULT // fetch)
            for some in np.split(rest, range(at_once, len(rest), at_once)):
                found, left = self._living(vectors, some, alive, k, fetch)
                parts.append(found)
                unfinished.append(left)
            rest = np.concatenate(unfinished)
        return _joined(parts)

    def within(self, vectors: Float32, bound: float) -> Found:
        """All living rows beyond ``bound``: inner products above it, or squared distances below."""
        found = None
        on_gpu = self._gpu is not None and self._gpu.ready()
        if not on_gpu and layout.has_range_search(self._index):
            found = self._ranged(vectors, bound)
        if found is None:
            found = self._widening(vectors, bound)
        alive = self._store.alive()
        if alive is None:
            return found
        keep = alive[found[2]]
        return found[0][keep], found[1][keep], found[2][keep]

    def _living(
        self, vectors: Float32, queries: Int64, alive: NDArray[np.bool_], k: int, fetch: int
    ) -> tuple[Found, Int64]:
        """The ``k`` best living of ``fetch`` rows, and the queries for which that was too few."""
        values, rows = self._top(vectors[queries], fetch)
        living = (rows >= 0) & alive[rows]
        # A query whose last place is empty has seen all that its lists or its graph hold.
        done = (living.sum(axis=1) >= k) | (rows[:, -1] < 0) | (fetch == len(alive))
        best = living & (np.cumsum(living, axis=1) <= k)
        query, value, row = _flat(values, rows, best & done[:, None])
        return (queries[query], value, row), queries[~done]

    def _ranged(self, vectors: Float32, bound: float) -> Found | None:
        """FAISS's own range search, or None if the type has none after all."""
        try:
            with comparing(self._index, vectors):
                limits, values, rows = self._index.range_search(vectors, bound)
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            return None
        ends = limits.astype(np.int64)
        return np.repeat(np.arange(len(vectors)), ends[1:] - ends[:-1]), values, rows

    def _widening(self, vectors: Float32, bound: float) -> Found:
        """Range search by top-k: larger k until the last neighbour is out of range."""
        larger_is_better = self._index.metric_type == faiss.METRIC_INNER_PRODUCT
        total = self._index.ntotal
        pending = np.arange(len(vectors), dtype=np.int64)
        parts: list[Found] = []
        k = min(FIRST_K, total)
        while len(pending):
            values, rows = self._top(vectors[pending], k)
            inside = (values > bound if larger_is_better else values < bound) & (rows >= 0)
            more = inside[:, -1] & (k < total)
            query, value, row = _flat(values, rows, inside & ~more[:, None])
            parts.append((pending[query], value, row))
            pending = pending[more]
            k = min(4 * k, total)
        query, value, row = (np.concatenate(column) for column in zip(*parts, strict=True))
        return query, value, row

    def _top(self, vectors: Float32, k: int) -> tuple[Float32, Int64]:
        found: tuple[Float32, Int64] | None = None
        if self._gpu is not None:
            found = self._gpu.search(vectors, k)
        if found is None:
            with comparing(self._index, vectors):
                found = self._index.search(vectors, k, params=layout.top_parameters(self._index, k))
        return found

    @property
    def _index(self) -> faiss.Index:
        return self._store.index


def _joined(parts: list[Found]) -> Found:
    """Hits of several searches, those of each query together."""
    if len(parts) == 1:
        return parts[0]
    query, value, row = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(query, kind="stable")
    return query[order], value[order], row[order]


def _flat(values: Float32, rows: Int64, keep: NDArray[np.bool_]) -> Found:
    query = np.repeat(np.arange(len(rows), dtype=np.int64), rows.shape[1])
    if keep.all():  # the usual case: nothing is copied
        return query, values.ravel(), rows.ravel()
    return query[keep.ravel()], values[keep], rows[keep]
