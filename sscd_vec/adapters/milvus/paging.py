"""Range search of any size, by pages.

A server returns at most 16384 hits per query. Beyond that, the next page is the band of scores
below the last hit: ``radius < value <= last`` for IP and cosine, ``last <= value < radius`` for L2.
Hits that tie with the last one come again and are skipped. Lite has no limit but cannot do bands
(it filters a fixed number of candidates), so there the page grows until it holds everything.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sscd_vec.adapters.milvus.rows import in_expression

SERVER_LIMIT = 16_384
FIRST_LIMIT = 1024


class Page(NamedTuple):
    """Hits of one query, best first."""

    ids: list[Any]
    values: list[float]
    metadata: list[dict[str, Any] | None] | None


class Request(NamedTuple):
    """One range search: at most ``limit`` hits, the best allowed value, and a filter to add."""

    limit: int
    best: float | None = None
    filter: str = ""


Ask = Callable[[Request], Page]


def growing(ask: Ask, first: int = FIRST_LIMIT) -> Iterator[Page]:
    """One page, asked for with larger limits until it is not full (Lite)."""
    limit = first
    while len((page := ask(Request(limit))).ids) >= limit:
        limit *= 8
    yield page


def banded(ask: Ask, limit: int = SERVER_LIMIT) -> Iterator[Page]:
    """Pages of at most ``limit`` hits, each band below the one before (a server)."""
    page = ask(Request(limit))
    yield page
    tied: set[Any] = set()
    while len(page.ids) >= limit:
        last = page.values[-1]
        at_last = {i for i, value in zip(page.ids, page.values, strict=True) if value == last}
        tied = tied | at_last if page.values[0] == last else at_last
        page = ask(Request(limit, last))
        fresh = [n for n, i in enumerate(page.ids) if i not in tied]
        if not fresh and len(page.ids) >= limit:
            # More ties than fit on a page: leave those already seen out on the server.
            page = ask(Request(limit, last, in_expression(sorted(tied), negated=True)))
            fresh = list(range(len(page.ids)))
        if not fresh:
            return
        kept = [page.metadata[n] for n in fresh] if page.metadata is not None else None
        yield Page([page.ids[n] for n in fresh], [page.values[n] for n in fresh], kept)
