"""Range search of any size, by pages.

A server returns at most 16384 hits per query. Beyond that, the next page is the band of scores
below the last hit: ``radius < value <= last`` for IP and cosine, ``last <= value < radius`` for L2.
Hits that tie with the last one come again and are skipped; ties that fill a whole page are asked
for by ranges of ids. Lite has no limit but cannot do bands (it filters a fixed number of
candidates), so there the page grows until it holds everything.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sscd_vec.adapters.milvus.rows import between

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


def banded(ask: Ask, limit: int = SERVER_LIMIT, worst: float = -np.inf) -> Iterator[Page]:
    """Pages of at most ``limit`` hits, each band below the one before (a server).

    Args:
        ask: Makes one request.
        limit: At least 2.
        worst: Where values get worse: to minus infinity, or to infinity for distances.
    """
    page = ask(Request(limit))
    yield page
    while len(page.ids) >= limit:
        last = page.values[-1]
        seen = {i for i, value in zip(page.ids, page.values, strict=True) if value == last}
        page = ask(Request(limit, last))
        if _all_tie(page, limit, last):
            for part in _ties(ask, limit, page):
                yield _picked(part, [n for n, i in enumerate(part.ids) if i not in seen])
            page = ask(Request(limit, float(np.nextafter(np.float32(last), np.float32(worst)))))
            yield page
        else:
            yield _picked(page, [n for n, i in enumerate(page.ids) if i not in seen])


def _ties(ask: Ask, limit: int, page: Page) -> Iterator[Page]:
    """All hits with the value of a page that they fill: ranges of ids, halved until each fits."""
    value = page.values[0]
    ranges: list[tuple[Any, Any]] = _halves(page, None, None)
    while ranges:
        low, high = ranges.pop()
        page = ask(Request(limit, value, between(low, high)))
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
