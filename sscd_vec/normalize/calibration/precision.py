"""A threshold for a wanted precision, from scores that people have labelled."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.normalize.calibration.thresholds import (
    LEAST_RECALL,
    VIEWS,
    WIDEST,
    Calibration,
    CalibrationError,
    Kind,
    Threshold,
)
from sscd_vec.normalize.descriptors import Float32, Float64

if TYPE_CHECKING:
    from sscd_vec.normalize.normalizer import Normalizer

ASK_FOR_LESS = "label more pairs, or ask for a lower precision"
LEAST_PAIRS = 20  # labelled pairs that a threshold can rest on


def precision_threshold(
    scores: ArrayLike,
    is_match: ArrayLike,
    precision: float,
    *,
    kind: Kind = "search",
    query_ids: ArrayLike | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Calibration:
    """The lowest threshold with the wanted precision, from labelled scores of any kind.

    Args:
        scores: ``(n,)`` scores of candidates, as a search in use returns them.
        is_match: ``(n,)`` whether each is a copy.
        precision: Wanted precision.
        kind: Kind of the scores.
        query_ids: Query of each candidate: candidates of one query are not independent.
        confidence: Coverage the interval aims at.
        seed: Of the bootstrap.
    """
    value, interval, hits, accepted = precision_point(
        scores, is_match, precision, query_ids, confidence, seed=seed
    )
    low, high = clopper_pearson(hits, accepted, confidence)
    threshold = Threshold(
        value=value,
        kind=kind,
        target="precision",
        wanted=precision,
        interval=interval,
        confidence=confidence,
        samples=len(np.asarray(scores)),
        note=f"{hits} of {accepted} accepted pairs are matches: precision {hits / accepted:.3f}, "
        f"{confidence:.0%} interval {low:.3f} to {high:.3f}",
    )
    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(is_match, dtype=bool)
    none = np.zeros((0, 2), dtype=np.int64)
    return Calibration(threshold, None, values[~labels], values[labels], none, np.zeros(0))


def trusted(found: Calibration, largest_score: float, force: bool = False) -> Calibration:
    """The same with what a person should know about it.

    Args:
        found: From labelled pairs.
        largest_score: What no score exceeds.
        force: Warn of what would be refused.

    Raises:
        CalibrationError: If the pairs are too few, or all of one kind.
    """
    copies, others = len(found.match_scores), len(found.nonmatch_scores)
    value, interval = found.threshold.value, found.threshold.interval
    low, high = interval or (value, value)
    doubts = [doubt] if (doubt := _why_too_few(copies, others)) else []
    if doubts and not force:
        raise CalibrationError("calibration refused: " + "; ".join(doubts), found)
    if high - low > WIDEST * largest_score:
        doubts.append(
            f"the threshold {value:.3f} could be anything from {low:.3f} to {high:.3f}: label "
            "pairs that score in between"
        )
    recall = float((found.match_scores >= value).mean()) if copies else 1.0
    if recall < LEAST_RECALL:
        doubts.append(
            f"at {value:.3f} only {recall:.1%} of the {copies} labelled copies are found; ask for "
            "a lower precision, or look at the copies below it"
        )
    return replace(found, warnings=(*found.warnings, *doubts))


def from_labels(
    normalizer: "Normalizer",
    queries: ArrayLike | None,
    references: ArrayLike | None,
    is_match: ArrayLike | None,
    precision: float,
    kind: Kind,
    confidence: float,
    seed: int,
) -> Calibration:
    """``calibrate`` for a precision: candidate pairs row by row, and whether each is a copy."""
    if queries is None or references is None or is_match is None:
        raise ValueError("precision: expected queries, references and is_match, row by row")
    if kind in VIEWS:
        raise ValueError(
            f"precision of {kind} scores: score the views, take the maximum per pair, and use "
            f"precision_threshold(scores, is_match, kind={kind!r})"
        )
    scores = paired_scores(normalizer, queries, references, kind)
    rows = np.unique(np.asarray(queries), axis=0, return_inverse=True)[1].ravel()
    return precision_threshold(
        scores, is_match, precision, kind=kind, query_ids=rows, confidence=confidence, seed=seed
    )


def paired_scores(
    normalizer: "Normalizer", queries: ArrayLike, references: ArrayLike, kind: Kind
) -> Float32:
    """Scores of pairs, row by row."""
    q, r = normalizer.whiten(queries), normalizer.whiten(references)
    if len(q) != len(r):
        raise ValueError(
            f"labelled pairs: expected as many queries as references, got {len(q)} and {len(r)}"
        )
    bias = normalizer.whitened_biases(q)
    if kind == "symmetric":
        bias = np.maximum(bias, normalizer.whitened_biases(r))
    scores: Float32 = np.einsum("nd,nd->n", q, r) - bias
    return scores


def precision_point(
    scores: ArrayLike,
    is_match: ArrayLike,
    wanted: float,
    query_ids: ArrayLike | None = None,
    confidence: float = 0.95,
    resamples: int = 400,
    seed: int = 0,
) -> tuple[float, tuple[float, float], int, int]:
    """The lowest threshold whose precision is at least ``wanted``.

    It lies halfway between the last accepted and the first rejected score, so that rounding on
    another backend does not change what it accepts. The interval resamples queries.

    Args:
        scores: ``(n,)`` scores of labelled candidates, in the proportions met in use.
        is_match: ``(n,)`` whether each is a copy.
        wanted: Precision, above 0 and up to 1.
        query_ids: Query of each candidate; each its own by default.
        confidence: Coverage aimed at.
        resamples: Bootstrap resamples.
        seed: Of the bootstrap.

    Returns:
        Threshold, its interval, matches accepted, candidates accepted.

    Raises:
        ValueError: If the input is malformed, or no threshold reaches the precision.
    """
    score, match = np.asarray(scores, dtype=np.float64), np.asarray(is_match, dtype=bool)
    if score.ndim != 1 or score.shape != match.shape or not np.isfinite(score).all():
        raise ValueError(
            f"labelled pairs: expected finite scores and labels of equal length, got shapes "
            f"{score.shape} and {match.shape}"
        )
    if not 0 < wanted <= 1:
        raise ValueError(f"precision: expected a number above 0 and up to 1, got {wanted}")
    order = np.argsort(-score, kind="stable")
    score, match = score[order], match[order]
    ends = np.append(score[1:] != score[:-1], True)  # a threshold takes all of a tie or none
    weight = np.ones(len(score))
    last = _last_good(match, weight, ends, wanted)
    if last is None:
        best = (np.cumsum(match) / np.arange(1, len(match) + 1))[ends].max() if len(match) else 0.0
        raise ValueError(
            f"precision: no threshold reaches {wanted:g}; the best in these {len(score)} labelled "
            f"pairs ({int(match.sum())} matches) is {best:.3f}; "
            + (_why_too_few(int(match.sum()), int((~match).sum())) or ASK_FOR_LESS)
        )
    if query_ids is None:
        query = np.arange(len(score))
    else:
        query = np.unique(np.asarray(query_ids), return_inverse=True)[1].ravel()[order]
    queries = int(query.max()) + 1
    random = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        times = np.bincount(random.integers(queries, size=queries), minlength=queries)
        at = _last_good(match, times[query].astype(np.float64), ends, wanted)
        # A resample that never reaches the precision asks for more than the highest score.
        drawn.append(score[0] if at is None else _between(score, at))
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    value = _between(score, last)
    return (
        value,
        (float(min(low, value)), float(max(high, value))),
        int(match[: last + 1].sum()),
        last + 1,
    )


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a proportion (Clopper & Pearson 1934), trials taken as independent."""
    outside = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _solve(successes, trials, outside)
    high = 1.0 if successes == trials else 1 - _solve(trials - successes, trials, outside)
    return low, high


def _why_too_few(copies: int, others: int) -> str:
    """What labelled pairs lack to support a threshold; empty if nothing."""
    if copies and others and copies + others >= LEAST_PAIRS:
        return ""
    return (
        f"expected at least {LEAST_PAIRS} labelled pairs, some of them copies and some not, "
        f"got {copies} copies and {others} others"
    )


def _solve(successes: int, trials: int, tail: float) -> float:
    """The ``p`` at which ``P(X >= successes) = tail`` for ``X ~ Binomial(trials, p)``."""
    counts = np.arange(successes, trials + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    ways = log_factorial[trials] - log_factorial[counts] - log_factorial[trials - counts]
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        log_terms = ways + counts * np.log(p) + (trials - counts) * np.log1p(-p)
        largest = log_terms.max()
        probability = np.exp(largest) * np.exp(log_terms - largest).sum()
        low, high = (p, high) if probability < tail else (low, p)
    return (low + high) / 2


def _last_good(
    match: NDArray[np.bool_], weight: Float64, ends: NDArray[np.bool_], wanted: float
) -> int | None:
    accepted = np.cumsum(weight)
    found = np.cumsum(weight * match)
    good = np.flatnonzero(ends & (found >= wanted * accepted) & (found > 0))
    return int(good[-1]) if len(good) else None


def _between(score: Float64, last: int) -> float:
    return float(score[last] if last + 1 == len(score) else (score[last] + score[last + 1]) / 2)
