"""Pairs of copies among very many images: each is compared with lists of neighbours, not with all.

Images are put into lists, each with the centroid it is most alike (k-means of unit vectors), and
every image is compared with all members of the ``probes`` lists it is most alike. Two copies meet
if either looks into the list of the other. With ``n`` images and ``√(n·probes)`` lists that takes
``2·n·√(n·probes)`` comparisons instead of ``n²/2``, all of them as matrix products, and every pair
that is found has its exact score. What is missed is measured on a sample of images that are
compared with all others (``count_found``).

Equal descriptors, such as those of a file that is there a thousand times, stand for one: the others
are paired with the first of them. ``memory`` bounds what is held besides the descriptors, which may
be mapped from a file.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank.groups import LINKS, Float32, Int64, Pairs

PROBES = 64
SMALLEST = 16  # lists, however few images there are
TRAINED_PER_LIST, ROUNDS = 16, 4
ROWS = 2048  # images compared at a time
MEMORY = 1 << 30
SAMPLE = 1024  # images compared with all others, to see what was missed
_PAIR_BYTES = 64  # of a pair while pairs are sorted
_VISIT_BYTES = 40  # of one look into a list, likewise

_Part = tuple[Int64, Int64, Float32]
Run = Callable[[Callable[[range], _Part], Sequence[range]], Iterator[_Part]]


@dataclass(frozen=True)
class Found:
    """Pairs, and how many of those of a sample of images are among them.

    Attributes:
        pairs: The pairs.
        sampled: Images compared with all others.
        expected: Pairs they have.
        met: How many of these were found.
    """

    pairs: Pairs
    sampled: int
    expected: int
    met: int

    @property
    def recall(self) -> float | None:
        """Share of the sampled pairs that were found; None if there were none."""
        return self.met / self.expected if self.expected else None


@dataclass(frozen=True)
class Rows:
    """Whitened unit descriptors ``(n, d)`` in memory or in a file, the same in every process."""

    array: Float32 | None = None
    path: Path | None = None
    dim: int = 0

    def open(self) -> Float32:
        """The array, mapped if it is a file."""
        if self.array is not None:
            return self.array
        if self.path is None:
            raise ValueError("expected an array or a path")
        return np.memmap(self.path, np.float32, "r").reshape(-1, self.dim)


def find_pairs(
    rows: Rows,
    biases: Float32,
    threshold: float,
    *,
    links: int = LINKS,
    probes: int = PROBES,
    memory: int = MEMORY,
    on_rows: Callable[[int], None] | None = None,
    run: Run = map,
) -> Found:
    """Nearly all pairs with ``score(a, b) >= threshold``; see ``groups.find_pairs``.

    Args:
        rows: Whitened unit descriptors.
        biases: ``(n,)``; zeros without score normalization.
        threshold: Least symmetric score of a copy.
        links: The strongest pairs kept per image.
        probes: Lists each image is compared with: more find more, and take longer.
        memory: Bytes held at a time, besides the descriptors.
        on_rows: Called with the number of images finished since the last call.
        run: Runs the parts of the comparison: ``map`` here, or on other machines.
    """
    z = rows.open()
    if len(z) < 2:
        return Found(Pairs(*_NOTHING), 0, 0, 0)
    first_of = equal_rows(z)
    single = np.flatnonzero(first_of == np.arange(len(z)))
    centroids = make_centroids(z, single, probes)
    visits = np.empty((len(single), min(probes, len(centroids))), np.int32)
    for begin in range(0, len(single), ROWS):
        part = single[begin : begin + ROWS]
        visits[begin : begin + ROWS] = _nearest(z[part], centroids, visits.shape[1])
    join = Join(rows, biases, threshold, single, visits, links, memory)
    held = [_equal_pairs(z, biases, threshold, first_of)]
    for lists, met in zip(slabs := join.slabs(len(centroids)), run(join, slabs), strict=True):
        held.append(met)
        if sum(len(first) for first, _, _ in held) * _PAIR_BYTES > memory:
            held = [_strongest(held, links)]
        if on_rows is not None:
            on_rows(len(z) * len(lists) // len(centroids))
    first, second, scores = _strongest(held, links)
    order = np.lexsort((second, first, -scores))
    pairs = Pairs(first[order], second[order], scores[order])
    return count_found(z, biases, threshold, pairs, first_of)


@dataclass(frozen=True, eq=False)
class Join:
    """Compares the members of some lists with all images that look into them.

    A copy of it works in another process, if ``rows`` is a file that both see.
    """

    rows: Rows
    biases: Float32
    threshold: float
    single: Int64
    visits: NDArray[np.int32]
    links: int
    memory: int

    def slabs(self, lists: int) -> list[range]:
        """Lists to be done together: what looks into them fits into ``memory``."""
        count = max(1, -(-self.visits.size * _VISIT_BYTES // self.memory))
        edges = np.linspace(0, lists, min(count, lists) + 1).astype(int).tolist()
        return [range(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]

    def __call__(self, lists: range) -> _Part:
        """The pairs that meet in these lists."""
        z = self.rows.open()
        visitor, column = np.nonzero((self.visits >= lists.start) & (self.visits < lists.stop))
        where = self.visits[visitor, column] - lists.start
        order = np.argsort(where, kind="stable")
        visitor, column = visitor[order].astype(np.int32), column[order]
        edges = np.searchsorted(where[order], np.arange(len(lists) + 1))
        parts, held = [_NOTHING], 0
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            rows = self.single[visitor[begin:end]]
            members = rows[column[begin:end] == 0]  # whose nearest list this is
            for part in self._compare(z, rows, members):
                parts.append(part)
                held += len(part[0])
            if held * _PAIR_BYTES > self.memory:
                parts = [_strongest(parts, self.links)]
                held = len(parts[0][0])
        return _strongest(parts, self.links)

    def _compare(self, z: Float32, rows: Int64, members: Int64) -> Iterator[_Part]:
        for column in range(0, len(members), ROWS):
            right = members[column : column + ROWS]
            theirs, their_bias = z[right].T, self.biases[right]
            for begin in range(0, len(rows), ROWS):
                left = rows[begin : begin + ROWS]
                yield _near(z[left] @ theirs, left, right, self.biases[left], their_bias,
                            self.threshold)  # fmt: skip


def equal_rows(z: Float32) -> Int64:
    """For each row the first one that is equal to it, bit by bit; mostly itself."""
    odd = np.random.default_rng(0).integers(0, 2**63, z.shape[1], np.uint64) * 2 + 1
    keys = np.empty(len(z), np.uint64)
    for begin in range(0, len(z), ROWS):
        bits = np.ascontiguousarray(z[begin : begin + ROWS]).view(np.uint32)
        keys[begin : begin + ROWS] = (bits * odd).sum(1, dtype=np.uint64)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    result: Int64 = first[inverse]
    return result


def make_centroids(z: Float32, rows: Int64, probes: int, seed: int = 0) -> Float32:
    """Unit centroids of ``√(n·probes)`` lists, by k-means on a sample."""
    count = min(len(rows), max(SMALLEST, round((len(rows) * probes) ** 0.5)))
    rng = np.random.default_rng(seed)
    taken = np.sort(rng.choice(rows, min(len(rows), TRAINED_PER_LIST * count), replace=False))
    sample = np.ascontiguousarray(z[taken])
    centroids: Float32 = sample[rng.choice(len(sample), count, replace=False)]
    for _ in range(ROUNDS):
        lists = np.concatenate(
            [
                _nearest(sample[b : b + ROWS], centroids, 1)[:, 0]
                for b in range(0, len(sample), ROWS)
            ]
        )
        order = np.argsort(lists, kind="stable")
        used, begin = np.unique(lists[order], return_index=True)
        centroids[used] = np.add.reduceat(sample[order], begin, axis=0)
        centroids /= np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
    return centroids


def count_found(
    z: Float32, biases: Float32, threshold: float, pairs: Pairs, first_of: Int64
) -> Found:
    """Compare a sample of images with all others, and count which of their pairs were found."""
    count = len(z)
    sample = np.sort(np.random.default_rng(1).choice(count, min(SAMPLE, count), replace=False))
    parts = [_NOTHING]
    for begin in range(0, count, ROWS):
        right = np.arange(begin, min(begin + ROWS, count))
        block = z[sample] @ z[right].T
        parts.append(_near(block, sample, right, biases[sample], biases[right], threshold))
    first, second, _ = (np.concatenate(column) for column in zip(*parts, strict=True))
    # Equal images are paired with the first of them, which stands for all.
    wanted = _keys(first_of[first], first_of[second], count)
    known = _keys(pairs.first, pairs.second, count)
    met = np.isin(wanted, known) | (first_of[first] == first_of[second])
    return Found(pairs, len(sample), len(wanted), int(met.sum()))


_NOTHING: _Part = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


def _near(
    block: Float32, left: Int64, right: Int64, ours: Float32, theirs: Float32, threshold: float
) -> _Part:
    """Pairs of a block of similarities, the smaller row first."""
    row, column = np.nonzero(block >= threshold + ours[:, None])
    scores = block[row, column] - np.maximum(ours[row], theirs[column])
    first, second = left[row], right[column]
    keep = (scores >= threshold) & (first != second)
    first, second = first[keep], second[keep]
    return np.minimum(first, second), np.maximum(first, second), scores[keep]


def _nearest(rows: Float32, centroids: Float32, count: int) -> NDArray[np.int32]:
    """The ``count`` most alike centroids of each row, the best first."""
    similarities = rows @ centroids.T
    if count == 1:
        best_one: NDArray[np.int32] = similarities.argmax(1).astype(np.int32)[:, None]
        return best_one
    best = np.argpartition(-similarities, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(similarities, best, 1), axis=1)
    nearest: NDArray[np.int32] = np.take_along_axis(best, order, 1).astype(np.int32)
    return nearest


def _equal_pairs(z: Float32, biases: Float32, threshold: float, first_of: Int64) -> _Part:
    second = np.flatnonzero(first_of != np.arange(len(z)))
    first = first_of[second]
    scores = np.empty(len(second), np.float32)
    for begin in range(0, len(second), ROWS):
        part = slice(begin, begin + ROWS)
        scores[part] = np.einsum("nd,nd->n", z[first[part]], z[second[part]])
    scores -= np.maximum(biases[first], biases[second])
    keep = scores >= threshold
    return first[keep], second[keep], scores[keep]


def _strongest(parts: Sequence[_Part], links: int) -> _Part:
    """Every pair once, and the ``links`` strongest of each first image."""
    first, second, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((second, first))
    first, second, scores = first[order], second[order], scores[order]
    new = np.ones(len(first), bool)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    first, second, scores = first[new], second[new], scores[new]
    order = np.lexsort((-scores, first))
    first, second, scores = first[order], second[order], scores[order]
    begin = np.searchsorted(first, first)  # sorted: where the pairs of this image begin
    keep = np.arange(len(first)) - begin < links
    return first[keep], second[keep], scores[keep]


def _keys(first: Int64, second: Int64, count: int) -> Int64:
    keys: Int64 = np.minimum(first, second) * count + np.maximum(first, second)
    return keys
