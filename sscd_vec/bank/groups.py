"""Groups of copies among n images: every pair scored, no pair held that is not a copy.

Neither of two images in a folder is the query, so a pair is scored by the smaller of its two
directed scores,

    score(a, b) = min(ŝ(a, b), ŝ(b, a)) = z_a·z_b - max(bias_a, bias_b),

with whitened unit descriptors ``z`` and the biases of score normalization (``Normalizer.whiten``,
``.biases``). All pairs are scored exhaustively, one block of the upper triangle at a time.

Grouping joins images, strongest pair first, by union-find. A join is *verified*: two groups
become one only if at least half of all pairs across them are copies, or if the hub of one (its
best linked member) is a copy of every member of the other. A chain of weak links (a is like b, b
is like c, c is like d) therefore ends early, while an original with many crops that do not
overlap each other stays one group. Copies left outside are kept as ``related`` pairs. A group of
more than 64 is represented by its hub and 63 members spread evenly, so that ten thousand equal
images do not cost ten thousand squared.

Images outside what the normalizer knows score high with each other whatever they show (``Doubt``).
Pairs of two such images join only if their pixels are the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Judged = Mapping[tuple[int, int], bool]  # whether two rows, the smaller first, are copies

ROWS, COLUMNS = 1024, 1024  # a block of scores is 4 MiB, whatever n is, and stays in the cache
PANEL = 64  # members that stand for a large group
LINKS = 100  # pairs kept per image: bounds memory where thousands of images are the same


@dataclass(frozen=True)
class Pairs:
    """Pairs of images that are copies: ``first < second``, strongest first."""

    first: Int64
    second: Int64
    scores: Float32

    def __len__(self) -> int:
        """How many pairs."""
        return len(self.first)

    def where(self, kept: NDArray[np.bool_]) -> "Pairs":
        """Some of them."""
        return Pairs(self.first[kept], self.second[kept], self.scores[kept])


@dataclass(frozen=True)
class Doubt:
    """Which images' scores with each other say little, and which of them are the same after all.

    Attributes:
        outside: ``(n,)`` whether the normalizer does not know this kind of image.
        same: ``(n,)`` a number that images with the same pixels share.
    """

    outside: NDArray[np.bool_]
    same: Int64

    def overrule(
        self, copies: NDArray[np.bool_], first: list[int], second: list[int]
    ) -> NDArray[np.bool_]:
        """Copies by score among rows ``first`` and ``second``; pixels decide those in doubt."""
        both = self.outside[first][:, None] & self.outside[second][None]
        same = self.same[first][:, None] == self.same[second][None]
        result: NDArray[np.bool_] = np.where(both, same, copies)
        return result


@dataclass(frozen=True)
class Group:
    """Images that are copies of each other.

    Attributes:
        members: Rows of the descriptors, ascending.
        hub: The member with most verified links inside the group.
        related: ``(member, outsider, score)``: copies of one member that the group as a whole did
            not accept.
    """

    members: tuple[int, ...]
    hub: int
    related: tuple[tuple[int, int, float], ...] = ()


def find_pairs(
    z: Float32,
    biases: Float32,
    threshold: float,
    *,
    links: int = LINKS,
    on_rows: Callable[[int], None] | None = None,
) -> Pairs:
    """All pairs with ``score(a, b) >= threshold``, at most ``links`` later images for each one.

    Args:
        z: ``(n, d)`` whitened unit descriptors.
        biases: ``(n,)`` biases; zeros without score normalization.
        threshold: Least symmetric score of a copy.
        links: The strongest pairs kept per image.
        on_rows: Called with the number of images finished since the last call.
    """
    _check(z, biases)
    found = [_NOTHING]
    for start in range(0, len(z), ROWS):
        rows = slice(start, min(start + ROWS, len(z)))
        found.append(row_pairs(z, biases, threshold, rows, links))
        if on_rows is not None:
            on_rows(rows.stop - rows.start)
    first, second, scores = _joined(found)
    order = np.lexsort((second, first, -scores))
    return Pairs(first[order], second[order], scores[order])


def group_pairs(
    z: Float32,
    biases: Float32,
    threshold: float,
    pairs: Pairs,
    judged: Judged | None = None,
    apart: Mapping[int, set[int]] | None = None,
    doubt: "Doubt | None" = None,
) -> list[Group]:
    """Groups of verified copies, the largest first; images without a copy are in none.

    Args:
        z: ``(n, d)`` whitened unit descriptors.
        biases: ``(n,)`` biases.
        threshold: The one ``pairs`` was found with.
        pairs: Of ``find_pairs``.
        judged: Pairs that are copies or not whatever they score, the smaller row first.
        apart: For a row, the rows that never share a group with it.
        doubt: Images whose scores with each other say little; none by default.
    """
    _check(z, biases)
    forest = _Forest(len(z))
    refused: dict[tuple[int, int], tuple[int, int]] = {}
    for a, b in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True):
        left, right = forest.root(a), forest.root(b)
        if left == right:
            continue
        key = (min(left, right), max(left, right))
        sizes = (len(forest.members[key[0]]), len(forest.members[key[1]]))
        if refused.get(key) == sizes:  # nothing changed since these two were last compared
            continue
        ours, theirs = forest.panel(left), forest.panel(right)
        copies = scores(z, biases, ours, theirs) >= threshold
        if doubt is not None:
            copies = doubt.overrule(copies, ours, theirs)
        if judged:
            _overrule(copies, ours, theirs, judged)
        half = 2 * int(copies.sum()) >= copies.size
        joined = half or copies[0].all() or copies[:, 0].all()
        if joined and not (apart and forest.crosses(left, right, apart)):
            forest.links[ours] += copies.sum(1)
            forest.links[theirs] += copies.sum(0)
            forest.join(left, right)
        else:
            refused[key] = sizes
    return _collect(forest, pairs)


def connected(count: int, pairs: Iterable[tuple[int, int]]) -> Int64:
    """For each of ``count`` rows, the smallest row it is connected with by pairs."""
    parent = list(range(count))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for a, b in pairs:
        left, right = sorted((root(a), root(b)))
        parent[right] = left
    return np.array([root(row) for row in range(count)], np.int64)


def components(pairs: Pairs, count: int) -> list[Group]:
    """Rows connected by pairs, however thinly, largest group first."""
    label = connected(count, zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
    roots, sizes = np.unique(label, return_counts=True)
    found = [np.flatnonzero(label == root) for root in roots[sizes > 1]]
    groups = [Group(tuple(rows.tolist()), int(rows[0])) for rows in found]
    return sorted(groups, key=lambda g: (-len(g.members), g.members))


def scores(z: Float32, biases: Float32, first: list[int], second: list[int]) -> Float32:
    """Symmetric scores of the rows ``first`` with the rows ``second``."""
    bias = np.maximum(biases[first][:, None], biases[second][None])
    result: Float32 = z[first] @ z[second].T - bias
    return result


def _overrule(
    copies: NDArray[np.bool_], ours: list[int], theirs: list[int], judged: Judged
) -> None:
    for row, a in enumerate(ours):
        for column, b in enumerate(theirs):
            copies[row, column] = judged.get((min(a, b), max(a, b)), copies[row, column])


class _Forest:
    """Union-find that knows each group's members and hub."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))
        self.members = {row: [row] for row in range(count)}
        self.hub = list(range(count))
        self.links = np.zeros(count, np.int64)  # verified copies inside the own group

    def root(self, row: int) -> int:
        while self.parent[row] != row:
            self.parent[row] = self.parent[self.parent[row]]
            row = self.parent[row]
        return row

    def panel(self, root: int) -> list[int]:
        """The hub first, then the others, or an even spread of them."""
        members, hub = self.members[root], self.hub[root]
        step = -(-len(members) // PANEL)
        return [hub, *(row for row in members[::step] if row != hub)]

    def crosses(self, left: int, right: int, apart: Mapping[int, set[int]]) -> bool:
        """Whether two groups hold rows that must stay apart."""
        return any(
            not apart.get(a, set()).isdisjoint(self.members[right]) for a in self.members[left]
        )

    def join(self, left: int, right: int) -> None:
        candidates = sorted({*self.panel(left), *self.panel(right)})
        hub = candidates[int(self.links[candidates].argmax())]
        if len(self.members[left]) < len(self.members[right]):
            left, right = right, left
        self.parent[right] = left
        self.members[left] += self.members.pop(right)
        self.hub[left] = hub


_Part = tuple[Int64, Int64, Float32]  # first, second, score
_NOTHING: _Part = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


def _joined(parts: list[_Part]) -> _Part:
    return (
        np.concatenate([first for first, _, _ in parts]),
        np.concatenate([second for _, second, _ in parts]),
        np.concatenate([score for _, _, score in parts]),
    )


def row_pairs(
    z: Float32, biases: Float32, threshold: float, rows: slice, links: int = LINKS
) -> _Part:
    """Pairs of some rows with all that come after each, as ``find_pairs`` finds them."""
    parts = [_NOTHING]
    held = 0
    for first, second, value in _blocks(z, biases, threshold, rows):
        parts.append((first, second, value))
        held += len(first)
        if held > 2 * links * (rows.stop - rows.start):
            parts = [_strongest(parts, links)]
            held = len(parts[0][0])
    return _strongest(parts, links)


def _blocks(z: Float32, biases: Float32, threshold: float, rows: slice) -> Iterator[_Part]:
    for start in range(rows.start, len(z), COLUMNS):
        columns = slice(start, min(start + COLUMNS, len(z)))
        block = z[rows] @ z[columns].T
        # One pass with the row's bias; the few that remain are checked against the column's.
        near = block >= threshold + biases[rows, None]
        if not near.any():
            continue
        row, column = np.nonzero(near)
        value = block[row, column]
        row, column = row + rows.start, column + columns.start
        value -= np.maximum(biases[row], biases[column])
        keep = (column > row) & (value >= threshold)
        yield row[keep], column[keep], value[keep]


def _strongest(parts: list[_Part], links: int) -> _Part:
    first, second, value = _joined(parts)
    order = np.lexsort((second, -value, first))
    first, second, value = first[order], second[order], value[order]
    _, begin, inverse = np.unique(first, return_index=True, return_inverse=True)
    rank = np.arange(len(first)) - begin[inverse] if len(first) else np.empty(0, np.int64)
    keep = rank < links
    return first[keep], second[keep], value[keep]


def _collect(forest: _Forest, pairs: Pairs) -> list[Group]:
    related: dict[int, list[tuple[int, int, float]]] = {}
    for a, b, score in zip(
        pairs.first.tolist(), pairs.second.tolist(), pairs.scores.tolist(), strict=True
    ):
        left, right = forest.root(a), forest.root(b)
        if left != right:
            related.setdefault(left, []).append((a, b, score))
            related.setdefault(right, []).append((b, a, score))
    groups = [
        Group(tuple(sorted(members)), forest.hub[root], tuple(related.get(root, ())))
        for root, members in forest.members.items()
        if len(members) > 1
    ]
    return sorted(groups, key=lambda g: (-len(g.members), g.members))


def _check(z: Float32, biases: Float32) -> None:
    if z.ndim != 2 or biases.shape != (len(z),):
        raise ValueError(
            f"expected descriptors (n, d) and biases (n,), got {z.shape} and {biases.shape}"
        )
