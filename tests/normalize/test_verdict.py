"""Grades and sentences: what a score means in a bank of a stated size."""

from pathlib import Path

import numpy as np
import pytest

from sscd_vec.normalize import (
    COPY_RATE,
    GRADES,
    KINDS,
    LOOK_RATE,
    Calibration,
    FalseMatchCurve,
    Kind,
    Normalizer,
    Proof,
    ScoreNorm,
    Threshold,
    UncalibratedError,
)
from sscd_vec.normalize.calibration.thresholds import RATES
from tests.normalize.made import descriptors


def made_curve(kind: Kind = "search", views: int = 1) -> FalseMatchCurve:
    """A decade per 0.06: one comparison in a million scores 0.26."""
    scores = -0.1 + 0.06 * -np.log10(RATES)
    return FalseMatchCurve(kind, scores, scores - 0.02, scores + 0.02, views=views)


def calibration(curve: FalseMatchCurve, threshold: Threshold) -> Calibration:
    none = np.zeros(0)
    pairs = np.zeros((0, 2), dtype=np.int64)
    return Calibration(threshold, curve, none, none, pairs, none)


@pytest.fixture
def judging() -> Normalizer:
    made = Normalizer.fit(descriptors(400))
    for kind in KINDS:
        curve = made_curve(kind, 10 if kind == "tiled" else 1)
        wanted = Threshold(
            curve.score(COPY_RATE, 1000),
            kind,
            target="false_match_rate_per_query",
            wanted=COPY_RATE,
            bank_size=1000,
        )
        made = made.with_calibration(calibration(curve, wanted))
    return made


def test_three_grades(judging: Normalizer) -> None:
    copy_at = judging.threshold_for(COPY_RATE, 1000)
    look_at = judging.threshold_for(LOOK_RATE, 1000)
    assert copy_at == pytest.approx(0.26, abs=1e-3) and look_at < copy_at - 0.05
    for score, grade in (
        (copy_at + 1e-6, "copy"),
        (copy_at - 1e-6, "look"),
        (look_at + 1e-6, "look"),
        (look_at - 1e-6, "no"),
    ):
        assert judging.judge(score, 1000).grade == grade
    verdict = judging.judge(0.26, 1000)
    assert verdict.false_match_rate == pytest.approx(1e-3, rel=1e-3)
    assert verdict.interval is not None
    assert verdict.interval[0] < 1e-3 < verdict.interval[1]


def test_thresholds_grow_with_the_bank(judging: Normalizer) -> None:
    sizes = (1000, 100_000, 10**7)
    values = [judging.threshold(bank_size=size) for size in sizes]
    assert values[1] - values[0] == pytest.approx(0.12, abs=1e-6)  # a hundredfold: two decades
    assert values[2] - values[1] == pytest.approx(0.12, abs=1e-6)
    assert judging.judge(0.3, 1000).grade == "copy"
    assert judging.judge(0.3, 100_000).grade == "look"
    assert judging.judge(0.3, 10**7).grade == "no"
    assert judging.threshold() == judging.thresholds["search"].value  # a bank of 1 000


def test_two_images_get_one_verdict_alone_and_in_any_small_bank(judging: Normalizer) -> None:
    for score in (0.1, 0.2, 0.25, 0.27, 0.5):
        verdicts = [judging.judge(score, size) for size in (None, 0, 1, 12, 1000)]
        assert all(verdict == verdicts[0] for verdict in verdicts)


def test_more_views_need_a_higher_score(judging: Normalizer) -> None:
    ten, one = (judging.threshold("tiled", 1000, views) for views in (10, 1))
    assert ten == judging.threshold("tiled") and one == pytest.approx(ten - 0.06)
    assert judging.judge(ten - 0.01, 1000, "tiled", views=1).grade == "copy"
    assert judging.judge(ten - 0.01, 1000, "tiled").grade == "look"


@pytest.mark.parametrize(
    ("score", "bank", "text"),
    [
        (0.3619, 1000, "0.36: about 1 stranger in 50 000 scores this high in a bank of 1 000"),
        (0.26, 1000, "0.26: about 1 stranger in 1 000 scores this high in a bank of 1 000"),
        (0.2, 12_500, "0.20: about 1 stranger in 9 scores this high in a bank of 12 500"),
        (0.26, 70_000, "0.26: about 1 stranger in 15 scores this high in a bank of 70 000"),
        (0.1, 1000, "0.10: strangers often score this high in a bank of 1 000"),
        (
            0.9,
            1,
            "0.90: fewer than 1 stranger in 1 000 000 000 scores this high in a bank of 1 000",
        ),
    ],
)
def test_every_score_is_explained(judging: Normalizer, score: float, bank: int, text: str) -> None:
    assert str(judging.judge(score, bank)) == text


def test_a_threshold_set_by_hand_or_for_a_precision_stays(judging: Normalizer) -> None:
    for threshold in (Threshold(0.33), Threshold(0.33, target="precision", wanted=0.9)):
        fixed = judging.with_threshold(threshold)
        assert {fixed.threshold(bank_size=size) for size in (1, 1000, 10**6)} == {0.33}
        assert fixed.judge(0.32, 1000).grade == "look" and fixed.judge(0.34, 10**6).grade == "copy"
    assert judging.judge(0.3, 1000, threshold=0.31).grade == "look"
    # Below the usual one there is nothing left to look at.
    assert judging.judge(0.05, 1000, threshold=0.06).grade == "no"


def test_another_rate_and_a_rate_per_comparison(judging: Normalizer) -> None:
    curve = made_curve()
    strict = Threshold(0.0, target="false_match_rate_per_query", wanted=1e-5, bank_size=7)
    for size in (7, 1000):
        assert judging.with_threshold(strict).threshold(bank_size=size) == pytest.approx(
            curve.score(1e-5, size)
        )
    pairs = Threshold(0.0, target="false_match_rate_per_comparison", wanted=1e-6)
    values = {judging.with_threshold(pairs).threshold(bank_size=size) for size in (1, 10**6)}
    assert values == {curve.score(1e-6, 1)}


def test_without_a_curve_a_threshold_still_judges() -> None:
    plain = Normalizer.identity(8).with_threshold(0.8)
    assert plain.judge(0.85).grade == "copy" and plain.judge(0.75).grade == "no"
    verdict = plain.judge(0.85)
    assert verdict.false_match_rate is None and "no false-match rate is known" in str(verdict)
    with pytest.raises(UncalibratedError, match="false-match rate for 'search'"):
        plain.false_match_rate(0.8, 10)
    with pytest.raises(UncalibratedError, match="threshold for 'symmetric' scores .stored: "):
        plain.threshold("symmetric")
    unknown = plain.judge(0.8, 10, "symmetric")
    assert (unknown.grade, unknown.is_copy, unknown.threshold) == ("unsure", None, None)
    assert "no threshold is calibrated for symmetric scores" in unknown.reason
    with pytest.raises(ValueError, match="kind: expected one of"):
        plain.threshold("else")  # type: ignore[arg-type]  # what a user may type


def test_without_a_threshold_a_curve_still_judges(judging: Normalizer) -> None:
    only = Normalizer(24, curves={"search": made_curve()})
    assert only.threshold(bank_size=5000) == judging.threshold(bank_size=5000)


def test_curves_are_kept_on_the_query_side(judging: Normalizer, tmp_path: Path) -> None:
    plain = Normalizer.fit(descriptors(400))
    assert judging.reference_fingerprint == plain.reference_fingerprint
    assert judging.query_fingerprint != plain.query_fingerprint
    judging.save(tmp_path / "n")
    loaded = Normalizer.load(tmp_path / "n")
    assert loaded.query_fingerprint == judging.query_fingerprint
    assert set(loaded.curves) == set(KINDS) and loaded.curves["tiled"].views == 10
    for kind in KINDS:
        assert (loaded.curves[kind].scores == judging.curves[kind].scores).all()
        assert loaded.judge(0.27, 5000, kind) == judging.judge(0.27, 5000, kind)
    with pytest.raises(TypeError):
        judging.curves["search"] = made_curve()  # type: ignore[index]  # the point of the test


def test_another_bias_drops_them_and_a_larger_background_keeps_them(judging: Normalizer) -> None:
    more, z, references = descriptors(300, seed=9), descriptors(50, seed=2), descriptors(40, seed=3)
    for changed in (judging.with_background(more), judging.with_score_norm(ScoreNorm(0.5))):
        assert changed.curves == {} and changed.thresholds == {}
    wider = judging.with_background(more, extend=True)
    assert wider.background is not None and len(wider.background) == 700
    assert wider.thresholds == judging.thresholds and set(wider.curves) == set(KINDS)
    # What the thresholds promise still holds: no score has risen.
    assert (wider.scores(z, references) <= judging.scores(z, references) + 1e-6).all()
    assert (wider.scores(z, references) < judging.scores(z, references) - 1e-3).any()
    with pytest.raises(ValueError, match="extend: expected a background"):
        Normalizer.identity(24).with_background(more, extend=True)
    with pytest.raises(ValueError, match="the same score_norm"):
        judging.with_background(more, extend=True, score_norm=ScoreNorm(0.5))


SAME = Proof(True, "the same pixels everywhere")
OTHER = Proof(None, "they differ in places")


@pytest.mark.parametrize("score", [0.05, 0.2, 0.5, 2.0])
@pytest.mark.parametrize("proof", [None, OTHER])
@pytest.mark.parametrize("shift", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("threshold", [None, 0.01])
def test_a_pair_in_doubt_is_never_a_copy_by_its_score(
    judging: Normalizer,
    score: float,
    proof: Proof | None,
    shift: float,
    threshold: float | None,
) -> None:
    verdict = judging.judge(
        score, 1000, in_doubt=True, shift=shift, proof=proof, threshold=threshold
    )
    assert verdict.grade in ("unsure", "no") and not verdict.is_copy


def test_pixels_outweigh_the_score(judging: Normalizer) -> None:
    for score in (0.1, 0.6):
        for in_doubt in (True, False):
            assert judging.judge(score, in_doubt=in_doubt, proof=SAME).grade == "copy"
            proof = Proof(False, "no part of one is found in the other")
            refused = judging.judge(score, in_doubt=in_doubt, proof=proof)
            assert (refused.grade, refused.reason) == ("no", proof.reason)
    assert judging.judge(0.6, in_doubt=True, proof=SAME).reason == SAME.reason
    assert judging.judge(0.6, proof=OTHER).grade == "copy"  # a photo: the score decides


def test_what_a_kind_has_in_common_is_taken_away(judging: Normalizer) -> None:
    assert judging.judge(0.6, shift=0.3, in_doubt=True).grade == "unsure"
    verdict = judging.judge(0.6, shift=0.5, in_doubt=True)
    assert (verdict.grade, verdict.score) == ("no", 0.6)
    assert verdict.reason == "no more alike than others of their kind"
    assert judging.judge(0.6, shift=0.5).grade == "copy"  # not in doubt: nothing is taken away


def test_reasons_say_why_in_one_line(judging: Normalizer) -> None:
    unsure = judging.judge(0.6, in_doubt=True, proof=OTHER)
    assert "look alike" in unsure.reason and "differ in places" in unsure.reason
    assert "compare their pixels" in judging.judge(0.6, in_doubt=True).reason
    for verdict in (judging.judge(s, in_doubt=d) for s in (0.0, 0.2, 0.9) for d in (True, False)):
        assert verdict.grade in GRADES
        assert "\n" not in verdict.reason and not verdict.reason.endswith(".")


def test_every_answer_in_json_says_the_same(judging: Normalizer) -> None:
    assert judging.judge(0.3000001, 1000).to_dict() == {
        "score": 0.3,
        "verdict": "copy",
        "copy": True,
        "reason": "about 1 stranger in 5 000 scores this high in a bank of 1 000",
        "false_match_rate": pytest.approx(10 ** -(0.04 / 0.06 + 3), rel=1e-3),
    }
