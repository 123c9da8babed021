"""Scales: look at a query larger too, for copies that fill only a part of it.

A copy inside a collage or on another image's ground is small; seen at twice the size it is as large
as its reference, which keeps its one vector. With ``q_s`` the descriptor of the query at ``s``
times the model's size (``Encoder.encode(..., scale=s)``),

    ŝ(q, r) = max(ŝ(q_1, r), ŝ(q_2, r) − penalty).

Each descriptor has its own bias. A larger look scores strangers a little higher; the penalty makes
up for it, so that the combined score keeps the threshold of a search at one scale. A second look
costs four encodings: take it only if the first score does not decide (``needs_larger_look``).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SCALES = (1.0, 2.0)
PENALTY = 0.04  # of every scale but the first; the threshold at 90 % precision stays within 0.002


def needs_larger_look(best_score: float, threshold: float) -> bool:
    """Whether the best score at the model's own size leaves open if there is a copy."""
    return best_score < threshold


def best_over_scales(
    scores: Sequence[NDArray[np.float32]], penalty: float = PENALTY
) -> NDArray[np.float32]:
    """Best score of every pair.

    Args:
        scores: One array per scale, all of one shape, the model's own size first.
        penalty: What a score at another scale loses.

    Raises:
        ValueError: There is no scale.
    """
    if not scores:
        raise ValueError("expected the scores of at least one scale, got none")
    best = np.array(scores[0], np.float32)
    for larger in scores[1:]:
        np.maximum(best, larger - np.float32(penalty), out=best)
    return best
