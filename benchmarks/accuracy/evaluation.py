"""The paper's retrieval protocol on descriptors: transforms, score normalization, figures.

Whitening and bias are fitted on the training split only. A transform is searched once: a bias
shifts all scores of a query alike, so it changes no query's own candidates, only the ranking of
candidates across queries. References are streamed in
blocks, exact products and top-k in tiles: memory does not grow with their number.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from accuracy.dataset import Descriptors, DiscSet, Shards
from sscd_vec.metrics import Summary, evaluate
from sscd_vec.normalize import ScoreNorm, Whitening
from sscd_vec.normalize.whitening import ROWS_PER_DIMENSION, Mode
from sscd_vec.predictions import Predictions

QUERY_ROWS = 1024


@dataclass(frozen=True)
class Candidates:
    """Candidate pairs by row: ``scores[i]`` is that of ``queries[i]`` with ``references[i]``."""

    queries: NDArray[np.int64]
    references: NDArray[np.int64]
    scores: NDArray[np.float32]

    def plus(self, offsets: NDArray[np.float32]) -> "Candidates":
        """The same pairs with a number per query added to their scores."""
        return Candidates(self.queries, self.references, self.scores + offsets[self.queries])


def nearest(
    queries: NDArray[np.float32], blocks: Iterable[NDArray[np.float32]], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The ``k`` largest inner products of each query, largest first, and the rows they are with.

    Args:
        queries: ``(n, d)``.
        blocks: References ``(m_i, d)`` in order; rows are counted across blocks.
        k: Neighbours wanted; fewer come back if there are fewer references.

    Returns:
        Scores and rows, both ``(n, min(k, m))``.
    """
    q = torch.from_numpy(queries)
    scores = torch.empty(len(q), 0)
    rows = torch.empty(len(q), 0, dtype=torch.int64)
    seen = 0
    for block in blocks:
        r = torch.from_numpy(np.ascontiguousarray(block))
        width = min(k, scores.shape[1] + len(r))
        new_scores = torch.empty(len(q), width)
        new_rows = torch.empty(len(q), width, dtype=torch.int64)
        for start in range(0, len(q), QUERY_ROWS):
            tile = slice(start, start + QUERY_ROWS)
            found, place = (q[tile] @ r.T).topk(min(k, len(r)))
            merged = torch.cat([scores[tile], found], 1)
            labels = torch.cat([rows[tile], place + seen], 1)
            new_scores[tile], order = merged.topk(width)
            new_rows[tile] = labels.gather(1, order)
        scores, rows = new_scores, new_rows
        seen += len(r)
    return scores.numpy(), rows.numpy()


def best_per_query(
    queries: NDArray[np.float32], blocks: Iterable[NDArray[np.float32]], k: int
) -> Candidates:
    """The ``k`` best references of every query as a list of pairs."""
    scores, rows = nearest(queries, blocks, k)
    labels = np.repeat(np.arange(len(queries)), scores.shape[1])
    return Candidates(labels, rows.reshape(-1), scores.reshape(-1))


def best_overall(
    queries: NDArray[np.float32],
    blocks: Iterable[NDArray[np.float32]],
    count: int,
    offsets: NDArray[np.float32] | None = None,
) -> Candidates:
    """The ``count`` pairs of largest score over all queries: the challenge's way.

    Args:
        queries: ``(n, d)``.
        blocks: References ``(m_i, d)`` in order.
        count: Pairs wanted (500 000 in the Image Similarity Challenge).
        offsets: Added to every score of a query (minus its bias).
    """
    q = torch.from_numpy(queries)
    shift = torch.zeros(len(q)) if offsets is None else torch.from_numpy(offsets)
    kept = [(torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))]
    held, bar, seen = 0, float("-inf"), 0
    for block in blocks:
        r = torch.from_numpy(np.ascontiguousarray(block))
        for start in range(0, len(q), QUERY_ROWS):
            tile = q[start : start + QUERY_ROWS] @ r.T
            tile += shift[start : start + QUERY_ROWS, None]
            flat = tile.reshape(-1)
            place = torch.nonzero(flat > bar).squeeze(1)
            if len(place) > count:
                place = place[flat[place].topk(count).indices]
            kept.append((flat[place], place // len(r) + start, place % len(r) + seen))
            held += len(place)
            if held >= 2 * count:
                kept = [_largest(kept, count)]
                held, bar = len(kept[0][0]), float(kept[0][0].min())
        seen += len(r)
    scores, query_rows, reference_rows = _largest(kept, count)
    return Candidates(query_rows.numpy(), reference_rows.numpy(), scores.numpy())


Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _largest(parts: list[Triple], count: int) -> Triple:
    scores, queries, references = (torch.cat(column) for column in zip(*parts, strict=True))
    top, order = scores.topk(min(count, len(scores)))
    return top, queries[order], references[order]


@dataclass(frozen=True)
class Transform:
    """What is done to descriptors before they are compared.

    Attributes:
        name: ``raw``, ``centred`` or ``whitened``.
        dim: Dimensions kept; all of them if None.
        l2_before: L2-normalize before the transform too, as the paper does for trunk features.
        shrinkage: Of the variances when whitening (``Whitening.eps``); the paper's is 0.
        shipped: A fitted whitening to take instead.
    """

    name: str
    dim: int | None = None
    l2_before: bool = False
    shrinkage: float = 0.0
    shipped: Whitening | None = None

    def fit(self, training: Iterable[Descriptors]) -> Whitening | None:
        """Fit on the training split, one batch at a time."""
        if self.name == "raw" or self.shipped is not None:
            return self.shipped
        mode: Mode = "centre" if self.name == "centred" else "whiten"
        return Whitening.fit(training, mode, self.dim, self.shrinkage, self.l2_before)

    @property
    def label(self) -> str:
        """Its name in a table."""
        if self.shipped is not None:
            return "whitened as shipped"
        return f"{self.name}, shrunk by {self.shrinkage:g}" if self.shrinkage else self.name


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    transform: str
    dim: int
    score_norm: str
    summary: Summary
    predictions: Predictions


def standard_transforms(
    dim: int, reduced: int = 256, trunk: bool = False, shrinkages: Sequence[float] = ()
) -> list[Transform]:
    """The paper's rows: raw, centred, whitened, and both PCA forms at 256 dimensions.

    Args:
        dim: Dimensions of the descriptors.
        reduced: Dimensions of the last two rows, which are left out if there are no more anyway.
        trunk: Whether descriptors are trunk features.
        shrinkages: Rows beyond the paper's: whitening with the variances shrunk by each of these.
    """
    rows = [Transform("raw"), Transform("centred", None, trunk), Transform("whitened", None, trunk)]
    rows += [Transform("whitened", None, trunk, shrinkage) for shrinkage in shrinkages]
    if dim > reduced:
        rows += [Transform("centred", reduced, trunk), Transform("whitened", reduced, trunk)]
    return rows


def without_unfit(
    transforms: Sequence[Transform], training: int, dim: int, shipped: Whitening | None
) -> list[Transform]:
    """What a small training split can fit, as ``Normalizer.fit`` decides it.

    Fewer than ten rows per dimension fit a whitening badly: the model's shipped one, if there is
    any, is measured too. No more rows than dimensions do not fit one at all.

    Args:
        transforms: Those wanted.
        training: Images to fit on.
        dim: Dimensions of the descriptors.
        shipped: The whitening shipped with the model.
    """
    if training >= ROWS_PER_DIMENSION * dim:
        return list(transforms)
    kept = [
        each
        for each in transforms
        if each.name != "whitened" or each.shrinkage or training > (each.dim or dim)
    ]
    return kept if shipped is None else [*kept, Transform("whitened", shipped=shipped)]


def dimension_sweep(dim: int, smallest: int = 64) -> list[Transform]:
    """Whitening to d, 3d/4, d/2, d/4, …: the paper's way for baselines, which keeps the best."""
    sizes = [dim, 3 * dim // 4]
    half = dim // 2
    while half >= smallest:
        sizes.append(half)
        half //= 2
    return [Transform("whitened", size, True) for size in sizes]


def evaluate_transform(
    transform: Transform,
    disc: DiscSet,
    queries: Shards,
    references: Shards,
    training: Shards,
    *,
    score_norm: ScoreNorm,
    k: int | None = 10,
    best: int = 500_000,
) -> list[Row]:
    """Rows without and with score normalization.

    Args:
        transform: What is done to descriptors.
        disc: The test.
        queries: Descriptors of its queries.
        references: Descriptors of its references.
        training: Descriptors of its training images.
        score_norm: Settings of the bias.
        k: Candidates per query; None takes the ``best`` pairs overall instead.
        best: Number of pairs then.
    """
    whitening = transform.fit(training.blocks())
    q = np.concatenate(list(_apply(whitening, queries.blocks())))
    similarities, _ = nearest(q, _apply(whitening, training.blocks()), score_norm.n_end)
    offsets = -score_norm.bias_from_neighbours(similarities)
    if k is None:
        plain = best_overall(q, _apply(whitening, references.blocks()), best)
        shifted = best_overall(q, _apply(whitening, references.blocks()), best, offsets)
    else:
        plain = best_per_query(q, _apply(whitening, references.blocks()), k)
        shifted = plain.plus(offsets)
    rows = []
    for candidates, norm in ((plain, "none"), (shifted, str(score_norm))):
        predictions = named(candidates, disc.queries.ids, disc.references.ids)
        summary = evaluate(predictions, disc.truth)
        rows.append(Row(transform.label, q.shape[1], norm, summary, predictions))
    return rows


def named(candidates: Candidates, queries: Sequence[str], references: Sequence[str]) -> Predictions:
    """Candidates by row as predictions by id."""
    return Predictions(
        np.asarray(queries)[candidates.queries],
        np.asarray(references)[candidates.references],
        candidates.scores,
    )


def _apply(whitening: Whitening | None, blocks: Iterable[Descriptors]) -> Iterator[Descriptors]:
    for block in blocks:
        yield block if whitening is None else whitening.apply(block)
