"""Matrix products by FAISS, with the threads that search before and after them.

After a product numpy's BLAS threads wait for the next one by spinning, for some 30 ms, in which
FAISS's would have to share their processor cores with them.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import faiss
import numpy as np

from sscd_vec.normalize import Normalizer
from sscd_vec.normalize.descriptors import Float32

# FAISS 1.15 compares with a flat index one by one as long as queries x dimensions are below
# 128 000, which suits 64 threads: with two, 100 queries of 512 dimensions take 7 times as long as
# by a product. What pays per thread is the same everywhere.
FOR_64_THREADS = 128_000
PER_THREAD = FOR_64_THREADS // 64


def by_faiss(normalizer: Normalizer) -> Normalizer:
    """The same normalizer, its products computed by FAISS: equal vectors, up to rounding."""
    whitening, background = normalizer.whitening, normalizer.background
    search = normalizer.search
    if search is None and background is not None:

        def search(queries: Float32, k: int) -> Float32:
            if k > len(background):
                raise ValueError(
                    f"k: expected at most {len(background)} (the background's size), got {k}"
                )
            with by_product(len(queries), background.shape[1]):
                found = faiss.knn(queries, background, k, metric=faiss.METRIC_INNER_PRODUCT)
            similarities: Float32 = found[0]
            return similarities

    return normalizer.with_products(
        None if whitening is None else _Product(whitening.matrix), search
    )


def comparing(index: faiss.Index, queries: Float32) -> AbstractContextManager[None]:
    """Around a search of an index on the CPU: flat ones compare with everything they have."""
    _threads.used = True
    return by_product(*queries.shape) if isinstance(index, faiss.IndexFlat) else nullcontext()


@contextmanager
def by_product(queries: int, dim: int) -> Iterator[None]:
    """Within the block, FAISS compares so many queries by a matrix product if that is faster.

    Then only one Python thread is inside at a time: callers of FAISS's BLAS wait for each other by
    spinning. FAISS's threshold is lowered meanwhile, unless somebody has set it to something else,
    or it counts in another unit, as before FAISS 1.15.
    """
    enough = PER_THREAD * faiss.omp_get_max_threads()
    if queries * dim < enough:
        yield
        return
    with _threads.lock:
        lowered = enough < faiss.cvar.distance_compute_blas_threshold == FOR_64_THREADS
        if lowered:
            faiss.cvar.distance_compute_blas_threshold = enough
        try:
            yield
        finally:
            if lowered and faiss.cvar.distance_compute_blas_threshold == enough:
                faiss.cvar.distance_compute_blas_threshold = FOR_64_THREADS


class _Product:
    """Rows times one matrix, by FAISS."""

    def __init__(self, weights: Float32) -> None:
        """Take the ``(dim, dim_in)`` matrix of a whitening."""
        self._linear = faiss.LinearTransform(weights.shape[1], weights.shape[0], False)
        faiss.copy_array_to_vector(weights.ravel().astype(np.float32), self._linear.A)
        self._linear.is_trained = True

    def __call__(self, rows: Float32, matrix: Float32) -> Float32:
        """As ``numpy.matmul``, for the transpose of the matrix above."""
        with _threads.lock:
            _threads.used = True
            projected: Float32 = self._linear.apply(rows)
        return projected


class _Threads:
    """Whose turn it is to use FAISS's threads for a product, and what a forked process has of them.

    Once they exist they do not come along to a forked child, and FAISS would wait for them forever:
    there it works with one.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.used = False
        if hasattr(os, "register_at_fork"):
            # Nobody may be inside while the process is copied, with the threshold lowered.
            os.register_at_fork(
                before=self.lock.acquire,
                after_in_parent=self.lock.release,
                after_in_child=self._in_child,
            )

    def _in_child(self) -> None:
        self.lock.release()
        if self.used:
            faiss.omp_set_num_threads(1)


_threads = _Threads()
