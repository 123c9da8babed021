"""``Matches``: what every search returns, on every backend.

Rows are kept flat, query after query (``offsets`` says where each query's matches begin), because a
range search returns a different number for each query and may return millions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

Metadata = dict[str, Any]


class Match(NamedTuple):
    """One reference that matched a query.

    Attributes:
        id: The id it was added with.
        score: The paper's normalized similarity; larger is better.
        metadata: What was added with it, or None.
    """

    id: str | int
    score: float
    metadata: Metadata | None


@dataclass(frozen=True, eq=False)
class Matches(Sequence[list[Match]]):
    """Matches of a batch of queries, best first within each query.

    ``matches[i]`` lists the ``Match``es of query ``i``; the arrays hold all of them without a
    Python object per match.

    Attributes:
        ids: ``(m,)`` int64 or object (str) ids, query after query.
        scores: ``(m,)`` float32 scores, larger is better.
        offsets: ``(n + 1,)`` int64; query ``i`` owns rows ``offsets[i]`` to ``offsets[i + 1]``.
        metadata: One mapping or None per row; None if no row has any.
        incomplete: Why matches may be missing, or None if all that the request asked for are here.
    """

    ids: NDArray[Any]
    scores: NDArray[np.float32]
    offsets: NDArray[np.int64]
    metadata: Sequence[Metadata | None] | None = field(default=None, repr=False)
    incomplete: str | None = None

    @property
    def complete(self) -> bool:
        """Whether every match the request asked for is certainly here."""
        return self.incomplete is None

    def __len__(self) -> int:
        """Number of queries."""
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, query: int) -> list[Match]: ...
    @overload
    def __getitem__(self, query: slice) -> list[list[Match]]: ...
    def __getitem__(self, query: int | slice) -> list[Match] | list[list[Match]]:
        """The matches of one query (or of a slice of queries), best first."""
        if isinstance(query, slice):
            return [self[i] for i in range(*query.indices(len(self)))]
        if not -len(self) <= query < len(self):
            raise IndexError(f"query {query} of {len(self)}")
        query %= len(self)
        begin, end = self.offsets[query], self.offsets[query + 1]
        ids = self.ids[begin:end].tolist()
        scores = self.scores[begin:end].tolist()
        metadata = [None] * len(ids) if self.metadata is None else self.metadata[begin:end]
        return [Match(*row) for row in zip(ids, scores, metadata, strict=True)]

    def __iter__(self) -> Iterator[list[Match]]:
        """The matches of each query in turn."""
        return (self[i] for i in range(len(self)))

    @property
    def counts(self) -> NDArray[np.int64]:
        """``(n,)`` matches per query."""
        counts: NDArray[np.int64] = np.diff(self.offsets)
        return counts

    @property
    def queries(self) -> NDArray[np.int64]:
        """``(m,)`` the query each row belongs to: with ``ids`` and ``scores``, one flat table."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.counts)

    def above(self, threshold: float) -> "Matches":
        """Only the matches that score at least ``threshold``."""
        return self.keep(self.scores >= threshold)

    def take(self, queries: NDArray[np.int64]) -> "Matches":
        """The matches of some queries, in this order."""
        counts = self.counts[queries]
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = np.arange(ends[-1]) + np.repeat(self.offsets[queries] - ends[:-1], counts)
        metadata = self.metadata
        if metadata is not None:
            metadata = [metadata[row] for row in rows.tolist()]
        return Matches(self.ids[rows], self.scores[rows], ends, metadata, self.incomplete)

    def keep(self, rows: NDArray[np.bool_]) -> "Matches":
        """Only the rows where ``rows`` is true."""
        if rows.all():
            return self
        kept = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        metadata = self.metadata
        if metadata is not None:
            metadata = [metadata[row] for row in np.flatnonzero(rows).tolist()]
        return Matches(
            self.ids[rows], self.scores[rows], kept[self.offsets], metadata, self.incomplete
        )

    def __repr__(self) -> str:
        """Sizes, not contents."""
        missing = "" if self.complete else f", incomplete: {self.incomplete}"
        return f"Matches({len(self)} queries, {len(self.ids)} matches{missing})"


def no_matches(queries: int) -> Matches:
    """The answer of an empty index."""
    return Matches(
        np.empty(0, dtype=object),
        np.empty(0, dtype=np.float32),
        np.zeros(queries + 1, dtype=np.int64),
    )


def concatenate(parts: Sequence[Matches]) -> Matches:
    """Matches of successive batches of queries as one."""
    if not parts:
        return no_matches(0)
    if len(parts) == 1:
        return parts[0]
    filled = [part for part in parts if len(part.ids)]
    ends = np.cumsum([0] + [len(part.ids) for part in parts])
    offsets = [part.offsets[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
    metadata: list[Metadata | None] | None = None
    if any(part.metadata is not None for part in parts):
        metadata = []
        for part in parts:
            metadata.extend([None] * len(part.ids) if part.metadata is None else part.metadata)
    return Matches(
        np.concatenate([part.ids for part in filled]) if filled else parts[0].ids,
        np.concatenate([part.scores for part in parts]),
        np.concatenate([*offsets, ends[-1:]]).astype(np.int64),
        metadata,
        next((part.incomplete for part in parts if part.incomplete), None),
    )
