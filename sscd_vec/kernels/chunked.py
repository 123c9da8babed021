"""The losses' sums in plain torch, tile by tile: the path for CPU tensors.

Forward keeps O(n) per row: the running maximum and sum of ``e^{s_ik}`` over negatives, and the most
similar negative. Backward recomputes each similarity tile instead of having kept it. A tile is
small enough for the last cache, and large enough that threads do not spend their time meeting.

If the local rows are the global batch, ``s`` is symmetric and only the tiles of the upper triangle
are computed, each serving its rows and its columns: half the products forward, half the
recomputation. Elementary products at N rows, in units of N^2 d multiply-adds: 1/2 forward, 1/2 + 1
backward, against 1 and 2 of the N x N form.

Mates come from sorting source ids: nearly all images of a batch are unmixed, so a row has a handful
of mates, and sorting puts the rows of one source next to each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sscd_vec.kernels.batch import GlobalBatch, Positives, Scan

TILE = 2048  # rows and columns
PAIRS_AT_ONCE = 8192  # pairs whose two descriptors are gathered at a time


@dataclass(frozen=True)
class _Tile:
    rows: slice
    columns: slice
    logits: Tensor  # (rows, columns) similarities, -inf between mates
    mirrored: bool  # its transpose is not visited: serve the columns too


def scan(batch: GlobalBatch, tau: float, *, lse: bool, nearest: bool) -> Scan:
    """One pass over the similarity tiles for both losses.

    Returns:
        ``log sum_{k negative of i} e^{s_ik}`` (-inf without negatives) if ``lse``, and the most
        similar negative (-1 without negatives) if ``nearest``.
    """
    n = len(batch.z)
    lowest = torch.finfo(batch.z.dtype).min  # finite, so that differences are never NaN
    state = _RunningMax(
        top=batch.z.new_full((n,), lowest),
        total=batch.z.new_zeros(n) if lse else None,
        index=torch.full((n,), -1, device=batch.z.device) if nearest else None,
        scratch=batch.z.new_empty(TILE * TILE),
    )
    for tile in _tiles(batch, tau):
        state.update(tile.rows, tile.logits, tile.columns.start, dim=1)
        if tile.mirrored:
            state.update(tile.columns, tile.logits, tile.rows.start, dim=0)
    return Scan(
        lse=None if state.total is None else state.top + state.total.log(),
        index=state.index,
        similarity=state.top * tau,
    )


def positives(batch: GlobalBatch, tau: float, lse: Tensor) -> Positives:
    """Each row's InfoNCE, ``mean_{j in P_i} log(1 + e^{lse_i - s_ij})``, and its pull.

    The pull ``mean_j sigmoid(lse_i - s_ij)`` is the loss's derivative by ``lse_i``.
    """
    loss, pull, similarity, count = batch.z.new_zeros(4, len(batch.z)).unbind(0)
    for row, mate in _positive_pairs(batch):
        cosine = (batch.z[row] * batch.all_z[mate]).sum(1)
        gap = lse[row] - cosine / tau
        loss.index_add_(0, row, torch.logaddexp(gap, torch.zeros_like(gap)))
        pull.index_add_(0, row, gap.sigmoid())
        similarity.index_add_(0, row, cosine)
        count.index_add_(0, row, torch.ones_like(cosine))
    share = count.clamp(min=1)
    return Positives(loss / share, pull / share, similarity / share, count)


def add_contrast_gradient(
    batch: GlobalBatch,
    tau: float,
    lse: Tensor,
    pull: Tensor,
    count: Tensor,
    dz: Tensor,
    dall: Tensor | None,
) -> None:
    """Add the gradient of the *sum* over local rows of InfoNCE to ``dz`` and ``dall``.

    ``d/ds_ik = pull_i e^{s_ik - lse_i}`` for negatives k and ``-sigmoid(lse_i - s_ij) / |P_i|`` for
    positives j; ``s`` brings ``1/tau``. ``dall`` is None if nobody asks for it, and ``dz`` itself
    for a whole batch.
    """
    # pull e^{s - lse} as one exponential; the 1/tau of s is in it too.
    weight = torch.where(pull > 0, (pull / tau).log() - lse, float("-inf"))
    scratch = batch.z.new_empty(TILE * TILE)
    for tile in _tiles(batch, tau):
        slope = scratch[: tile.logits.numel()].view_as(tile.logits)
        torch.add(tile.logits, weight[tile.rows, None], out=slope).exp_()
        if tile.mirrored:
            slope += tile.logits.add_(weight[tile.columns]).exp_()
        dz[tile.rows].addmm_(slope, batch.all_z[tile.columns])
        if dall is not None and (tile.mirrored or not batch.whole):
            dall[tile.columns].addmm_(slope.T, batch.z[tile.rows])
        elif batch.whole:  # a tile on the diagonal: its transpose is itself
            dz[tile.rows].addmm_(slope.T, batch.all_z[tile.columns])
    for row, mate in _positive_pairs(batch):
        a, b = batch.z[row], batch.all_z[mate]
        gap = lse[row] - (a * b).sum(1) / tau
        step = (gap.sigmoid() / (count[row] * -tau))[:, None]
        dz.index_add_(0, row, step * b)
        if dall is not None:
            dall.index_add_(0, mate, step * a)


def squared_distance(batch: GlobalBatch, index: Tensor) -> Tensor:
    """``||z_i - z_index(i)||^2`` from the difference of the rows; of no meaning at index -1."""
    squared = batch.z.new_empty(len(index))
    for rows in _slices(0, len(index), PAIRS_AT_ONCE):
        near = batch.all_z[index[rows].clamp(min=0)]
        squared[rows] = (batch.z[rows] - near).square_().sum(1)
    return squared


def add_pair_gradient(
    batch: GlobalBatch, index: Tensor, slope: Tensor, dz: Tensor, dall: Tensor | None
) -> None:
    """Add the gradient of ``sum_i slope_i ||z_i - z_index(i)||^2 / 2``, slopes fixed."""
    for rows in _slices(0, len(index), PAIRS_AT_ONCE):
        near = index[rows].clamp(min=0)
        step = (batch.z[rows] - batch.all_z[near]).mul_(slope[rows, None])
        dz[rows] += step
        if dall is not None:
            dall.index_add_(0, near, step, alpha=-1)


@dataclass
class _RunningMax:
    top: Tensor
    total: Tensor | None
    index: Tensor | None
    scratch: Tensor

    def update(self, rows: slice, logits: Tensor, first: int, dim: int) -> None:
        """Take in a tile whose candidates lie along ``dim`` and start at row ``first``."""
        before = self.top[rows]
        top = logits.amax(dim)
        if self.index is not None:
            # Few rows find a better neighbour in a late tile: only those are searched.
            better = (top > before).nonzero()[:, 0]
            if len(better):
                found = logits.index_select(1 - dim, better).argmax(dim)
                self.index[rows][better] = found + first
        top = torch.maximum(top, before)
        if self.total is not None:
            part = self.scratch[: logits.numel()].view_as(logits)
            torch.sub(logits, top.unsqueeze(dim), out=part).exp_()
            self.total[rows].mul_((before - top).exp_()).add_(part.sum(dim))
        before.copy_(top)


def _tiles(batch: GlobalBatch, tau: float) -> Iterator[_Tile]:
    """Similarity tiles, row by row; the buffer of one is reused by the next."""
    runs = SourceRuns.of(batch.all_sources)
    buffer = batch.z.new_empty(TILE * TILE)
    for rows in _slices(0, len(batch.z), TILE):
        row, mate = runs.pairs(batch.sources[rows])
        mate, order = mate.sort()
        row = row[order]
        columns = list(_slices(rows.start if batch.whole else 0, len(batch.all_z), TILE))
        starts = torch.tensor([c.start for c in columns] + [len(batch.all_z)], device=mate.device)
        bounds = torch.searchsorted(mate, starts).tolist()
        for number, column in enumerate(columns):
            a, b = batch.z[rows], batch.all_z[column]
            logits = buffer[: len(a) * len(b)].view(len(a), len(b))
            torch.addmm(logits, a, b.T, beta=0, alpha=1 / tau, out=logits)
            here = slice(bounds[number], bounds[number + 1])
            logits[row[here], mate[here] - column.start] = float("-inf")
            yield _Tile(rows, column, logits, mirrored=batch.whole and column.start > rows.start)


def _positive_pairs(batch: GlobalBatch) -> Iterator[tuple[Tensor, Tensor]]:
    runs = SourceRuns.of(batch.all_sources)
    return positive_pairs(runs, batch.sources, batch.row_offset, rows_at_once=TILE)


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


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    for begin in range(start, stop, step):
        yield slice(begin, min(begin + step, stop))
