"""The far tail of a score distribution: a generalized Pareto fit over a high level.

For a level ``u`` exceeded with probability ``zeta``, scores above it follow (Pickands 1975)::

    P(score > t) = zeta (1 + xi (t - u) / sigma)^(-1/xi),      zeta exp(-(t - u) / sigma) if xi = 0

so that rates far below one in the sample size can be estimated: extrapolated, not counted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize.descriptors import Float64

TAIL_SHARE = 0.1  # the level u is exceeded by this share of the sample ...
LEAST, MOST = 25, 1000  # ... but by at least and at most so many


@dataclass(frozen=True)
class Tail:
    """A fitted tail.

    Attributes:
        level: ``u``.
        share: ``zeta = P(score > u)``.
        shape: ``xi``; negative for a bounded tail.
        scale: ``sigma``.
    """

    level: float
    share: float
    shape: float
    scale: float

    @classmethod
    def fit(cls, exceedances: Float64, level: float, share: float) -> "Tail":
        """Fit to the scores above ``level``, by the estimator of Zhang & Stephens (2009).

        It averages the profile likelihood over a grid of ``theta = -xi / sigma``; unlike maximum
        likelihood it always exists and never puts the end of the tail below the sample's maximum.
        """
        x = np.sort(exceedances - level)
        count = len(x)
        largest, quartile = x[-1], x[int(count / 4 + 0.5) - 1]
        if largest <= 0 or quartile <= 0:  # ties at the level: nothing to extrapolate from
            return cls(level, share, 0.0, max(float(x.mean()), 1e-12))
        steps = 30 + int(np.sqrt(count))
        theta = 1 / largest + (1 - np.sqrt(steps / (np.arange(1, steps + 1) - 0.5))) / (
            3 * quartile
        )
        theta = theta[np.abs(theta) > 1e-12 / largest]
        shape = np.log1p(-theta[:, None] * x).mean(axis=1)
        log_likelihood = count * (np.log(-theta / shape) - shape - 1)
        weight = np.exp(log_likelihood - log_likelihood.max())
        mean_theta = float((theta * weight).sum() / weight.sum())
        xi = float(np.log1p(-mean_theta * x).mean())
        if abs(mean_theta * largest) < 1e-9:
            return cls(level, share, 0.0, float(x.mean()))
        return cls(level, share, xi, -xi / mean_theta)

    def quantile(self, rate: float) -> float:
        """The score exceeded with probability ``rate <= share``."""
        ratio = self.share / rate
        if abs(self.shape) < 1e-9:
            return float(self.level + self.scale * np.log(ratio))
        return float(self.level + self.scale / self.shape * (ratio**self.shape - 1))


def tail_size(count: int) -> int:
    """How many of ``count`` scores the tail is fitted to."""
    return int(min(max(TAIL_SHARE * count, LEAST), MOST, count - 1))


def exceeded_with(
    rate: float,
    top: Float64,
    cluster: NDArray[np.int64],
    clusters: int,
    count: int,
    confidence: float,
    resamples: int = 400,
    seed: int = 0,
) -> tuple[float, tuple[float, float]]:
    """The score exceeded with probability ``rate``, and a bootstrap interval for it.

    Scores of one query depend on each other, so whole queries are resampled.

    Args:
        rate: Wanted probability.
        top: The highest of ``count`` scores, descending: more than ``rate * count`` of them and
            more than ``tail_size(count)``.
        cluster: Query of each score in ``top``, 0 to ``clusters - 1``.
        clusters: Number of queries, including those with nothing in ``top``.
        count: Number of all scores.
        confidence: Coverage aimed at, such as 0.95.
        resamples: Bootstrap resamples.
        seed: Of the bootstrap.
    """
    random = np.random.default_rng(seed)
    estimate = _quantile(rate, top, count)
    drawn = []
    for _ in range(resamples):
        times = np.bincount(random.integers(clusters, size=clusters), minlength=clusters)
        sample = np.repeat(top, times[cluster])
        if len(sample) > LEAST:
            drawn.append(_quantile(rate, sample, count))
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return estimate, (float(min(low, estimate)), float(max(high, estimate)))


def _quantile(rate: float, top: Float64, count: int) -> float:
    size = min(tail_size(count), len(top) - 1)
    if rate * count >= size:  # inside the sample: count
        return float(top[min(int(np.ceil(rate * count)), len(top)) - 1])
    level = float(top[size])
    return Tail.fit(top[:size], level, size / count).quantile(rate)
