"""FAISS computes a normalizer's products: the same vectors, and its global setting is put back."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import faiss
import numpy as np
import pytest

from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.products import FOR_64_THREADS, PER_THREAD, by_faiss, by_product
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
def test_one_thread_makes_products_beside_a_milvus_and_faiss_keeps_its_own(
    photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    knn: Any = faiss.knn
    apply: Any = faiss.LinearTransform.apply

    def counting(*arguments: object, **options: object) -> object:
        asked.append(faiss.omp_get_max_threads())
        return knn(*arguments, **options)

    def applying(self: faiss.LinearTransform, rows: Float32) -> object:
        asked.append(faiss.omp_get_max_threads())
        return apply(self, rows)

    monkeypatch.setattr(faiss, "knn", counting)
    monkeypatch.setattr(faiss.LinearTransform, "apply", applying)
    alone, together = by_faiss(normalizer, alone=True), by_faiss(normalizer)
    alone.queries(photos.queries)
    assert asked == [1, 1] and faiss.omp_get_max_threads() == 2
    together.queries(photos.queries)
    by_faiss(alone).queries(photos.queries)  # taken over by a FAISS index
    assert asked[2:] == [2] * 4
    asked.clear()
    alone.queries(np.tile(photos.queries, (10, 1)))
    assert asked == [1, 2], "many queries are worth all threads"
    alone.references(photos.references)
    assert asked[2:] == [1] and faiss.omp_get_max_threads() == 2


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


def test_products_survive_a_pickle(photos: Photos, normalizer: Normalizer) -> None:
    same = by_faiss(normalizer)
    again = pickle.loads(pickle.dumps(same.matmul))
    assert normalizer.whitening is not None
    matrix = normalizer.whitening.matrix
    for product in (same.matmul, again):
        np.testing.assert_allclose(
            product(photos.queries, matrix.T), photos.queries @ matrix.T, atol=1e-5
        )


def test_a_product_with_another_matrix_is_not_that_of_the_last(photos: Photos) -> None:
    product = by_faiss(Normalizer.identity(DIM)).matmul
    rng = np.random.default_rng(0)
    for _ in range(20):  # matrices that are freed leave their place in memory to the next
        matrix = rng.normal(size=(DIM, 7)).astype(np.float32)
        np.testing.assert_allclose(
            product(photos.queries, matrix), photos.queries @ matrix, atol=1e-5
        )


# ---------------------------------------------------------------------- forks

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")


def forked(script: str) -> None:
    """Run a script that prints 0, in a process of its own: a fork leaves this one's threads."""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert ended.stdout.strip() == b"0", ended.stderr.decode()


@FORKS
@pytest.mark.parametrize("whitening", ["whiten", None])
@pytest.mark.parametrize("factory", ["Flat", "HNSW16"])
def test_a_forked_process_searches_and_adds(factory: str, whitening: str | None) -> None:
    forked(f"""
import os
os.environ["OMP_NUM_THREADS"] = "2"
import numpy as np
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.normalize import Normalizer

rows = np.random.default_rng(0).normal(size=(900, {DIM})).astype(np.float32)
rows /= np.linalg.norm(rows, axis=1, keepdims=True)
rules = Normalizer.fit(rows, whitening={whitening!r}, score_norm=None)
index = FaissIndex(rules, "{factory}")
index.add(range(800), rows[:800])
index.search(rows, 1)
child = os.fork()
if not child:
    index.add(range(800, 900), rows[800:])
    one = index.search(rows[:1], 1).ids.tolist()
    many = index.search(rows[:800], 1).ids.tolist()
    os._exit(0 if one == [0] and many == list(range(800)) and len(index) == 900 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


@FORKS
def test_a_fork_in_the_middle_of_a_product_leaves_neither_lock_nor_threshold() -> None:
    forked("""
import os
os.environ["OMP_NUM_THREADS"] = "2"
import threading
import faiss
from sscd_vec.adapters.products import FOR_64_THREADS, by_product

inside, leave = threading.Event(), threading.Event()

def product():
    with by_product(1000, 1000):
        inside.set()
        leave.wait()

thread = threading.Thread(target=product)
thread.start()
inside.wait()
child = os.fork()
if not child:
    with by_product(1000, 1000):  # would wait forever for the parent's thread
        pass
    os._exit(int(faiss.cvar.distance_compute_blas_threshold != FOR_64_THREADS))
leave.set()
thread.join()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code or int(faiss.cvar.distance_compute_blas_threshold != FOR_64_THREADS))
""")


@FORKS
def test_importing_registers_nothing_for_forks() -> None:
    forked("""
import os, sys
hooks = []
register = os.register_at_fork
def watched(**hooked):
    if "sscd_vec" in sys._getframe(1).f_code.co_filename:
        hooks.append(hooked)
    register(**hooked)
os.register_at_fork = watched
import sscd_vec.adapters.faiss, sscd_vec.adapters.milvus
print(len(hooks))
""")
