from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from sscd_vec.normalize import (
    CalibrationError,
    Kind,
    Normalizer,
    OverlapError,
    ScoreNorm,
    Threshold,
    calibrate,
    precision_threshold,
)
from sscd_vec.normalize.calibration.nonmatches import Sides, score_nonmatches
from sscd_vec.normalize.calibration.precision import clopper_pearson
from sscd_vec.normalize.descriptors import Float32, Float64


def images(count: int, seed: int, dim: int = 32) -> Float32:
    """Unrelated images: uniform on the sphere, as whitened descriptors nearly are."""
    rows = np.random.default_rng(seed).normal(size=(count, dim))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


@pytest.fixture(scope="module")
def normalizer() -> Normalizer:
    return Normalizer.fit(images(1500, 0))


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
    assert low <= threshold.value <= high
    if rate < 0.1:  # with so many false matches comparisons of a query no longer count as
        assert low <= np.quantile(fresh, 1 - rate) <= high
    assert (
        fresh >= threshold.value
    ).mean() <= 1.3 * rate  # independent; the rate is an upper bound
    assert not threshold.extrapolated and threshold.bank_size == bank


def test_the_rate_per_comparison_holds(normalizer: Normalizer) -> None:
    calibrated = normalizer.calibrate(images(1000, 1), false_match_rate=1e-5, per="comparison")
    fresh = normalizer.scores(images(1500, 2), images(1500, 3))
    assert 0.5e-5 <= (fresh >= calibrated.threshold()).mean() <= 2e-5


def test_rates_the_sample_cannot_count_are_said_to_be_extrapolated(normalizer: Normalizer) -> None:
    held_out = images(600, 1)
    counted = calibrate(normalizer, held_out, false_match_rate=0.05).threshold
    far = calibrate(normalizer, held_out, false_match_rate=1e-3).threshold
    larger = calibrate(normalizer, held_out, false_match_rate=0.05, bank_size=60_000).threshold
    assert not counted.extrapolated and counted.note == "" and counted.bank_size == 600
    for threshold in (far, larger):
        assert threshold.extrapolated and "extrapolated" in str(threshold)
        assert "fewer than ten of 359400 comparisons" in threshold.note
    assert counted.value < far.value < larger.value
    widths = [t.interval[1] - t.interval[0] for t in (counted, far) if t.interval is not None]
    assert widths[1] > widths[0]


def test_a_larger_bank_needs_a_higher_threshold(normalizer: Normalizer) -> None:
    held_out = images(1000, 1)
    values = [
        calibrate(normalizer, held_out, false_match_rate=0.02, bank_size=size).threshold.value
        for size in (10, 100, 500, 2000)
    ]
    assert values == sorted(values)
    fresh = normalizer.scores(images(1500, 2), images(2000, 3))
    for value, size in zip(values[1:], (100, 500, 2000), strict=True):
        assert (fresh[:, :size].max(axis=1) >= value).mean() == pytest.approx(0.02, rel=0.6)
    # One calibration serves banks of every size.
    stored = normalizer.calibrate(held_out, false_match_rate=0.02, bank_size=10)
    assert [stored.threshold(bank_size=size) for size in (10, 100, 500, 2000)] == values


def test_symmetric_scores_have_their_own_threshold(normalizer: Normalizer) -> None:
    both = normalizer.calibrate(images(1200, 1), false_match_rate=0.03).calibrate(
        images(1200, 1), false_match_rate=0.03, kind="symmetric"
    )
    limit = both.threshold_for(0.03, 600, "symmetric")
    assert limit < both.threshold_for(0.03, 600)
    fresh = normalizer.symmetric_scores(images(2000, 2), images(600, 3)).max(axis=1)
    assert (fresh >= limit).mean() == pytest.approx(0.03, rel=0.5)
    curve = both.curves["symmetric"]
    assert curve.comparisons + curve.left_out == 1200 * 1199 // 2  # every pair once
    assert both.reference_fingerprint == normalizer.reference_fingerprint
    assert both.query_fingerprint != normalizer.query_fingerprint


VIEWS: tuple[Kind, ...] = ("tiled", "scaled")


@pytest.mark.parametrize("kind", VIEWS)
def test_a_maximum_over_views_has_its_own_threshold(normalizer: Normalizer, kind: Kind) -> None:
    tiles, references = images(600 * 5, 1), images(300, 2)
    groups = np.repeat(np.arange(600), 5)
    made = normalizer.calibrate(
        tiles, references, false_match_rate=0.05, kind=kind, query_groups=groups
    )
    tiled = made.thresholds[kind]
    single = calibrate(normalizer, tiles[::5], references, false_match_rate=0.05).threshold
    assert tiled.value > single.value and made.curves[kind].views == 5
    fresh = normalizer.scores(images(1500 * 5, 3), images(300, 4)).max(axis=1).reshape(1500, 5)
    rates = (fresh.max(axis=1) >= tiled.value).mean(), (fresh[:, :2] >= tiled.value).any(1).mean()
    assert rates[0] == pytest.approx(0.05, rel=0.5)
    # Fewer views, fewer comparisons.
    assert made.false_match_rate(tiled.value, 300, kind) == pytest.approx(0.05, rel=1e-3)
    two = made.false_match_rate(tiled.value, 300, kind, views=2)
    assert rates[1] == pytest.approx(two, rel=0.6) and two < 0.025
    with pytest.raises(ValueError, match="consecutive"):
        calibrate(
            normalizer,
            tiles[:4],
            references,
            false_match_rate=0.05,
            kind=kind,
            query_groups=[0, 1, 0, 1],
        )
    with pytest.raises(ValueError, match="scaled or tiled only"):
        calibrate(normalizer, tiles, references, false_match_rate=0.05, query_groups=groups)


@pytest.mark.parametrize("memory", [1, 1 << 20])
@pytest.mark.parametrize("symmetric", [False, True])
def test_blocks_of_nonmatches_agree_with_the_plain_way(memory: int, symmetric: bool) -> None:
    q, r = images(12, 1), images(14, 2)
    q_groups, r_groups = np.arange(12) // 3, np.arange(14) // 2
    q_bias = np.linspace(0, 0.3, 12, dtype=np.float32)
    r_bias = np.linspace(0.2, 0, 14, dtype=np.float32) if symmetric else None
    sides = Sides(q, r, q_bias, r_bias, np.arange(12), np.arange(14))
    found = score_nonmatches(
        sides, q_groups, r_groups, 5, related=np.array([[1, 2], [3, 0]]), memory=memory
    )
    bias = q_bias[:, None] if r_bias is None else np.maximum(q_bias[:, None], r_bias[None])
    pairs = (q @ r.T - bias).reshape(4, 3, 7, 2).max(axis=(1, 3))
    pairs[[1, 3], [2, 0]] = -np.inf
    expected = np.sort(pairs[np.isfinite(pairs)])[::-1]
    np.testing.assert_allclose(found.top, expected[:5], atol=1e-6)
    assert found.count == 26 and found.queries == 4 and found.references == 7
    assert tuple(found.top_pairs[0]) == np.unravel_index(pairs.argmax(), pairs.shape)
    np.testing.assert_allclose(np.sort(found.sample)[::-1], expected, atol=1e-6)
    assert found.histogram.sum() == 26
    above = [found.histogram[found.edges[:-1] >= limit].sum() for limit in (expected[9] - 0.01,)]
    assert above[0] == (expected >= expected[9] - 0.01).sum()


@pytest.mark.parametrize("memory", [1, 1 << 20])
def test_one_array_is_compared_with_itself_each_image_with_all_others(memory: int) -> None:
    z, bias = images(9, 1), np.linspace(0, 0.3, 9, dtype=np.float32)
    rows, groups = np.arange(9), np.arange(9)
    directed = score_nonmatches(
        Sides(z, z, bias, None, rows, rows, one_set=True),
        groups,
        groups,
        100,
        related=np.array([[4, 2]]),
        memory=memory,
    )
    assert directed.count == 9 * 8 - 2 == len(directed.top)
    assert (directed.top_pairs[:, 0] != directed.top_pairs[:, 1]).all()
    symmetric = score_nonmatches(
        Sides(z, z, bias, bias, rows, rows, one_set=True), groups, groups, 100, memory=memory
    )
    assert symmetric.count == 36 == len(symmetric.top)
    assert (symmetric.top_pairs[:, 0] < symmetric.top_pairs[:, 1]).all()


def test_the_background_alone_is_split_never_scored_against_itself() -> None:
    made = Normalizer.fit(images(4000, 0))
    threshold = made.calibrate(false_match_rate=0.02).thresholds["search"]
    assert "1000 queries, 1000 references, bias from the other 2000 rows" in threshold.note
    assert threshold.bank_size == 1000
    fresh = made.scores(images(3000, 2), images(1000, 3)).max(axis=1)
    # The split's smaller background gives smaller biases: the threshold errs to the safe side.
    assert 0.002 <= (fresh >= threshold.value).mean() <= 0.03


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_a_whitening_is_not_calibrated_on_the_few_rows_it_was_fitted_on(eps: float) -> None:
    few = Normalizer.fit(images(900, 0, dim=100), eps=eps)
    with pytest.raises(ValueError, match="at least 1000 rows, got 900.*other images"):
        few.calibrate(false_match_rate=0.05)
    held_out = few.calibrate(images(450, 1, dim=100), false_match_rate=0.05)
    fresh = few.scores(images(3000, 2, dim=100), images(450, 3, dim=100)).max(axis=1)
    assert 0.02 <= (fresh >= held_out.threshold_for(0.05, 450)).mean() <= 0.1


@pytest.mark.parametrize(("mode", "rows"), [("whiten", 1000), ("centre", 400)])
def test_with_rows_enough_the_background_alone_does_not_promise_too_much(
    mode: Literal["whiten", "centre"], rows: int
) -> None:
    """Ten rows per dimension; centring has nothing to overfit but the mean."""
    made = Normalizer.fit(images(rows, 0, dim=100), whitening=mode)
    threshold = made.calibrate(false_match_rate=0.05).threshold_for(0.05, rows // 4)
    fresh = made.scores(images(3000, 2, dim=100), images(rows // 4, 3, dim=100)).max(axis=1)
    assert (fresh >= threshold).mean() <= 0.075


def test_images_on_two_sides_are_refused(normalizer: Normalizer) -> None:
    with pytest.raises(OverlapError, match="background rows are also among the queries"):
        calibrate(normalizer, images(1500, 0), images(300, 3), false_match_rate=0.1)
    with pytest.raises(OverlapError, match="queries are also among the references"):
        calibrate(normalizer, images(300, 3), images(300, 3), false_match_rate=0.1)


@pytest.fixture(scope="module")
def wide() -> Normalizer:
    """A hundred dimensions: strangers score far below copies, as photos do."""
    return Normalizer.fit(images(1500, 0, 100))


def with_near_copies(pairs: int, seed: int = 3, dim: int = 100) -> Float32:
    """Unrelated images, the first few of which nearly repeat the last few."""
    held_out = images(500, seed, dim)
    if pairs:
        held_out[:pairs] = held_out[-pairs:] + 0.2 * images(pairs, seed + 1, dim)
    held_out /= np.linalg.norm(held_out, axis=1, keepdims=True)
    return held_out


def test_pairs_far_above_the_rest_are_left_out_and_listed(wide: Normalizer) -> None:
    clean = calibrate(wide, images(500, 3, 100), false_match_rate=0.01)
    mixed = with_near_copies(2)
    found = calibrate(wide, mixed, false_match_rate=0.01)
    assert found.curve is not None and found.curve.left_out == 4  # either of each pair asks
    assert found.threshold.value == pytest.approx(clean.threshold.value, abs=0.02)
    assert clean.warnings == () and "4 pairs score far above the others" in found.warnings[0]
    listed = {frozenset(pair) for pair in found.highest_pairs[:4].tolist()}
    assert listed == {frozenset({0, 498}), frozenset({1, 499})}
    assert (np.diff(found.highest_scores) <= 0).all() and found.highest_scores[3] > 0.5
    # Said to be related, they are no longer suspicious; counted in, they raise the threshold.
    told = calibrate(wide, mixed, false_match_rate=0.01, related=[[0, 498], [499, 1]])
    assert told.warnings == () and told.highest_scores[0] < 0.5
    assert told.threshold.value == pytest.approx(clean.threshold.value, abs=0.02)
    counted = calibrate(wide, mixed, false_match_rate=0.01, leave_out=0, force=True)
    assert counted.threshold.value > clean.threshold.value + 0.03


def test_duplicates_are_refused_by_row(normalizer: Normalizer) -> None:
    held_out = images(400, 3)
    held_out[311] = held_out[7]
    with pytest.raises(OverlapError) as caught:
        calibrate(normalizer, held_out, false_match_rate=0.1)
    assert np.asarray(caught.value.pairs).tolist() == [[7, 311]]


# ---------------------------------------------------------------------- what is refused


def test_a_rate_far_below_what_the_sample_can_say_is_refused(normalizer: Normalizer) -> None:
    with pytest.raises(CalibrationError, match="too far below one in the 89700 at hand") as caught:
        normalizer.calibrate(images(300, 1), false_match_rate=1e-3, bank_size=10**6)
    assert caught.value.calibration.threshold.value <= 1
    forced = calibrate(
        normalizer, images(300, 1), false_match_rate=1e-3, bank_size=10**6, force=True
    )
    assert any("too far below" in warning for warning in forced.warnings)


@pytest.mark.parametrize(("queries", "references"), [(20, None), (10, 5000)])
def test_few_images_are_refused(
    normalizer: Normalizer, queries: int, references: int | None
) -> None:
    sides = images(queries, 1), None if references is None else images(references, 2)
    with pytest.raises(CalibrationError, match="are too few: give 4000 of 20 or more on either"):
        calibrate(normalizer, *sides, false_match_rate=0.1)
    forced = calibrate(normalizer, *sides, false_match_rate=0.1, force=True)
    assert "too few" in forced.warnings[0]


def test_a_threshold_that_could_be_anything_is_refused(wide: Normalizer) -> None:
    """Half of the images come in near-copies, too many to be left out as a few mistakes."""
    mixed = with_near_copies(40)
    with pytest.raises(CalibrationError, match="could be anything from|would be found") as caught:
        calibrate(wide, mixed, false_match_rate=1e-4)
    found = caught.value.calibration
    assert found.threshold.value <= 1 and found.threshold.interval is not None
    assert found.threshold.interval[1] <= 1
    assert abs(int(np.diff(found.highest_pairs[0])[0])) == 460


def test_a_threshold_that_misses_known_copies_is_refused(normalizer: Normalizer) -> None:
    originals = images(100, 5)
    weak = originals + 1.6 * images(100, 6)
    weak /= np.linalg.norm(weak, axis=1, keepdims=True)
    strong = originals + 0.3 * images(100, 6)
    strong /= np.linalg.norm(strong, axis=1, keepdims=True)
    held_out = images(800, 1)
    with pytest.raises(CalibrationError, match="of the 100 known copies would be found") as caught:
        calibrate(normalizer, held_out, false_match_rate=1e-3, copies=(weak, originals))
    assert len(caught.value.calibration.match_scores) == 100
    good = calibrate(normalizer, held_out, false_match_rate=1e-3, copies=(strong, originals))
    assert good.warnings == () and (good.match_scores >= good.threshold.value).mean() >= 0.95
    allowed = calibrate(
        normalizer, held_out, false_match_rate=1e-3, copies=(weak, originals), least_recall=0.0
    )
    assert allowed.threshold.value == good.threshold.value


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("copies", [0, 1, 5, 40])
def test_every_threshold_is_possible(wide: Normalizer, seed: int, copies: int) -> None:
    """Small samples, clean or not: a threshold a copy can reach, or a refusal."""
    held_out = with_near_copies(copies, 10 + seed)
    found = calibrate(wide, held_out, false_match_rate=1e-3, bank_size=1000, force=True, seed=seed)
    assert found.threshold.interval is not None
    low, high = found.threshold.interval
    assert -1 <= low <= found.threshold.value <= high <= wide.largest_score
    with pytest.raises(ValueError, match="at most 1, the score of an exact copy"):
        wide.with_threshold(2.74)


def test_requests_that_make_no_sense_are_refused(normalizer: Normalizer) -> None:
    z = images(300, 1)
    with pytest.raises(ValueError, match="one of false_match_rate and precision"):
        calibrate(normalizer, z)
    with pytest.raises(ValueError, match="one of false_match_rate and precision"):
        calibrate(normalizer, z, false_match_rate=0.1, precision=0.9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(normalizer, z, false_match_rate=0)
    with pytest.raises(ValueError, match="at least 100 comparisons, got 90 of 10 and 10 images"):
        calibrate(normalizer, images(10, 1), false_match_rate=0.1, force=True)
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
