"""Loss and gradient over every rank's rows without gathering them: the rows go round in a ring.

A gather puts the global batch on every rank, 2 GB of float32 for a million descriptors of 512, and
as much again for its gradient. Here the ranks' rows visit each other, as in Inf-CL (Cheng et al.
2024): a rank holds a few slices of the batch, however many ranks there are. The rows go round
twice. On the first round each rank finds its own rows' log-sum-exp, positives and neighbours. On
the second the gradient of the visiting rows travels with them, and is complete when it comes home.

Only the order of sums differs from the gathered loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sscd_vec.kernels.batch import GlobalBatch, Positives, SSCDLoss
from sscd_vec.kernels.chunked import PAIRS_AT_ONCE, SourceRuns, add_positives, mean_positives
from sscd_vec.kernels.objective import asked_for, full_precision, mean_where, spread_of, sums_of
from sscd_vec.trainer.distributed import Ranks


@dataclass
class Nearest:
    """What the negatives that have passed by so far are to n local rows.

    Attributes:
        lse: (n,) log-sum-exp of their logits.
        similarity: (n,) cosine of the nearest one, -inf without any.
        index: (n,) its row in the global batch, -1 without any.
        squared: (n,) its squared distance.
    """

    lse: Tensor
    similarity: Tensor
    index: Tensor
    squared: Tensor

    @classmethod
    def of_nobody(cls, z: Tensor) -> "Nearest":
        """Before the first visit."""
        nothing = z.new_full((len(z),), float("-inf"))
        return cls(nothing, nothing, z.new_full((len(z),), -1, dtype=torch.int64), nothing)


@dataclass(frozen=True)
class Pairs:
    """Local rows and their positives among the visiting rows, (m,) each."""

    row: Tensor
    mate: Tensor
    cosine: Tensor


@dataclass(frozen=True)
class Ring:
    """One step's loss on the rows of all ranks.

    Attributes:
        z: (n, d) this rank's unit descriptors; every rank has n.
        all_sources: (N, 2) the sources of all ranks' rows, in rank order.
        tau: Temperature.
        ranks: The processes that share the batch.
        products: Dtype in which negatives are multiplied.
    """

    z: Tensor
    all_sources: Tensor
    tau: float
    ranks: Ranks
    products: torch.dtype

    def gradient(self, entropy_weight: float) -> tuple[SSCDLoss, Tensor]:
        """The loss of the local rows, and the gradient of the sum of all ranks' at them."""
        with full_precision(self.z):
            near, pairs = self._first_round()
            positive = self._positives(near.lse, pairs)
            spread, slope = spread_of(near.squared, near.index >= 0)
            contrast = positive.loss.mean()
            loss = SSCDLoss(
                *(contrast + entropy_weight * spread, contrast, spread),
                mean_where(positive.similarity, positive.count > 0),
                mean_where(near.similarity, near.index >= 0),
            )
            return loss, self._second_round(near, pairs, positive, entropy_weight * slope)

    def _visits(self) -> Iterator[tuple[int, GlobalBatch]]:
        """The global row at which the visiting rows begin, and the local rows among them."""
        sources = torch.split(self.all_sources, len(self.z))
        own = sources[self.ranks.rank]
        for owner, rows in self.ranks.visits(self.z):
            batch = GlobalBatch(self.z, own, rows, sources[owner], None, whole=False)
            yield owner * len(self.z), batch

    def _first_round(self) -> tuple[Nearest, list[Pairs]]:
        near, pairs = Nearest.of_nobody(self.z), []
        for first, batch in self._visits():
            step = sums_of(batch, self.tau, self.products)
            found = step.scan(lse=True, nearest=True)
            near.lse = torch.logaddexp(near.lse, asked_for(found.lse))
            visitor = asked_for(found.index)
            index = visitor + first
            closer = (found.similarity > near.similarity) | (
                (found.similarity == near.similarity) & (index < near.index)
            )
            closer &= visitor >= 0
            near.similarity = found.similarity.where(closer, near.similarity)
            near.index = index.where(closer, near.index)
            near.squared = step.squared_distance(visitor).where(closer, near.squared)
            pairs.append(self._pairs(first, batch))
        return near, pairs

    def _pairs(self, first: int, batch: GlobalBatch) -> Pairs:
        row, mate = SourceRuns.of(batch.all_sources).pairs(batch.sources)
        other = first + mate != self.ranks.rank * len(self.z) + row  # no row is its own positive
        row, mate = row[other], mate[other]
        parts = zip(*(torch.split(x, PAIRS_AT_ONCE) for x in (row, mate)), strict=True)
        return Pairs(row, mate, torch.cat([(self.z[i] * batch.all_z[j]).sum(1) for i, j in parts]))

    def _positives(self, lse: Tensor, pairs: list[Pairs]) -> Positives:
        sums = self.z.new_zeros(len(self.z), 4)
        for some in pairs:
            add_positives(sums, some.row, some.cosine, lse, self.tau)
        return mean_positives(sums)

    def _second_round(
        self, near: Nearest, pairs: list[Pairs], positive: Positives, slope: Tensor
    ) -> Tensor:
        """(n, d) gradient at the local rows, as anchors here and as others' rows everywhere."""
        as_row, visiting = torch.zeros_like(self.z), torch.zeros_like(self.z)
        for (first, batch), some in zip(self._visits(), pairs, strict=True):
            here = (near.index >= first) & (near.index < first + len(self.z))
            index = torch.where(here, near.index - first, -1)
            dz, dall = self._at_visit(batch, near, positive, some, index, slope.where(here, 0.0))
            as_row += dz
            visiting += dall
            del dz, dall  # before the next visit makes its own
            visiting = self.ranks.pass_on(visiting)
        return as_row.add_(visiting).div_(len(self.z))

    def _at_visit(
        self,
        batch: GlobalBatch,
        near: Nearest,
        positive: Positives,
        some: Pairs,
        index: Tensor,
        slope: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(n, d) gradients at the local and the visiting rows of what they are to each other."""
        step = sums_of(batch, self.tau, self.products)
        dz, dall = torch.zeros_like(self.z), torch.zeros_like(self.z)
        step.push_negatives(near.lse, positive.pull, near.similarity, dz, dall)
        self._pull(batch.all_z, some, near.lse, positive.count, dz, dall)
        step.add_pair_gradient(index, slope, dz, dall)
        return dz, dall

    def _pull(
        self, rows: Tensor, some: Pairs, lse: Tensor, count: Tensor, dz: Tensor, dall: Tensor
    ) -> None:
        gap = lse[some.row] - some.cosine / self.tau
        step = gap.sigmoid() / (count[some.row] * -self.tau)
        whole = (some.row, some.mate, step)
        for i, j, part in zip(*(torch.split(x, PAIRS_AT_ONCE) for x in whole), strict=True):
            dz.index_add_(0, i, rows[j] * part[:, None])
            dall.index_add_(0, j, self.z[i] * part[:, None])
