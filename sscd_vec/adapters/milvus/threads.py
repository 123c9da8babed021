"""Threads of numpy's BLAS, kept out of the way of a Milvus on the same machine.

After a matrix product OpenBLAS's threads wait for the next one by spinning, for some 30 ms. What is
sent to a Milvus in that time has to share its processor cores with them: rows took a third longer.
So the few queries of an ordinary search are transformed by one thread, which takes a millisecond,
and so are rows; large batches of queries, where the product itself counts, by all of them.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from threadpoolctl import ThreadpoolController

FEW = 256  # queries


def quiet_blas(rows: int) -> AbstractContextManager[None]:
    """Within the block, products are made by one thread if so few rows are few."""
    return one_blas_thread() if rows <= FEW else nullcontext()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within the block, products are made by one thread.

    Blocks of several Python threads may overlap: the first one limits, the last one restores.
    """
    _limit.enter()
    try:
        yield
    finally:
        _limit.leave()


class _Limit:
    """One BLAS thread for as long as anybody is inside.

    Not threadpoolctl's own context: it describes every library again each time (a tenth of a
    millisecond), and of two that overlap the second would restore what the first one had set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[int] = []

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = [library.num_threads for library in _blas()]
                for library in _blas():
                    library.set_num_threads(1)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for library, threads in zip(_blas(), self._before, strict=True):
                    library.set_num_threads(threads)


_limit = _Limit()


@lru_cache(maxsize=1)
def _blas() -> list[Any]:
    """The BLAS libraries loaded by now; looking for them takes milliseconds, so once.

    Not those whose threads are OpenMP's, such as FAISS's own, which sleep soon.
    """
    loaded = ThreadpoolController().select(user_api="blas").lib_controllers
    return [each for each in loaded if each.info().get("threading_layer") != "openmp"]
