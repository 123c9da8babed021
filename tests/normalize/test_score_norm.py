import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sscd_vec.normalize import Normalizer, ScoreNorm, nearest_neighbours, nearest_similarities
from sscd_vec.normalize.descriptors import Float32, block_shape
from tests.normalize.made import descriptors


def test_the_bias_by_hand() -> None:
    q = np.array([[1.0, 0.0]], dtype=np.float32)
    background = np.array([[0.6, 0.8], [0.8, 0.6], [0.0, 1.0], [-1.0, 0.0]], dtype=np.float32)
    assert ScoreNorm(1.0, 1, 1).bias(q, background)[0] == pytest.approx(0.8)
    assert ScoreNorm(1.0, 2, 2).bias(q, background)[0] == pytest.approx(0.6)
    assert ScoreNorm(0.5, 1, 3).bias(q, background)[0] == pytest.approx(0.5 * 1.4 / 3)
    assert ScoreNorm(0.0).bias(q, background)[0] == 0


def test_the_authors_notation_counts_from_zero() -> None:
    assert ScoreNorm.parse("1.0[0,2]") == ScoreNorm(1.0, 1, 3)
    assert ScoreNorm.parse(" 0.75 [ 1 , 4 ]") == ScoreNorm(0.75, 2, 5)
    assert str(ScoreNorm()) == "1.0[0,2]"


@pytest.mark.parametrize(
    "text", ["", "1.0", "1.0[2,0]", "x[0,2]", "-1[0,2]", "1.0[0,2", "nan[0,1]"]
)
def test_other_notation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as '1.0"):
        ScoreNorm.parse(text)


@pytest.mark.parametrize(
    ("beta", "n", "n_end"), [(-1, 1, 3), (np.nan, 1, 3), (np.inf, 1, 3), (1, 0, 3), (1, 3, 2)]
)
def test_impossible_settings_are_refused(beta: float, n: int, n_end: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        ScoreNorm(beta, n, n_end)


@pytest.mark.parametrize(
    ("beta", "n", "n_end", "wrong"),
    [("1.0[0,2]", 1, 3, "beta: .*parse"), (1.0, 1.5, 3, "whole numbers, got 1.5 and 3")],
)
def test_settings_of_another_type_are_refused(
    beta: object, n: object, n_end: object, wrong: str
) -> None:
    with pytest.raises(TypeError, match=wrong):
        ScoreNorm(beta, n, n_end)  # type: ignore[arg-type]  # the point of the test


def test_equal_settings_have_one_fingerprint_and_can_be_saved(tmp_path: Path) -> None:
    background = descriptors(400)
    plain = Normalizer.fit(background)
    other = Normalizer.fit(background, score_norm=ScoreNorm(1, *np.array([1, 3])))
    assert other.query_fingerprint == plain.query_fingerprint
    other.save(tmp_path / "n")
    assert Normalizer.load(tmp_path / "n").score_norm == ScoreNorm()
    assert str(other.score_norm) == "1.0[0,2]"


@given(
    st.integers(0, 99),
    st.integers(1, 50),
    st.integers(1, 90),
    st.integers(1, 7),
    st.integers(4, 9000),
)
@settings(max_examples=60, deadline=None)
def test_the_blocked_search_is_exact_for_any_memory(
    seed: int, queries: int, background: int, k: int, memory: int
) -> None:
    k = min(k, background)
    q, b = descriptors(queries, 8, seed), descriptors(background, 8, seed + 1)
    product = q @ b.T
    expected = -np.sort(-product, axis=1)[:, :k]
    np.testing.assert_allclose(nearest_similarities(q, b, k, memory), expected, atol=1e-6)
    values, rows = nearest_neighbours(q, b, k, memory)
    np.testing.assert_allclose(values, expected, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(product, rows, 1), expected, atol=1e-6)
    assert np.prod(block_shape(queries, background, memory)) * 4 <= max(memory, 4)


@pytest.mark.parametrize("memory", [1 << 20, 4 << 20])
def test_memory_is_bounded_by_the_setting(memory: int) -> None:
    q, b = descriptors(3000, 8), descriptors(3000, 8, 1)
    for search in (nearest_similarities, nearest_neighbours):
        tracemalloc.start()
        search(q, b, 3, memory)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= memory + 3000 * 3 * (4 + 8) + 200_000  # the result, and small change
        assert peak > memory // 4  # and the setting is used


def test_equal_neighbours_all_count() -> None:
    q = descriptors(5, 8)
    background = np.repeat(q[:1], 4, axis=0)
    np.testing.assert_allclose(nearest_similarities(q, background, 3)[0], 1, atol=1e-6)


def test_fewer_references_than_asked_for_are_marked() -> None:
    values, rows = nearest_neighbours(descriptors(2, 8), descriptors(3, 8, 1), 5)
    assert (rows[:, 3:] == -1).all() and np.isneginf(values[:, 3:]).all()
    with pytest.raises(ValueError, match="1 to 3"):
        nearest_similarities(descriptors(2, 8), descriptors(3, 8, 1), 5)


def test_neighbours_from_an_index_in_any_order() -> None:
    q, b = descriptors(20), descriptors(200, seed=1)
    norm = ScoreNorm(1.2, 2, 4)
    asked: list[int] = []

    def search(queries: Float32, k: int) -> Float32:
        asked.append(k)
        return np.sort(queries @ b.T, axis=1)[:, -k:]  # ascending: the order must not matter

    np.testing.assert_allclose(norm.bias(q, b, search), norm.bias(q, b), atol=1e-6)
    assert asked == [4]
    with pytest.raises(ValueError, match="shape"):
        norm.bias(q, b, lambda queries, k: np.zeros((len(queries), k - 1), dtype=np.float32))
    with pytest.raises(ValueError, match="fewer neighbours"):
        norm.bias(q, b, lambda queries, k: np.full((len(queries), k), -np.inf, dtype=np.float32))
