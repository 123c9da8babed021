import numpy as np
import pytest
from numpy.typing import NDArray

from accuracy.evaluation import best_overall, best_per_query, nearest


def unit_rows(count: int, dim: int, seed: int) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).standard_normal((count, dim), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


@pytest.mark.parametrize("block", [7, 1000])
@pytest.mark.parametrize("k", [1, 10])
def test_nearest_is_the_sorted_product_whatever_the_blocks(block: int, k: int) -> None:
    queries, references = unit_rows(41, 19, 0), unit_rows(271, 19, 1)
    blocks = [references[start : start + block] for start in range(0, 271, block)]
    scores, rows = nearest(queries, blocks, k)
    product = queries @ references.T
    expected = -np.sort(-product, axis=1)[:, :k]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(product, rows, 1), scores, atol=1e-6)


def test_nearest_returns_all_there_are_when_fewer_than_k() -> None:
    scores, rows = nearest(unit_rows(3, 8, 0), [unit_rows(2, 8, 1), unit_rows(2, 8, 2)], 10)
    assert scores.shape == rows.shape == (3, 4)
    assert all(sorted(row) == [0, 1, 2, 3] for row in rows.tolist())


@pytest.mark.parametrize("block", [97, 1000])
@pytest.mark.parametrize("count", [1, 400, 10**6])
@pytest.mark.parametrize("shifted", [False, True])
def test_best_overall_is_the_top_of_all_pairs(block: int, count: int, shifted: bool) -> None:
    queries, references = unit_rows(41, 19, 0), unit_rows(271, 19, 1)
    offsets = np.linspace(-0.5, 0.5, 41, dtype=np.float32) if shifted else None
    blocks = [references[start : start + block] for start in range(0, 271, block)]
    found = best_overall(queries, blocks, count, offsets)
    product = queries @ references.T + (0 if offsets is None else offsets[:, None])
    expected = -np.sort(-product.reshape(-1))[:count]
    np.testing.assert_allclose(found.scores, expected, atol=1e-6)
    np.testing.assert_allclose(product[found.queries, found.references], found.scores, atol=1e-6)
    assert len(set(zip(found.queries, found.references, strict=True))) == len(found.scores)


def test_an_offset_per_query_moves_that_query_only() -> None:
    found = best_per_query(unit_rows(5, 8, 0), [unit_rows(20, 8, 1)], 3)
    offsets = np.array([0, 1, 2, 3, 4], np.float32)
    moved = found.plus(offsets)
    np.testing.assert_array_equal(moved.references, found.references)
    np.testing.assert_allclose(moved.scores - found.scores, np.repeat(offsets, 3), atol=1e-6)
