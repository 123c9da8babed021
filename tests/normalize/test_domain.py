"""Images outside are recognised, photos keep their scores, files give back the same numbers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from sscd_vec.normalize import ScoreNorm
from sscd_vec.normalize.domain import Domain

DIM = 128
Rows = NDArray[np.float32]


def unit(rows: NDArray[np.float64]) -> Rows:
    scaled: Rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def photos(count: int, seed: int = 0) -> Rows:
    return unit(np.random.default_rng(seed).normal(size=(count, DIM)))


def others(count: int, seed: int = 1) -> Rows:
    """Like documents: what they share is more than what tells them apart."""
    rng = np.random.default_rng(seed)
    return unit(rng.normal(size=(count, DIM)) / 12 + 2.0 * np.eye(DIM)[0])


@pytest.fixture(scope="module")
def fitted() -> Domain:
    return Domain.fit(photos(4000), others(200))


def test_others_lie_outside_and_photos_inside_as_promised(fitted: Domain) -> None:
    assert fitted.outside(others(500, seed=5)).all()
    assert fitted.outside(photos(20_000, seed=6)).mean() == pytest.approx(0.003, rel=0.7)


def test_a_larger_share_of_photos_moves_the_threshold(fitted: Domain) -> None:
    wide = Domain.fit(photos(4000), others(200), false_alarm=0.05)
    assert wide.threshold < fitted.threshold
    assert wide.outside(photos(20_000, seed=6)).mean() == pytest.approx(0.05, rel=0.3)


def test_margins_are_the_formula(fitted: Domain) -> None:
    rows = photos(7, seed=8)
    expected = rows.astype(float) @ fitted.direction - fitted.threshold
    np.testing.assert_allclose(fitted.margins(rows), expected, atol=1e-6)
    assert np.linalg.norm(fitted.direction) == pytest.approx(1, abs=1e-6)


def test_shifts_are_what_the_other_background_adds_to_the_bias(fitted: Domain) -> None:
    rows, norm = np.concatenate([others(5, seed=9), photos(5, seed=9)]), ScoreNorm(1.0, 1, 3)
    biases = np.full(10, 0.4, dtype=np.float32)
    nearest = np.sort(rows @ fitted.background.T, axis=1)[:, -3:].mean(axis=1)
    np.testing.assert_allclose(
        fitted.shifts(rows, biases, norm), np.maximum(nearest - 0.4, 0), atol=1e-6
    )
    assert (fitted.shifts(rows, biases, norm)[:5] > 0.3).all()


def test_strangers_of_a_kind_no_longer_score_like_copies(fitted: Domain) -> None:
    queries, norm = others(40, seed=11), ScoreNorm()
    biases = norm.bias(queries, photos(500, seed=12))
    scores = queries @ others(40, seed=13).T - biases[:, None]
    shifted = scores - fitted.shifts(queries, biases, norm)[:, None]
    assert scores.min() > 0.2
    assert shifted.max() < 0.1


def test_a_background_smaller_than_the_neighbours_counted_shifts_nothing() -> None:
    few = Domain.fit(photos(4000), others(2))
    assert not few.shifts(others(4), np.zeros(4), ScoreNorm(1.0, 1, 3)).any()


def test_arrays_give_back_the_same_domain(fitted: Domain) -> None:
    again = Domain.from_arrays(fitted.arrays())
    for name in ("direction", "background", "threshold", "false_alarm"):
        np.testing.assert_array_equal(getattr(again, name), getattr(fitted, name))
    assert all(name.startswith("domain.") for name in fitted.arrays())


def test_it_cannot_be_changed(fitted: Domain) -> None:
    with pytest.raises(ValueError, match="read-only"):
        fitted.direction[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        fitted.background[0] = 1


def test_incomplete_or_wrong_arrays_are_refused(fitted: Domain) -> None:
    arrays = fitted.arrays()
    with pytest.raises(ValueError, match=r"got none of \['domain.limits'\]"):
        Domain.from_arrays({n: a for n, a in arrays.items() if n != "domain.limits"})
    with pytest.raises(ValueError, match="expected two numbers"):
        Domain.from_arrays(arrays | {"domain.limits": np.zeros(3)})
    with pytest.raises(ValueError, match=r"expected direction \(dim,\) and background"):
        Domain.from_arrays(arrays | {"domain.direction": np.ones(DIM + 1, np.float32)})
    with pytest.raises(ValueError, match="expected finite numbers"):
        Domain.from_arrays(arrays | {"domain.limits": np.array([np.nan, 0.003])})


def test_too_few_photos_for_the_share_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 6 of 100 photos.*share of 0.003"):
        Domain.fit(photos(100), others(20))
    with pytest.raises(ValueError, match="others: expected at least two rows, got 1"):
        Domain.fit(photos(4000), others(1))


def test_other_dimensions_are_refused(fitted: Domain) -> None:
    with pytest.raises(ValueError, match="expected"):
        fitted.outside(np.zeros((3, DIM + 2), np.float32))
