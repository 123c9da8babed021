"""Searching a FAISS index, on the CPU or from a copy on a GPU: values and row numbers."""

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.faiss import layout
from sscd_vec.adapters.faiss.store import Store

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Found = tuple[Int64, Float32, Int64]  # query, value and row of each hit

GPU_LARGEST_K = 2048
FIRST_K = 64


class Searcher:
    """Top-k and range search of one index, with its dead rows left out.

    A GPU holds a copy. It is made when first needed, and again when the index has changed; what a
    GPU cannot do (k above 2048) the index on the CPU does.
    """

    def __init__(self, store: Store) -> None:
        """Search what is in ``store``, on the CPU until told otherwise."""
        self._store = store
        self._copy: faiss.Index | None = None
        self._copied = -1  # the store's changes when the copy was made
        self._gpu: int | None = None

    def use_gpu(self, device: int | None) -> None:
        """Search on this GPU from now on, or with None on the CPU."""
        self._gpu, self._copy = device, None

    def nearest(self, vectors: Float32, k: int) -> Found:
        """The ``k`` best living rows of each vector, best first."""
        total, alive = self._index.ntotal, self._store.alive()
        if alive is None:
            values, rows = self._top(vectors, min(k, total))
            return _flat(values, rows, rows >= 0)
        dead = total - int(alive.sum())
        k = min(k, total - dead)
        fetch = min(total, k + int(2 * k * dead / total) + 8)
        while True:
            values, rows = self._top(vectors, fetch)
            living = (rows >= 0) & alive[rows]
            # A query whose last place is empty has seen all that its lists or its graph hold.
            enough = (living.sum(axis=1) >= k) | (rows[:, -1] < 0)
            if fetch == total or enough.all():
                break
            fetch = min(total, 2 * fetch)
        return _flat(values, rows, living & (np.cumsum(living, axis=1) <= k))

    def within(self, vectors: Float32, bound: float) -> Found:
        """All living rows beyond ``bound``: inner products above it, or squared distances below."""
        found = None
        if self._on_gpu() is None and layout.has_range_search(self._index):
            found = self._ranged(vectors, bound)
        if found is None:
            found = self._widening(vectors, bound)
        alive = self._store.alive()
        if alive is None:
            return found
        keep = alive[found[2]]
        return found[0][keep], found[1][keep], found[2][keep]

    def _ranged(self, vectors: Float32, bound: float) -> Found | None:
        """FAISS's own range search, or None if the type has none after all."""
        try:
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
        copy = self._on_gpu() if k <= GPU_LARGEST_K else None
        values, rows = (self._index if copy is None else copy).search(vectors, k)
        return values, rows

    @property
    def _index(self) -> faiss.Index:
        return self._store.index

    def _on_gpu(self) -> faiss.Index | None:
        if self._gpu is None:
            return None
        if self._copy is None or self._copied != self._store.changes:
            self._copy = None  # makes room for the next one
            resources = faiss.StandardGpuResources()
            self._copy = faiss.index_cpu_to_gpu(resources, self._gpu, self._index)
            self._copied = self._store.changes
        return self._copy


def gpus() -> int:
    """GPUs that FAISS sees."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def _flat(values: Float32, rows: Int64, keep: NDArray[np.bool_]) -> Found:
    query = np.repeat(np.arange(len(rows), dtype=np.int64), rows.shape[1])
    if keep.all():  # the usual case: nothing is copied
        return query, values.ravel(), rows.ravel()
    return query[keep.ravel()], values[keep], rows[keep]
