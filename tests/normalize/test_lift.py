import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sscd_vec.normalize import Lift, Metric, Normalizer, ScoreNorm
from sscd_vec.normalize.descriptors import Float32, Float64
from tests.normalize.made import descriptors

METRICS: tuple[Metric, ...] = ("ip", "l2", "cosine")


def measured(q: Float32, r: Float32, metric: Metric) -> Float64:
    """What an index returns, in float64."""
    a, b = q.astype(np.float64), r.astype(np.float64)
    if metric == "l2":
        return np.asarray(((a[:, None] - b[None]) ** 2).sum(axis=2))
    product = a @ b.T
    if metric == "cosine":
        product /= np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)
    return np.asarray(product)


@given(st.floats(0, 4), st.integers(0, 99), st.sampled_from(METRICS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_scores_order_and_threshold_agree_on_every_metric(
    beta: float, seed: int, metric: Metric, unit: bool
) -> None:
    background = descriptors(40, 8, seed)
    q, r = descriptors(6, 8, seed + 1), descriptors(15, 8, seed + 2)
    if not unit:
        lengths = np.random.default_rng(seed).uniform(0.1, 1.2, size=(15, 1)).astype(np.float32)
        q, r = 0.9 * q, r * lengths
    normalizer = Normalizer.fit(
        background, whitening=None, unit=unit, score_norm=ScoreNorm(beta, 1, 3)
    )
    scores = normalizer.scores(q, r).astype(np.float64)
    lifted_q, lifted_r = normalizer.queries(q), normalizer.references(r)
    assert lifted_q.shape[1] == lifted_r.shape[1] == normalizer.lifted_dim == 8 + (2 if unit else 3)
    np.testing.assert_allclose(lifted_q @ lifted_r.T, scores, atol=1e-6 * (1 + beta))

    values = measured(lifted_q, lifted_r, metric)
    tolerance = 4e-6 * (1 + beta) ** 2
    np.testing.assert_allclose(normalizer.from_metric(values, metric), scores, atol=tolerance)
    np.testing.assert_allclose(normalizer.to_metric(scores, metric), values, atol=tolerance)

    threshold = float(np.median(scores))
    clear = np.abs(scores - threshold) > tolerance
    limit = normalizer.to_metric(threshold, metric)
    passed = values < limit if metric == "l2" else values > limit
    assert (passed == (scores > threshold))[clear].all()


@given(st.floats(0, 10), st.floats(0.1, 10), st.floats(-5, 5), st.sampled_from(METRICS))
@settings(max_examples=100, deadline=None)
def test_conversion_goes_both_ways(
    beta: float, radius: float, score: float, metric: Metric
) -> None:
    lift = Lift(beta, radius, unit=radius == 1)
    there = lift.to_metric(score, metric)
    assert isinstance(there, float)
    assert lift.from_metric(there, metric) == pytest.approx(
        score, abs=1e-12 * (1 + lift.query_square + lift.reference_square)
    )


def test_all_lifted_vectors_have_one_length_and_m_depends_on_beta_alone() -> None:
    norm = ScoreNorm(1.5)
    small = Normalizer.fit(descriptors(300), score_norm=norm)
    other = Normalizer.fit(descriptors(900, seed=5), score_norm=norm)
    for normalizer in (small, other):
        assert normalizer.lift.query_square == 1 + 1.5**2
        lengths = np.linalg.norm(normalizer.queries(descriptors(50, seed=1)), axis=1)
        np.testing.assert_allclose(lengths, np.sqrt(1 + 1.5**2), atol=1e-6)
        lengths = np.linalg.norm(normalizer.references(descriptors(50, seed=1)), axis=1)
        np.testing.assert_allclose(lengths, np.sqrt(2), atol=1e-6)


def test_the_formulas_by_hand() -> None:
    lift = Lift(beta=1.0)
    z = np.array([[0.6, 0.8]], dtype=np.float32)
    q = lift.queries(z, np.array([0.5], dtype=np.float32))
    np.testing.assert_allclose(q, [[0.6, 0.8, -0.5, np.sqrt(2 - 1 - 0.25)]], atol=1e-7)
    np.testing.assert_allclose(lift.references(z), [[0.6, 0.8, 1, 0]], atol=1e-7)
    assert lift.to_metric(0.3, "l2") == pytest.approx(2 + 2 - 0.6)
    assert lift.to_metric(0.3, "cosine") == pytest.approx(0.3 / (np.sqrt(2) * np.sqrt(2)))
    assert lift.to_metric(0.3, "ip") == 0.3


@given(st.floats(0, 4), st.integers(0, 99), st.sampled_from([8, 512]))
@settings(max_examples=30, deadline=None)
def test_the_inner_product_is_the_score_to_1e_6(beta: float, seed: int, dim: int) -> None:
    """Against ``s - bias`` from the formula, in float64, on unit vectors of either size."""
    background, q, r = (descriptors(n, dim, seed + n) for n in (50, 6, 15))
    normalizer = Normalizer.fit(background, whitening=None, score_norm=ScoreNorm(beta, 2, 4))
    wide_q, wide_r, wide_b = (
        z / np.linalg.norm(z, axis=1, keepdims=True)
        for z in (x.astype(np.float64) for x in (q, r, background))
    )
    bias = beta * -np.sort(-(wide_q @ wide_b.T), axis=1)[:, 1:4].mean(axis=1)
    found = measured(normalizer.queries(q), normalizer.references(r), "ip")
    np.testing.assert_allclose(found, wide_q @ wide_r.T - bias[:, None], atol=1e-6, rtol=0)


def test_lists_are_converted_like_arrays() -> None:
    lift = Lift(1.0)
    np.testing.assert_allclose(lift.from_metric([3.4, 4.0], "l2"), [0.3, 0.0])
    np.testing.assert_allclose(lift.to_metric([0.3, 0.0], "l2"), [3.4, 4.0])


def test_the_largest_bias_does_not_make_a_nan() -> None:
    z = descriptors(3)
    normalizer = Normalizer.fit(
        np.repeat(z, 5, axis=0), whitening=None, score_norm=ScoreNorm(2.0)
    )  # every query is in the background: bias = beta, the root's argument is 0 up to rounding
    assert np.isfinite(normalizer.queries(z)).all()


def test_a_longer_vector_than_r_is_refused() -> None:
    normalizer = Normalizer.fit(
        descriptors(50), whitening=None, unit=False, max_length=2.0, score_norm=None
    )
    normalizer.references(2 * descriptors(3))
    with pytest.raises(ValueError, match=r"length 2\.1 is longer than R = 2"):
        normalizer.references(2.1 * descriptors(3))
    with pytest.raises(ValueError, match="longer than R"):
        normalizer.queries(2.1 * descriptors(3))


def test_unknown_metrics_are_refused() -> None:
    wrong: str = "L2"
    with pytest.raises(ValueError, match="expected one of"):
        Lift(1.0).to_metric(0.0, wrong)  # type: ignore[call-overload]  # what a user may type
    with pytest.raises(ValueError, match="expected one of"):
        Lift(1.0).from_metric(0.0, wrong)  # type: ignore[call-overload]  # what a user may type
