"""Learning rate and entropy weight as plain functions of the step: nothing to save or resume."""

import math

ENTROPY_RAMP_START = 0.1  # lambda begins at a tenth of its value: the first minutes need it


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine to zero, per step.

    ``(t + 1) / w`` for ``t < w``; after that ``(1 + cos(pi * (t - w) / (T - w))) / 2``.

    Args:
        step: t, counted from 0.
        steps: T, the length of the run.
        warmup: w, the steps of warm-up.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def entropy_factor(step: int, steps: int, ramp: float) -> float:
    """Part of lambda at this step: from a tenth to all of it over the first ``ramp`` of the run."""
    length = ramp * steps
    if step >= length:
        return 1.0
    return ENTROPY_RAMP_START + (1 - ENTROPY_RAMP_START) * step / length
