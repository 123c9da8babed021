"""The paper's retrieval protocol on descriptors: transforms, score normalization, figures.

Whitening and bias are fitted on the training split only. A transform is searched once: a bias
shifts all scores of a query alike, so it changes no query's own candidates, only the ranking of
candidates across queries. References are streamed: memory does not grow with their number.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from candidates import Candidates, best_overall, best_per_query, nearest
from descriptor_cache import Descriptors, Shards
from disc_layout import DiscSet
from sscd_vec.metrics import Summary, evaluate
from sscd_vec.normalize import ScoreNorm, Whitening
from sscd_vec.normalize.whitening import Mode
from sscd_vec.predictions import Predictions


@dataclass(frozen=True)
class Transform:
    """What is done to descriptors before they are compared.

    Attributes:
        name: ``raw``, ``centred`` or ``whitened``.
        dim: Dimensions kept; all of them if None.
        l2_before: L2-normalize before the transform too, as the paper does for trunk features.
        shrinkage: Of the variances when whitening (``Whitening.eps``); the paper's is 0.
    """

    name: str
    dim: int | None = None
    l2_before: bool = False
    shrinkage: float = 0.0

    def fit(self, training: Iterable[Descriptors]) -> Whitening | None:
        """Fit on the training split, one batch at a time."""
        if self.name == "raw":
            return None
        mode: Mode = "centre" if self.name == "centred" else "whiten"
        return Whitening.fit(training, mode, self.dim, self.shrinkage, self.l2_before)

    @property
    def label(self) -> str:
        """Its name in a table."""
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
