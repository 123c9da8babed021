from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from sscd_vec.normalize import (
    Kind,
    Normalizer,
    OverlapError,
    ScoreNorm,
    Threshold,
    calibrate,
    precision_threshold,
)
from sscd_vec.normalize.calibration.nonmatches import score_nonmatches
from sscd_vec.normalize.calibration.precision import clopper_pearson
from sscd_vec.normalize.calibration.tail import Tail, exceeded_with, tail_size
from sscd_vec.normalize.descriptors import Float32, Float64


def images(count: int, seed: int, dim: int = 32) -> Float32:
    """Unrelated images: uniform on the sphere, as whitened descriptors nearly are."""
    rows = np.random.default_rng(seed).normal(size=(count, dim))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


@pytest.fixture(scope="module")
def normalizer() -> Normalizer:
    return Normalizer.fit(images(1500, 0))


# ---------------------------------------------------------------------- the tail


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


def test_the_tail_never_ends_below_the_sample() -> None:
    for seed in range(30):
        x = np.random.default_rng(seed).random(30)  # bounded by 1
        tail = Tail.fit(x, 0.0, 1.0)
        assert tail.quantile(1e-12) >= x.max() * (1 - 1e-9)


def test_a_tail_of_equal_scores_does_not_break() -> None:
    tail = Tail.fit(np.full(40, 3.0), 3.0, 0.1)
    assert tail.quantile(1e-6) == pytest.approx(3.0, abs=1e-9)


def top_of(scores: Float64) -> Float64:
    return np.asarray(-np.sort(-scores)[: tail_size(len(scores)) + 1])


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Exponential scores; the rate is a tenth of 1/n, and so extrapolated."""
    count, rate, covered, runs = 1000, 1e-4, 0, 60
    for seed in range(runs):
        scores = np.random.default_rng(seed).exponential(size=count)
        order = np.argsort(-scores)[: tail_size(count) + 1]
        _, (low, high) = exceeded_with(
            rate, scores[order], order, count, count, 0.9, resamples=100, seed=seed
        )
        covered += low <= -np.log(rate) <= high
    # A percentile bootstrap of a far quantile covers somewhat less than its nominal 90 %.
    assert 0.72 * runs <= covered <= runs


def test_inside_the_sample_the_rate_is_counted() -> None:
    scores = np.arange(1000, dtype=np.float64)[::-1]
    value, (low, high) = exceeded_with(0.2, scores, np.arange(1000), 1000, 1000, 0.95)
    assert value == 800  # 800..999 are 20 %
    assert low < value < high


def test_dependent_scores_widen_the_interval() -> None:
    scores = np.sort(np.random.default_rng(0).exponential(size=500))[::-1]
    kept = tail_size(2000) + 1
    single = np.repeat(scores, 4)[:kept]
    alone = exceeded_with(1e-4, single, np.arange(kept), 2000, 2000, 0.95)[1]
    together = exceeded_with(1e-4, single, np.arange(kept) // 4, 500, 2000, 0.95)[1]
    assert together[1] - together[0] > 1.5 * (alone[1] - alone[0])


# ---------------------------------------------------------------------- false-match rates


@pytest.mark.parametrize(("rate", "bank"), [(0.02, 200), (0.02, 800), (0.3, 800)])
def test_the_rate_per_query_holds_on_images_never_seen(
    normalizer: Normalizer, rate: float, bank: int
) -> None:
    threshold = normalizer.calibrate(
        images(4000, 1), images(bank, 4), false_match_rate=rate
    ).thresholds["search"]
    fresh = normalizer.scores(images(4000, 2), images(bank, 3)).max(axis=1)
    assert (fresh >= threshold.value).mean() == pytest.approx(rate, rel=0.4)
    assert threshold.interval is not None
    low, high = threshold.interval
    assert low <= np.quantile(fresh, 1 - rate) <= high
    assert not threshold.extrapolated and threshold.bank_size == bank


def test_the_rate_per_comparison_holds(normalizer: Normalizer) -> None:
    calibrated = normalizer.calibrate(images(1000, 1), false_match_rate=1e-5, per="comparison")
    fresh = normalizer.scores(images(1500, 2), images(1500, 3))
    assert 0.5e-5 <= (fresh >= calibrated.threshold()).mean() <= 2e-5


def test_rates_below_one_in_n_are_said_to_be_extrapolated(normalizer: Normalizer) -> None:
    held_out = images(600, 1)
    counted = calibrate(normalizer, held_out, false_match_rate=0.01).threshold
    far = calibrate(normalizer, held_out, false_match_rate=1e-4).threshold
    larger = calibrate(normalizer, held_out, false_match_rate=0.05, bank_size=900).threshold
    assert not counted.extrapolated and counted.note == ""
    assert far.extrapolated and "not counted" in far.note and "extrapolated" in str(far)
    assert larger.extrapolated and "upper bound" in larger.note
    assert counted.value < far.value
    assert counted.interval is not None and far.interval is not None
    width = [high - low for low, high in (counted.interval, far.interval)]
    assert width[1] > width[0]


def test_a_larger_bank_needs_a_higher_threshold(normalizer: Normalizer) -> None:
    held_out = images(1000, 1)
    values = [
        calibrate(normalizer, held_out, false_match_rate=0.02, bank_size=size).threshold.value
        for size in (10, 100, 500, 2000)
    ]
    assert values == sorted(values)
    fresh = normalizer.scores(images(1500, 2), images(2000, 3)).max(axis=1)
    assert (fresh >= values[-1]).mean() <= 0.03  # the extrapolated one bounds the rate


def test_symmetric_scores_have_their_own_threshold(normalizer: Normalizer) -> None:
    both = normalizer.calibrate(images(1200, 1), false_match_rate=0.03).calibrate(
        images(1200, 1), false_match_rate=0.03, kind="symmetric"
    )
    assert both.threshold("symmetric") < both.threshold("search")
    fresh = normalizer.symmetric_scores(images(2000, 2), images(600, 3)).max(axis=1)
    assert (fresh >= both.threshold("symmetric")).mean() == pytest.approx(0.03, rel=0.5)
    assert both.reference_fingerprint == normalizer.reference_fingerprint
    assert both.query_fingerprint != normalizer.query_fingerprint


def test_tiled_scores_have_their_own_threshold(normalizer: Normalizer) -> None:
    tiles, references = images(600 * 5, 1), images(300, 2)
    groups = np.repeat(np.arange(600), 5)
    tiled = calibrate(
        normalizer, tiles, references, false_match_rate=0.05, kind="tiled", query_groups=groups
    ).threshold
    single = calibrate(normalizer, tiles[::5], references, false_match_rate=0.05).threshold
    assert tiled.value > single.value
    fresh = normalizer.scores(images(1500 * 5, 3), images(300, 4)).max(axis=1)
    assert (fresh.reshape(1500, 5).max(axis=1) >= tiled.value).mean() == pytest.approx(
        0.05, rel=0.5
    )
    with pytest.raises(ValueError, match="consecutive"):
        calibrate(
            normalizer,
            tiles[:4],
            references,
            false_match_rate=0.05,
            kind="tiled",
            query_groups=[0, 1, 0, 1],
        )
    with pytest.raises(ValueError, match="'tiled' only"):
        calibrate(normalizer, tiles, references, false_match_rate=0.05, query_groups=groups)


@pytest.mark.parametrize("bank", [1, 3, 7])
@pytest.mark.parametrize("memory", [1, 1 << 20])
def test_blocks_of_nonmatches_agree_with_the_plain_way(bank: int, memory: int) -> None:
    q, r = images(12, 1), images(14, 2)
    q_groups, r_groups = np.arange(12) // 3, np.arange(14) // 2
    q_bias = np.linspace(0, 0.3, 12, dtype=np.float32)
    r_bias = np.linspace(0.2, 0, 14, dtype=np.float32)
    found = score_nonmatches(q, r, q_bias, r_bias, q_groups, r_groups, bank, 5, memory=memory)
    scores = q @ r.T - np.maximum(q_bias[:, None], r_bias[None])
    pairs = scores.reshape(4, 3, 7, 2).max(axis=(1, 3))
    chosen = np.random.default_rng(0).permutation(7)[: 7 // bank * bank]
    maxima = pairs[:, chosen].reshape(4, -1, bank).max(axis=2)
    np.testing.assert_allclose(found.top, -np.sort(-maxima.ravel())[:5], atol=1e-6)
    assert found.count == maxima.size and found.queries == 4
    assert tuple(found.highest_pairs[0]) == np.unravel_index(pairs.argmax(), pairs.shape)
    np.testing.assert_allclose(np.sort(found.sample), np.sort(pairs.ravel()), atol=1e-6)


def test_the_background_alone_is_split_never_scored_against_itself() -> None:
    made = Normalizer.fit(images(4000, 0))
    threshold = made.calibrate(false_match_rate=0.02).thresholds["search"]
    assert "1000 queries, 1000 references, bias from the other 2000 rows" in threshold.note
    fresh = made.scores(images(3000, 2), images(1000, 3)).max(axis=1)
    # The split's smaller background gives smaller biases: the threshold errs to the safe side.
    assert 0.002 <= (fresh >= threshold.value).mean() <= 0.03


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_a_whitening_is_not_calibrated_on_the_few_rows_it_was_fitted_on(eps: float) -> None:
    few = Normalizer.fit(images(900, 0, dim=100), eps=eps)
    with pytest.raises(ValueError, match="at least 1000 rows, got 900.*other images"):
        few.calibrate(false_match_rate=0.05)
    held_out = few.calibrate(images(450, 1, dim=100), false_match_rate=0.05)
    fresh = few.scores(images(3000, 2, dim=100), images(225, 3, dim=100)).max(axis=1)
    assert 0.02 <= (fresh >= held_out.threshold()).mean() <= 0.1


@pytest.mark.parametrize(("mode", "rows"), [("whiten", 1000), ("centre", 400)])
def test_with_rows_enough_the_background_alone_does_not_promise_too_much(
    mode: Literal["whiten", "centre"], rows: int
) -> None:
    """Ten rows per dimension; centring has nothing to overfit but the mean."""
    made = Normalizer.fit(images(rows, 0, dim=100), whitening=mode)
    threshold = made.calibrate(false_match_rate=0.05).threshold()
    fresh = made.scores(images(3000, 2, dim=100), images(rows // 4, 3, dim=100)).max(axis=1)
    assert (fresh >= threshold).mean() <= 0.075


def test_images_on_two_sides_are_refused(normalizer: Normalizer) -> None:
    with pytest.raises(OverlapError, match="background rows are also among the queries"):
        calibrate(normalizer, images(1500, 0), images(300, 3), false_match_rate=0.1)
    with pytest.raises(OverlapError, match="queries are also among the references"):
        calibrate(normalizer, images(300, 3), images(300, 3), false_match_rate=0.1)


def test_pairs_name_the_rows_that_were_given(normalizer: Normalizer) -> None:
    held_out = images(400, 3)
    near = held_out[7] + 0.3 * held_out[200]
    held_out[311] = near / np.linalg.norm(near)  # an unnoticed copy, on whichever side
    for seed in range(8):
        found = calibrate(normalizer, held_out, false_match_rate=0.1, seed=seed)
        if set(found.highest_pairs[0].tolist()) == {7, 311}:
            break
    else:
        raise AssertionError("no split put the copies on two sides")
    held_out[311] = held_out[7]
    with pytest.raises(OverlapError) as caught:
        calibrate(normalizer, held_out, false_match_rate=0.1, seed=seed)
    assert set(np.asarray(caught.value.pairs).ravel().tolist()) == {7, 311}


def test_requests_that_make_no_sense_are_refused(normalizer: Normalizer) -> None:
    z = images(300, 1)
    with pytest.raises(ValueError, match="one of false_match_rate and precision"):
        calibrate(normalizer, z)
    with pytest.raises(ValueError, match="one of false_match_rate and precision"):
        calibrate(normalizer, z, false_match_rate=0.1, precision=0.9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(normalizer, z, false_match_rate=0)
    with pytest.raises(ValueError, match="at least 100"):
        calibrate(normalizer, images(20, 1), false_match_rate=0.1)
    for size in (0, -5, 2.5):
        with pytest.raises(ValueError, match=f"bank_size: expected .* at least 1, got {size}"):
            calibrate(normalizer, z, false_match_rate=0.1, bank_size=size)  # type: ignore[arg-type]  # 2.5
    with pytest.raises(ValueError, match="got neither with kind='tiled'"):
        calibrate(normalizer, z, images(200, 2), false_match_rate=0.1, kind="tiled")
    with pytest.raises(ValueError, match="no background"):
        calibrate(Normalizer.identity(32), false_match_rate=0.1)
    with pytest.raises(ValueError, match="is_match"):
        calibrate(normalizer, z, precision=0.9)


# ---------------------------------------------------------------------- precision


def labelled(count: int, seed: int) -> tuple[Float64, NDArray[np.bool_]]:
    random = np.random.default_rng(seed)
    match = random.random(count) < 0.3
    return np.asarray(random.normal(size=count) + 2.0 * match), match


def test_the_precision_holds_on_pairs_never_seen() -> None:
    covered = 0
    fresh, truth = labelled(200_000, 999)
    order = np.argsort(-fresh)
    precision = np.cumsum(truth[order]) / np.arange(1, len(order) + 1)
    exact = fresh[order][np.flatnonzero(precision >= 0.9)[-1]]
    for seed in range(20):
        threshold = precision_threshold(*labelled(2000, seed), 0.9, seed=seed).threshold
        assert threshold.interval is not None
        covered += threshold.interval[0] <= exact <= threshold.interval[1]
        assert truth[fresh >= threshold.value].mean() == pytest.approx(0.9, abs=0.04)
    assert covered >= 17


def test_precision_by_hand() -> None:
    scores = np.array([9, 8, 7, 6, 5, 4.0])
    match = np.array([1, 1, 0, 1, 0, 0], dtype=bool)
    found = precision_threshold(scores, match, 0.75)
    assert found.threshold.value == 5.5  # 3 of 4 down to 6; halfway to 5
    assert found.match_scores.tolist() == [9, 8, 6]
    assert "3 of 4 accepted" in found.threshold.note
    assert precision_threshold(scores, match, 0.8).threshold.value == 7.5
    assert precision_threshold(scores, match, 0.5).threshold.value == 4.0
    with pytest.raises(ValueError, match="no threshold reaches 0.9.*best.*0.500"):
        precision_threshold([3.0, 3.0, 1.0], [True, False, False], 0.9)  # a tie goes in whole


def test_precision_from_descriptors_and_labels(normalizer: Normalizer) -> None:
    originals = images(400, 5)
    noise = images(400, 6)
    copies = originals + 0.5 * noise
    copies /= np.linalg.norm(copies, axis=1, keepdims=True)
    q, r = np.concatenate([copies, copies]), np.concatenate([originals, np.roll(originals, 1, 0)])
    match = np.repeat([True, False], 400)
    kinds: tuple[Kind, ...] = ("search", "symmetric")
    for kind in kinds:
        made = normalizer.calibrate(q, r, match, precision=0.95, kind=kind)
        every = normalizer.scores(q, r) if kind == "search" else normalizer.symmetric_scores(q, r)
        accepted = np.diag(every) >= made.threshold(kind)
        assert match[accepted].mean() >= 0.95 and accepted.sum() >= 400
        assert made.thresholds[kind].target == "precision"


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [  # quantiles of the beta distribution, from scipy
        (0, 10, 0.0, 1 - 0.025 ** (1 / 10)),
        (10, 10, 0.025 ** (1 / 10), 1.0),
        (5, 10, 0.18708602844739855, 0.8129139715526015),
        (90, 100, 0.8237774022599773, 0.9509953107785141),
    ],
)
def test_clopper_pearson(hits: int, trials: int, low: float, high: float) -> None:
    assert clopper_pearson(hits, trials) == pytest.approx((low, high), abs=1e-9)


def test_thresholds_speak(normalizer: Normalizer) -> None:
    threshold = Threshold(0.5)
    assert str(threshold) == "search: score >= 0.5000"
    assert Threshold.from_dict(threshold.to_dict()) == threshold
    with pytest.raises(ValueError, match="NaN"):
        Threshold(float("nan"))
    assert normalizer.with_score_norm(ScoreNorm(0.5)).thresholds == {}
