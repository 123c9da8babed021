"""Threads of numpy's BLAS, kept out of the way of an index's own.

After a matrix product OpenBLAS's threads wait for the next one by spinning, for some 30 ms. A
search that begins in that time has to share its processor cores with them: FAISS's inverted lists
took half as long again. So the few queries of an ordinary search are transformed by one thread,
which takes a millisecond; large batches, where the product itself counts, by all of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from threadpoolctl import ThreadpoolController

FEW = 256  # queries


@contextmanager
def quiet_blas(rows: int) -> Iterator[None]:
    """Within the block, products over so few rows are made by one thread."""
    if rows > FEW:
        yield
        return
    with _controller().limit(limits=1, user_api="blas"):
        yield


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    """Knows the BLAS libraries loaded by now; looking for them takes milliseconds, so once."""
    return ThreadpoolController()
