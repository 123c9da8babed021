"""Few queries are transformed by one BLAS thread, many by all; afterwards all is as before."""

import numpy as np
from threadpoolctl import threadpool_info

from sscd_vec.adapters.threads import FEW, quiet_blas


def blas_threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_threads_are_limited_for_few_rows_only() -> None:
    square = np.eye(4, dtype=np.float32)
    assert (square @ square == square).all()
    before = blas_threads()
    assert before, "numpy brings a BLAS"
    with quiet_blas(FEW):
        assert set(blas_threads()) == {1}
    assert blas_threads() == before
    with quiet_blas(FEW + 1):
        assert blas_threads() == before
