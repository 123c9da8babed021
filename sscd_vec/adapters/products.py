"""Matrix products by FAISS, for every index: whitening, and neighbours in the background.

After a product numpy's BLAS threads spin for some 30 ms, waiting for the next one, and whatever
works next has to share the cores with them. FAISS's threads are those that a FAISS index searches
with; a Milvus on the same machine wants the cores itself, so there one thread makes the products of
a search.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize import Normalizer
from sscd_vec.normalize.descriptors import Float32, as_descriptors

Found = tuple[Float32, NDArray[np.int64]]  # values and rows

# FAISS 1.15 compares with a flat index one by one as long as queries x dimensions are below
# 128 000, which suits 64 threads: with two, 100 queries of 512 dimensions take 7 times as long as
# by a product. What pays per thread is the same everywhere.
FOR_64_THREADS = 128_000
PER_THREAD = FOR_64_THREADS // 64
FEW = 256  # queries of an ordinary search
CANDIDATES = 100
# Below this many rows an exhaustive search is as fast, and exact.
SMALL = 10_000
_TRAINING_ROWS = 5_000
_QUERY_ROWS = 8_192


def by_faiss(normalizer: Normalizer, *, alone: bool = False) -> Normalizer:
    """The same normalizer, its products made by FAISS: equal vectors, up to rounding.

    Args:
        normalizer: Products that someone has set already stay.
        alone: Let one thread make them, but for searches of the background by many queries.
    """
    matmul, search = normalizer.matmul, normalizer.search
    if matmul is np.matmul or isinstance(matmul, _Product):
        matmul = _Product(alone)
    if (search is None or isinstance(search, _Neighbours)) and normalizer.background is not None:
        search = _Neighbours(normalizer.background, alone)
    return normalizer.with_products(matmul, search)


class _Product:
    """``rows @ matrix`` for a matrix that is nearly always that of the last time."""

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._last: tuple[object, Float32, faiss.LinearTransform] | None = None

    def __call__(self, rows: Float32, matrix: Float32) -> Float32:
        linear = self._linear(matrix)
        with ready_threads().turn, _one_thread(self._alone):
            product: Float32 = linear.apply(np.ascontiguousarray(rows))
        return product

    def _linear(self, matrix: Float32) -> faiss.LinearTransform:
        """FAISS's copy of a matrix."""
        key = matrix.__array_interface__["data"], matrix.shape, matrix.strides
        last = self._last
        if last is not None and last[0] == key:
            return last[2]
        linear = faiss.LinearTransform(matrix.shape[0], matrix.shape[1], False)
        faiss.copy_array_to_vector(np.ascontiguousarray(matrix.T, np.float32).ravel(), linear.A)
        linear.is_trained = True
        self._last = key, matrix, linear  # held, so that no other takes its place in memory
        return linear

    def __reduce__(self) -> tuple[type["_Product"], tuple[bool]]:
        """Without FAISS's copy."""
        return _Product, (self._alone,)


class _Neighbours:
    """The largest similarities to a background, exhaustively."""

    def __init__(self, background: Float32, alone: bool) -> None:
        self._background, self._alone = background, alone

    def __call__(self, queries: Float32, k: int) -> Float32:
        rows = len(self._background)
        if k > rows:
            raise ValueError(f"k: expected at most {rows} (the background's size), got {k}")
        ready_threads()
        alone = self._alone and len(queries) <= FEW
        with _one_thread(alone), by_product(*queries.shape):
            found = faiss.knn(queries, self._background, k, metric=faiss.METRIC_INNER_PRODUCT)
        similarities: Float32 = found[0]
        return similarities


class BackgroundSearch:
    """Neighbours in a large background: codes first, then a second look at the best.

        normalizer = normalizer.with_products(search=BackgroundSearch(normalizer.background))

    Every background descriptor is also kept as a product quantizer's code of two bits per
    dimension, compared with a query in registers (FAISS's fast scan). The best ``candidates`` of
    each query are then compared again in half precision, and the best of these are returned: of
    random vectors, which have the closest neighbours of all, 98 in 100 of the true ones.
    """

    def __init__(self, background: Float32, candidates: int = CANDIDATES) -> None:
        """Encode a background, which takes seconds for 100 000 rows.

        Args:
            background: ``(m, d)`` unit descriptors, as whitened by the normalizer.
            candidates: How many are looked at twice; more find more, and take longer.

        Raises:
            TypeError: If it does not hold floating point numbers; a normalizer without score
                normalization has no background.
            ValueError: If it is not a matrix of finite numbers, or ``candidates`` is below one.
        """
        if candidates < 1:
            raise ValueError(f"candidates: expected at least 1, got {candidates}")
        rows = as_descriptors(background, what="background")
        self._dim = rows.shape[1]
        self._candidates = candidates
        self._rows = len(rows)
        even = _even(rows)
        if len(rows) < SMALL:
            self._index: Any = faiss.IndexFlatIP(even.shape[1])
            self._index.add(even)
            return
        metric = faiss.METRIC_INNER_PRODUCT
        # The refining index does not own these two; Python must hold them.
        self._codes = faiss.IndexPQFastScan(even.shape[1], even.shape[1] // 2, 4, metric)
        self._halves = faiss.IndexScalarQuantizer(
            even.shape[1], faiss.ScalarQuantizer.QT_fp16, metric
        )
        step = max(1, len(even) // _TRAINING_ROWS)
        ready_threads()
        self._codes.train(np.ascontiguousarray(even[::step]))
        for index in (self._codes, self._halves):
            index.add(even)
        self._index = faiss.IndexRefine(self._codes, self._halves)

    def __call__(self, queries: Float32, k: int) -> Float32:
        """The ``k`` largest inner products of each query, largest first."""
        if not 1 <= k <= self._rows:
            raise ValueError(f"k: expected 1 to {self._rows} (the background's size), got {k}")
        queries = as_descriptors(queries, self._dim, "queries")
        settings: Any = None
        if isinstance(self._index, faiss.IndexRefine):
            # Not set on the index: threads that ask for different k may share it.
            settings = faiss.IndexRefineSearchParameters()
            settings.k_factor = max(1.0, min(self._candidates, self._rows) / k)
        nearest = np.empty((len(queries), k), np.float32)
        for start in range(0, len(queries), _QUERY_ROWS):
            block = _even(queries[start : start + _QUERY_ROWS])
            nearest[start : start + _QUERY_ROWS] = search(self._index, block, k, settings)[0]
        return nearest


def _even(rows: Float32) -> Float32:
    """Contiguous rows of an even number of columns: a column of zeros changes no inner product."""
    if rows.shape[1] % 2:
        rows = np.pad(rows, ((0, 0), (0, 1)))
    return np.ascontiguousarray(rows, np.float32)


def search(index: Any, queries: Float32, k: int, params: Any = None) -> Found:  # noqa: ANN401
    """``index.search`` on the CPU; flat indexes compare with everything they have."""
    with _comparing(index, queries):
        found: Found = index.search(queries, k, params=params)
    return found


def range_search(index: Any, queries: Float32, bound: float) -> tuple[Any, Float32, Any]:  # noqa: ANN401
    """``index.range_search``, likewise."""
    with _comparing(index, queries):
        found: tuple[Any, Float32, Any] = index.range_search(queries, bound)
    return found


def _comparing(index: Any, queries: Float32) -> AbstractContextManager[None]:  # noqa: ANN401
    ready_threads()
    return by_product(*queries.shape) if isinstance(index, faiss.IndexFlat) else nullcontext()


@contextmanager
def by_product(queries: int, dim: int) -> Iterator[None]:
    """Let FAISS use a matrix product for this many queries within the block, if that is faster.

    Then only one Python thread is inside at a time: callers of FAISS's BLAS wait for each other by
    spinning. FAISS's threshold is lowered meanwhile, unless someone has set it to something else,
    or it counts in another unit, as before FAISS 1.15.
    """
    enough = PER_THREAD * faiss.omp_get_max_threads()
    if queries * dim < enough:
        yield
        return
    threads = ready_threads()
    with threads.turn:
        threads.lowered = enough < faiss.cvar.distance_compute_blas_threshold == FOR_64_THREADS
        if threads.lowered:
            faiss.cvar.distance_compute_blas_threshold = enough
        try:
            yield
        finally:
            if threads.lowered and faiss.cvar.distance_compute_blas_threshold == enough:
                faiss.cvar.distance_compute_blas_threshold = FOR_64_THREADS
            threads.lowered = False


@contextmanager
def _one_thread(alone: bool) -> Iterator[None]:
    """Make FAISS use one thread within the block, for this Python thread, where it must."""
    before = faiss.omp_get_max_threads()
    if not alone or before == 1:
        yield
        return
    faiss.omp_set_num_threads(1)  # OpenMP keeps this number for each thread
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


class _Threads:
    """FAISS's threads in one process.

    Attributes:
        process: The process that has them.
        turn: Held by whoever makes a product.
        lowered: Whether the threshold of ``by_product`` is lowered just now.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.turn = threading.Lock()
        self.lowered = False


_threads: _Threads | None = None


def ready_threads() -> _Threads:
    """Call this before FAISS's threads are used: a forked process has none of its parent's.

    FAISS would wait for them forever, so a child of a process that has used them works with one. A
    lock that the parent held, and the threshold it had lowered, do not come along.
    """
    global _threads
    threads = _threads
    if threads is None or threads.process != os.getpid():
        if threads is not None:
            faiss.omp_set_num_threads(1)
            if threads.lowered:
                faiss.cvar.distance_compute_blas_threshold = FOR_64_THREADS
        _threads = threads = _Threads()
    return threads
