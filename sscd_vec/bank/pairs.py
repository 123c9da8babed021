"""Which pairs of images are copies: by score, and by what people, geometry and pixels say.

A person's decision counts before everything else. Geometry decides about pairs near the threshold.
Pairs of two images outside what the normalizer knows score high whatever they show, so they are
copies only if their pixels are the same; the others stay *unsure*.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank.decisions import Decisions
from sscd_vec.bank.exact import SecondLook
from sscd_vec.bank.groups import Doubt, Judged, Pairs, connected, scores
from sscd_vec.bank.judging import NOT_FOUND, SECOND_LOOKS, TELLING, look_closely
from sscd_vec.bank.records import BankImage
from sscd_vec.normalize import Normalizer, Outside, Proof
from sscd_vec.progress import ProgressBar

if TYPE_CHECKING:
    from sscd_vec.bank.describe import ImageEncoder
    from sscd_vec.files import ImageFile
    from sscd_vec.verify import Evidence

Float32 = NDArray[np.float32]
Relate = Callable[[BankImage, BankImage, float | None], "Evidence | None"]
BELOW, ABOVE = 0.05, 0.1  # scores so far below and above the threshold are verified
LIKELY = 0.5  # verified score of a pair above the threshold that is not refused
MOST_DOUBTFUL = 10  # pairs below the threshold that are verified for an image


@dataclass(frozen=True)
class Tools:
    """What images are compared with.

    Attributes:
        normalizer: Scores, thresholds, verdicts.
        file: The file of an image, if it has one that may be read.
        relate: Compares two images by geometry; None to leave geometry out.
        encoder: Loads the model for heatmaps; None to leave these out.
    """

    normalizer: Normalizer
    file: "Callable[[BankImage], ImageFile | None]"
    relate: Relate | None = None
    encoder: "Callable[[], ImageEncoder] | None" = None


@dataclass(frozen=True, eq=False)
class Scored:
    """Images, and what their scores are made of.

    Attributes:
        images: The images.
        z: ``(n, d)`` their whitened descriptors.
        biases: ``(n,)``
        outside: Which of them lie outside what the normalizer knows.
        threshold: Least symmetric score of a copy.
    """

    images: Sequence[BankImage]
    z: Float32
    biases: Float32
    outside: Outside
    threshold: float

    @classmethod
    def of(
        cls,
        images: Sequence[BankImage],
        z: Float32,
        normalizer: Normalizer,
        threshold: float | None,
    ) -> "Scored":
        """Score images; the threshold is by default the calibrated one for this many images."""
        if threshold is None:
            threshold = normalizer.threshold("symmetric", len(images))
        return cls(images, z, normalizer.whitened_biases(z), normalizer.outside(z), threshold)

    def both_outside(self, pairs: Pairs) -> NDArray[np.bool_]:
        """Pairs of two images outside what the normalizer knows: two pages, two charts."""
        flags = self.outside.flags
        both: NDArray[np.bool_] = flags[pairs.first] & flags[pairs.second]
        return both


@dataclass(frozen=True)
class Settled:
    """What was decided about pairs.

    Attributes:
        copies: Pairs that are copies.
        unsure: Pairs that score like copies and cannot be told from strangers of their kind.
        judged: Pairs that are copies or not whatever they score.
        apart: For a row, the rows that never share a group with it.
        doubt: Whose scores say little, and what their pixels say.
    """

    copies: Pairs
    unsure: Pairs
    judged: Judged
    apart: Mapping[int, set[int]]
    doubt: Doubt


def settle(
    scored: Scored, pairs: Pairs, decisions: Decisions, tools: Tools, bar: ProgressBar
) -> Settled:
    """Decide which of the pairs that score like copies, or nearly so, are copies."""
    outside, threshold = scored.outside, scored.threshold
    judged = {} if tools.relate is None else _verify(scored, pairs, tools.relate, bar)
    decided = {(a, b): is_copy for a, b, is_copy in _decided(decisions, scored.images)}
    judged |= decided
    high = (pairs.scores >= threshold).tolist()
    kept = [judged.get(pair, above) for pair, above in zip(_rows(pairs), high, strict=True)]
    pairs = pairs.where(np.array(kept, bool))
    both = scored.both_outside(pairs)
    same, different = _look_at_pixels(scored.images, pairs.where(both), tools, bar)
    accepted = np.array([judged.get(pair, False) for pair in _rows(pairs)], bool)
    refuted = np.array([pair in different for pair in _rows(pairs)], bool)
    in_doubt = both & (same[pairs.first] != same[pairs.second]) & ~accepted
    unsure = _alike(pairs.where(in_doubt & ~refuted), scored)
    copies = _with_accepted(pairs.where(~in_doubt), judged, scored)
    return Settled(copies, unsure, judged, _apart(decided), Doubt(outside.flags, same))


def _rows(pairs: Pairs) -> Iterator[tuple[int, int]]:
    return zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)


def _verify(
    scored: Scored, pairs: Pairs, relate: Relate, bar: ProgressBar
) -> dict[tuple[int, int], bool]:
    """What geometry says about pairs near the threshold, by their rows.

    Below the threshold a pair must be sure to count, above it doubtful not to; and that geometry
    sees nothing refutes a pair only together with a descriptor score the verifier knows. Pages of
    one form share lines and boxes, so two images outside are left to their pixels.
    """
    near = pairs.where((pairs.scores < scored.threshold + ABOVE) & ~scored.both_outside(pairs))
    judged: dict[tuple[int, int], bool] = {}
    doubtful: Counter[int] = Counter()
    scores = near.scores.tolist()
    for (a, b), score in bar.track(list(zip(_rows(near), scores, strict=True)), "verifying"):
        is_below = score < scored.threshold
        if is_below:
            doubtful[a] += 1
            if doubtful[a] > MOST_DOUBTFUL:
                continue
        evidence = relate(scored.images[a], scored.images[b], score)
        if evidence is None:
            continue
        if is_below:
            judged[a, b] = evidence.is_copy
        elif evidence.descriptor_score is not None:
            judged[a, b] = evidence.score >= LIKELY and not evidence.doubt
    return judged


def _decided(decisions: Decisions, images: Sequence[BankImage]) -> Iterator[tuple[int, int, bool]]:
    """Pairs of rows that a person decided about, the smaller one first."""
    if not decisions.pairs:
        return
    rows: dict[str, list[int]] = {}
    for row, image in enumerate(images):
        rows.setdefault(image.digest, []).append(row)
    for one in decisions:
        for a in rows.get(one.first, ()):
            for b in rows.get(one.second, ()):
                if a != b:
                    yield min(a, b), max(a, b), one.is_copy


def _apart(decided: Judged) -> dict[int, set[int]]:
    apart: dict[int, set[int]] = {}
    for (a, b), is_copy in decided.items():
        if not is_copy:
            apart.setdefault(a, set()).add(b)
            apart.setdefault(b, set()).add(a)
    return apart


def _look_at_pixels(
    images: Sequence[BankImage], pairs: Pairs, tools: Tools, bar: ProgressBar
) -> tuple[NDArray[np.int64], set[tuple[int, int]]]:
    """For each image a number that images with the same pixels share, and pairs that differ.

    The pairs in question come strongest first, and the best few of each image are compared.
    """
    digests: dict[str, int] = {}
    same = [(digests.setdefault(i.digest, row), row) for row, i in enumerate(images) if i.digest]
    different: set[tuple[int, int]] = set()
    looks = np.zeros(len(images), np.int64)
    chosen = []
    for a, b in _rows(pairs):
        if images[a].digest != images[b].digest and looks[[a, b]].min() < SECOND_LOOKS:
            looks[[a, b]] += 1
            chosen.append((a, b))
    look, last = SecondLook(None), -1
    for a, b in bar.track(sorted(chosen), "comparing pixels"):
        if a != last:
            look, last = SecondLook(tools.file(images[a])), a
        found = look(tools.file(images[b]))
        if not (found is not None and found.is_copy):
            found = _closer(images[a], images[b], tools) or found
        if found is not None and found.is_copy:
            same.append((a, b))
        elif found is not None and found.is_copy is False:
            different.add((a, b))
    return connected(len(images), same), different


def _closer(first: BankImage, second: BankImage, tools: Tools) -> Proof | None:
    """What geometry says about two images in doubt, and their pixels where it aligns them."""
    evidence = None if tools.relate is None else tools.relate(first, second, None)
    if evidence is None:
        return None
    if not evidence.located:
        return Proof(False, NOT_FOUND, "geometry") if evidence.visible >= TELLING else None
    return look_closely(tools.file(first), tools.file(second), evidence)


def _alike(pairs: Pairs, scored: Scored) -> Pairs:
    """Pairs in doubt that score like copies even among images of their kind."""
    biases, raised = scored.biases, scored.biases + scored.outside.shifts
    before = np.maximum(biases[pairs.first], biases[pairs.second])
    after = np.maximum(raised[pairs.first], raised[pairs.second])
    return pairs.where(pairs.scores - (after - before) >= scored.threshold)


def _with_accepted(pairs: Pairs, judged: Judged, scored: Scored) -> Pairs:
    """Pairs, and those that were judged copies though their score is low."""
    there = set(_rows(pairs))
    more = [pair for pair, is_copy in judged.items() if is_copy and pair not in there]
    if not more:
        return pairs
    values = [scores(scored.z, scored.biases, [a], [b])[0, 0] for a, b in more]
    first, second = np.array(more, np.int64).T
    return Pairs(
        np.append(pairs.first, first),
        np.append(pairs.second, second),
        np.append(pairs.scores, np.array(values, np.float32)),
    )
