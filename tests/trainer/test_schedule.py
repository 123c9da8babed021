import math

import pytest

from sscd_vec.trainer.schedule import entropy_factor, learning_rate_factor


def test_warm_up_then_cosine_against_a_slow_version() -> None:
    steps, warmup = 200, 10
    for step in range(steps):
        if step < warmup:
            expected = sum(1 / warmup for _ in range(step + 1))
        else:
            angle = 180 * (step - warmup) / (steps - warmup)
            expected = (1 + math.cos(math.radians(angle))) / 2
        assert learning_rate_factor(step, steps, warmup) == pytest.approx(expected)


def test_landmarks() -> None:
    assert learning_rate_factor(0, 100, 5) == pytest.approx(0.2)
    assert learning_rate_factor(4, 100, 5) == 1
    assert learning_rate_factor(5, 100, 5) == 1
    assert learning_rate_factor(100, 100, 5) == pytest.approx(0, abs=1e-12)
    assert learning_rate_factor(0, 100, 0) == 1


def test_entropy_ramp_from_a_tenth_to_all() -> None:
    assert entropy_factor(0, 100, 0.0) == 1
    assert entropy_factor(0, 100, 0.2) == pytest.approx(0.1)
    assert entropy_factor(10, 100, 0.2) == pytest.approx(0.55)
    assert entropy_factor(20, 100, 0.2) == 1
