"""Searching a FAISS index, on the CPU or from a copy on a GPU: values and row numbers."""

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.faiss import layout

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Found = tuple[Int64, Float32, Int64]  # query, value and row of each hit

GPU_LARGEST_K = 2048
FIRST_K = 64


class Searcher:
    """Top-k and range search of one index, with its dead rows left out.

    A GPU holds a copy. It is made when first needed and dropped when the index changes; what a GPU
    cannot do (k above 2048) the index on the CPU does.
    """

    def __init__(self, index: faiss.Index) -> None:
        """Search ``index`` on the CPU until told otherwise."""
        self._index = index
        self._copy: faiss.Index | None = None
        self.gpu: int | None = None

    def refresh(self, index: faiss.Index) -> None:
        """Search ``index`` from now on; forget the copy on the GPU."""
        self._index, self._copy = index, None

    def nearest(self, vectors: Float32, k: int, alive: NDArray[np.bool_] | None) -> Found:
        """The ``k`` best living rows of each vector, best first."""
        total = self._index.ntotal
        if alive is None:
            values, rows = self._top(vectors, min(k, total))
            return _flat(values, rows, rows >= 0)
        dead = total - int(alive.sum())
        k = min(k, total - dead)
        fetch = min(total, k + int(2 * k * dead / total) + 8)
        while True:
            values, rows = self._top(vectors, fetch)
            living = (rows >= 0) & alive[rows]
            if fetch == total or (living.sum(axis=1) >= k).all():
                break
            fetch = min(total, 2 * fetch)
        return _flat(values, rows, living & (np.cumsum(living, axis=1) <= k))

    def within(self, vectors: Float32, bound: float, alive: NDArray[np.bool_] | None) -> Found:
        """All living rows beyond ``bound``: inner products above it, or squared distances below."""
        if self._on_gpu() is None and layout.has_range_search(self._index):
            limits, values, rows = self._index.range_search(vectors, bound)
            ends = limits.astype(np.int64)
            query = np.repeat(np.arange(len(vectors)), ends[1:] - ends[:-1])
            found = query, values, rows
        else:
            found = self._widening(vectors, bound)
        if alive is None:
            return found
        keep = alive[found[2]]
        return found[0][keep], found[1][keep], found[2][keep]

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

    def _on_gpu(self) -> faiss.Index | None:
        if self.gpu is not None and self._copy is None:
            resources = faiss.StandardGpuResources()
            self._copy = faiss.index_cpu_to_gpu(resources, self.gpu, self._index)
        return self._copy


def gpus() -> int:
    """GPUs that FAISS sees."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def _flat(values: Float32, rows: Int64, keep: NDArray[np.bool_]) -> Found:
    query = np.broadcast_to(np.arange(len(rows), dtype=np.int64)[:, None], rows.shape)
    return query[keep], values[keep], rows[keep]
