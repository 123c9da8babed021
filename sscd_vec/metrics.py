"""How good a list of candidates is: µAP, recall at a precision, accuracy@1, MRR, mAP.

Ties are resolved against us: among equal scores, non-matches come first. A threshold accepts all
of a tie or none of it. A pair predicted twice is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sscd_vec.predictions import GroundTruth, Ids, Predictions, number_ids

Rule = Literal["trapezoid", "step"]


@dataclass(frozen=True)
class OperatingPoint:
    """What a threshold gives.

    Attributes:
        recall: Share of all true pairs with a score of at least ``threshold``.
        precision: Share of true pairs among candidates with such a score.
        threshold: The score; infinity if the precision is never reached.
    """

    recall: float
    precision: float
    threshold: float


@dataclass(frozen=True, eq=False)
class Curve:
    """Precision and recall at every distinct score, highest score first.

    Attributes:
        recall: ``(k,)`` non-decreasing.
        precision: ``(k,)``.
        threshold: ``(k,)`` scores, strictly decreasing.
    """

    recall: NDArray[np.float64]
    precision: NDArray[np.float64]
    threshold: NDArray[np.floating]


@dataclass(frozen=True)
class Summary:
    """The usual figures of one set of predictions.

    Attributes:
        micro_ap: µAP.
        recall_at_p90: Recall at 90 % precision.
        threshold_at_p90: The score that gives it.
        accuracy_at_1: Share of the queries with a match whose first result is one.
        mrr: Mean reciprocal rank over those queries.
        queries: Queries with a match.
        pairs: True pairs.
        candidates: Predictions.
    """

    micro_ap: float
    recall_at_p90: float
    threshold_at_p90: float
    accuracy_at_1: float
    mrr: float
    queries: int
    pairs: int
    candidates: int


def micro_average_precision(predictions: Predictions, truth: GroundTruth) -> float:
    """µAP: ``sum_k (recall_k - recall_{k-1}) precision_k`` over all candidates in one list."""
    return _micro_ap(_match(predictions, truth))


def precision_recall_curve(predictions: Predictions, truth: GroundTruth) -> Curve:
    """Precision and recall of accepting every candidate down to each distinct score."""
    return _curve(_match(predictions, truth))


def recall_at_precision(
    predictions: Predictions, truth: GroundTruth, precision: float = 0.9
) -> OperatingPoint:
    """The largest recall at which precision is still at least ``precision``, and its threshold."""
    return _recall_at_precision(_curve(_match(predictions, truth)), precision)


def accuracy_at_1(predictions: Predictions, truth: GroundTruth) -> float:
    """Share of the queries with a match whose first result is a match (recall@1)."""
    ranks = _first_ranks(_match(predictions, truth))
    return float((ranks == 1).mean()) if len(ranks) else float("nan")


def mean_reciprocal_rank(predictions: Predictions, truth: GroundTruth) -> float:
    """Mean of ``1 / rank of the first match`` over the queries with a match; 0 if not found."""
    ranks = _first_ranks(_match(predictions, truth))
    return float((1 / ranks).mean()) if len(ranks) else float("nan")


def mean_average_precision(
    predictions: Predictions, truth: GroundTruth, rule: Rule = "trapezoid"
) -> float:
    """Mean over the queries with a match of their average precision.

    With ``rank_j`` the 1-based rank of the j-th match found for a query with ``R`` matches,
    ``"trapezoid"`` (Copydays, Holidays) is ``1/R sum_j (p0_j + p1_j) / 2`` with
    ``p0_j = (j - 1) / (rank_j - 1)`` (1 at rank 1) and ``p1_j = j / rank_j``; ``"step"`` is
    ``1/R sum_j p1_j``.
    """
    if rule not in get_args(Rule):
        raise ValueError(f"rule: expected one of {get_args(Rule)}, got {rule!r}")
    matched = _match(predictions, truth)
    if matched.query_count == 0:
        return float("nan")
    order, rank = _ranked_within_queries(matched)
    query, hit = matched.query[order], matched.is_match[order]
    # Matches of a query are consecutive in `order`: number them by their place in the run.
    query, rank = query[hit], rank[hit]
    found = 1 + _place_in_run(query)
    precision = found / rank
    if rule == "trapezoid":
        before = np.where(rank == 1, 1.0, (found - 1) / np.maximum(rank - 1, 1))
        precision = (precision + before) / 2
    pairs_of_query = np.bincount(matched.truth_query, minlength=matched.query_count)
    total = np.bincount(query, precision, minlength=matched.query_count)[: matched.query_count]
    return float((total / pairs_of_query).mean())


def evaluate(predictions: Predictions, truth: GroundTruth) -> Summary:
    """µAP, recall@P90 with its threshold, accuracy@1 and MRR at once."""
    return _summary(_match(predictions, truth))


@dataclass(frozen=True)
class EditSummary:
    """Figures of the queries made with one kind of edit.

    Attributes:
        pairs: True pairs among them.
        micro_ap: µAP of their candidates alone.
        accuracy_at_1: As in ``Summary``.
        recall_at_p90: Share of their pairs found at the threshold that gives 90 % precision over
            *all* queries: what a user of that threshold sees for this edit.
    """

    pairs: int
    micro_ap: float
    accuracy_at_1: float
    recall_at_p90: float


def by_edit(
    predictions: Predictions, truth: GroundTruth, edits: Mapping[Any, str | Sequence[str]]
) -> dict[str, EditSummary]:
    """Figures per edit; a query with several edits counts for each, sorted by name.

    Args:
        predictions: All candidates.
        truth: All true pairs.
        edits: Edit or edits of each query by its id; queries not listed count for none.
    """
    matched = _match(predictions, truth)
    threshold = _recall_at_precision(_curve(matched), 0.9).threshold
    queries_of_edit: dict[str, set[Any]] = {}
    for query, names in edits.items():
        for name in (names,) if isinstance(names, str) else names:
            queries_of_edit.setdefault(name, set()).add(query)
    figures = {}
    for name in sorted(queries_of_edit):
        part = matched.of_queries(queries_of_edit[name])
        if part.pairs == 0:
            continue
        accepted = part.is_match & (part.score >= threshold)
        figures[name] = EditSummary(
            pairs=part.pairs,
            micro_ap=_micro_ap(part),
            accuracy_at_1=float((_first_ranks(part) == 1).mean()),
            recall_at_p90=float(accepted.sum() / part.pairs),
        )
    return figures


# ---------------------------------------------------------------------- predictions, judged


@dataclass(frozen=True, eq=False)
class _Matched:
    """Predictions with their verdicts; queries with a match are numbered 0 to query_count - 1."""

    query: NDArray[np.int64]
    score: NDArray[np.floating]
    is_match: NDArray[np.bool_]
    truth_query: NDArray[np.int64]
    query_count: int
    names: Ids  # id of each query number

    @property
    def pairs(self) -> int:
        return len(self.truth_query)

    @cached_property
    def numbers(self) -> dict[Any, int]:
        return {name: number for number, name in enumerate(self.names.tolist())}

    def of_queries(self, wanted: set[Any]) -> "_Matched":
        """The part that belongs to some queries, renumbered."""
        chosen = np.zeros(len(self.names), dtype=bool)
        chosen[[self.numbers[q] for q in wanted if q in self.numbers]] = True
        renumbered = np.cumsum(chosen) - 1  # queries with a match come first, so they stay first
        rows, truth_rows = chosen[self.query], chosen[self.truth_query]
        return _Matched(
            renumbered[self.query[rows]],
            self.score[rows],
            self.is_match[rows],
            renumbered[self.truth_query[truth_rows]],
            int(chosen[: self.query_count].sum()),
            self.names[chosen],
        )


def _match(predictions: Predictions, truth: GroundTruth) -> _Matched:
    predictions = truth.counting(predictions)
    truth_query, query, names, count = number_ids(truth.query_ids, predictions.query_ids)
    truth_reference, reference, references, _ = number_ids(
        truth.reference_ids, predictions.reference_ids
    )
    width = max(len(references), 1)
    truth_pair = truth_query * width + truth_reference
    pair = query * width + reference
    _refuse_duplicates(truth_pair, truth.query_ids, truth.reference_ids, "ground truth")
    _refuse_duplicates(pair, predictions.query_ids, predictions.reference_ids, "predictions")
    is_match = _member(pair, np.sort(truth_pair))
    return _Matched(query, predictions.scores, is_match, truth_query, count, names)


def _member(values: NDArray[np.int64], ordered: NDArray[np.int64]) -> NDArray[np.bool_]:
    if len(ordered) == 0:
        return np.zeros(len(values), dtype=bool)
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    member: NDArray[np.bool_] = ordered[place] == values
    return member


def _refuse_duplicates(pair: NDArray[np.int64], queries: Ids, references: Ids, what: str) -> None:
    ordered = np.sort(pair)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        row = int(np.flatnonzero(pair == repeated[0])[1])
        raise ValueError(
            f"{what}: {len(repeated)} pairs are listed more than once (first: query "
            f"{queries[row]!s}, reference {references[row]!s}, again in row {row}); "
            "keep one score per pair"
        )


def _micro_ap(matched: _Matched) -> float:
    if matched.pairs == 0:
        return float("nan")
    is_match = matched.is_match[np.lexsort((matched.is_match, -matched.score))]
    places = np.flatnonzero(is_match) + 1
    precision = np.arange(1, len(places) + 1) / places
    return float(precision.sum() / matched.pairs)


def _curve(matched: _Matched) -> Curve:
    order = np.argsort(-matched.score)
    score = matched.score[order]
    last = np.ones(len(score), dtype=bool)
    last[:-1] = score[1:] != score[:-1]  # the last of each tie
    accepted = np.flatnonzero(last) + 1
    found = np.cumsum(matched.is_match[order])[last]
    recall = found / matched.pairs if matched.pairs else np.full(len(found), np.nan)
    return Curve(recall, found / accepted, score[last])


def _recall_at_precision(curve: Curve, precision: float) -> OperatingPoint:
    if not 0 < precision <= 1:
        raise ValueError(f"precision: expected a number above 0 and up to 1, got {precision}")
    # A candidate list may pass through the precision several times; recall only grows: the last.
    good = np.flatnonzero((curve.precision >= precision) & (curve.recall > 0))
    if len(good) == 0:
        return OperatingPoint(0.0, 1.0, float("inf"))
    at = good[np.argmax(curve.recall[good])]  # the highest threshold with that recall
    return OperatingPoint(
        float(curve.recall[at]), float(curve.precision[at]), float(curve.threshold[at])
    )


def _summary(matched: _Matched) -> Summary:
    point = _recall_at_precision(_curve(matched), 0.9)
    ranks = _first_ranks(matched)
    nothing = float("nan")
    return Summary(
        micro_ap=_micro_ap(matched),
        recall_at_p90=point.recall,
        threshold_at_p90=point.threshold,
        accuracy_at_1=float((ranks == 1).mean()) if len(ranks) else nothing,
        mrr=float((1 / ranks).mean()) if len(ranks) else nothing,
        queries=matched.query_count,
        pairs=matched.pairs,
        candidates=len(matched.score),
    )


def _first_ranks(matched: _Matched) -> NDArray[np.float64]:
    """Rank of the first match of each query with a match; infinity where none was found."""
    first = np.full(matched.query_count, np.inf)
    order, rank = _ranked_within_queries(matched)
    hit = matched.is_match[order]
    np.minimum.at(first, matched.query[order][hit], rank[hit])
    return first


def _ranked_within_queries(
    matched: _Matched,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """An order by query, descending score, non-matches first; and each one's 1-based rank."""
    order = np.lexsort((matched.is_match, -matched.score, matched.query))
    return order, 1 + _place_in_run(matched.query[order])


def _place_in_run(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """0-based place of each element within its run of equal values."""
    starts = np.ones(len(groups), dtype=bool)
    starts[1:] = groups[1:] != groups[:-1]
    first = np.flatnonzero(starts)
    place: NDArray[np.int64] = np.arange(len(groups)) - np.repeat(
        first, np.diff(first, append=len(groups))
    )
    return place
