"""The far tail of strangers' scores, and the curve of false matches fitted with it.

Above a level ``u`` that a share ``zeta`` of all comparisons reaches, scores follow a generalized
Pareto distribution (Pickands 1975), cut off at the largest score there can be, ``L``::

    P(score >= t) = zeta (S(t) - S(L)) / (1 - S(L)),      S(t) = (1 + xi (t - u) / sigma)^(-1/xi)

so that rates far below one in the sample size can be estimated: extrapolated, not counted. The
shape ``xi`` decides how far such an extrapolation goes, and few scores say little about it. So it
has a prior, normal around 0 (an exponential tail): a few hundred scores hardly move it, thousands
do. A curve takes no shape above 0: similarities are bounded, so strangers have no heavy tail, and
one that looks heavy is made by pairs that are not strangers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize.calibration.nonmatches import NonMatches
from sscd_vec.normalize.calibration.thresholds import RATES, FalseMatchCurve, Kind
from sscd_vec.normalize.descriptors import Float64

TAIL_SHARE = 1e-3  # the level u is reached by this share of the comparisons ...
LEAST, MOST = 50, 1000  # ... but by at least and at most so many
SHAPE_DEVIATION = 0.1  # of the prior of xi
UNEXPLAINED = 0.01  # a pair is no stranger if so few are expected above it ...
HEAVIER = 1.5  # ... by an exponential tail this many times as wide as the rest's
RESAMPLES = 200


@dataclass(frozen=True)
class Tail:
    """A fitted tail.

    Attributes:
        level: ``u``.
        share: ``zeta = P(score >= u)``.
        shape: ``xi``.
        scale: ``sigma``.
        limit: ``L``, the largest score there can be.
    """

    level: float
    share: float
    shape: float
    scale: float
    limit: float = float("inf")

    @classmethod
    def fit(
        cls,
        exceedances: Float64,
        level: float,
        share: float,
        limit: float = float("inf"),
        weights: Float64 | None = None,
        deviation: float = SHAPE_DEVIATION,
        heaviest: float = float("inf"),
    ) -> "Tail":
        """Fit to the scores above ``level``, after Zhang & Stephens (2009).

        Their estimator averages the profile likelihood over a grid of ``theta = -xi / sigma``;
        unlike maximum likelihood it always exists. Here the likelihood is multiplied by the prior
        of the shape it implies.

        Args:
            exceedances: Scores of at least ``level``, in any order.
            level: ``u``.
            share: ``zeta``.
            limit: ``L``.
            weights: How often each score counts; once by default.
            deviation: Standard deviation of the prior of ``xi``; infinity for none.
            heaviest: The largest ``xi`` allowed; beyond it the tail is exponential.
        """
        x = exceedances - level
        weight = np.ones(len(x)) if weights is None else weights
        count = float(weight.sum())
        largest, quartile = float(x.max()), _weighted_quartile(x, weight)
        mean = float((x * weight).sum() / count)
        if largest <= 0 or quartile <= 0:  # ties at the level: nothing to extrapolate from
            return cls(level, share, 0.0, max(mean, 1e-12), limit)
        steps = 30 + int(np.sqrt(count))
        theta = 1 / largest + (1 - np.sqrt(steps / (np.arange(1, steps + 1) - 0.5))) / (
            3 * quartile
        )
        theta = theta[np.abs(theta) > 1e-9 / largest]
        shape = np.log1p(-theta[:, None] * x) @ weight / count
        posterior = count * (np.log(-theta / shape) - shape - 1) - (shape / deviation) ** 2 / 2
        belief = np.exp(posterior - posterior.max())
        mean_theta = float((theta * belief).sum() / belief.sum())
        xi = float(np.log1p(-mean_theta * x) @ weight / count)
        if abs(mean_theta * largest) < 1e-9 or xi > heaviest:
            return cls(level, share, 0.0, mean, limit)
        return cls(level, share, xi, -xi / mean_theta, limit)

    def quantile(self, rate: float | Float64) -> Float64:
        """The score reached with probability ``rate <= share``; below ``limit``."""
        cut = self._survival(self.limit)
        ratio = np.asarray(rate) / self.share * (1 - cut) + cut
        if abs(self.shape) < 1e-9:
            excess = -self.scale * np.log(ratio)
        else:
            excess = self.scale / self.shape * (ratio**-self.shape - 1)
        quantile: Float64 = np.asarray(np.minimum(self.level + excess, self.limit))
        return quantile

    def expected_above(self, score: float, count: int) -> float:
        """How many of ``count`` scores this tail expects above ``score``."""
        cut = self._survival(self.limit)
        return count * self.share * (self._survival(score) - cut) / (1 - cut)

    def _survival(self, score: float) -> float:
        z = (score - self.level) / self.scale
        if abs(self.shape) < 1e-9:
            return float(np.exp(-z))
        return float(np.maximum(1 + self.shape * z, 0) ** (-1 / self.shape))


def _weighted_quartile(x: Float64, weights: Float64) -> float:
    """The value that a quarter of the weight does not exceed."""
    order = np.argsort(x)
    place = np.searchsorted(weights[order].cumsum(), weights.sum() / 4)
    return float(x[order[min(int(place), len(x) - 1)]])


def tail_size(count: int) -> int:
    """How many of ``count`` scores the tail is fitted to."""
    return int(min(max(TAIL_SHARE * count, LEAST), MOST, count // 2))


def fit_curve(
    found: NonMatches,
    kind: Kind,
    limit: float,
    *,
    views: int = 1,
    leave_out: int = 0,
    confidence: float = 0.95,
    seed: int = 0,
) -> FalseMatchCurve:
    """Counted as far as the sample goes, the tail beyond, with a bootstrap interval.

    Scores of one image depend on each other, so whole images are resampled, as queries and as
    references (Owen's pigeonhole bootstrap, 2007).

    Args:
        found: Scores of strangers.
        kind: Their kind.
        limit: The largest score there can be.
        views: Comparisons of views per pair of images.
        leave_out: So many of the highest pairs are left out as no strangers.
        confidence: Coverage of the interval.
        seed: Of the bootstrap.
    """
    top, pairs = found.top[leave_out:], found.top_pairs[leave_out:]
    count = found.count - leave_out
    size = tail_size(count)
    counted = RATES * count >= size
    bulk = _counted_scores(found, leave_out, RATES[counted])
    tail = RATES[~counted]
    scores = np.append(bulk, _tail_scores(top, np.ones(len(top)), size, count, limit, tail))
    random = np.random.default_rng(seed)
    drawn = np.empty((RESAMPLES, len(tail)))
    for row in drawn:
        row[:] = _tail_scores(top, _resampled(found, pairs, random), size, count, limit, tail)
    ends = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    low = np.minimum(ends[0] - scores[counted.sum() :], 0)
    high = np.maximum(ends[1] - scores[counted.sum() :], 0)
    # Where everything is counted the interval is narrower than where the tail begins.
    low, high = (np.append(np.full(len(bulk), side[0]), side) for side in (low, high))
    return FalseMatchCurve(
        kind=kind,
        scores=np.maximum.accumulate(scores),
        low=np.maximum.accumulate(scores + low),
        high=np.minimum(np.maximum.accumulate(scores + high), max(limit, scores[-1])),
        views=views,
        confidence=confidence,
        comparisons=count,
        images=(found.queries, found.references),
        left_out=leave_out,
    )


def unexplained_pairs(found: NonMatches) -> int:
    """How many of the highest pairs score far above what the others' tail explains.

    The width of an exponential tail is taken from the scores below the highest 2 %, which a few
    copies cannot move.
    """
    size = tail_size(found.count)
    level, skipped = found.top[size], max(5, size // 50)
    width = float(found.top[skipped] - level) / np.log(size / skipped)
    highest = level + HEAVIER * width * np.log(size / UNEXPLAINED)
    return int((found.top[:skipped] > highest).sum())


def _counted_scores(found: NonMatches, leave_out: int, rates: Float64) -> Float64:
    """The scores that large shares of all comparisons reach, from the histogram."""
    above = found.histogram[::-1].cumsum()[::-1] - leave_out
    filled = above > 0
    shares, edges = above[filled] / (found.count - leave_out), found.edges[:-1][filled]
    scores: Float64 = np.interp(np.log(rates), np.log(shares[::-1]), edges[::-1])
    return scores


def _tail_scores(
    top: Float64, weights: Float64, size: int, count: int, limit: float, rates: Float64
) -> Float64:
    """The scores that small shares reach, from the tail above the ``size`` highest."""
    cumulated = weights.cumsum()
    last = min(int(np.searchsorted(cumulated, size)), len(top) - 2)
    level = float(top[last + 1])
    share, counted = cumulated[last] / count, weights[: last + 1]
    tail = Tail.fit(top[: last + 1], level, share, limit, counted, heaviest=0.0)
    return tail.quantile(rates)


def _resampled(found: NonMatches, pairs: NDArray[np.int64], random: np.random.Generator) -> Float64:
    """How often each pair is drawn when images are drawn with replacement."""
    sides = [found.queries] if found.one_set else [found.queries, found.references]
    times = [np.bincount(random.integers(n, size=n), minlength=n) for n in sides]
    weights: Float64 = (times[0][pairs[:, 0]] * times[-1][pairs[:, 1]]).astype(np.float64)
    return weights
