"""The Triton engine of the losses: what ``chunked`` does in torch, composed from the kernels."""

import math
from typing import TypeVar

import torch
from torch import Tensor

from sscd_vec.kernels import neighbours
from sscd_vec.kernels.batch import GlobalBatch, Positives, Scan
from sscd_vec.kernels.pull import positives, pull_positives
from sscd_vec.kernels.push import push_negatives
from sscd_vec.kernels.scan import scan
from sscd_vec.kernels.tiles import Factors, Runs, sorted_sources

Rows = TypeVar("Rows", Tensor, Factors)


class TiledStep:
    """The sums of one step over one batch; sources are sorted once for forward and backward."""

    def __init__(
        self, batch: GlobalBatch, tau: float, products: torch.dtype, saved: Tensor | None = None
    ) -> None:
        """Sort the sources, unless ``saved`` brings what an earlier step over the batch sorted."""
        self._z = batch.z.contiguous()
        self._all_z = self._z if batch.whole else batch.all_z.contiguous()
        self._tau = tau
        self._whole = batch.whole
        self._a = Factors.of(self._z, products)
        self._b = self._a if batch.whole else Factors.of(self._all_z, products)
        if batch.row_offset is None:
            self.saved = batch.sources.new_empty(3, 0, dtype=torch.int32)
            self._runs = Runs.of_bank(batch.sources, batch.all_sources)
        else:
            self.saved = sorted_sources(batch.all_sources) if saved is None else saved
            self._runs = Runs.of_slice(self.saved, batch.row_offset, len(self._z))

    def scan(self, *, lse: bool, nearest: bool, splits: int | None = None) -> Scan:
        """Each local row's log-sum-exp over negatives, and its most similar negative."""
        return scan(
            self._a, self._b, self._runs, self._tau, lse=lse, nearest=nearest, splits=splits
        )

    def positives(self, lse: Tensor) -> Positives:
        """Each local row's loss from its positives, and the loss's derivative by ``lse``."""
        return positives(self._z, self._all_z, self._runs, self._tau, lse)

    def squared_distance(self, index: Tensor) -> Tensor:
        """``||z_i - z_index(i)||^2``; of no meaning at index -1."""
        return neighbours.squared_distance(self._z, self._all_z, index)

    def push_negatives(
        self,
        lse: Tensor,
        pull: Tensor,
        similarity: Tensor,
        dz: Tensor,
        dall: Tensor | None,
        *,
        splits: int | None = None,
    ) -> None:
        """Fill ``dz`` and ``dall`` with what negatives give the gradient of InfoNCE's *sum*.

        Args:
            lse: (n,) log-sum-exp of each row's negatives.
            pull: (n,) derivative of each row's loss by ``lse``.
            similarity: (n,) cosine of each row's nearest negative.
            dz: (n, d) float32.
            dall: (N, d) float32; ``dz`` itself for a whole batch, None if nobody asks.
            splits: Parts into which the other side's rows are cut.
        """
        weight = ((pull / self._tau).log() - lse) / math.log(2.0)
        # Without negatives lse is -inf and without positives pull is 0: neither pushes anybody.
        weight = weight.where((pull > 0) & (lse > float("-inf")), float("-inf"))
        top = similarity / (self._tau * math.log(2.0))
        for anchors, a, b, gradient in self._sides(self._a, self._b, dz, dall):
            push_negatives(a, b, self._runs, weight, top, self._tau, gradient, anchors, splits)

    def pull_positives(self, lse: Tensor, count: Tensor, dz: Tensor, dall: Tensor | None) -> None:
        """Add what positives give to ``dz`` and ``dall``, which the negatives have filled."""
        for anchors, a, b, gradient in self._sides(self._z, self._all_z, dz, dall):
            pull_positives(a, b, self._runs, lse, count, self._tau, gradient, anchors)

    def add_pair_gradient(
        self, index: Tensor, slope: Tensor, dz: Tensor, dall: Tensor | None
    ) -> None:
        """Add the gradient of ``sum_i slope_i ||z_i - z_index(i)||^2 / 2`` to both sides."""
        neighbours.add_pair_gradient(self._z, self._all_z, index, slope, dz, dall)

    def _sides(
        self, local: Rows, everyone: Rows, dz: Tensor, dall: Tensor | None
    ) -> list[tuple[str, Rows, Rows, Tensor]]:
        """Who the anchors are, the rows that get a gradient, the other rows, and the gradient."""
        if self._whole:
            return [("both", local, everyone, dz)]
        if dall is None:
            return [("a", local, everyone, dz)]
        return [("a", local, everyone, dz), ("b", everyone, local, dall)]
