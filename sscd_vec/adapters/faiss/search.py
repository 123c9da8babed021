"""Searching a FAISS index, on the CPU or from a copy on a GPU."""

import logging
import threading
from typing import Any, Literal, get_args

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters import products
from sscd_vec.adapters.arguments import Float32, padded
from sscd_vec.adapters.faiss.storage import Storage
from sscd_vec.adapters.faiss.types import innermost
from sscd_vec.adapters.matches import Matches, no_matches

Device = Literal["auto", "cpu", "gpu"]
Int64 = NDArray[np.int64]
Found = tuple[Int64, Float32, Int64]  # query, value and row of each hit

FIRST_K = 64
LARGEST_RESULT = 1 << 25  # values of one search of a few queries for many rows: some 400 MB
LARGEST_GPU_K = 2048  # neighbours of a search on a GPU, and lists that it probes
FLAT = {"IndexFlat", "IndexFlatIP", "IndexFlatL2"}
LISTS = {"IndexIVFFlat", "IndexIVFPQ", "IndexIVFScalarQuantizer"}

logger = logging.getLogger(__name__)


class Searcher:
    """Top-k and range search of one index, with its dead rows left out.

    A GPU holds a copy; what a GPU cannot do (k above 2048) the index on the CPU does. The caller
    holds ``storage.lock.reading()``.
    """

    def __init__(self, storage: Storage) -> None:
        """Search what is in ``storage``, on the CPU until told otherwise."""
        self.storage = storage
        self._gpu: _GpuCopy | None = None

    def use(self, device: Device) -> None:
        """Search on the CPU, on the first GPU, or (``"auto"``) on that if it is possible."""
        if device not in get_args(Device):
            raise ValueError(f"device: expected one of {get_args(Device)}, got {device!r}")
        if device == "cpu":
            self._gpu = None
        else:
            self.use_gpu(0, or_cpu=device == "auto")

    def use_gpu(self, device: int, *, or_cpu: bool = False) -> None:
        """Search on this GPU from now on; if that is impossible, raise or stay on the CPU.

        Raises:
            RuntimeError: If FAISS has no such GPU or cannot put this index there.
        """
        fits = type(innermost(self._index)).__name__ in FLAT | LISTS
        if or_cpu and not (fits and _gpus()):
            return
        if not 0 <= device < _gpus():
            raise RuntimeError(
                f"to_gpu: expected GPU {device}, but FAISS sees {_gpus()} GPUs (compiled with "
                f"{faiss.get_compile_options().strip()}); see `sscd-vec doctor`"
            )
        if not fits:
            raise RuntimeError(
                f"to_gpu: FAISS keeps Flat, IVF-Flat, IVF-PQ and IVF-SQ on a GPU, not "
                f"{self.storage.factory}; stay on the CPU or build another type"
            )
        with self.storage.lock.reading():
            self._gpu = _GpuCopy(self.storage, device, or_cpu=or_cpu)

    def nearest(self, vectors: Float32, k: int, metadata: bool) -> Matches:
        """The ``k`` best living rows of each vector, best first; values in place of scores."""
        total, table = self._index.ntotal, self.storage.table
        living = total - len(table.dead)
        if not living:
            return no_matches(len(vectors))
        if vectors.shape[1] < self._index.d:
            vectors = padded(vectors, self._index.d)
        if living == total:
            values, rows = self._top(vectors, min(k, total))
            found = _flat(values, rows, rows >= 0)
        else:
            found = self._nearest_living(vectors, min(k, living), table.alive())
        return self._matches(len(vectors), found, metadata)

    def within(self, vectors: Float32, bound: float, metadata: bool) -> Matches:
        """All living rows beyond ``bound``: inner products above it, or squared distances below."""
        table = self.storage.table
        if self._index.ntotal == len(table.dead):
            return no_matches(len(vectors))
        if vectors.shape[1] < self._index.d:
            vectors = padded(vectors, self._index.d)
        found = None
        on_gpu = self._gpu is not None and self._gpu.ready()
        if not on_gpu and has_range_search(self._index):
            found = self._ranged(vectors, bound)
        if found is None:
            found = self._widening(vectors, bound)
        query, values, rows = found
        if table.dead:
            keep = table.alive()[rows]
            query, values, rows = query[keep], values[keep], rows[keep]
        order = np.lexsort((-values if self.storage.metric == "ip" else values, query))
        found = query[order], values[order], rows[order]
        return self._matches(len(vectors), found, metadata)

    def _matches(self, queries: int, found: Found, metadata: bool) -> Matches:
        query, values, rows = found
        ids, more = self.storage.table.at(rows, metadata)
        offsets = np.searchsorted(query, np.arange(queries + 1))  # they come query after query
        incomplete = None
        if not is_exact(self._index):
            incomplete = f"{self.storage.factory} is approximate and may miss references"
        return Matches(ids, values, offsets, more, incomplete)

    def _nearest_living(self, vectors: Float32, k: int, alive: NDArray[np.bool_]) -> Found:
        total, dead = len(alive), len(self.storage.table.dead)
        fetch = min(total, k + int(2 * k * dead / total) + 8)
        found, rest = self._living(vectors, np.arange(len(vectors)), alive, k, fetch)
        parts = [found]
        # A query near many dead rows goes on alone: the others have their answer.
        chosen = living_only(self._index, alive) if len(rest) else None
        if chosen is not None:
            values, rows = products.search(self._index, vectors[rest], k, chosen)
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
            limits, values, rows = products.range_search(self._index, vectors, bound)
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
            parameters = top_parameters(self._index, k)
            found = products.search(self._index, vectors, k, parameters)
        return found

    @property
    def _index(self) -> faiss.Index:
        return self.storage.index


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


def top_parameters(index: faiss.Index, k: int) -> faiss.SearchParameters | None:
    """What a search for ``k`` is told: to refine no more candidates than there are rows.

    FAISS would make room for ``k`` times the factor of them.
    """
    refining = faiss.downcast_index(index)
    if not isinstance(refining, faiss.IndexRefine) or k * refining.k_factor <= index.ntotal:
        return None
    parameters = faiss.IndexRefineSearchParameters()
    parameters.k_factor = index.ntotal / k
    return parameters


def is_exact(index: faiss.Index) -> bool:
    """Whether a search compares with every vector, uncompressed."""
    if isinstance(index, faiss.IndexFlat):
        return True
    if not isinstance(index, faiss.IndexIVFFlat):
        return False
    # A graph or lists over the centroids find fewer lists than they are asked for, and max_codes
    # stops before the last of them.
    every_list = isinstance(faiss.downcast_index(index.quantizer), faiss.IndexFlat)
    return every_list and bool(index.nprobe >= index.nlist and index.max_codes == 0)


def has_range_search(index: faiss.Index) -> bool:
    """Whether the type's own range search finds what its top-k search would.

    A graph's range search stops at efSearch candidates, where its top-k search can be widened;
    that of fast-scan lists finds nothing at all with inner products; and one that refines asks its
    coarse codes first what is in range, which score good matches too low.
    """
    inner = innermost(index)
    names = ("HNSW", "NSG", "NNDescent", "FastScan", "Refine", "IVFPQR")
    return not any(name in type(inner).__name__ for name in names)


def living_only(index: faiss.Index, alive: NDArray[np.bool_]) -> faiss.SearchParameters | None:
    """Search parameters that leave dead rows out; None if the type has none.

    Graphs do, but stop at efSearch nodes, dead ones included: better to search them widely.
    """
    inner: Any = innermost(index)
    kind = type(inner).__name__
    if kind not in FLAT | LISTS:
        return None
    made: Any = faiss  # its type hints do not know what these take
    chosen = made.IDSelectorBitmap(np.packbits(alive, bitorder="little"))
    parameters: faiss.SearchParameters
    if kind in FLAT:
        parameters = made.SearchParameters(sel=chosen)
    else:
        parameters = made.SearchParametersIVF(
            sel=chosen, nprobe=inner.nprobe, max_codes=inner.max_codes
        )
    if isinstance(faiss.downcast_index(index), faiss.IndexPreTransform):
        parameters = made.SearchParametersPreTransform(index_params=parameters)
    return parameters


def _gpus() -> int:
    """GPUs that FAISS sees."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


class _GpuCopy:
    """A copy of an index on a GPU: made at once, and again when the index has changed."""

    def __init__(self, storage: Storage, device: int, *, or_cpu: bool = False) -> None:
        """Copy the index over.

        Args:
            storage: Holds the index.
            device: Number of the GPU.
            or_cpu: If the GPU refuses the index, now or when it has grown, warn and search
                on the CPU instead of raising.

        Raises:
            RuntimeError: If the GPU refuses it.
        """
        self._storage, self._device, self._or_cpu = storage, device, or_cpu
        self._lock = threading.Lock()  # a GPU's index serves one thread at a time
        self._copy: faiss.Index | None = None
        self._copied = -1  # the storage's changes when the copy was made
        self._refused = False
        self.ready()

    def ready(self) -> bool:
        """Whether there is a copy of the index as it is now."""
        with self._lock:
            return self._fresh() is not None

    def search(self, vectors: Float32, k: int) -> tuple[Float32, Int64] | None:
        """Values and rows of the ``k`` best; None if the CPU has to find them."""
        lists = faiss.try_extract_index_ivf(self._storage.index)
        if max(k, 0 if lists is None else lists.nprobe) > LARGEST_GPU_K:
            return None
        with self._lock:
            copy = self._fresh()
            if copy is None:
                return None
            values, rows = copy.search(vectors, k)
            return values, rows

    def _fresh(self) -> faiss.Index | None:
        if self._refused or self._copied == self._storage.changes:
            return self._copy
        self._copy = None  # makes room for the next one
        try:
            resources = faiss.StandardGpuResources()
            self._copy = faiss.index_cpu_to_gpu(resources, self._device, self._storage.index)
        except RuntimeError as error:
            problem = f"GPU {self._device} refuses {self._storage.factory} ({error})"
            if not self._or_cpu:
                raise RuntimeError(f"{problem}; use to_cpu(), or build another type") from error
            logger.warning("%s: it is searched on the CPU", problem)
            self._refused = True
        self._copied = self._storage.changes
        return self._copy
