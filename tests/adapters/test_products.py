"""FAISS computes a normalizer's products: the same vectors, and its global setting is put back."""

import threading
from collections.abc import Iterator

import faiss
import numpy as np
import pytest

from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.faiss.products import FOR_64_THREADS, PER_THREAD, blocked, by_faiss
from sscd_vec.normalize import Normalizer
from sscd_vec.normalize.descriptors import Float32
from tests.adapters.conftest import Photos


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
    index.normalizer = normalizer.with_search(search)
    plain = index.search(photos.queries, 1).scores
    assert asked == [len(photos.queries)]
    np.testing.assert_allclose(plain - biased, normalizer.biases(photos.queries), atol=1e-5)


def test_other_descriptors_are_refused_as_ever(photos: Photos, normalizer: Normalizer) -> None:
    index = FaissIndex(normalizer)
    with pytest.raises(ValueError, match="expected unit length"):
        index.add(photos.ids, 2 * photos.references)
    with pytest.raises(ValueError, match="dimensions, got"):
        index.search(photos.queries[:, :-1])
    assert len(index) == 0


@pytest.mark.usefixtures("two_threads")
def test_blocks_lower_the_threshold_and_put_it_back() -> None:
    with blocked():
        assert threshold() == 2 * PER_THREAD
    assert threshold() == FOR_64_THREADS
    faiss.omp_set_num_threads(100)
    with blocked():
        assert threshold() == FOR_64_THREADS, "never raised"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("own", [20, 0, 1_000_000])
def test_a_threshold_that_somebody_set_is_kept(own: int) -> None:
    faiss.cvar.distance_compute_blas_threshold = own
    with blocked():
        assert threshold() == own
    assert threshold() == own


@pytest.mark.usefixtures("two_threads")
def test_blocks_that_overlap_put_it_back_last() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with blocked():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with blocked():
        thread.start()
        assert entered.wait(10)
    assert threshold() == 2 * PER_THREAD, "the other one is still inside"
    leave.set()
    thread.join()
    assert threshold() == FOR_64_THREADS


@pytest.mark.usefixtures("two_threads")
def test_a_refused_search_puts_it_back(
    photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FaissIndex(normalizer)
    index.add(photos.ids, photos.references)

    def refuse(*_: object) -> None:
        assert threshold() < FOR_64_THREADS
        raise RuntimeError("no")

    monkeypatch.setattr(index.index, "search", refuse)
    with pytest.raises(RuntimeError, match="no"):
        index.search(photos.queries)
    assert threshold() == FOR_64_THREADS
