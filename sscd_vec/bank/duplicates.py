"""Groups of copies among images, and the one of each to keep: of a bank, or of files.

Read downward: descriptors; pairs that score like copies (``groups``, or ``join`` for very many);
what people, geometry and pixels say about them (``pairs``); groups of what is left (``groups``);
the one of each group to keep (``keeping``).
"""

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank import groups, join
from sscd_vec.bank.decisions import Decisions
from sscd_vec.bank.describe import Source, describe
from sscd_vec.bank.keeping import build_groups
from sscd_vec.bank.lineage import Rules
from sscd_vec.bank.pairs import BELOW, Scored, Tools, settle
from sscd_vec.bank.parquet import open_files
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.results import Copies
from sscd_vec.bank.views import image_of
from sscd_vec.files import ImageFile, PathLike, Unreadable, find_images
from sscd_vec.progress import ProgressBar, progress_bar
from sscd_vec.shards import DescriptorFiles, ShardRows, split_places

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank
    from sscd_vec.bank.setup import Setup

Float32 = NDArray[np.float32]
T = TypeVar("T")
MOST_COMPARED = 50_000  # images of which every pair is compared; more go through lists
LEAST_RECALL = 0.99  # measured on a sample, before someone is warned

logger = logging.getLogger(__name__)


def find_copies_in(
    places: Iterable[PathLike],
    setup: "Setup",
    threshold: float | None = None,
    *,
    prefer: str | None = None,
    protect: Sequence[Path] = (),
    decisions: Decisions | None = None,
    leave_out: Path | None = None,
    cache: Path | None = None,
    heatmaps: bool = False,
    verify: bool = False,
    show_progress: bool | None = None,
) -> Copies:
    """Find groups of copies among files, without a bank.

    Args:
        places: Files, folders, tars, lists of paths, Parquet files of descriptors.
        setup: The model and the normalizer.
        threshold: See ``Bank.duplicates``.
        prefer: See ``Bank.duplicates``.
        protect: See ``Bank.duplicates``.
        decisions: What a person decided about images, and which ones to keep.
        leave_out: A folder that is not entered where it lies below a place.
        cache: Folder that keeps descriptors of files, so that none is encoded twice.
        heatmaps: See ``Bank.duplicates``.
        verify: See ``Bank.duplicates``.
        show_progress: See ``Bank.duplicates``.

    Raises:
        ImportError: ``verify`` needs OpenCV, which is not installed.
        UncalibratedError: No threshold is given or calibrated.
    """
    known = decisions or Decisions()
    rules = Rules(prefer, tuple(path.resolve() for path in protect), frozenset(known.kept))
    relate = None
    if verify:
        from sscd_vec.bank.second_stage import file_comparison

        relate = file_comparison(setup)
    encoder = (lambda: setup.encoder) if heatmaps else None
    tools = Tools(setup.normalizer, attrgetter("file"), relate, encoder)
    unreadable: list[Unreadable] = []
    images, shards = split_places(places)
    described = open_files(setup, shards) if shards else None
    files = find_images(images, unreadable.append, leave_out=leave_out)
    count = len(files) + (0 if described is None else described.rows)
    with progress_bar("encoding", len(files), show_progress) as bar:
        parts = _described(setup, files, described, cache, unreadable, bar)
        with _kept_rows(parts, count, setup.normalizer.dim, lambda i: i.id) as (found, rows):
            copies = _find(found, rows, tools, threshold, rules, known, bar=bar)
    return replace(copies, unreadable=[*unreadable, *copies.unreadable])


def find_copies(
    bank: "Bank",
    threshold: float | None = None,
    *,
    prefer: str | None = None,
    protect: Sequence[Path] = (),
    heatmaps: bool = False,
    verify: bool = False,
    exhaustive: bool | None = None,
    memory: int = join.MEMORY,
    show_progress: bool | None = None,
) -> Copies:
    """Find groups of copies among a bank's images; see ``Bank.duplicates``."""
    known = bank.storage.records.decisions()
    rules = Rules(prefer, tuple(path.resolve() for path in protect), frozenset(known.kept))
    relate = bank.second_stage.relate if verify else None
    encoder = (lambda: bank.encoder) if heatmaps else None
    tools = Tools(bank.normalizer, bank.shown_file, relate, encoder)
    with _bank_rows(bank) as (ids, rows), progress_bar("", len(ids), show_progress) as bar:
        images = _BankImages(bank, ids)
        return _find(images, rows, tools, threshold, rules, known, exhaustive, memory, bar=bar)


def _find(
    images: Sequence[BankImage],
    rows: join.Rows,
    tools: Tools,
    threshold: float | None,
    rules: Rules,
    decisions: Decisions,
    exhaustive: bool | None = None,
    memory: int = join.MEMORY,
    *,
    bar: ProgressBar,
) -> Copies:
    bar.update(0, len(images), title="comparing")
    scored = Scored.of(images, rows.open(), tools.normalizer, threshold)
    least = scored.threshold if tools.relate is None else scored.threshold - BELOW
    pairs, recall = _compare(scored, rows, least, exhaustive, memory, bar)
    settled = settle(scored, pairs, decisions, tools, bar)
    found = groups.group_pairs(
        scored.z,
        scored.biases,
        scored.threshold,
        settled.copies,
        settled.judged,
        settled.apart,
        settled.doubt,
    )
    alike = groups.components(settled.unsure, len(images))
    built, unsure, unreadable = build_groups(found, alike, scored, tools, rules, bar)
    count, total = len(images), len(settled.copies)
    return Copies(built, scored.threshold, count, total, unreadable, recall, unsure)


def _compare(
    scored: Scored,
    rows: join.Rows,
    least: float,
    exhaustive: bool | None,
    memory: int,
    bar: ProgressBar,
) -> tuple[groups.Pairs, float | None]:
    """Pairs that score at least so much, and which share of them was found."""
    if len(scored.z) <= MOST_COMPARED if exhaustive is None else exhaustive:
        return groups.find_pairs(scored.z, scored.biases, least, on_rows=bar.advance), 1.0
    found = join.find_pairs(rows, scored.biases, least, memory=memory, on_rows=bar.advance)
    level = logging.INFO if (found.recall or 1) >= LEAST_RECALL else logging.WARNING
    logger.log(
        level,
        "copies were found through lists of neighbours: %d of the %d pairs of %d sampled images",
        found.met, found.expected, found.sampled,
    )  # fmt: skip
    return found.pairs, found.recall


def scored_decisions(bank: "Bank") -> Decisions:
    """A bank's decisions with symmetric scores, where both images are in it."""
    decisions = bank.storage.records.decisions()
    decisions.normalizer = bank.normalizer.query_fingerprint
    with _bank_rows(bank) as (ids, stored):
        z = stored.open()
        biases = bank.normalizer.whitened_biases(z)
        rows = {image.digest: row for row, image in enumerate(_BankImages(bank, ids))}
        decisions.add(
            replace(one, score=float(groups.scores(z, biases, [rows[a]], [rows[b]])[0, 0]))
            for one in list(decisions)
            for a, b in [one.pair]
            if a in rows and b in rows
        )
    return decisions


# ---------------------------------------------------------------------- whitened descriptors


def _described(
    setup: "Setup",
    files: Sequence[ImageFile],
    described: DescriptorFiles | None,
    cache: Path | None,
    unreadable: list[Unreadable],
    bar: ProgressBar,
) -> Iterator[tuple[list[BankImage], Float32]]:
    """Images and their whitened descriptors: those of Parquet files, then those of images."""
    sources = [Source.of_file(file) for file in files]
    if described is not None:
        left, known = {source.id: source for source in sources}, set[str]()
        for rows in described.parts():
            unreadable += [
                Unreadable(Path(str(name)), error)
                for name, error in zip(rows.ids, rows.errors, strict=True)
                if error
            ]
            images, descriptors = _unknown(rows.readable(), left, known)
            if images:
                yield images, setup.normalizer.whiten(descriptors)
        sources = list(left.values())
    if not sources:
        return
    for part in describe(setup.encoder, sources, cache=cache):
        unreadable += [Unreadable(Path(one.source.id), one.reason) for one in part if one.reason]
        ready = [(one, one.descriptors) for one in part if one.descriptors is not None]
        if ready:
            images = [BankImage(one.source.id, one.digest, 1, one.source.file) for one, _ in ready]
            yield images, setup.normalizer.whiten(np.concatenate([rows for _, rows in ready]))
        bar.advance(len(part))


def _unknown(
    rows: ShardRows, left: dict[str, Source], known: set[str]
) -> tuple[list[BankImage], Float32]:
    """Images of a Parquet file, each once, without files that changed since."""
    images, kept = [], []
    for row, (name, file) in enumerate(zip(map(str, rows.ids), rows.files, strict=True)):
        if name in known or (name in left and left[name].file != file):
            continue
        known.add(name)
        left.pop(name, None)
        digest = hashlib.sha256(rows.descriptors[row].tobytes()).hexdigest()
        images.append(BankImage(name, digest, 1, file))
        kept.append(row)
    return images, rows.descriptors[kept]


@contextmanager
def _bank_rows(bank: "Bank") -> Iterator[tuple[list[str], join.Rows]]:
    """Ids of a bank's images and their whole view's whitened descriptors."""
    index = bank.storage.index

    def parts() -> Iterator[tuple[list[str], Float32]]:
        for ids, part in index.iterate_vectors():
            whole = [row for row, name in enumerate(ids) if image_of(str(name)) == str(name)]
            yield [str(ids[row]) for row in whole], part[whole]

    with _kept_rows(parts(), len(index), bank.normalizer.dim, str) as kept:
        yield kept


@contextmanager
def _kept_rows(
    parts: Iterable[tuple[list[T], Float32]], count: int, dim: int, name: Callable[[T], str]
) -> Iterator[tuple[list[T], join.Rows]]:
    """Images with their descriptors: few are kept in memory, sorted; many go to a file."""
    if count <= MOST_COMPARED:
        images: list[T] = []
        rows = [np.empty((0, dim), np.float32)]
        for some, part in parts:
            images += some
            rows.append(part)
        order = sorted(range(len(images)), key=lambda row: name(images[row]))
        yield [images[row] for row in order], join.Rows(np.concatenate(rows)[order])
        return
    with tempfile.TemporaryDirectory(prefix="sscd-vec-") as folder:
        path, images = Path(folder) / "descriptors", []
        with path.open("wb") as file:
            for some, part in parts:
                images += some
                file.write(np.ascontiguousarray(part, np.float32).data)
        yield images, join.Rows(path=path, dim=dim)


class _BankImages(Sequence[BankImage]):
    """The images of rows, looked up when needed: only those in groups ever are."""

    def __init__(self, bank: "Bank", ids: Sequence[str]) -> None:
        self._bank, self._ids = bank, ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, row: int) -> BankImage: ...
    @overload
    def __getitem__(self, row: slice) -> list[BankImage]: ...
    def __getitem__(self, row: int | slice) -> BankImage | list[BankImage]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        return self._bank.get(self._ids[row]) or BankImage(self._ids[row], "", 1)
