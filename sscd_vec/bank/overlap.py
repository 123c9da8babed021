"""How much of one set of images is in another: evaluation in training, generated in training.

The images of the first set are queries, those of the second a bank. Each query has one best score;
the share of queries that have a copy comes with its 95 % interval (Wilson's), because the queries
are mostly a sample of what one wants to know about.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sscd_vec.bank.parquet import open_files
from sscd_vec.bank.quality import InspectedImage, inspect_image
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.results import Copies, Copy, CopyGroup
from sscd_vec.bank.views import best_hits, image_of
from sscd_vec.files import PathLike, Unreadable, find_images, staging
from sscd_vec.progress import ProgressBar, progress_bar
from sscd_vec.shards import Float32, ShardRows, arrow, split_places

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank

BEST, PAIRS = "best.parquet", "pairs.parquet"
SHOWN = 300  # images of a report, the strongest first
MOST_COPIES = 20  # shown of each
BLOCK = 1024
_Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Overlapping:
    """An image of the first set and its copies in the second, best first."""

    image: BankImage
    copies: tuple[tuple[str, float], ...]


@dataclass
class Overlap:
    """What ``find_overlap`` found.

    Attributes:
        images: Images of the first set that could be read.
        copies: How many of them have a copy in the second.
        pairs: Pairs of an image and a copy.
        references: Images of the second set.
        threshold: Least score of a copy.
        complete: Whether every pair above the threshold was surely found.
        strongest: The images with the highest scores, for a report.
        unreadable: Images of the first set that could not be read.
    """

    threshold: float
    references: int
    images: int = 0
    copies: int = 0
    pairs: int = 0
    complete: bool = True
    strongest: list[Overlapping] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """Share of the images that have a copy; None without images."""
        return self.copies / self.images if self.images else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the share."""
        return wilson(self.copies, self.images) if self.images else None


def find_overlap(
    places: Iterable[PathLike],
    bank: "Bank",
    threshold: float | None = None,
    *,
    to: Path | None = None,
    show_progress: bool | None = None,
) -> Overlap:
    """Look for every image of ``places`` in a bank.

    Args:
        places: Images (folders, tars, lists) or Parquet files of descriptors.
        bank: The other set.
        threshold: Least score of a copy; the calibrated one by default.
        to: Folder for ``best.parquet`` (every image, its best match and score) and
            ``pairs.parquet`` (every pair above the threshold).
        show_progress: Whether to draw a progress bar.

    Raises:
        UncalibratedError: No threshold is given or calibrated.
    """
    limit = threshold if threshold is not None else bank.threshold
    if limit is None:
        limit = bank.normalizer.threshold(bank.score_kind(), len(bank))
    found = Overlap(limit, len(bank))
    with ExitStack() as stack:
        best = pairs = None
        if to is not None:
            to.mkdir(parents=True, exist_ok=True)
            best = stack.enter_context(_Table(to / BEST, ("id", "match", "score", "is_copy")))
            pairs = stack.enter_context(_Table(to / PAIRS, ("id", "match", "score")))
        bar = stack.enter_context(progress_bar("searching", None, show_progress))
        for rows in _rows(bank, places, found, bar):
            _search(bank, rows, found, best, pairs)
            bar.advance(len(rows.ids))
    return found


def report_copies(bank: "Bank", found: Overlap) -> Copies:
    """The strongest overlaps as groups, for ``report.write_report``."""
    groups = []
    for one in found.strongest:
        copies = [
            Copy(image, score, _inspected(image))
            for image, score in ((_image(bank, name), score) for name, score in one.copies)
        ]
        groups.append(CopyGroup(Copy(one.image, 1.0, _inspected(one.image)), tuple(copies)))
    return Copies(groups, found.threshold, found.images, found.pairs, found.unreadable)


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z2 = hits / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * ((share * (1 - share) + z2 / (4 * total)) / total) ** 0.5 / (1 + z2 / total)
    # Exactly at the ends, whatever rounding does.
    return middle - half if hits else 0.0, middle + half if hits < total else 1.0


def _rows(
    bank: "Bank", places: Iterable[PathLike], found: Overlap, bar: ProgressBar
) -> Iterator[ShardRows]:
    """Descriptors of the first set, block by block; what has none is noted."""
    images, described = split_places(places)
    if described:
        for part in open_files(bank, described).parts(BLOCK):
            found.unreadable += [
                Unreadable(Path(str(name)), error)
                for name, error in zip(part.ids, part.errors, strict=True)
                if error
            ]
            yield part.readable()
    if not images:
        return
    from sscd_vec.bank.describe import Source, describe

    files = find_images(images, found.unreadable.append)
    bar.update(0, len(files))
    for block in describe(bank.encoder, [Source.of_file(file) for file in files]):
        found.unreadable += [Unreadable(Path(d.source.id), d.reason) for d in block if d.reason]
        good = [(d.source, d.descriptors[0]) for d in block if d.descriptors is not None]
        if good:
            ids, rows = [source.id for source, _ in good], np.stack([row for _, row in good])
            yield ShardRows(ids, rows, [""] * len(ids), [source.file for source, _ in good])


def _search(
    bank: "Bank", rows: ShardRows, found: Overlap, best: "_Table | None", pairs: "_Table | None"
) -> None:
    if not rows.ids:
        return
    bank.storage.refresh()
    index, ids = bank.storage.index, [str(name) for name in rows.ids]
    nearest = index.search(rows.descriptors, k=1, metadata=False)
    top = [(str(m[0].id), float(m[0].score)) if len(m) else ("", float("-inf")) for m in nearest]
    hits = [row for row, (_, score) in enumerate(top) if score >= found.threshold]
    found.images += len(ids)
    found.copies += len(hits)
    matches = _all_copies(index, rows.descriptors[hits], found)
    for row, copies in zip(hits, matches, strict=True):
        image = BankImage(ids[row], "", 1, rows.files[row])
        found.strongest.append(Overlapping(image, tuple(copies[:MOST_COPIES])))
        found.pairs += len(copies)
    found.strongest = nlargest(SHOWN, found.strongest, key=lambda each: each.copies[0][1])
    if best is not None:
        names = [image_of(name) if name else None for name, _ in top]
        scores = [score if name else None for name, score in top]
        copied = set(hits)
        best.write([ids, names, scores, [row in copied for row in range(len(ids))]])
    if pairs is not None:
        flat = [(ids[r], i, s) for r, c in zip(hits, matches, strict=True) for i, s in c]
        pairs.write([list(column) for column in zip(*flat, strict=True)] or [[], [], []])


def _all_copies(
    index: Any,  # noqa: ANN401 - an Index, whose room loads FAISS or pymilvus
    descriptors: Float32,
    found: Overlap,
) -> list[list[tuple[str, float]]]:
    if not len(descriptors):
        return []
    matches = index.range_search(descriptors, found.threshold, metadata=False)
    found.complete = found.complete and bool(matches.complete)
    return [
        [(hit.id, hit.score) for hit in best_hits([[(str(m.id), float(m.score)) for m in each]])]
        for each in matches
    ]


def _image(bank: "Bank", name: str) -> BankImage:
    return bank.get(name) or BankImage(name, "", 1)


def _inspected(image: BankImage) -> InspectedImage | None:
    try:
        return None if image.file is None else inspect_image(image.file)
    except (OSError, ValueError):  # gone since it was encoded: listed without a thumbnail
        return None


class _Table:
    """A Parquet file, written block by block, whole or not at all."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._arrow, self._parquet = path, *arrow()
        pa = self._arrow
        kinds = {"score": pa.float32(), "is_copy": pa.bool_()}
        self._schema = pa.schema([(name, kinds.get(name, pa.string())) for name in columns])
        self._open = ExitStack()

    def write(self, columns: Sequence[Sequence[Any]]) -> None:
        pa = self._arrow
        kinds = [field.type for field in self._schema]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
        self._writer.write_table(pa.table(arrays, schema=self._schema))

    def __enter__(self) -> "_Table":
        staged = self._open.enter_context(staging(self._path))
        writer = self._parquet.ParquetWriter(staged, self._schema)
        self._writer: Any = self._open.enter_context(writer)
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        self._open.__exit__(*error)
