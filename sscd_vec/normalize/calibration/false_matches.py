"""Calibration: the threshold for a wanted false-match rate or precision, or a reason to refuse.

A false-match rate comes from images that are not copies of each other: their scores give a
``FalseMatchCurve``, and the curve a threshold for a bank of any size. A precision comes from
labelled pairs. Whatever the sample cannot say is refused, or returned with a warning if forced.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from sscd_vec.normalize.calibration.nonmatches import (
    NonMatches,
    Sides,
    both_sides,
    image_numbers,
    score_nonmatches,
)
from sscd_vec.normalize.calibration.precision import from_labels, paired_scores, trusted
from sscd_vec.normalize.calibration.tail import MOST, fit_curve, unexplained_pairs
from sscd_vec.normalize.calibration.thresholds import (
    KINDS,
    LEAST_RECALL,
    VIEWS,
    WIDEST,
    Calibration,
    CalibrationError,
    FalseMatchCurve,
    Kind,
    Threshold,
)
from sscd_vec.normalize.descriptors import Float64

if TYPE_CHECKING:
    from sscd_vec.normalize.normalizer import Normalizer

Per = Literal["query", "comparison"]
LEAST_COMPARISONS = 100  # to fit anything at all
ENOUGH_IMAGES, ENOUGH_COMPARISONS = 20, 4_000  # on either side, and of them, to be trusted
FURTHEST = 1e-3  # a rate may be extrapolated to this share of one in the comparisons
KEPT_PAIRS = 4 * MOST
HIGHEST = 20  # pairs returned for a second look


class Options(TypedDict, total=False):
    """What ``calibrate`` takes by name."""

    false_match_rate: float | None
    precision: float | None
    per: Per
    bank_size: int | None
    kind: Kind
    query_groups: ArrayLike | None
    reference_groups: ArrayLike | None
    query_penalty: ArrayLike | None
    related: ArrayLike | None
    leave_out: int | Literal["auto"]
    copies: tuple[ArrayLike, ArrayLike] | None
    least_recall: float
    highest: int
    force: bool
    confidence: float
    seed: int


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
    query_penalty: ArrayLike | None = None,
    related: ArrayLike | None = None,
    leave_out: int | Literal["auto"] = "auto",
    copies: tuple[ArrayLike, ArrayLike] | None = None,
    least_recall: float = LEAST_RECALL,
    highest: int = HIGHEST,
    force: bool = False,
    confidence: float = 0.95,
    seed: int = 0,
) -> Calibration:
    """Find the threshold for a false-match rate, or for a precision.

    **False-match rate.** ``queries`` and ``references`` are descriptors of images that are neither
    copies of each other nor in the background. One array alone is compared with itself, each image
    with all others. Without any, the background is split in three (queries, references, and a
    smaller background for the bias), as no background image may be scored against itself. A
    whitening fitted on few rows makes these very rows less alike than images it never saw, so this
    is refused below ten rows per dimension.

    **Precision.** Row ``i`` of ``queries`` and of ``references`` are a candidate pair, and
    ``is_match[i]`` says whether it is a copy. The candidates should be what a search returns in
    use: precision depends on how many of them are copies. Fewer than twenty are refused.

    Args:
        normalizer: Whose scores are calibrated.
        queries: Descriptors ``(n, d)``.
        references: Descriptors ``(m, d)``.
        is_match: Labels ``(n,)``, for a precision.
        false_match_rate: Wanted probability of a false match, per query or per comparison.
        precision: Wanted precision.
        per: ``"query"``: at least one false match in the whole bank; ``"comparison"``: per pair.
        bank_size: References in the bank in use; those given by default.
        kind: ``"search"``, ``"symmetric"``, or a maximum over views: ``"scaled"``, ``"tiled"``.
        query_groups: For a maximum: image of each query row, views of an image side by side.
        reference_groups: The same for references, if these have several views too.
        query_penalty: What each query row's scores lose, ``(n,)``, if some views are to score less.
        related: ``(k, 2)`` rows (images) of pairs known to be copies or shots of one scene; they
            are left out.
        leave_out: How many of the highest pairs are left out of the fit. ``"auto"``: those far
            above what the others explain, with a warning that lists them.
        copies: Descriptors of known copies, ``(queries, references)`` row by row.
        least_recall: Refuse a threshold that finds a smaller share of these. Without any, exact
            copies of the queries stand for them.
        highest: How many of the highest-scoring non-matches are returned.
        force: Return a refused threshold with a warning instead.
        confidence: Coverage the interval aims at.
        seed: Of splits and bootstrap.

    Raises:
        CalibrationError: If the threshold is not to be trusted, and not forced.
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
        labelled = from_labels(
            normalizer, queries, references, is_match, precision, kind, confidence, seed
        )
        return trusted(labelled, normalizer.largest_score, force)
    rate = float(false_match_rate or 0)
    if not 0 < rate < 1:
        raise ValueError(f"false_match_rate: expected a number between 0 and 1, got {rate}")
    if per not in ("query", "comparison"):
        raise ValueError(f"per: expected 'query' or 'comparison', got {per!r}")
    if bank_size is not None and not (bank_size >= 1 and bank_size == int(bank_size)):
        raise ValueError(f"bank_size: expected a whole number of at least 1, got {bank_size}")
    grouped = query_groups is not None or reference_groups is not None
    if grouped != (kind in VIEWS):
        raise ValueError(
            f"query_groups and reference_groups: expected with kind {' or '.join(VIEWS)} only, and "
            f"at least one of them there; got {'some' if grouped else 'neither'} with kind={kind!r}"
        )
    sides = both_sides(normalizer, queries, references, kind, seed)
    if query_penalty is not None:
        sides = replace(sides, q_bias=sides.q_bias + np.asarray(query_penalty, np.float32))
    q_groups = image_numbers(query_groups, len(sides.q))
    r_groups = image_numbers(reference_groups, len(sides.r))
    known = None if related is None else np.asarray(related, dtype=np.int64).reshape(-1, 2)
    kept = max(KEPT_PAIRS, highest)
    found = score_nonmatches(sides, q_groups, r_groups, kept, related=known, seed=seed)
    _require_enough(found)
    skipped = unexplained_pairs(found) if leave_out == "auto" else leave_out
    curve = fit_curve(
        found,
        kind,
        normalizer.largest_score,
        views=round(len(sides.q) / found.queries * len(sides.r) / found.references),
        leave_out=skipped,
        confidence=confidence,
        seed=seed,
    )
    bank = 1 if per == "comparison" else int(bank_size or found.references)
    threshold = _threshold(curve, rate, bank, per, sides.note)
    match_scores = _copy_scores(normalizer, sides, copies, kind)
    warnings = [_suspects(sides, found, skipped)] if skipped and leave_out == "auto" else []
    doubts = _doubts(curve, threshold, match_scores, copies is not None, least_recall, normalizer)
    calibration = Calibration(
        threshold=threshold,
        curve=curve,
        nonmatch_scores=found.sample,
        match_scores=match_scores if copies is not None else np.zeros(0),
        highest_pairs=sides.given_rows(found.top_pairs[:highest]),
        highest_scores=found.top[:highest],
        warnings=(*warnings, *doubts),
    )
    if doubts and not force:
        raise CalibrationError("calibration refused: " + "; ".join(doubts), calibration)
    return calibration


# ---------------------------------------------------------------------- what may be wrong


def _require_enough(found: NonMatches) -> None:
    if found.count < LEAST_COMPARISONS:
        raise ValueError(
            f"calibration: expected at least {LEAST_COMPARISONS} comparisons, got {found.count} of "
            f"{found.queries} and {found.references} images; give more images"
        )


def _threshold(curve: FalseMatchCurve, rate: float, bank: int, per: Per, note: str) -> Threshold:
    extrapolated = curve.per_comparison(rate, bank) < curve.counted
    if extrapolated:
        said = f"fewer than ten of {curve.comparisons} comparisons score so high: extrapolated"
        note = f"{note}; {said}" if note else said
    return Threshold(
        value=curve.score(rate, bank),
        kind=curve.kind,
        target="false_match_rate_per_query"
        if per == "query"
        else "false_match_rate_per_comparison",
        wanted=rate,
        interval=curve.score_interval(rate, bank),
        confidence=curve.confidence,
        samples=curve.comparisons,
        bank_size=bank if per == "query" else None,
        extrapolated=extrapolated,
        note=note,
    )


def _copy_scores(
    normalizer: "Normalizer",
    sides: Sides,
    copies: tuple[ArrayLike, ArrayLike] | None,
    kind: Kind,
) -> Float64:
    """Scores of known copies, or of each query with itself: the most any copy can reach."""
    if copies is not None:
        return paired_scores(normalizer, *copies, kind).astype(np.float64)
    itself: Float64 = np.einsum("nd,nd->n", sides.q, sides.q) - sides.q_bias.astype(np.float64)
    return itself


def _suspects(sides: Sides, found: NonMatches, count: int) -> str:
    pairs = sides.given_rows(found.top_pairs[: min(count, 3)]).tolist()
    listed = ", ".join(f"{a} and {b}" for a, b in pairs)
    return (
        f"{count} pairs score far above the others (from {found.top[count - 1]:.2f} to "
        f"{found.top[0]:.2f}; rows {listed}{' …' if count > 3 else ''}) and were left out: they "
        "may be copies, or shots of one scene. Look at highest_pairs"
    )


def _doubts(
    curve: FalseMatchCurve,
    threshold: Threshold,
    copies: Float64,
    known: bool,
    least_recall: float,
    normalizer: "Normalizer",
) -> list[str]:
    """Why a threshold should not be used."""
    doubts = []
    if min(curve.images) < ENOUGH_IMAGES or curve.comparisons < ENOUGH_COMPARISONS:
        doubts.append(
            f"{curve.comparisons} comparisons of {curve.images[0]} and {curve.images[1]} images "
            f"are too few: give {ENOUGH_COMPARISONS} of {ENOUGH_IMAGES} or more on either side"
        )
    bank = threshold.bank_size or 1
    wanted = curve.per_comparison(threshold.wanted or 0.5, bank)
    if wanted < FURTHEST / curve.comparisons:
        images = int(np.ceil(np.sqrt(FURTHEST / wanted)))
        doubts.append(
            f"a rate of {wanted:.1g} per comparison is too far below one in the "
            f"{curve.comparisons} at hand; give {images} images or more, a higher rate or a "
            "smaller bank_size"
        )
    low, high = threshold.interval or (threshold.value, threshold.value)
    widest = WIDEST * normalizer.largest_score
    if high - low > widest:
        doubts.append(
            f"the threshold {threshold.value:.3f} could be anything from {low:.3f} to {high:.3f}, "
            f"which is wider than {widest:g}; give more images, and look at highest_pairs"
        )
    recall = float((copies >= threshold.value).mean())
    if recall < least_recall:
        what = f"{len(copies)} known copies" if known else "exact copies of the queries"
        doubts.append(
            f"at {threshold.value:.3f} only {recall:.1%} of the {what} would be found, fewer than "
            f"{least_recall:.0%}; look at highest_pairs, or ask for a higher rate"
        )
    return doubts
