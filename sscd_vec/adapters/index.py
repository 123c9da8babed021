"""``Index``: what every index does. A backend only stores rows and compares vectors.

An index stores *lifted* vectors, from which any metric gives the score (see ``normalize.lift``); an
adopted one the *plain* descriptors that someone else put there (see ``plain``).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.adapters import plain
from sscd_vec.adapters.arguments import (
    LARGEST_THRESHOLD,
    Batch,
    Float32,
    Id,
    Ids,
    IdType,
    Rows,
    Threshold,
    Wanted,
    as_ids,
    as_rows,
    check_fingerprint,
    is_id,
    unpack,
)
from sscd_vec.adapters.matches import Matches, Metadata, concatenate
from sscd_vec.adapters.products import by_faiss
from sscd_vec.normalize import Metric, Normalizer

CHECKED_ROWS = 8192  # descriptors checked at a time before the first is stored
RANGE_BLOCK = 1024  # queries of a range search at a time
SEARCH_BLOCK = 16_384  # and of a search for k, whose result has a known size
STORED_BLOCK = 4096  # rows read at a time from an adopted index


class Index(ABC):
    """References to search: descriptors in, calibrated matches out.

    ``FaissIndex`` and ``MilvusCollection`` have these verbs and return the same scores.
    """

    _takes_filters = False
    _plain = False  # adopted: plain descriptors, not lifted vectors
    _leaves_cores = False  # to a search outside of FAISS, on the same machine

    def __init__(self, normalizer: Normalizer) -> None:
        """Remember what turns descriptors into vectors and values into scores."""
        self._normalizer = by_faiss(normalizer, alone=self._leaves_cores)

    # ------------------------------------------------------------------ what a backend adds

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """``"ip"``, ``"l2"`` or ``"cosine"``; the scores are the same."""

    @property
    @abstractmethod
    def generation(self) -> int:
        """A number that changes with every commit."""

    @abstractmethod
    def commit(self) -> None:
        """Make everything added and removed so far safe, on disk or in the server."""

    @abstractmethod
    def _close(self, commit: bool) -> None:
        """Release files and connections, committed or not; a second call does nothing."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of references."""

    @abstractmethod
    def _id_type(self) -> IdType | None:
        """Type of the ids; None if nothing was ever added."""

    @abstractmethod
    def _add(self, rows: Rows, id_type: IdType) -> None:
        """Store checked rows, replacing those with the same ids."""

    @abstractmethod
    def _remove(self, ids: list[Any]) -> int:
        """Remove rows; return how many were there. The ids do not repeat."""

    @abstractmethod
    def _present(self, ids: list[Any]) -> set[Any]:
        """Which of these ids are there."""

    @abstractmethod
    def _nearest(self, vectors: Float32, k: int, wanted: Wanted) -> Matches:
        """The ``k`` best of each vector, with values of the metric in place of scores."""

    @abstractmethod
    def _within(self, vectors: Float32, bound: float, wanted: Wanted) -> Matches:
        """All references whose metric value is better than ``bound``; values in place of scores."""

    @abstractmethod
    def _stored(self) -> Iterator[Batch]:
        """Ids, vectors and metadata of every row, in batches."""

    # ------------------------------------------------------------------ adding and removing

    def add(
        self,
        ids: Ids | Id,
        descriptors: ArrayLike,
        metadata: Sequence[Metadata | None] | Metadata | None = None,
    ) -> None:
        """Add references; an id that is already there is replaced, metadata and all.

        All ids, descriptors and metadata of a call are checked before its first row is stored. A
        large call is stored in parts: if FAISS or the server fails at one, those before it stay.

        Args:
            ids: ``n`` strings or ``n`` integers; of a repeated id the last row wins.
            descriptors: ``(n, dim_in)`` as the encoder gives them.
            metadata: One JSON object or None per row.
        """
        rows, id_type = as_rows(ids, descriptors, metadata, self._id_type())
        if id_type is None or not rows.ids:
            return
        for begin in range(0, len(rows.ids), CHECKED_ROWS):
            self._normalizer.check(rows.descriptors[begin : begin + CHECKED_ROWS])
        self._add(rows, id_type)

    def add_batches(self, batches: Iterable[Batch]) -> int:
        """Add ``(ids, descriptors[, metadata])`` batches from any iterable, one at a time.

        Returns:
            Rows taken from the batches.
        """
        count = 0
        for ids, descriptors, metadata in unpack(batches):
            self.add(ids, descriptors, metadata)
            count += len(ids)
        return count

    def remove(self, ids: Ids | Id) -> int:
        """Remove ids; those that are not there are ignored.

        Returns:
            How many were there.
        """
        unique = list(dict.fromkeys(as_ids(ids, self._id_type())[0]))
        return self._remove(unique) if unique else 0

    def migrate(self, source: "Index") -> int:
        """Add every descriptor of an adopted index, transformed by this index's normalizer.

        ``source`` stays as it is, and may be of the other backend.

        Returns:
            Rows taken.

        Raises:
            ValueError: If ``source`` was not adopted, or keeps codes in place of descriptors.
        """
        if not source._plain:
            raise ValueError(
                "migrate: expected an adopted index of plain descriptors; this one stores vectors "
                "that a normalizer has transformed already. Encode its images again"
            )
        return self.add_batches(source._stored())

    def iterate_vectors(self) -> Iterator[tuple[Ids, Float32]]:
        """Ids and whitened descriptors ``(n, dim)`` of every reference, in batches.

        An index that keeps codes gives what they decode to.
        """
        for batch in self._stored():
            yield batch[0], np.asarray(batch[1], np.float32)[:, : self._normalizer.dim]

    def present(self, ids: Ids) -> set[Any]:
        """Which of these ids are there: one question for thousands of them."""
        asked = as_ids(ids, self._id_type())[0]
        return self._present(asked) if asked else set()

    def __contains__(self, id: object) -> bool:
        """Whether a reference with this id is there."""
        if not is_id(id):
            return False
        try:
            asked, _ = as_ids(cast(Id, id), self._id_type())
        except (TypeError, ValueError):  # empty, beyond int64, …: add would not have taken it
            return False
        return bool(self._present(asked))

    # ------------------------------------------------------------------ searching

    def search(
        self,
        descriptors: ArrayLike,
        k: int = 10,
        threshold: Threshold | None = None,
        *,
        filter: str = "",
        metadata: bool = True,
    ) -> Matches:
        """The ``k`` best references of each query.

        Args:
            descriptors: ``(n, dim_in)`` queries.
            k: At most this many per query.
            threshold: Only scores of at least this; ``"calibrated"`` takes the normalizer's.
            filter: Milvus expression over metadata, e.g. ``'year > 2020 and label == "cat"'``;
                FAISS has no filters.
            metadata: Whether to return metadata.
        """
        k, wanted, rules = _as_count(k, "k"), self._wanted(filter, metadata), self._normalizer
        lowest = None if threshold is None else self._lowest(threshold)
        queries = _as_queries(descriptors)
        parts = []
        for begin in range(0, len(queries), SEARCH_BLOCK):
            vectors, bias = self._queries(rules, queries[begin : begin + SEARCH_BLOCK])
            part = self._scored(rules, self._nearest(vectors, k, wanted), bias)
            parts.append(part if lowest is None else part.above(lowest))
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def range_search(
        self,
        descriptors: ArrayLike,
        threshold: Threshold = "calibrated",
        *,
        filter: str = "",
        metadata: bool = True,
    ) -> Matches:
        """All references that score at least ``threshold``; ``complete`` says if surely all.

        The arguments are those of ``search``.
        """
        parts = self.iterate_range(descriptors, threshold, filter=filter, metadata=metadata)
        return concatenate([part for _, part in parts])

    def iterate_range(
        self,
        descriptors: ArrayLike,
        threshold: Threshold = "calibrated",
        *,
        block: int = RANGE_BLOCK,
        filter: str = "",
        metadata: bool = True,
    ) -> Iterator[tuple[int, Matches]]:
        """``range_search`` in blocks of queries, for results too big for memory.

        Returns:
            Pairs of the number of a block's first query and the block's matches.
        """
        lowest, wanted = self._lowest(threshold), self._wanted(filter, metadata)
        return self._ranges(_as_queries(descriptors), lowest, _as_count(block, "block"), wanted)

    def _ranges(
        self, queries: NDArray[Any], lowest: float, block: int, wanted: Wanted
    ) -> Iterator[tuple[int, Matches]]:
        for begin in range(0, len(queries), block):
            rules = self._normalizer
            vectors, bias = self._queries(rules, queries[begin : begin + block])
            found = self._all_within(rules, vectors, bias, lowest, wanted)
            yield begin, self._scored(rules, found, bias).above(lowest)

    def _all_within(
        self, rules: Normalizer, vectors: Float32, bias: Float32, lowest: float, wanted: Wanted
    ) -> Matches:
        """Range search of one block; plain queries whose biases differ a lot are searched apart."""
        lowest -= 1e-5 * (1 + abs(lowest))  # indexes compare strictly and in float32
        if not self._plain:
            return self._within(vectors, rules.lift.to_metric(lowest, self.metric), wanted)
        groups = list(plain.ranges(bias, lowest, self.metric))
        parts = [self._within(vectors[rows], bound, wanted) for rows, bound in groups]
        return concatenate(parts).take(np.argsort(np.concatenate([rows for rows, _ in groups])))

    # ------------------------------------------------------------------ the rest

    @property
    def normalizer(self) -> Normalizer:
        """Turns descriptors into vectors; one with the same reference side may take its place."""
        return self._normalizer

    @normalizer.setter
    def normalizer(self, normalizer: Normalizer) -> None:
        check_fingerprint(self._normalizer.reference_fingerprint, normalizer, "this index")
        self._normalizer = by_faiss(normalizer, alone=self._leaves_cores)

    def reload_if_changed(self) -> bool:
        """See what other processes have committed; return whether there was anything.

        Milvus shows it at once and never has to reload.
        """
        return False

    def close(self) -> None:
        """Commit, then release files and connections. A second call does nothing."""
        self._close(commit=True)

    def __enter__(self) -> Self:
        """Nothing to do: it is open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; after an exception without a commit."""
        self._close(commit=kind is None)

    def _wanted(self, filter: str, metadata: bool) -> Wanted:
        if filter and not self._takes_filters:
            raise ValueError(f"filter: FAISS has none, got {filter!r}; use MilvusCollection")
        return Wanted(filter, metadata)

    def _lowest(self, threshold: Threshold) -> float:
        """The score behind a threshold argument; ``"calibrated"`` asks the normalizer."""
        if isinstance(threshold, str):
            if threshold != "calibrated":
                raise ValueError(
                    f"threshold: expected a number, None or 'calibrated', got {threshold!r}"
                )
            return self._normalizer.threshold("search", len(self))
        if not isinstance(threshold, float | int | np.number) or not np.isfinite(threshold):
            raise ValueError(
                f"threshold: expected a finite score or 'calibrated', got {threshold!r}"
            )
        return min(max(float(threshold), -LARGEST_THRESHOLD), LARGEST_THRESHOLD)

    def _queries(self, rules: Normalizer, descriptors: NDArray[Any]) -> tuple[Float32, Float32]:
        """Query vectors, and what to subtract from the similarities of each."""
        if self._plain:
            whitened = rules.whiten(descriptors)
            return whitened, rules.whitened_biases(whitened)
        return rules.queries(descriptors), np.empty(0, dtype=np.float32)

    def _references(self, descriptors: NDArray[Any]) -> Float32:
        """Descriptors as they are stored."""
        rules = self._normalizer
        return rules.whiten(descriptors) if self._plain else rules.references(descriptors)

    def _scored(self, rules: Normalizer, found: Matches, bias: Float32) -> Matches:
        """Values of the metric as scores."""
        if not len(found.ids):
            return found
        metric = self.metric
        if self._plain:
            scores = plain.similarities(found.scores, metric) - bias[found.queries]
        elif metric == "ip":  # the inner product of lifted vectors is the score
            return found
        else:
            scores = rules.lift.from_metric(found.scores, metric)
        return replace(found, scores=scores.astype(np.float32))


def _as_count(number: int, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise ValueError(f"{what}: expected a positive integer, got {number!r}")
    return int(number)


def _as_queries(descriptors: ArrayLike) -> NDArray[Any]:
    """Queries as rows: a single descriptor is one row, an empty list none."""
    array = np.asarray(descriptors)
    return np.empty((0, 0)) if array.shape == (0,) else np.atleast_2d(array)
