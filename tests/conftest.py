"""Settings of every test run."""

import os
from collections.abc import Iterator

import pytest

# Two workers with two threads each would fight over two cores; one thread each is faster. Libraries
# read this when they are first imported, and child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from or written to the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSCD_VEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
