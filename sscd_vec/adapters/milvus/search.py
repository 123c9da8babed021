"""Searching a collection: requests to Milvus, its answers as ``Matches``, pages where one is small.

A server returns at most 16384 hits per query. Beyond that, the next page is the band of scores
below the last hit: ``radius < value <= last`` for IP and cosine, ``last <= value < radius`` for L2.
Hits that tie with the last one come again and are skipped; ties that fill a whole page are asked
for by ranges of ids. Lite has no limit but cannot do bands (it filters a fixed number of
candidates), so there the page grows until it holds everything.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sscd_vec.adapters.arguments import Float32, Wanted, padded
from sscd_vec.adapters.matches import Matches, Metadata
from sscd_vec.adapters.milvus.connection import AnswerTooLarge
from sscd_vec.adapters.milvus.rows import REQUEST_BYTES, between
from sscd_vec.adapters.milvus.settings import EXACT, ID, SEARCH, Params, Settings
from sscd_vec.adapters.milvus.storage import Storage

RESPONSE_HITS = 200_000  # some 20 MB with short metadata
REQUEST_QUERIES = 16_384  # a server takes no more at once
SERVER_LIMIT = 16_384  # hits per query
FIRST_HITS = 256  # most queries have few matches: one small request settles many of them
PAGE_WITH_METADATA = 4096
FIRST_LIMIT = 1024


class Page(NamedTuple):
    """Hits of one query, best first."""

    ids: list[Any]
    values: list[float]
    metadata: list[Metadata | None] | None


class Request(NamedTuple):
    """One range search: at most ``limit`` hits, the best allowed value, and a filter to add."""

    limit: int
    best: float | None = None
    filter: str = ""


Ask = Callable[[Request], Page]


@dataclass
class Searcher:
    """Searches with one filter, with or without metadata.

    Attributes:
        storage: Where.
        settings: Of the collection.
        params: Search parameters of the index.
        wanted: Filter, and whether to fetch metadata.
    """

    storage: Storage
    settings: Settings
    params: Params
    wanted: Wanted
    _hits: int = RESPONSE_HITS  # fewer, once metadata turn out to be long
    _apart: bool = False  # whether metadata are fetched after the hits, rather than with them

    def nearest(self, vectors: Float32, k: int, incomplete: str | None = None) -> Matches:
        """The ``k`` best of each vector; values in place of scores."""
        if vectors.shape[1] < self.settings.dim:
            vectors = padded(vectors, self.settings.dim)
        block = max(1, min(RESPONSE_HITS // k, REQUEST_QUERIES, self._sendable))
        pages = []
        for begin in range(0, len(vectors), block):
            pages += self._ask(vectors[begin : begin + block], Request(k))
        return self._matches(pages, incomplete)

    def within(self, vectors: Float32, radius: float) -> Matches:
        """All hits beyond ``radius``; values in place of scores."""
        if vectors.shape[1] < self.settings.dim:
            vectors = padded(vectors, self.settings.dim)
        block = max(1, min(RESPONSE_HITS // FIRST_HITS, self._sendable))
        pages = []
        for begin in range(0, len(vectors), block):
            part = vectors[begin : begin + block]
            for n, page in enumerate(self._ask(part, Request(FIRST_HITS), radius)):
                if len(page.ids) >= FIRST_HITS:
                    page = _joined(list(self._all_pages(part[n : n + 1], radius)))
                pages.append(page)
        return self._matches(pages)

    def _all_pages(self, vector: Float32, radius: float) -> Iterator[Page]:
        """Pages of one vector with many hits."""

        def ask(request: Request) -> Page:
            return self._ask(vector, request, radius)[0]

        if self.storage.is_lite:
            return growing(ask)
        limit = PAGE_WITH_METADATA if self.wanted.metadata else SERVER_LIMIT
        worst = np.inf if self.settings.metric == "l2" else -np.inf
        return banded(ask, limit, worst, self.settings.id_field)

    @property
    def _sendable(self) -> int:
        return REQUEST_BYTES // (4 * self.settings.dim)

    def _matches(self, pages: list[Page], incomplete: str | None = None) -> Matches:
        """One page per query as ``Matches``."""
        settings = self.settings
        counts = [len(page.ids) for page in pages]
        ids = np.empty(sum(counts), dtype=np.int64 if settings.id_type == "int" else object)
        ids[:] = [i for page in pages for i in page.ids]
        values = np.array([v for page in pages for v in page.values], dtype=np.float32)
        if incomplete is None and settings.index_type not in EXACT:
            incomplete = f"{settings.index_type} is approximate and may miss references"
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Matches(ids, values, offsets, _metadata_of(pages), incomplete)

    def _ask(self, vectors: Float32, request: Request, radius: float | None = None) -> list[Page]:
        """Pages of these vectors, in as many requests as their answers need.

        How long metadata are shows only when a server cannot send them: then fewer vectors are
        asked for at once, and if one alone has too many, its metadata apart from its hits.
        """
        pages: list[Page] = []
        while len(pages) < len(vectors):
            part = vectors[len(pages) :][: max(1, self._hits // request.limit)]
            try:
                pages += self._send(part, request, radius)
            except AnswerTooLarge:
                if self._apart or not self.wanted.metadata:
                    raise
                if len(part) == 1:
                    self._apart = True
                else:
                    self._hits = max(1, len(part) * request.limit // 4)
        return pages

    def _send(self, vectors: Float32, request: Request, radius: float | None) -> list[Page]:
        settings, storage = self.settings, self.storage
        bounds = {} if radius is None else {"radius": radius}
        if request.best is not None:
            bounds["range_filter"] = request.best
        # A radius on Lite picks from five times the limit; a graph must walk as far.
        reach = 5 * request.limit if bounds and storage.is_lite else request.limit
        filters = [f"({part})" for part in (self.wanted.filter, request.filter) if part]
        together = bool(self.wanted.metadata and not self._apart and settings.metadata_fields)
        found = storage.connection.call(
            "search",
            collection_name=storage.name,
            data=vectors.astype(settings.dtype, copy=False),
            anns_field=settings.vector_field,
            limit=request.limit,
            filter=" and ".join(filters),
            partition_names=[storage.partition],
            search_params=search_params(settings, reach, self.params, **bounds),
            # Asked for none, Lite gives all.
            output_fields=[*settings.metadata_fields] if together else [settings.id_field],
            consistency_level=storage.consistency,
        )
        pages = []
        for hits in found:
            more: list[Metadata | None] | None = None
            if together:
                more = [hit["entity"] or None for hit in hits]
            elif self.wanted.metadata and settings.metadata_fields:
                stored = storage.metadata(hits.ids)
                more = [stored.get(i) for i in hits.ids]
            pages.append(Page(hits.ids, hits.distances, more))
        return pages


def search_params(settings: Settings, k: int, given: Params, **bounds: float) -> dict[str, Any]:
    """Parameters of one search for ``k`` neighbours, with range bounds if any."""
    params = {**SEARCH.get(settings.index_type, {}), **given, **bounds}
    for width in ("ef", "search_list"):  # Milvus refuses less than k
        if width in params:
            params[width] = max(int(params[width]), k)
    return {"metric_type": settings.metric.upper(), "params": params}


# ---------------------------------------------------------------------- pages


def growing(ask: Ask, first: int = FIRST_LIMIT) -> Iterator[Page]:
    """One page, asked for with larger limits until it is not full (Lite)."""
    limit = first
    while len((page := ask(Request(limit))).ids) >= limit:
        limit *= 8
    yield page


def banded(
    ask: Ask, limit: int = SERVER_LIMIT, worst: float = -np.inf, id_field: str = ID
) -> Iterator[Page]:
    """Pages of at most ``limit`` hits, each band below the one before (a server).

    Args:
        ask: Makes one request.
        limit: At least 2.
        worst: Where values get worse: to minus infinity, or to infinity for distances.
        id_field: Name of the ids.
    """
    page = ask(Request(limit))
    yield page
    while len(page.ids) >= limit:
        last = page.values[-1]
        seen = {i for i, value in zip(page.ids, page.values, strict=True) if value == last}
        page = ask(Request(limit, last))
        if _all_tie(page, limit, last):
            for part in _ties(ask, limit, page, id_field):
                yield _picked(part, [n for n, i in enumerate(part.ids) if i not in seen])
            page = ask(Request(limit, float(np.nextafter(np.float32(last), np.float32(worst)))))
            yield page
        else:
            yield _picked(page, [n for n, i in enumerate(page.ids) if i not in seen])


def _ties(ask: Ask, limit: int, page: Page, id_field: str) -> Iterator[Page]:
    """All hits with the value of a page that they fill: ranges of ids, halved until each fits."""
    value = page.values[0]
    ranges: list[tuple[Any, Any]] = _halves(page, None, None)
    while ranges:
        low, high = ranges.pop()
        page = ask(Request(limit, value, between(low, high, id_field)))
        if _all_tie(page, limit, value):
            ranges += _halves(page, low, high)
        else:
            yield _picked(page, [n for n, found in enumerate(page.values) if found == value])


def _halves(page: Page, low: Any, high: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    middle = sorted(page.ids)[len(page.ids) // 2]
    return [(middle, high), (low, middle)]


def _all_tie(page: Page, limit: int, value: float) -> bool:
    return len(page.ids) >= limit and page.values[-1] == value


def _picked(page: Page, places: list[int]) -> Page:
    kept = None if page.metadata is None else [page.metadata[n] for n in places]
    return Page([page.ids[n] for n in places], [page.values[n] for n in places], kept)


def _joined(pages: Sequence[Page]) -> Page:
    """All pages of one query as one."""
    return Page(
        [i for page in pages for i in page.ids],
        [value for page in pages for value in page.values],
        _metadata_of(pages),
    )


def _metadata_of(pages: Sequence[Page]) -> list[Metadata | None] | None:
    """Metadata of all hits; None if no hit has any."""
    if not any(page.metadata is not None and any(page.metadata) for page in pages):
        return None
    return [m for page in pages for m in page.metadata or [None] * len(page.ids)]
