"""Groups of copies among the images of a bank, and the one of each to keep."""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank import groups, join
from sscd_vec.bank.decisions import Decisions
from sscd_vec.bank.heat_grid import IMAGE_SIDE, coarse, reduced
from sscd_vec.bank.judging import same_pixels
from sscd_vec.bank.lineage import Choice, Rules, choose
from sscd_vec.bank.quality import InspectedImage, inspect_image
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.views import image_of
from sscd_vec.encoder.images import ImageError, Pixels, load_pixels
from sscd_vec.files import Unreadable
from sscd_vec.normalize import Grade, Normalizer, Outside, Proof, Verdict
from sscd_vec.normalize.verdict import ALIKE
from sscd_vec.progress import ProgressBar, progress_bar

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank
    from sscd_vec.bank.describe import ImageEncoder
    from sscd_vec.bank.second_stage import SecondStage
    from sscd_vec.verify import Evidence

Float32 = NDArray[np.float32]
Heatmap = NDArray[np.floating]  # (h, w), larger is more alike
MOST_RELATED = 10
BELOW, ABOVE = 0.05, 0.1  # scores so far below and above the threshold are verified
LIKELY = 0.5  # verified score of a pair above the threshold that is not refused
MOST_DOUBTFUL = 10  # pairs below the threshold that are verified for an image
MOST_COMPARED = 50_000  # images of which every pair is compared; more go through lists
LEAST_RECALL = 0.99  # measured on a sample, before somebody is warned

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copy:
    """A member of a group of copies.

    Attributes:
        image: What the bank knows about it.
        score: Symmetric score with the one to keep; 1 for that one itself.
        inspected: Its size, detail and thumbnail; None without a file.
        heatmap: Which part of it matches the one to keep.
        keep_heatmap: Which part of the one to keep it matches.
        evidence: What geometry says, with the copy as the query and the one to keep as the
            reference; None if the copies were not verified.
        reason: What speaks against it, in words; '' if nothing does.
        is_protected: Whether it stays where it is, whatever it is.
        judged: What its score means in a bank of this size; None for the one to keep.
    """

    image: BankImage
    score: float = 1.0
    inspected: InspectedImage | None = None
    heatmap: Heatmap | None = None
    keep_heatmap: Heatmap | None = None
    evidence: "Evidence | None" = None
    reason: str = ""
    is_protected: bool = False
    judged: Verdict | None = None


@dataclass(frozen=True)
class CopyGroup:
    """Images that are copies of each other, or that only a person can tell apart.

    Attributes:
        keep: The one to keep.
        copies: The others, most alike first.
        related: Ids with a score: copies of one member that are not copies of the group.
        reason: Why this is the one to keep.
        leave_alone: Why no file of the group is moved or linked, such as that it is unsure which
            one to keep; '' if they may be.
        verdict: ``"copy"``, or ``"unsure"``: they look alike to the model and may all be different.
    """

    keep: Copy
    copies: tuple[Copy, ...]
    related: tuple[tuple[str, float], ...] = ()
    reason: str = ""
    leave_alone: str = ""
    verdict: Grade = "copy"

    @property
    def is_sure(self) -> bool:
        """Whether copies may be moved away."""
        return not self.leave_alone

    @property
    def members(self) -> tuple[Copy, ...]:
        """All of them, the one to keep first."""
        return (self.keep, *self.copies)


@dataclass(frozen=True)
class Copies:
    """What a search for copies found.

    Attributes:
        groups: The groups of copies, largest first.
        threshold: Least symmetric score of a copy.
        scanned: Images compared.
        pairs: Pairs of copies, in groups or not.
        unreadable: Files that could be encoded earlier and cannot be read now.
        recall: Share of the copies found, measured on a sample of images; 1 if every pair of
            images was compared, None if the sample has no copies.
        unsure: Groups of documents, screens or graphics that score like copies and cannot be told
            from strangers of their kind. Nothing ever moves or links them.
    """

    groups: list[CopyGroup]
    threshold: float
    scanned: int
    pairs: int
    unreadable: list[Unreadable]
    recall: float | None = 1.0
    unsure: list[CopyGroup] = field(default_factory=list)


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
    decisions = bank.storage.records.decisions()
    rules = Rules(prefer, tuple(path.resolve() for path in protect), frozenset(decisions.kept))
    unreadable: list[Unreadable] = []
    with (
        _opened_rows(bank) as (ids, rows),
        progress_bar("comparing", len(ids), show_progress) as bar,
    ):
        images, z = _Images(bank, ids), rows.open()
        if threshold is None:
            threshold = bank.normalizer.threshold("symmetric", len(images))
        biases, outside = bank.normalizer.whitened_biases(z), bank.normalizer.outside(z)
        least = threshold - BELOW if verify else threshold
        recall: float | None = 1.0
        if len(z) <= MOST_COMPARED if exhaustive is None else exhaustive:
            pairs = groups.find_pairs(z, biases, least, on_rows=bar.advance)
        else:
            joined = join.find_pairs(rows, biases, least, memory=memory, on_rows=bar.advance)
            pairs, recall = joined.pairs, joined.recall
            _report_recall(joined)
        judged = _judge(bank.second_stage, images, pairs, threshold, bar) if verify else {}
        # Pages of one form share lines and boxes: of two images outside, geometry proves no copy.
        judged = {p: j for p, j in judged.items() if not (j and outside.flags[list(p)].all())}
        judged |= _decided(decisions, images)
        pairs = _copies_only(pairs, threshold, judged)
        doubt = _doubt(bank, images, pairs, outside, bar, verify)
        in_doubt = doubt.about(pairs) & ~_accepted(pairs, judged)
        left = _alike(pairs.where(in_doubt), biases, outside, threshold)
        pairs = _with_accepted(pairs.where(~in_doubt), judged, z, biases)
        apart = _apart(decisions, images)
        found = groups.group_pairs(z, biases, threshold, pairs, judged, apart, doubt)
        unsure = groups.components(left, len(images))
        bar.update(0, len(found) + len(unsure), title="inspecting groups")
        built: list[CopyGroup] = []
        for group in found:
            if all(rules.protects(images[row].file) for row in group.members):
                bar.advance()
                continue
            members = _inspect([images[row] for row in group.members], unreadable)
            if len(members) > 1:
                readable = [row for row in group.members if images[row].id in members]
                one = _build(group, readable, images, members, z, biases, rules)
                one = _with_verdicts(one, bank.normalizer, len(images), threshold)
                one = _with_evidence(one, bank.second_stage) if verify else one
                built.append(_with_heatmaps(one, bank.encoder) if heatmaps else one)
            bar.advance()
        listed = []
        for group in unsure:
            members = _inspect([images[row] for row in group.members], unreadable)
            readable = [row for row in group.members if images[row].id in members]
            if len(readable) > 1:
                one = _build_unsure(readable, images, members, z, biases)
                listed.append(_with_verdicts(one, bank.normalizer, len(images), threshold))
            bar.advance()
    return Copies(built, threshold, len(ids), len(pairs), unreadable, recall, listed)


def _doubt(
    bank: "Bank",
    images: Sequence[BankImage],
    pairs: groups.Pairs,
    outside: Outside,
    bar: ProgressBar,
    verify: bool,
) -> groups.Doubt:
    """Whose scores say little, and what their pixels say."""
    both = pairs.where(outside.flags[pairs.first] & outside.flags[pairs.second])
    relate = bank.second_stage.relate if verify else None
    same = same_pixels(bank, images, both, partial(bar.update, title="comparing pixels"), relate)
    return groups.Doubt(outside.flags, same)


def _accepted(pairs: groups.Pairs, judged: groups.Judged) -> NDArray[np.bool_]:
    rows = zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    return np.array([judged.get(pair, False) for pair in rows], bool)


def _alike(
    pairs: groups.Pairs, biases: Float32, outside: Outside, threshold: float
) -> groups.Pairs:
    """Pairs in doubt that score like copies even among images of their kind."""
    raised = biases + outside.shifts
    before = np.maximum(biases[pairs.first], biases[pairs.second])
    after = np.maximum(raised[pairs.first], raised[pairs.second])
    return pairs.where(pairs.scores - (after - before) >= threshold)


def _build_unsure(
    rows: list[int],
    images: Sequence[BankImage],
    inspected: dict[str, InspectedImage | None],
    z: Float32,
    biases: Float32,
) -> CopyGroup:
    """A group that is only shown; its first image stands for the others."""
    scores = groups.scores(z, biases, rows[:1], rows)[0].tolist()
    first, *others = [
        Copy(images[row], score, inspected[images[row].id])
        for row, score in zip(rows, scores, strict=True)
    ]
    copies = tuple(sorted(others, key=lambda copy: -copy.score))
    keep = replace(first, score=1.0)
    return CopyGroup(keep, copies, leave_alone=ALIKE, verdict="unsure")


def _with_verdicts(group: CopyGroup, rules: Normalizer, size: int, threshold: float) -> CopyGroup:
    """The group with a verdict on each of its members and the one to keep."""
    is_unsure, copies = group.verdict == "unsure", []
    for copy in group.copies:
        both = bool(group.keep.image.outside and copy.image.outside)
        same = Proof(True, "the same pixels everywhere") if both and not is_unsure else None
        judged = rules.judge(
            copy.score, size, "symmetric", threshold=threshold, in_doubt=is_unsure, proof=same
        )
        if judged.grade != group.verdict:  # its score with other members made it one of them
            judged = replace(judged, grade=group.verdict, reason="alike to others of its group")
        copies.append(replace(copy, judged=judged))
    return replace(group, copies=tuple(copies))


def scored_decisions(bank: "Bank") -> Decisions:
    """A bank's decisions with symmetric scores, where both images are in it."""
    decisions = bank.storage.records.decisions()
    decisions.normalizer = bank.normalizer.query_fingerprint
    with _opened_rows(bank) as (ids, stored):
        z = stored.open()
        biases = bank.normalizer.whitened_biases(z)
        rows = {image.digest: row for row, image in enumerate(_Images(bank, ids))}
        decisions.add(
            replace(one, score=float(groups.scores(z, biases, [rows[a]], [rows[b]])[0, 0]))
            for one in list(decisions)
            for a, b in [one.pair]
            if a in rows and b in rows
        )
    return decisions


def _rows_of(decisions: Decisions, images: Sequence[BankImage]) -> Iterator[tuple[int, int, bool]]:
    """Pairs of rows that a person decided about, the smaller one first."""
    if not len(decisions):
        return
    rows: dict[str, list[int]] = {}
    for row, image in enumerate(images):
        rows.setdefault(image.digest, []).append(row)
    for one in decisions:
        for a in rows.get(one.first, ()):
            for b in rows.get(one.second, ()):
                if a != b:
                    yield min(a, b), max(a, b), one.is_copy


def _decided(decisions: Decisions, images: Sequence[BankImage]) -> dict[tuple[int, int], bool]:
    return {(a, b): is_copy for a, b, is_copy in _rows_of(decisions, images)}


def _apart(decisions: Decisions, images: Sequence[BankImage]) -> dict[int, set[int]]:
    apart: dict[int, set[int]] = {}
    for a, b, is_copy in _rows_of(decisions, images):
        if not is_copy:
            apart.setdefault(a, set()).add(b)
            apart.setdefault(b, set()).add(a)
    return apart


def _with_accepted(
    pairs: groups.Pairs, judged: groups.Judged, z: Float32, biases: Float32
) -> groups.Pairs:
    """Pairs, and those that were judged copies though their score is low."""
    there = set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
    more = [pair for pair, is_copy in judged.items() if is_copy and pair not in there]
    if not more:
        return pairs
    scores = [groups.scores(z, biases, [a], [b])[0, 0] for a, b in more]
    first, second = np.array(more, np.int64).T
    return groups.Pairs(
        np.append(pairs.first, first),
        np.append(pairs.second, second),
        np.append(pairs.scores, np.array(scores, np.float32)),
    )


def _judge(
    stage: "SecondStage",
    images: Sequence[BankImage],
    pairs: groups.Pairs,
    threshold: float,
    bar: ProgressBar,
) -> dict[tuple[int, int], bool]:
    """What geometry says about pairs near the threshold, by their rows.

    Below the threshold a pair must be sure to count, above it doubtful not to; and that geometry
    sees nothing refutes a pair only together with a descriptor score the verifier knows.
    """
    near = pairs.where(pairs.scores < threshold + ABOVE)
    bar.update(0, len(near), title="verifying")
    judged: dict[tuple[int, int], bool] = {}
    doubtful: Counter[int] = Counter()
    for a, b, score in zip(
        near.first.tolist(), near.second.tolist(), near.scores.tolist(), strict=True
    ):
        bar.advance()
        if score < threshold:
            doubtful[a] += 1
            if doubtful[a] > MOST_DOUBTFUL:
                continue
        evidence = stage.relate(images[a], images[b], score)
        if evidence is None:
            continue
        if score < threshold:
            judged[a, b] = evidence.is_copy
        elif evidence.descriptor_score is not None:
            judged[a, b] = evidence.score >= LIKELY
    return judged


def _copies_only(pairs: groups.Pairs, threshold: float, judged: groups.Judged) -> groups.Pairs:
    rows = zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    high = (pairs.scores >= threshold).tolist()
    kept = [judged.get(pair, above) for pair, above in zip(rows, high, strict=True)]
    return pairs.where(np.array(kept, bool))


class _Images(Sequence[BankImage]):
    """The images of rows, looked up as they are needed: only those in groups are."""

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


@contextmanager
def _opened_rows(bank: "Bank") -> Iterator[tuple[list[str], join.Rows]]:
    """Ids of all images and their whole view's whitened descriptors; many are kept in a file."""
    dim, index = bank.normalizer.dim, bank.storage.index
    if len(index) <= MOST_COMPARED:
        ids, parts = [], [np.empty((0, dim), np.float32)]
        for names, part in _whole_views(bank):
            ids += names
            parts.append(part)
        order = sorted(range(len(ids)), key=ids.__getitem__)
        yield [ids[row] for row in order], join.Rows(np.concatenate(parts)[order])
        return
    with tempfile.TemporaryDirectory(prefix="sscd-vec-") as folder:
        path, ids = Path(folder) / "descriptors", []
        with path.open("wb") as file:
            for names, part in _whole_views(bank):
                ids += names
                file.write(np.ascontiguousarray(part, np.float32).data)
        yield ids, join.Rows(path=path, dim=dim)


def _whole_views(bank: "Bank") -> Iterator[tuple[list[str], Float32]]:
    for ids, part in bank.storage.index.iterate_vectors():
        whole = [row for row, name in enumerate(ids) if image_of(str(name)) == str(name)]
        yield [str(ids[row]) for row in whole], part[whole]


def _report_recall(found: join.Found) -> None:
    level = logging.INFO if (found.recall or 1) >= LEAST_RECALL else logging.WARNING
    logger.log(
        level,
        "copies were found through lists of neighbours: %d of the %d pairs of %d sampled images",
        found.met, found.expected, found.sampled,
    )  # fmt: skip


def _inspect(
    images: Sequence[BankImage], unreadable: list[Unreadable]
) -> dict[str, InspectedImage | None]:
    """What each image looks like; files that are gone or changed are left out."""
    found: dict[str, InspectedImage | None] = {}
    for image in images:
        try:
            found[image.id] = None if image.file is None else inspect_image(image.file)
        except (OSError, ValueError) as error:
            if image.file is not None:
                unreadable.append(Unreadable(image.file.path, str(error)))
    return found


def _build(
    group: groups.Group,
    rows: list[int],
    images: Sequence[BankImage],
    inspected: dict[str, InspectedImage | None],
    z: Float32,
    biases: Float32,
    rules: Rules,
) -> CopyGroup:
    """Choose the one to keep and score the others with it."""
    seen = [inspected[images[row].id] for row in rows]
    if any(image is None for image in seen):
        at = rows.index(group.hub) if group.hub in rows else 0
        choice = Choice(at, False, "not all of them are files", ("",) * len(rows))
    else:
        choice = choose([image for image in seen if image], [images[r].digest for r in rows], rules)
    scores = groups.scores(z, biases, [rows[choice.keep]], rows)[0].tolist()
    members = [
        Copy(images[row], score, image, reason=why, is_protected=rules.protects(images[row].file))
        for row, score, image, why in zip(rows, scores, seen, choice.reasons, strict=True)
    ]
    keep = replace(members.pop(choice.keep), score=1.0)
    related = {images[outsider].id: score for _, outsider, score in reversed(group.related)}
    return CopyGroup(
        keep,
        tuple(sorted(members, key=lambda copy: -copy.score)),
        tuple(sorted(related.items(), key=lambda item: -item[1])[:MOST_RELATED]),
        choice.reason,
        "" if choice.is_sure else f"unsure which one to keep: {choice.reason}",
    )


def _with_evidence(group: CopyGroup, stage: "SecondStage") -> CopyGroup:
    copies = tuple(
        replace(copy, evidence=stage.relate(copy.image, group.keep.image, copy.score))
        for copy in group.copies
    )
    return replace(group, copies=copies)


def _with_heatmaps(group: CopyGroup, encoder: "ImageEncoder") -> CopyGroup:
    try:
        kept = _pixels(group.keep)
        if kept is None:
            return group
        copies = []
        for copy in group.copies:
            pixels = _pixels(copy)
            if pixels is not None:
                copy = replace(
                    copy,
                    heatmap=coarse(encoder.heatmap(pixels, kept)),
                    keep_heatmap=coarse(encoder.heatmap(kept, pixels)),
                )
            copies.append(copy)
    except ImageError:  # gone since it was inspected: the group is shown without
        return group
    return replace(group, copies=tuple(copies))


def _pixels(copy: Copy) -> Pixels | None:
    if copy.image.file is None:
        return None
    return reduced(load_pixels(copy.image.file, reduce_to=lambda h, w: (IMAGE_SIDE, IMAGE_SIDE)))
