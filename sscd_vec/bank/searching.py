"""Searching a bank: describe the queries, ask the index, look larger or verify, judge."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank.describe import Described, Source, describe
from sscd_vec.bank.judging import judge_hits
from sscd_vec.bank.parquet import search_files
from sscd_vec.bank.results import Answer, BankMatch
from sscd_vec.bank.views import PENALTY, SCALES, needs_larger_look
from sscd_vec.files import ImageFile, PathLike, Unreadable, find_images
from sscd_vec.normalize import Outside
from sscd_vec.progress import progress_bar
from sscd_vec.shards import holds_descriptors

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank
    from sscd_vec.encoder.images import ImageInput

Float32 = NDArray[np.float32]
Scales = Literal["auto", "one", "both"]
TILED_HITS = 8  # an image may own many of the nearest vectors: fetch enough to see k of them


def search_images(
    bank: "Bank",
    images: "PathLike | Iterable[ImageInput | ImageFile]",
    k: int = 10,
    *,
    tiles: int = 1,
    scales: Scales = "auto",
    verify: bool | int = False,
    threshold: float | None = None,
    show_progress: bool | None = False,
) -> Iterator[Answer]:
    """Search for many images, in order; see ``Bank.search_many``."""
    if scales not in get_args(Scales):
        raise ValueError(f"scales: expected one of {get_args(Scales)}, got {scales!r}")
    if tiles > 1 or bank.settings.tiles > 1:
        scales = "one"  # the crops are a larger look already
    problems: list[Unreadable] = []
    if isinstance(images, str | os.PathLike) and holds_descriptors(images):
        yield from search_files(bank, [images], k)
        return
    if isinstance(images, str | os.PathLike):
        sources = [Source.of_file(f) for f in find_images(images, problems.append)]
    else:
        sources = [Source.of_query(image, n) for n, image in enumerate(images)]
    for problem in problems:
        yield Answer(str(problem.path), [], problem.reason)
    if not sources:
        return
    with progress_bar("searching", len(sources), show_progress) as bar:
        for part in describe(bank.encoder, sources, tiles=tiles):
            matches = _search(bank, part, k, scales, verify, threshold)
            for one, found in zip(part, matches, strict=True):
                yield Answer(one.source.id, _decided(bank, one.digest, found), one.reason)
            bar.advance(len(part))


def search_described(
    bank: "Bank",
    queries: Sequence[Float32],
    k: int = 10,
    *,
    images: "Sequence[ImageInput | None] | None" = None,
    threshold: float | None = None,
    penalty: float = 0.0,
) -> list[list[BankMatch]]:
    """Search for images already described; see ``Bank.search_descriptors``."""
    if not queries:
        return []
    bank.storage.refresh()
    bank.storage.require_vectors()
    many = k * TILED_HITS if bank.settings.tiles > 1 else k
    rows = np.concatenate(queries)
    found = bank.storage.index.search(rows, k=many)
    outside = bank.normalizer.outside(bank.normalizer.whiten(rows))
    least = bank.threshold if threshold is None else threshold
    answers, row = [], 0
    for query, image in zip(queries, images or [None] * len(queries), strict=True):
        views = slice(row, row + len(query))
        row, known = views.stop, Outside(outside.flags[views], outside.shifts[views])
        answers.append(
            judge_hits(bank, found[views], known, k, image=image, threshold=least, penalty=penalty)
        )
    return answers


def _search(
    bank: "Bank",
    part: Sequence[Described],
    k: int,
    scales: Scales,
    verify: bool | int,
    least: float | None,
) -> list[list[BankMatch]]:
    """Matches of each image, verified if that is wanted."""
    if verify:
        limit = None if verify is True else int(verify)
        return bank.second_stage.search(part, k, limit, scales, least)
    return _look_larger(bank, part, _search_part(bank, part, k, least), k, scales, least)


def _search_part(
    bank: "Bank",
    part: Sequence[Described],
    k: int,
    least: float | None,
    penalty: float = 0.0,
) -> list[list[BankMatch]]:
    """Matches of each image; none for those that could not be read."""
    ready = [one for one in part if one.descriptors is not None]
    found = iter(
        bank.search_descriptors(
            [one.rows for one in ready],
            k,
            images=[one.source.image for one in ready],
            threshold=least,
            penalty=penalty,
        )
    )
    return [[] if one.descriptors is None else next(found) for one in part]


def _look_larger(
    bank: "Bank",
    part: Sequence[Described],
    found: list[list[BankMatch]],
    k: int,
    scales: Scales,
    least: float | None,
) -> list[list[BankMatch]]:
    """Add what a second look at twice the size finds, where one is wanted."""
    limit = bank.threshold_of("search") if least is None else least

    def is_open(matches: list[BankMatch]) -> bool:
        if scales == "auto" and limit is not None and matches:
            return needs_larger_look(matches[0].score, limit)
        return scales == "both"

    rows = [
        row
        for row, (one, matches) in enumerate(zip(part, found, strict=True))
        if one.descriptors is not None and is_open(matches)
    ]
    looks = describe(bank.encoder, [part[row].source for row in rows], scale=SCALES[1])
    larger = [matches for look in looks for matches in _search_part(bank, look, k, least, PENALTY)]
    merged = list(found)
    for row, matches in zip(rows, larger, strict=True):
        merged[row] = merge_looks(found[row], matches, k)
    return merged


def merge_looks(first: list[BankMatch], larger: list[BankMatch], k: int) -> list[BankMatch]:
    """The ``k`` best of two looks at one image, each match once.

    Args:
        first: Found at the model's own size.
        larger: Found at another scale, with scores that have lost ``PENALTY``.
        k: At most this many.
    """
    best = {match.id: match for match in first}
    for match in larger:
        if match.id not in best or best[match.id].score < match.score:
            best[match.id] = match
    return sorted(best.values(), key=lambda match: (-match.score, match.id))[:k]


def _decided(bank: "Bank", digest: str, matches: list[BankMatch]) -> list[BankMatch]:
    """Matches with what a person decided about them and the query."""
    decisions = bank.storage.records.decisions(about=digest) if digest and matches else ()
    if not decisions:
        return matches
    return [
        match
        if match.image is None
        else replace(match, decision=decisions.about(digest, match.image.digest))
        for match in matches
    ]
