import numpy as np
import pytest

from sscd_vec.normalize.scales import best_over_scales, needs_larger_look


def test_the_best_scale_wins_after_its_penalty() -> None:
    own = np.array([[0.1, 0.5, -0.2]], np.float32)
    larger = np.array([[0.3, 0.52, -0.1]], np.float32)
    best = best_over_scales([own, larger], penalty=0.05)
    np.testing.assert_allclose(best, [[0.25, 0.5, -0.15]], atol=1e-6)
    assert own[0, 0] == np.float32(0.1), "the scores given are left alone"
    np.testing.assert_array_equal(best_over_scales([own]), own)


def test_no_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one scale"):
        best_over_scales([])


def test_a_decided_copy_needs_no_second_look() -> None:
    assert needs_larger_look(0.05, 0.07) and not needs_larger_look(0.07, 0.07)
