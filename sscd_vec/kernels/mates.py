"""Mates of a row found by sorting source ids: a sparse list instead of an N x N comparison.

Rows i and j are mates if their source pairs intersect. Nearly all images of a batch are unmixed, so
a row has a handful of mates; sorting the ids once puts the rows of one source next to each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS_AT_ONCE = 8192  # pairs whose two descriptors are gathered at a time


@dataclass(frozen=True)
class SourceRuns:
    """Rows of the global batch in the order of their source ids.

    Attributes:
        all_sources: (N, 2) source ids.
        ids: (e,) the ids in ascending order; a mixed row has two entries, an unmixed row one.
        rows: (e,) the row of each entry.
    """

    all_sources: Tensor
    ids: Tensor
    rows: Tensor

    @classmethod
    def of(cls, all_sources: Tensor) -> "SourceRuns":
        """Sort the entries of ``all_sources``."""
        first, second = all_sources.unbind(1)
        mixed = (first != second).nonzero()[:, 0]
        ids, order = torch.cat([first, second[mixed]]).sort(stable=True)
        rows = torch.cat([torch.arange(len(first), device=mixed.device), mixed])[order]
        return cls(all_sources, ids, rows)

    def pairs(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        """All pairs (i, j) of a row of ``sources`` and a mate of it in the global batch, once each.

        Returns:
            (m,) rows of ``sources`` and (m,) rows of the global batch, a row being its own mate.
        """
        sources = sources.contiguous()
        start = torch.searchsorted(self.ids, sources)  # (n, 2)
        count = torch.searchsorted(self.ids, sources, right=True) - start
        count[:, 1] *= sources[:, 0] != sources[:, 1]
        counts, starts = count.T.flatten(), start.T.flatten()  # first ids of all rows, then second
        run = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        within = torch.arange(len(run), device=run.device) - (counts.cumsum(0) - counts)[run]
        mate = self.rows[starts[run] + within]
        row = run % len(sources)
        # A pair that shares both sources turns up in both runs: keep it in the first.
        again = (run >= len(sources)) & (self.all_sources[mate] == sources[row, :1]).any(1)
        return row[~again], mate[~again]


def positive_pairs(
    runs: SourceRuns, sources: Tensor, row_offset: int, rows_at_once: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (local row, positive of it in the global batch) in pieces of bounded length.

    Args:
        runs: The sorted global batch.
        sources: (n, 2) source ids of the local rows.
        row_offset: Local row i is row ``row_offset + i`` of the global batch, and no positive of
            itself.
        rows_at_once: Local rows whose pairs are listed at a time.
    """
    for begin in range(0, len(sources), rows_at_once):
        row, mate = runs.pairs(sources[begin : begin + rows_at_once])
        row = row + begin
        other = mate != row + row_offset
        row, mate = row[other], mate[other]
        for first in range(0, len(row), PAIRS_AT_ONCE):
            yield row[first : first + PAIRS_AT_ONCE], mate[first : first + PAIRS_AT_ONCE]
