import math

import pytest

from sscd_vec.trainer.run import COLLAPSE_WINDOW, Health, TrainingDiverged


def test_bad_steps_are_skipped_counted_and_stop_the_run_with_advice() -> None:
    health = Health(max_bad_steps=3)
    assert health.gradient_is_fine(1.0, 0, 30)
    assert not health.gradient_is_fine(math.nan, 1, 30)
    assert not health.gradient_is_fine(math.inf, 2, 30)
    assert health.gradient_is_fine(1.0, 3, 30), "a good step forgives the bad ones"
    assert health.skipped == 2
    health.gradient_is_fine(math.nan, 4, 30)
    health.gradient_is_fine(math.nan, 5, 30)
    with pytest.raises(TrainingDiverged, match=r"entropy weight \(now 30.*zero_init_residual"):
        health.gradient_is_fine(math.nan, 6, 30)


def words(positive: float, negative: float) -> str:
    health = Health()
    said = [health.collapse(positive, negative) for _ in range(COLLAPSE_WINDOW)]
    assert not any(said[:-1]), "one odd step is no collapse"
    return said[-1]


def test_collapse_is_said_in_words() -> None:
    assert "collapse to uniform" in words(0.03, 0.25)
    assert "collapse to a point" in words(0.999, 0.995)
    assert words(0.7, 0.3) == ""
    assert words(0.8, 0.9) == "", "not learned yet is not collapsed"


def test_the_watch_survives_a_resume() -> None:
    health = Health()
    for _ in range(COLLAPSE_WINDOW - 1):
        health.collapse(0.0, 0.3)
    health.gradient_is_fine(math.nan, 0, 1)
    resumed = Health()
    resumed.load(health.state())
    assert resumed.skipped == 1
    assert "uniform" in resumed.collapse(0.0, 0.3)
