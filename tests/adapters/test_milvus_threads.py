"""Few queries are transformed by one BLAS thread, many by all; afterwards all is as before."""

import threading

import numpy as np
from threadpoolctl import threadpool_info

from sscd_vec.adapters.milvus.threads import FEW, quiet_blas


def blas_threads(openmp: bool = False) -> list[int]:
    """Threads of each BLAS with threads of its own, or of each that uses OpenMP's."""
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return [
        pool["num_threads"] for pool in pools if (pool.get("threading_layer") == "openmp") == openmp
    ]


def test_threads_are_limited_for_few_rows_only() -> None:
    square = np.eye(4, dtype=np.float32)
    assert (square @ square == square).all()
    before = blas_threads()
    assert before, "numpy brings a BLAS"
    searching = blas_threads(openmp=True)
    with quiet_blas(FEW):
        assert set(blas_threads()) == {1}
        assert blas_threads(openmp=True) == searching, "FAISS keeps its threads"
    assert blas_threads() == before
    with quiet_blas(FEW + 1):
        assert blas_threads() == before


def test_overlapping_searches_restore_the_threads() -> None:
    before = blas_threads()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with quiet_blas(1):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with quiet_blas(1):
        thread.start()
        assert entered.wait(10)
    assert set(blas_threads()) == {1}, "the other one is still inside"
    leave.set()
    thread.join()
    assert blas_threads() == before
