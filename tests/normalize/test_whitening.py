import logging
from collections.abc import Iterator

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sscd_vec.normalize import Whitening
from sscd_vec.normalize.descriptors import Float32, as_descriptors
from tests.normalize.made import descriptors


@given(st.integers(0, 1000), st.integers(2, 12), st.integers(20, 60))
@settings(max_examples=25, deadline=None)
def test_the_whitened_covariance_is_the_identity(seed: int, dim: int, factor: int) -> None:
    background = descriptors(dim * factor, dim, seed)
    projected = Whitening.fit(background).project(background).astype(np.float64)
    np.testing.assert_allclose(projected.mean(axis=0), 0, atol=1e-3)
    covariance = np.cov(projected.T, bias=True).reshape(dim, dim)
    np.testing.assert_allclose(covariance, np.eye(dim), atol=2e-3)


@pytest.mark.parametrize(("mode", "power"), [("whiten", -0.5), ("centre", 0.0)])
@pytest.mark.parametrize("dim", [24, 16])
def test_equal_to_faiss_after_l2_up_to_sign(mode: str, power: float, dim: int) -> None:
    background, z = descriptors(3000), descriptors(50, seed=1)
    matrix = faiss.PCAMatrix(24, dim, power)
    matrix.train(background)
    theirs = matrix.apply(z)
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    ours = Whitening.fit(background, "whiten" if mode == "whiten" else "centre", dim).apply(z)
    signs = np.sign((ours * theirs).sum(axis=0))
    np.testing.assert_allclose(ours * signs, theirs, atol=2e-5)


def test_faiss_scales_by_the_root_of_n_and_we_do_not() -> None:
    background = descriptors(2000)
    matrix = faiss.PCAMatrix(24, 24, -0.5)
    matrix.train(background)
    ours = Whitening.fit(background).project(background)
    assert np.abs(ours).mean() / np.abs(matrix.apply(background)).mean() == pytest.approx(
        np.sqrt(2000), rel=1e-3
    )


def test_batches_give_what_one_array_gives() -> None:
    background = descriptors(1000)

    def parts() -> Iterator[Float32]:
        yield from np.split(background, [1, 7, 500])

    whole, streamed = Whitening.fit(background), Whitening.fit(parts())
    assert streamed.count == 1000
    np.testing.assert_allclose(whole.mean, streamed.mean, atol=1e-7)
    np.testing.assert_allclose(whole.apply(background), streamed.apply(background), atol=1e-5)


def test_float64_accumulation_survives_a_large_offset() -> None:
    random = np.random.default_rng(0)
    background = (1000 + random.normal(size=(4000, 5))).astype(np.float32)
    projected = Whitening.fit(background).project(background).astype(np.float64)
    np.testing.assert_allclose(np.cov(projected.T, bias=True), np.eye(5), atol=2e-3)


def test_any_permutation_of_rows_permutes_the_result() -> None:
    background, z = descriptors(500), descriptors(60, seed=2)
    order = np.random.default_rng(0).permutation(60)
    fitted = Whitening.fit(background)
    np.testing.assert_allclose(fitted.apply(z)[order], fitted.apply(z[order]), atol=1e-6)


def test_centring_keeps_distances_and_whitening_does_not() -> None:
    background, z = descriptors(500), descriptors(10, seed=3)
    distances = np.linalg.norm(z[:, None] - z[None], axis=2)
    for mode, kept in (("centre", True), ("whiten", False)):
        y = Whitening.fit(background, "centre" if mode == "centre" else "whiten").project(z)
        assert (
            np.allclose(np.linalg.norm(y[:, None] - y[None], axis=2), distances, atol=1e-5) is kept
        )


def test_full_shrinkage_is_centring() -> None:
    background, z = descriptors(500), descriptors(10, seed=3)
    shrunk = Whitening.fit(background, "whiten", eps=1.0).apply(z)
    np.testing.assert_allclose(shrunk, Whitening.fit(background, "centre").apply(z), atol=1e-5)


@pytest.mark.parametrize("count", [2, 10, 24])
def test_too_few_rows_are_refused_with_a_remedy(count: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} rows vary in {count - 1} directions.*oas"):
        Whitening.fit(descriptors(count))


def test_hardly_any_shrinkage_does_not_let_a_few_rows_explode() -> None:
    with pytest.raises(ValueError, match="10 rows vary in 9 directions"):
        Whitening.fit(descriptors(10), eps=1e-10)
    same = np.repeat(descriptors(1), 50, axis=0)
    for eps in (0.0, 0.5):
        with pytest.raises(ValueError, match="all rows are the same"):
            Whitening.fit(same, eps=eps)


def test_a_collapsed_dimension_is_refused_and_fewer_dimensions_work() -> None:
    background = descriptors(500)
    background[:, 3] = 0
    background /= np.linalg.norm(background, axis=1, keepdims=True)
    with pytest.raises(ValueError, match="vary in 23 directions"):
        Whitening.fit(background)
    assert Whitening.fit(background, dim=20).apply(background).shape == (500, 20)


def test_oas_shrinkage_tames_a_tiny_background() -> None:
    fitted = Whitening.fit(descriptors(20), eps="oas")
    assert 0 < fitted.eps < 1
    gains = np.linalg.norm(fitted.matrix, axis=1)
    assert gains.max() / gains.min() < 30
    assert Whitening.fit(descriptors(20000), eps="oas").eps < 0.01


def test_a_small_background_is_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Whitening.fit(descriptors(100))
    assert "from 100 rows" in caplog.text


def test_l2_before_makes_length_irrelevant() -> None:
    background, z = descriptors(500), descriptors(10, seed=3)
    scale = np.linspace(1, 9, 500, dtype=np.float32)[:, None]
    fitted = Whitening.fit(background * scale, l2_before=True)
    np.testing.assert_allclose(fitted.apply(z * 7), Whitening.fit(background).apply(z), atol=1e-5)


def test_what_is_refused() -> None:
    fitted = Whitening.fit(descriptors(500))
    z = descriptors(3)
    with pytest.raises(ValueError, match="expected 24 dimensions, got 23"):
        fitted.apply(z[:, :23])
    with pytest.raises(ValueError, match="expected unit length, got lengths from 2 to 2"):
        fitted.apply(2 * z)
    with pytest.raises(TypeError, match="dtype int64"):
        fitted.apply(np.ones((2, 24), dtype=np.int64))
    with pytest.raises(ValueError, match="shape"):
        fitted.apply(np.ones((2, 3, 24)))
    for bad in (np.nan, np.inf):
        z = descriptors(3)
        z[1, 5] = bad
        with pytest.raises(ValueError, match=r"1 of 3 rows \(first: row 1\)"):
            fitted.apply(z)
    huge = np.full((2, 24), 3e38, dtype=np.float32)  # their sum is infinite, they are not
    assert as_descriptors(huge) is huge
    with pytest.raises(ValueError, match="no direction"):
        Whitening.fit(descriptors(500), l2_before=True).apply(np.zeros((1, 24)))
    with pytest.raises(ValueError, match="1 to 24"):
        Whitening.fit(descriptors(500), dim=25)
    with pytest.raises(ValueError, match="at least 2 rows, got 0"):
        Whitening.fit(iter([]))
    with pytest.raises(ValueError, match="read-only"):
        fitted.mean[0] = 1
