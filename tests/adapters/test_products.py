"""FAISS computes a normalizer's products: the same vectors, and its global setting is put back."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import faiss
import numpy as np
import pytest

from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.faiss.products import FOR_64_THREADS, PER_THREAD, by_faiss, by_product
from sscd_vec.normalize import Normalizer
from sscd_vec.normalize.descriptors import Float32

from .conftest import DIM, Photos


def threshold() -> int:
    return int(faiss.cvar.distance_compute_blas_threshold)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A FAISS that counts queries x dimensions, searching with two threads."""
    before, threads = threshold(), faiss.omp_get_max_threads()
    faiss.cvar.distance_compute_blas_threshold = FOR_64_THREADS
    faiss.omp_set_num_threads(2)
    yield
    faiss.cvar.distance_compute_blas_threshold = before
    faiss.omp_set_num_threads(threads)


@pytest.mark.parametrize("kind", ["whiten", "centre", None])
def test_vectors_are_the_same_up_to_rounding(kind: str | None, photos: Photos) -> None:
    background = np.random.default_rng(3).normal(size=(900, photos.queries.shape[1]))
    background /= np.linalg.norm(background, axis=1, keepdims=True)
    normalizer = Normalizer.fit(background, whitening=kind)  # type: ignore[arg-type]
    same = by_faiss(normalizer)
    for side in ("queries", "references"):
        expected, got = getattr(normalizer, side), getattr(same, side)
        np.testing.assert_allclose(got(photos.queries), expected(photos.queries), atol=1e-6)
    assert same.reference_fingerprint == normalizer.reference_fingerprint
    assert same.query_fingerprint == normalizer.query_fingerprint


def test_a_search_of_ones_own_finds_the_neighbours(photos: Photos, normalizer: Normalizer) -> None:
    asked: list[int] = []

    def search(queries: Float32, k: int) -> Float32:
        asked.append(len(queries))
        return np.zeros((len(queries), k), np.float32)

    index = FaissIndex(normalizer)
    index.add(photos.ids, photos.references)
    biased = index.search(photos.queries, 1).scores
    index.normalizer = normalizer.with_products(search=search)
    plain = index.search(photos.queries, 1).scores
    assert asked == [len(photos.queries)]
    np.testing.assert_allclose(plain - biased, normalizer.biases(photos.queries), atol=1e-5)


def test_a_background_smaller_than_the_neighbours_asked_for_is_refused(
    photos: Photos, normalizer: Normalizer
) -> None:
    index = FaissIndex(replace(normalizer, background=photos.references[:2].copy()))
    index.add(photos.ids, photos.references)
    with pytest.raises(ValueError, match=r"at most 2 \(the background's size\), got 3"):
        index.search(photos.queries)


def test_other_descriptors_are_refused_as_ever(photos: Photos, normalizer: Normalizer) -> None:
    index = FaissIndex(normalizer)
    with pytest.raises(ValueError, match="expected unit length"):
        index.add(photos.ids, 2 * photos.references)
    with pytest.raises(ValueError, match="dimensions, got"):
        index.search(photos.queries[:, :-1])
    assert len(index) == 0


MANY = 1000  # queries of as many dimensions: enough for any machine


@pytest.mark.usefixtures("two_threads")
def test_the_threshold_is_lowered_where_a_product_pays_and_put_back() -> None:
    with by_product(100, 512):
        assert threshold() == 2 * PER_THREAD
    assert threshold() == FOR_64_THREADS
    with by_product(7, 512):
        assert threshold() == FOR_64_THREADS, "so few are compared one by one"
    faiss.omp_set_num_threads(100)
    with by_product(MANY, MANY):
        assert threshold() == FOR_64_THREADS, "never raised"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("own", [20, 0, 1_000_000])
def test_a_threshold_that_somebody_set_is_kept(own: int) -> None:
    with by_product(MANY, MANY):
        faiss.cvar.distance_compute_blas_threshold = own
    assert threshold() == own
    with by_product(MANY, MANY):
        assert threshold() == own
    assert threshold() == own


def test_one_thread_makes_products_at_a_time_and_single_queries_do_not_wait() -> None:
    inside = threading.Event()

    def product() -> None:
        with by_product(MANY, MANY):
            inside.set()

    thread = threading.Thread(target=product)
    with by_product(MANY, MANY):
        thread.start()
        with by_product(1, 512):
            pass
        assert not inside.wait(0.1)
    assert inside.wait(30)
    thread.join()


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat"])
def test_threads_that_search_at_once_find_what_one_finds(
    factory: str, photos: Photos, normalizer: Normalizer
) -> None:
    index = FaissIndex(normalizer, factory)
    index.add(photos.ids, photos.references)
    queries = np.tile(photos.queries, (10, 1))
    expected = index.search(queries, 3)
    with ThreadPoolExecutor(6) as threads:
        for found in threads.map(lambda _: index.search(queries, 3), range(12)):
            assert found.ids.tolist() == expected.ids.tolist()
            np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)


@pytest.mark.usefixtures("two_threads")
def test_a_refused_search_puts_the_threshold_back(
    photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FaissIndex(normalizer)
    index.add(photos.ids, photos.references)

    def refuse(*_: object, **__: object) -> None:
        assert threshold() == 2 * PER_THREAD
        raise RuntimeError("no")

    monkeypatch.setattr(index.index, "search", refuse)
    with pytest.raises(RuntimeError, match="no"):
        index.search(np.tile(photos.queries, (10, 1)))
    assert threshold() == FOR_64_THREADS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.parametrize("factory", ["Flat", "HNSW16"])
def test_a_forked_process_searches_and_adds(factory: str) -> None:
    # In a process of its own: this one has threads that a fork would leave behind.
    script = f"""
import os, numpy as np
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.normalize import Normalizer

rows = np.random.default_rng(0).normal(size=(900, {DIM})).astype(np.float32)
rows /= np.linalg.norm(rows, axis=1, keepdims=True)
index = FaissIndex(Normalizer.fit(rows), "{factory}")
index.add(range(800), rows[:800])
index.search(rows, 1)
child = os.fork()
if not child:
    one = index.search(rows[:1], 1).ids.tolist()
    many = index.search(rows[:800], 1).ids.tolist()
    index.add(range(800, 900), rows[800:])
    os._exit(0 if one == [0] and many == list(range(800)) and len(index) == 900 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert ended.stdout.strip() == b"0", ended.stderr.decode()
