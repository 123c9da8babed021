"""Searching a collection: requests to Milvus and its answers as ``Matches``."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.matches import Matches, Metadata
from sscd_vec.adapters.milvus.connection import AnswerTooLarge
from sscd_vec.adapters.milvus.paging import SERVER_LIMIT, Ask, Page, Request, banded, growing
from sscd_vec.adapters.milvus.rows import REQUEST_BYTES
from sscd_vec.adapters.milvus.settings import ID, VECTOR, Params
from sscd_vec.adapters.milvus.table import Table
from sscd_vec.normalize import Normalizer

Float32 = NDArray[np.float32]

RESPONSE_HITS = 200_000  # some 20 MB with short metadata
REQUEST_QUERIES = 16_384  # a server takes no more at once
FIRST_HITS = 256  # most queries have few matches: one small request settles many of them
PAGE_WITH_METADATA = 4096


class Finder:
    """Searches with one filter, with or without metadata.

    Args:
        table: Where.
        normalizer: Turns what Milvus returns into scores.
        params: Search parameters of the index.
        filter: Milvus expression.
        metadata: Whether to fetch metadata.
    """

    def __init__(
        self, table: Table, normalizer: Normalizer, params: Params, filter: str, metadata: bool
    ) -> None:
        """Remember them."""
        self._table, self._normalizer, self._params = table, normalizer, params
        self._filter, self._metadata = filter, metadata
        self._hits = RESPONSE_HITS  # fewer, once metadata turn out to be long
        self._apart = False  # whether metadata are fetched after the hits, rather than with them

    def top(self, vectors: Float32, k: int) -> list[Page]:
        """The ``k`` best of each vector."""
        sendable = REQUEST_BYTES // (4 * vectors.shape[1])
        block = max(1, min(RESPONSE_HITS // k, REQUEST_QUERIES, sendable))
        pages = []
        for begin in range(0, len(vectors), block):
            pages += self._ask(vectors[begin : begin + block], Request(k))
        return pages

    def within(self, vectors: Float32, radius: float) -> Iterator[tuple[int, Page]]:
        """Pages of all hits beyond ``radius``, with the number of their vector."""
        sendable = REQUEST_BYTES // (4 * vectors.shape[1])
        block = max(1, min(RESPONSE_HITS // FIRST_HITS, sendable))
        for begin in range(0, len(vectors), block):
            part = vectors[begin : begin + block]
            for n, page in enumerate(self._ask(part, Request(FIRST_HITS), radius)):
                if len(page.ids) < FIRST_HITS:
                    yield begin + n, page
                    continue
                ask = self._asking(part[n : n + 1], radius)
                limit = PAGE_WITH_METADATA if self._metadata else SERVER_LIMIT
                worst = np.inf if self._table.opened().metric == "l2" else -np.inf
                rest = growing(ask) if self._table.is_lite else banded(ask, limit, worst)
                for more in rest:
                    if more.ids:
                        yield begin + n, more

    def matches(self, pages: list[Page], incomplete: str | None = None) -> Matches:
        """One page per query as ``Matches``."""
        settings = self._table.opened()
        counts = [len(page.ids) for page in pages]
        ids = np.empty(sum(counts), dtype=np.int64 if settings.id_type == "int" else object)
        ids[:] = [i for page in pages for i in page.ids]
        values = np.array([v for page in pages for v in page.values], dtype=np.float64)
        metadata: list[Metadata | None] | None = None
        if any(page.metadata is not None and any(page.metadata) for page in pages):
            metadata = [m for page in pages for m in page.metadata or [None] * len(page.ids)]
        if incomplete is None and not settings.exact:
            incomplete = f"{settings.index_type} is approximate and may miss references"
        return Matches(
            ids,
            self._normalizer.from_metric(values, settings.metric).astype(np.float32),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            metadata,
            incomplete,
        )

    def _asking(self, vector: Float32, radius: float) -> Ask:
        return lambda request: self._ask(vector, request, radius)[0]

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
                if self._apart or not self._metadata:
                    raise
                if len(part) == 1:
                    self._apart = True
                else:
                    self._hits = max(1, len(part) * request.limit // 4)
        return pages

    def _send(self, vectors: Float32, request: Request, radius: float | None) -> list[Page]:
        settings = self._table.opened()
        bounds = {} if radius is None else {"radius": radius}
        if request.best is not None:
            bounds["range_filter"] = request.best
        # A radius on Lite picks from five times the limit; a graph must walk as far.
        reach = 5 * request.limit if bounds and self._table.is_lite else request.limit
        filters = [f"({part})" for part in (self._filter, request.filter) if part]
        together = self._metadata and not self._apart
        found = self._table.call(
            "search",
            data=vectors,
            anns_field=VECTOR,
            limit=request.limit,
            filter=" and ".join(filters),
            partition_names=[self._table.partition],
            search_params=settings.search_params(reach, self._params, **bounds),
            output_fields=["$meta" if together else ID],  # asked for none, Lite gives all
            consistency_level=self._table.consistency,
        )
        pages = []
        for hits in found:
            more: list[Metadata | None] | None = None
            if together:
                more = [hit["entity"] or None for hit in hits]
            elif self._metadata:
                stored = self._table.metadata(hits.ids)
                more = [stored.get(i) for i in hits.ids]
            pages.append(Page(hits.ids, hits.distances, more))
        return pages


def joined(pages: Sequence[Page]) -> Page:
    """All pages of one query as one."""
    if len(pages) == 1:
        return pages[0]
    metadata: list[Metadata | None] | None = None
    if any(page.metadata is not None for page in pages):
        metadata = [m for page in pages for m in page.metadata or [None] * len(page.ids)]
    return Page(
        [i for page in pages for i in page.ids],
        [value for page in pages for value in page.values],
        metadata,
    )
