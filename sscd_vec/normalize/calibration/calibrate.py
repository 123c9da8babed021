"""Calibration: the threshold for a wanted false-match rate or precision.

From images that are no copies of each other, ``P(a query has a false match in a bank of N)`` is
estimated from the maxima of each query's scores over N references. The rate per comparison is the
same with N = 1. If N is larger than the references at hand, ``rate(N) <= N / n * rate(n)`` is
used: an upper bound that is close while false matches are rare.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.normalize.calibration.nonmatches import both_sides, image_numbers, score_nonmatches
from sscd_vec.normalize.calibration.precision import clopper_pearson, precision_point
from sscd_vec.normalize.calibration.tail import exceeded_with, tail_size
from sscd_vec.normalize.calibration.threshold import KINDS, Kind, Threshold
from sscd_vec.normalize.descriptors import Float32, Float64

if TYPE_CHECKING:
    from sscd_vec.normalize.normalizer import Normalizer

Per = Literal["query", "comparison"]
LEAST_SAMPLES = 100


class Options(TypedDict, total=False):
    """What ``calibrate`` takes by name."""

    false_match_rate: float | None
    precision: float | None
    per: Per
    bank_size: int | None
    kind: Kind
    query_groups: ArrayLike | None
    reference_groups: ArrayLike | None
    confidence: float
    seed: int


@dataclass(frozen=True, eq=False)
class Calibration:
    """A threshold and the scores it was found from, for a plot or a second look.

    Attributes:
        threshold: The result; give it to ``Normalizer.with_threshold``.
        nonmatch_scores: Scores of non-matching pairs: a random sample, or all that were labelled.
        match_scores: Scores of labelled matches; empty when calibrated on non-matches alone.
        highest_pairs: ``(k, 2)`` rows (query, reference) of the highest-scoring non-matches, as
            they were given: rows of one array if that was split, images if tiled. If some of
            these turn out to be copies, remove them and calibrate again.
    """

    threshold: Threshold
    nonmatch_scores: Float64
    match_scores: Float64
    highest_pairs: NDArray[np.int64]


def calibrate(
    normalizer: "Normalizer",
    queries: ArrayLike | None = None,
    references: ArrayLike | None = None,
    is_match: ArrayLike | None = None,
    *,
    false_match_rate: float | None = None,
    precision: float | None = None,
    per: Per = "query",
    bank_size: int | None = None,
    kind: Kind = "search",
    query_groups: ArrayLike | None = None,
    reference_groups: ArrayLike | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Calibration:
    """Find the threshold for a false-match rate, or for a precision.

    **False-match rate.** ``queries`` and ``references`` are descriptors of images that are neither
    copies of each other nor in the background. One array alone is split in two. Without any, the
    background is split in three (queries, references, and a smaller background for the bias), as
    no background image may be scored against itself. A whitening fitted on few rows makes these
    very rows less alike than images it never saw, so this is refused below ten rows per dimension.

    **Precision.** Row ``i`` of ``queries`` and of ``references`` are a candidate pair, and
    ``is_match[i]`` says whether it is a copy. The candidates should be what a search returns in
    use: precision depends on how many of them are copies.

    Args:
        normalizer: Whose scores are calibrated.
        queries: Descriptors ``(n, d)``.
        references: Descriptors ``(m, d)``.
        is_match: Labels ``(n,)``, for a precision.
        false_match_rate: Wanted probability of a false match, per query or per comparison.
        precision: Wanted precision.
        per: ``"query"``: at least one false match in the whole bank; ``"comparison"``: per pair.
        bank_size: References in the bank in use; those given by default.
        kind: ``"search"``, ``"symmetric"`` or ``"tiled"``.
        query_groups: For ``"tiled"``: image of each query row, tiles of an image side by side.
        reference_groups: The same for references, if these are tiled too.
        confidence: Coverage the interval aims at.
        seed: Of splits and bootstrap.

    Raises:
        ValueError: If not exactly one target is given, or there is too little data for it.
        OverlapError: If an image is on two sides.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    if (false_match_rate is None) == (precision is None):
        raise ValueError("expected one of false_match_rate and precision, got both or neither")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}")
    if precision is not None:
        if queries is None or references is None or is_match is None:
            raise ValueError("precision: expected queries, references and is_match, row by row")
        if kind == "tiled":
            raise ValueError(
                "precision of tiled scores: score the tiles, take the maximum per pair, and use "
                "precision_threshold(scores, is_match, kind='tiled')"
            )
        scores = _paired_scores(normalizer, queries, references, kind)
        rows = np.unique(np.asarray(queries), axis=0, return_inverse=True)[1].ravel()
        return precision_threshold(
            scores, is_match, precision, kind=kind, query_ids=rows, confidence=confidence, seed=seed
        )
    rate = float(false_match_rate or 0)
    if not 0 < rate < 1:
        raise ValueError(f"false_match_rate: expected a number between 0 and 1, got {rate}")
    if per not in ("query", "comparison"):
        raise ValueError(f"per: expected 'query' or 'comparison', got {per!r}")
    if bank_size is not None and not (bank_size >= 1 and bank_size == int(bank_size)):
        raise ValueError(f"bank_size: expected a whole number of at least 1, got {bank_size}")
    grouped = query_groups is not None or reference_groups is not None
    if grouped != (kind == "tiled"):
        raise ValueError(
            "query_groups and reference_groups: expected with kind='tiled' only, and at least one "
            f"of them there; got {'some' if grouped else 'neither'} with kind={kind!r}"
        )
    sides = both_sides(normalizer, queries, references, kind, seed)
    q, r, q_bias, r_bias, note = sides.q, sides.r, sides.q_bias, sides.r_bias, sides.note
    q_groups, r_groups = (
        image_numbers(query_groups, len(q)),
        image_numbers(reference_groups, len(r)),
    )
    available = len(np.unique(r_groups))
    bank = 1 if per == "comparison" else int(bank_size or available)
    sampled_bank = min(bank, available)
    sample_rate = rate * sampled_bank / bank
    count = len(np.unique(q_groups)) * (available // sampled_bank)
    if count < LEAST_SAMPLES:
        raise ValueError(
            f"calibration: expected at least {LEAST_SAMPLES} queries x banks of {sampled_bank}, "
            f"got {count}; give more images or a smaller bank_size"
        )
    keep = max(tail_size(count) + 1, 2 * int(np.ceil(sample_rate * count)))
    found = score_nonmatches(q, r, q_bias, r_bias, q_groups, r_groups, sampled_bank, keep, seed)
    value, interval = exceeded_with(
        sample_rate, found.top, found.top_query, found.queries, found.count, confidence, seed=seed
    )
    notes = [note] if note else []
    if sample_rate * found.count < 1:
        notes.append(
            f"the rate is below one in {found.count} samples: extrapolated from the tail, not "
            "counted"
        )
    if bank > available:
        notes.append(
            f"a bank of {bank} is larger than the {available} references at hand: the rate is an "
            "upper bound"
        )
    threshold = Threshold(
        value=value,
        kind=kind,
        target="false_match_rate_per_query"
        if per == "query"
        else "false_match_rate_per_comparison",
        wanted=rate,
        interval=interval,
        confidence=confidence,
        samples=found.count,
        bank_size=bank if per == "query" else None,
        extrapolated=sample_rate * found.count < 1 or bank > available,
        note="; ".join(notes),
    )
    return Calibration(threshold, found.sample, np.zeros(0), sides.given_rows(found.highest_pairs))


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
    return Calibration(threshold, values[~labels], values[labels], none)


def _paired_scores(
    normalizer: "Normalizer", queries: ArrayLike, references: ArrayLike, kind: Kind
) -> Float32:
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
