"""The tail of strangers' scores and the curve of false matches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sscd_vec.normalize.calibration.nonmatches import NonMatches
from sscd_vec.normalize.calibration.tail import Tail, fit_curve, tail_size, unexplained_pairs
from sscd_vec.normalize.calibration.thresholds import RATES, FalseMatchCurve
from sscd_vec.normalize.descriptors import Float64


def nonmatches(scores: Float64, queries: NDArray[np.int64] | None = None) -> NonMatches:
    """Scores of one comparison each, or of so many queries, as if they had been scored."""
    query = np.arange(len(scores)) if queries is None else queries
    order = np.argsort(-scores)[:4000]
    span = float(np.abs(scores).max()) * 1.01
    histogram, edges = np.histogram(scores, 4096, (-span, span))
    return NonMatches(
        count=len(scores),
        queries=int(query.max()) + 1,
        references=1,
        one_set=False,
        histogram=histogram,
        edges=edges,
        top=scores[order],
        top_pairs=np.stack([query[order], np.zeros_like(order)], axis=1),
        sample=scores[:100],
    )


@pytest.mark.parametrize("xi", [-0.3, 0.0, 0.3])
def test_the_tail_fit_finds_its_parameters(xi: float) -> None:
    uniform = np.random.default_rng(0).random(20_000)
    excess = -np.log(uniform) if xi == 0 else (uniform**-xi - 1) / xi
    tail = Tail.fit(5 + 2 * excess, level=5.0, share=0.1)
    assert tail.shape == pytest.approx(xi, abs=0.03)
    assert tail.scale == pytest.approx(2, rel=0.04)
    ratio = np.log(1000) if xi == 0 else (1000**xi - 1) / xi
    assert tail.quantile(1e-4) == pytest.approx(5 + 2 * ratio, rel=0.08)
    assert tail.quantile(0.1) == pytest.approx(5)


def test_few_scores_leave_the_shape_near_the_prior() -> None:
    """Forty scores of a heavy tail: alone they may say anything, with the prior they do not."""
    free, held = [], []
    for seed in range(40):
        uniform = np.random.default_rng(seed).random(40)
        excess = (uniform**-0.1 - 1) / 0.1
        free.append(Tail.fit(excess, 0.0, 1.0, deviation=1e6).shape)
        held.append(Tail.fit(excess, 0.0, 1.0).shape)
    assert np.std(held) < 0.6 * np.std(free)
    assert np.abs(held).max() < 0.25 < np.abs(free).max()


def test_weights_are_repeated_scores() -> None:
    x = np.random.default_rng(0).exponential(size=300)
    times = np.random.default_rng(1).integers(0, 4, size=300)
    repeated = Tail.fit(np.repeat(x, times), 0.0, 1.0)
    weighted = Tail.fit(x, 0.0, 1.0, weights=times.astype(np.float64))
    assert weighted.shape == pytest.approx(repeated.shape, abs=0.01)
    assert weighted.scale == pytest.approx(repeated.scale, rel=0.01)


@given(st.integers(0, 999), st.floats(-0.5, 1.5), st.integers(20, 200))
@settings(max_examples=40, deadline=None)
def test_no_quantile_is_impossible(seed: int, xi: float, count: int) -> None:
    """Whatever the scores, the tail ends between their maximum's neighbourhood and the limit."""
    uniform = np.random.default_rng(seed).random(count)
    excess = -np.log(uniform) if abs(xi) < 1e-9 else (uniform**-xi - 1) / xi
    scores = 0.1 + 0.02 * excess
    scores = scores[scores < 1.0]
    if len(scores) < 10:
        return
    tail = Tail.fit(scores, 0.1, 0.01, limit=1.0)
    quantiles = tail.quantile(np.array([1e-2, 1e-4, 1e-8, 1e-12]))
    assert (np.diff(quantiles) >= 0).all() and 0.0999 <= quantiles[0] and quantiles[-1] <= 1.0
    assert tail.expected_above(1.0, 10**9) == pytest.approx(0, abs=1e-3)


def test_a_tail_of_equal_scores_does_not_break() -> None:
    tail = Tail.fit(np.full(40, 3.0), 3.0, 0.1)
    assert tail.quantile(1e-6) == pytest.approx(3.0, abs=1e-9)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Exponential scores; the rate is a tenth of 1/n, and so extrapolated."""
    rate, covered, runs = 1e-5, 0, 40
    for seed in range(runs):
        scores = np.random.default_rng(seed).exponential(size=10_000)
        curve = fit_curve(nonmatches(scores), "search", np.inf, confidence=0.9, seed=seed)
        low, high = curve.score_interval(rate, 1)
        covered += low <= -np.log(rate) <= high
        assert low <= curve.score(rate, 1) <= high
    # A percentile bootstrap of a far quantile covers somewhat less than its nominal 90 %.
    assert 0.72 * runs <= covered <= runs


def test_the_bulk_is_counted() -> None:
    scores = np.random.default_rng(0).permutation(100_000) / 100_000
    curve = fit_curve(nonmatches(scores), "search", 1.0)
    counted = RATES >= 1e-3
    np.testing.assert_allclose(curve.scores[counted][1:], 1 - RATES[counted][1:], atol=1e-3)
    assert curve.comparisons == 100_000 and curve.counted == 1e-4


def test_scores_of_one_query_widen_the_interval() -> None:
    scores = np.repeat(np.random.default_rng(0).exponential(size=2500), 4)
    alone = fit_curve(nonmatches(scores), "search", np.inf).score_interval(1e-5, 1)
    queries = np.arange(10_000) // 4
    together = fit_curve(nonmatches(scores, queries), "search", np.inf).score_interval(1e-5, 1)
    assert together[1] - together[0] > 1.3 * (alone[1] - alone[0])


def test_pairs_that_strangers_cannot_explain_are_found() -> None:
    strangers = np.random.default_rng(0).exponential(size=50_000) * 0.03
    assert unexplained_pairs(nonmatches(strangers)) == 0
    mixed = np.append(strangers, [0.8, 0.75, 0.9])
    assert unexplained_pairs(nonmatches(mixed)) == 3
    clean = fit_curve(nonmatches(strangers), "search", 1.0).score(1e-3, 1000)
    robust = fit_curve(nonmatches(mixed), "search", 1.0, leave_out=3).score(1e-3, 1000)
    fooled = fit_curve(nonmatches(mixed), "search", 1.0).score(1e-3, 1000)
    assert robust == pytest.approx(clean, abs=0.01) and fooled > clean + 0.03


def test_how_many_scores_make_a_tail() -> None:
    assert [tail_size(n) for n in (60, 10_000, 200_000, 10**9)] == [30, 50, 200, 1000]


# ---------------------------------------------------------------------- the curve


@pytest.fixture
def curve() -> FalseMatchCurve:
    """Half a decade per 0.03, as photos have about; the interval 0.02 to either side."""
    scores = -0.1 + 0.06 * -np.log10(RATES)
    return FalseMatchCurve("tiled", scores, scores - 0.02, scores + 0.02, views=10)


@given(st.floats(1e-6, 0.9), st.integers(1, 10**7), st.sampled_from([None, 1, 3, 100]))
@settings(max_examples=60, deadline=None)
def test_rate_and_score_are_inverse(rate: float, bank: int, views: int | None) -> None:
    scores = -0.1 + 0.06 * -np.log10(RATES)
    curve = FalseMatchCurve("tiled", scores, scores, scores, views=10)
    per_comparison = curve.per_comparison(rate, bank, views)
    if not RATES[-1] < per_comparison < 1:
        return
    assert curve.rate(curve.score(rate, bank, views), bank, views) == pytest.approx(rate, rel=1e-6)


def test_the_curve_by_hand(curve: FalseMatchCurve) -> None:
    at = -0.1 + 0.06 * 6  # one comparison in a million
    assert curve.rate(at, 1000) == pytest.approx(-np.expm1(-1e-3))
    assert curve.rate(at, 1000, views=30) == pytest.approx(-np.expm1(-3e-3))
    assert curve.rate(at, 100_000) == pytest.approx(-np.expm1(-0.1))
    assert curve.score(1 - np.exp(-1e-3), 1000) == pytest.approx(at)
    low, high = curve.interval(at, 1000)
    assert low < 1e-3 < high and curve.rate(at + 0.02, 1000) == pytest.approx(low)
    assert curve.score_interval(1e-3, 1000) == pytest.approx(
        (curve.score(1e-3, 1000) - 0.02, curve.score(1e-3, 1000) + 0.02)
    )
    rates = curve.rate(np.array([-5.0, at, 5.0]), 1000)
    assert rates[0] == 1 and rates[2] == pytest.approx(1e-9)


def test_a_larger_bank_needs_a_higher_score(curve: FalseMatchCurve) -> None:
    scores = [curve.score(1e-3, size) for size in (1, 10, 1000, 10**5, 10**7)]
    assert scores == sorted(scores) and len(set(scores)) == 5


def test_a_curve_that_is_none_is_refused(curve: FalseMatchCurve) -> None:
    falling = curve.scores[::-1].copy()
    with pytest.raises(ValueError, match="do not fall"):
        FalseMatchCurve("search", falling, falling, falling)
    with pytest.raises(ValueError, match="kind"):
        FalseMatchCurve("else", curve.scores, curve.low, curve.high)  # type: ignore[arg-type]
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="bank_size"):
            curve.rate(0.1, wrong)
    with pytest.raises(ValueError, match="views"):
        curve.rate(0.1, 10, views=0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        curve.score(1.0, 10)
    with pytest.raises(ValueError, match="read-only"):
        curve.scores[0] = 0
