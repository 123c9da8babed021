"""A normalizer whose matrix products FAISS computes, with the threads that search afterwards.

After a product numpy's BLAS threads wait for the next one by spinning, for some 30 ms, in which
FAISS's would have to share their processor cores with them. FAISS's own wait in one pool.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property

import faiss

from sscd_vec.normalize import Normalizer, Whitening
from sscd_vec.normalize.descriptors import Float32

# FAISS compares queries one by one as long as queries x dimensions are below 128 000, which suits
# 64 threads: with two, a hundred queries of 512 dimensions take 7 times as long as by a product.
FOR_64_THREADS = 128_000
PER_THREAD = FOR_64_THREADS // 64


def by_faiss(normalizer: Normalizer) -> Normalizer:
    """The same normalizer: equal vectors, up to rounding."""
    whitening, background = normalizer.whitening, normalizer.background
    search = normalizer.search
    if search is None and background is not None:

        def search(queries: Float32, k: int) -> Float32:
            with blocked():
                found = faiss.knn(queries, background, k, metric=faiss.METRIC_INNER_PRODUCT)
            similarities: Float32 = found[0]
            return similarities

    return replace(
        normalizer,
        whitening=None if whitening is None else _Whitening.like(whitening),
        search=search,
    )


@contextmanager
def blocked() -> Iterator[None]:
    """Within the block, FAISS compares with matrix products wherever its threads are few enough.

    Blocks of several Python threads may overlap: the first one sets, the last one restores. Whoever
    has set FAISS's threshold to something else keeps that, and so does a FAISS that counts in
    another unit.
    """
    _threshold.enter()
    try:
        yield
    finally:
        _threshold.leave()


class _Whitening(Whitening):
    """``Whitening`` whose product is FAISS's."""

    @classmethod
    def like(cls, other: Whitening) -> "_Whitening":
        return cls(**{each.name: getattr(other, each.name) for each in fields(other)})

    @cached_property
    def _linear(self) -> faiss.LinearTransform:
        linear = faiss.LinearTransform(self.dim_in, self.dim, False)
        faiss.copy_array_to_vector(self.matrix.ravel(), linear.A)
        linear.is_trained = True
        return linear

    def _product(self, rows: Float32) -> Float32:
        projected: Float32 = self._linear.apply(rows)
        return projected


class _Threshold:
    """FAISS's threshold, lowered for as long as anybody is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = faiss.cvar.distance_compute_blas_threshold
                if self._before == FOR_64_THREADS:
                    lowered = min(self._before, PER_THREAD * faiss.omp_get_max_threads())
                    faiss.cvar.distance_compute_blas_threshold = lowered
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                faiss.cvar.distance_compute_blas_threshold = self._before


_threshold = _Threshold()
