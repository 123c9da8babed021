from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sscd_vec.adapters.faiss import BackgroundSearch
from sscd_vec.adapters.products import SMALL
from sscd_vec.normalize import Normalizer, nearest_similarities
from sscd_vec.normalize.descriptors import Float32


def unit_rows(count: int, dim: int, seed: int) -> Float32:
    rows = np.random.default_rng(seed).standard_normal((count, dim), dtype=np.float32)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


@pytest.mark.parametrize("dim", [64, 33])
def test_biases_are_nearly_those_of_the_exhaustive_search(dim: int) -> None:
    background, queries = unit_rows(SMALL + 5_000, dim, 0), unit_rows(300, dim, 1)
    normalizer = Normalizer.fit(background, whitening=None)
    searching = normalizer.with_products(search=BackgroundSearch(background))
    exact, found = normalizer.whitened_biases(queries), searching.whitened_biases(queries)
    # A neighbour that is missed is replaced by one that is hardly farther, never by a nearer one.
    assert (found <= exact + 1e-3).all()
    assert np.abs(found - exact).mean() < 0.01 * exact.std() + 1e-4
    assert not np.array_equal(found, exact)  # the codes were used


def test_all_candidates_give_the_exact_neighbours_in_half_precision() -> None:
    background, queries = unit_rows(SMALL, 32, 0), unit_rows(50, 32, 1)
    found = BackgroundSearch(background, candidates=SMALL)(queries, 5)
    exact = nearest_similarities(queries, background, 5)
    assert np.abs(found - exact).max() < 1e-3
    assert (np.diff(found, axis=1) <= 0).all()


def test_threads_that_ask_for_different_numbers_share_it() -> None:
    background, queries = unit_rows(SMALL, 32, 0), unit_rows(64, 32, 1)
    search = BackgroundSearch(background)
    alone = {k: search(queries, k) for k in (1, 3, 50)}
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda k: search(queries, k), [*alone] * 20))
    for k, nearest in zip([*alone] * 20, found, strict=True):
        np.testing.assert_allclose(nearest, alone[k], atol=1e-6)


def test_a_small_background_is_searched_exhaustively() -> None:
    background, queries = unit_rows(100, 17, 0), unit_rows(9, 17, 1)
    search = BackgroundSearch(background)
    assert np.allclose(search(queries, 3), nearest_similarities(queries, background, 3), atol=1e-6)
    assert search(queries[:0], 3).shape == (0, 3)


def test_more_queries_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sscd_vec.adapters.products._QUERY_ROWS", 4)
    background, queries = unit_rows(100, 16, 0), unit_rows(9, 16, 1)
    found = BackgroundSearch(background)(queries, 2)
    assert np.allclose(found, nearest_similarities(queries, background, 2), atol=1e-6)


def test_it_says_what_is_wrong() -> None:
    search = BackgroundSearch(unit_rows(20, 16, 0))
    with pytest.raises(ValueError, match="k: expected 1 to 20"):
        search(unit_rows(1, 16, 1), 21)
    with pytest.raises(ValueError, match="queries"):
        search(unit_rows(1, 8, 1), 3)
    with pytest.raises(ValueError, match="candidates: expected at least 1, got 0"):
        BackgroundSearch(unit_rows(20, 16, 0), candidates=0)
    with pytest.raises(TypeError, match="background: expected floating point numbers"):
        BackgroundSearch(Normalizer.identity(16).background)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="background: NaN"):
        BackgroundSearch(np.full((3, 4), np.nan, np.float32))
