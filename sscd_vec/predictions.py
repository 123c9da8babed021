"""Predictions and ground truth of a copy-detection benchmark, and their CSV files."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.files import writing

Ids = NDArray[Any]  # strings or integers

_YES_OR_NO = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, eq=False)
class Predictions:
    """Candidates ``(query, reference, score)``, in any order; a larger score is a surer copy.

    Attributes:
        query_ids: ``(n,)`` strings or integers.
        reference_ids: ``(n,)`` strings or integers.
        scores: ``(n,)`` numbers, compared in the precision they are given in.
    """

    query_ids: Ids
    reference_ids: Ids
    scores: NDArray[np.floating]

    def __init__(self, query_ids: ArrayLike, reference_ids: ArrayLike, scores: ArrayLike) -> None:
        """Take three sequences of equal length.

        Raises:
            ValueError: If lengths differ or a score is NaN.
        """
        queries, references, values = (
            np.asarray(query_ids),
            np.asarray(reference_ids),
            np.asarray(scores),
        )
        if not np.issubdtype(values.dtype, np.floating):
            values = values.astype(np.float64)
        if not queries.shape == references.shape == values.shape or values.ndim != 1:
            raise ValueError(
                "predictions: expected three sequences of equal length, got shapes "
                f"{queries.shape}, {references.shape}, {values.shape}"
            )
        if np.isnan(values).any():
            row = int(np.flatnonzero(np.isnan(values))[0])
            raise ValueError(
                f"predictions: the score of row {row} ({queries[row]}, {references[row]}) is NaN; "
                "a NaN has no place in a ranking"
            )
        for name, value in (
            ("query_ids", queries),
            ("reference_ids", references),
            ("scores", values),
        ):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self.scores)

    def best(self, count: int) -> "Predictions":
        """The ``count`` candidates of highest score (the challenge allows 500 000)."""
        if len(self) <= count:
            return self
        return self.select(np.sort(np.argpartition(-self.scores, count - 1)[:count]))

    def select(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> "Predictions":
        """The candidates of some rows."""
        return Predictions(self.query_ids[rows], self.reference_ids[rows], self.scores[rows])


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The pairs that are copies.

    Attributes:
        query_ids: ``(m,)`` query of each pair.
        reference_ids: ``(m,)`` reference of each pair.
        judged: Ids of all queries that count, with and without a match; None if every one does.
    """

    query_ids: Ids
    reference_ids: Ids
    judged: Ids | None

    def __init__(
        self, query_ids: ArrayLike, reference_ids: ArrayLike, judged: ArrayLike | None = None
    ) -> None:
        """Take two sequences of equal length, and the queries that count if not all do.

        Raises:
            ValueError: If their lengths differ.
        """
        queries, references = np.asarray(query_ids), np.asarray(reference_ids)
        if queries.shape != references.shape or queries.ndim != 1:
            raise ValueError(
                "ground truth: expected two sequences of equal length, got shapes "
                f"{queries.shape}, {references.shape}"
            )
        object.__setattr__(self, "query_ids", queries)
        object.__setattr__(self, "reference_ids", references)
        object.__setattr__(self, "judged", None if judged is None else np.asarray(judged))

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[Any, Any]]) -> "GroundTruth":
        """From ``(query_id, reference_id)`` pairs."""
        listed = list(pairs)
        return cls([q for q, _ in listed], [r for _, r in listed])

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.query_ids)

    def counting(self, predictions: Predictions) -> Predictions:
        """The candidates of the queries that are scored."""
        if self.judged is None:
            return predictions
        _, queries, _, judged = number_ids(self.judged, predictions.query_ids)
        return predictions.select(queries < judged)


def read_predictions(path: str | Path) -> Predictions:
    """Read a CSV file with columns ``query_id,reference_id,score``.

    Raises:
        ValueError: If a column is missing, a line is incomplete or a score is not a number.
    """
    queries: list[str] = []
    references: list[str] = []
    scores: list[float] = []
    for number, (query, reference, score) in _rows(path, ("query_id", "reference_id", "score")):
        queries.append(query)
        references.append(reference)
        try:
            scores.append(float(score))
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: expected a number as score, got {score!r}"
            ) from None
    return Predictions(queries, references, np.asarray(scores, dtype=np.float64))


def write_predictions(path: str | Path, predictions: Predictions) -> None:
    """Write a CSV file with columns ``query_id,reference_id,score``, whole or not at all.

    Scores are written in full, so that reading them back gives the same ranking.
    """
    columns = predictions.query_ids, predictions.reference_ids, predictions.scores
    ids, references, scores = (column.tolist() for column in columns)
    with writing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["query_id", "reference_id", "score"])
        writer.writerows(zip(ids, references, map(repr, scores), strict=True))
        text.flush()
        text.detach()


def read_ground_truth(path: str | Path) -> GroundTruth:
    """Read a CSV file with columns ``query_id,reference_id``; an empty reference is no match.

    A file that lists queries without a match lists all queries that count: the challenge's public
    part names half of them. One that lists matches only says nothing of the other queries, and
    they all count. The first line names the columns, or is data already, as in DISC2021's own
    files.
    """
    rows = [pair for _, pair in _rows(path, ("query_id", "reference_id"), data_first=True)]
    matches = [(query, reference) for query, reference in rows if reference]
    judged = None if len(matches) == len(rows) else sorted({query for query, _ in rows})
    return GroundTruth([q for q, _ in matches], [r for _, r in matches], judged)


@dataclass(frozen=True, eq=False)
class Labels:
    """Pairs that a person has judged.

    Attributes:
        query_ids: ``(n,)`` query of each pair.
        reference_ids: ``(n,)`` reference of each pair.
        is_copy: ``(n,)`` whether it is a copy.
    """

    query_ids: Ids
    reference_ids: Ids
    is_copy: NDArray[np.bool_]

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.is_copy)


def read_labels(path: str | Path) -> Labels:
    """Read a CSV file with columns ``query,reference,is_copy``; 1, true or yes is a copy.

    Raises:
        ValueError: If a column is missing, a label is neither yes nor no, or a pair is listed
            with both.
    """
    judged: dict[tuple[str, str], bool] = {}
    for number, (query, reference, label) in _rows(path, ("query", "reference", "is_copy")):
        is_copy = _YES_OR_NO.get(label.lower())
        if is_copy is None:
            raise ValueError(
                f"{path}, line {number}: expected is_copy to be 1 or 0, true or false, yes or no; "
                f"got {label!r}"
            )
        if judged.setdefault((query, reference), is_copy) != is_copy:
            raise ValueError(
                f"{path}, line {number}: the pair {query}, {reference} is labelled a copy in one "
                "line and not in another; keep the right one"
            )
    queries, references = ([pair[side] for pair in judged] for side in (0, 1))
    labels = np.fromiter(judged.values(), dtype=bool, count=len(judged))
    return Labels(np.asarray(queries), np.asarray(references), labels)


def number_ids(first: Ids, second: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64], Ids, int]:
    """Number the ids of two columns 0, 1, ... together; those in ``first`` get the lower numbers.

    Returns:
        Numbers of ``first``, numbers of ``second``, the id of each number, and how many ids
        ``first`` holds.
    """
    kinds = {first.dtype.kind, second.dtype.kind}
    # Joined only where that changes no id: numpy would make the number 1 and the string "1" equal.
    if kinds == {"U"} or kinds <= {"i", "u"} and first.dtype == second.dtype:
        joined = np.concatenate([first, second])
    else:
        joined = np.array([*first.tolist(), *second.tolist(), None], dtype=object)[:-1]
    codes, names = _codes(joined)
    in_first = np.zeros(len(names), dtype=bool)
    in_first[codes[: len(first)]] = True
    order = np.argsort(~in_first, kind="stable")
    number = np.empty(len(names), dtype=np.int64)
    number[order] = np.arange(len(names))
    codes = number[codes]
    return codes[: len(first)], codes[len(first) :], names[order], int(in_first.sum())


def _codes(ids: Ids) -> tuple[NDArray[np.int64], Ids]:
    """A number for each id, and the id of each number."""
    if ids.dtype.kind != "O" and len(ids):
        keys = _hashes(ids) if ids.dtype.kind == "U" else ids
        _, places, codes = np.unique(keys, return_index=True, return_inverse=True)
        names = ids[places]
        if (names[codes] == ids).all():  # always so, unless two strings share a 64-bit hash
            return codes.astype(np.int64), names
    numbers: dict[Any, int] = {}
    listed = [numbers.setdefault(name, len(numbers)) for name in ids.tolist()]
    unique = np.empty(len(numbers), dtype=object)
    unique[:] = list(numbers)
    return np.array(listed, dtype=np.int64), unique


def _hashes(strings: Ids) -> NDArray[np.uint64]:
    """64 bits per string, from a polynomial in its characters: sorting these beats sorting text."""
    width = strings.dtype.itemsize // 4
    letters = np.ascontiguousarray(strings).view(np.uint32).reshape(len(strings), width)
    hashed = np.zeros(len(strings), dtype=np.uint64)
    for column in range(width):
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + letters[:, column]
        hashed ^= hashed >> np.uint64(29)
    return hashed


def _rows(
    path: str | Path, columns: Sequence[str], data_first: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and the cells of ``columns``; ``data_first`` allows files that name none."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in columns if name not in header]
        # No column is called Q00001: an id has a digit.
        if missing and data_first and len(header) == len(columns) and _has_digit(header[0]):
            yield 1, header
            header, missing = list(columns), []
        if missing:
            raise ValueError(
                f"{path}: expected a first line naming the columns {','.join(columns)}, "
                f"got {','.join(header) or 'an empty file'}"
            )
        places = [header.index(name) for name in columns]
        for row in reader:
            if not row:
                continue
            if len(row) <= max(places):
                raise ValueError(
                    f"{path}, line {reader.line_num}: expected {len(header)} columns, "
                    f"got {len(row)}"
                )
            yield reader.line_num, [row[place].strip() for place in places]


def _has_digit(text: str) -> bool:
    return any(letter.isdigit() for letter in text)
