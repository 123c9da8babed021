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


class ChunkedStep:
    """The sums of one step over one batch."""

    def __init__(
        self, batch: GlobalBatch, tau: float, products: torch.dtype, saved: Tensor | None = None
    ) -> None:
        """Widen the rows to float32, unless they are float64, and find the order of the sources.

        Args:
            batch: Local rows and global batch.
            tau: Temperature.
            products: Descriptors are rounded to this dtype before negatives are multiplied.
            saved: Nothing; another engine keeps its order of the sources from step to step.
        """
        self.saved = batch.sources.new_empty(3, 0, dtype=torch.int32)
        self._batch = batch
        self._tau = tau
        self._z = _widened(batch.z)
        self._all_z = self._z if batch.whole else _widened(batch.all_z)
        rounded = products.itemsize < self._z.dtype.itemsize
        self._a = self._z.to(products).to(self._z.dtype) if rounded else self._z
        self._b = self._a
        if not batch.whole:
            self._b = self._all_z.to(products).to(self._z.dtype) if rounded else self._all_z
        self._runs = SourceRuns.of(batch.all_sources)

    def scan(self, *, lse: bool, nearest: bool) -> Scan:
        """One pass over the similarity tiles for both losses.

        Returns:
            ``log sum_{k negative of i} e^{s_ik}`` (-inf without negatives) if ``lse``, and the most
            similar negative (-1 without negatives) if ``nearest``.
        """
        n = len(self._z)
        lowest = torch.finfo(self._z.dtype).min  # finite, so that differences are never NaN
        state = _RunningMax(
            top=self._z.new_full((n,), lowest),
            total=self._z.new_zeros(n) if lse else None,
            index=torch.full((n,), -1, device=self._z.device) if nearest else None,
            scratch=self._buffer(),
        )
        for tile in self._tiles():
            state.update(tile.rows, tile.logits, tile.columns.start, dim=1)
            if tile.mirrored:
                state.update(tile.columns, tile.logits, tile.rows.start, dim=0)
        return Scan(
            lse=None if state.total is None else state.top + state.total.log(),
            index=state.index,
            similarity=state.top * self._tau,
        )

    def positives(self, lse: Tensor) -> Positives:
        """Each row's InfoNCE, ``mean_{j in P_i} log(1 + e^{lse_i - s_ij})``, and its pull.

        The pull ``mean_j sigmoid(lse_i - s_ij)`` is the loss's derivative by ``lse_i``.
        """
        sums = self._z.new_zeros(len(self._z), 4)
        for row, mate in self._positive_pairs():
            cosine = (self._z[row] * self._all_z[mate]).sum(1)
            add_positives(sums, row, cosine, lse, self._tau)
        return mean_positives(sums)

    def squared_distance(self, index: Tensor) -> Tensor:
        """``||z_i - z_index(i)||^2`` from the difference of the rows; of no meaning at index -1."""
        squared = self._z.new_empty(len(index))
        for rows in _slices(0, len(index), PAIRS_AT_ONCE):
            near = self._all_z[index[rows].clamp(min=0)]
            torch.sum(near.sub_(self._z[rows]).square_(), 1, out=squared[rows])
        return squared

    def push_negatives(
        self, lse: Tensor, pull: Tensor, similarity: Tensor, dz: Tensor, dall: Tensor | None
    ) -> None:
        """Add what negatives k give the gradient of InfoNCE's *sum* over local rows.

        ``d/ds_ik = pull_i e^{s_ik - lse_i}``; ``s`` brings ``1/tau``. ``dall`` is None if nobody
        asks for it, and ``dz`` itself for a whole batch.
        """
        # pull e^{s - lse} as one exponential; the 1/tau of s is in it too.
        weight = torch.where(pull > 0, (pull / self._tau).log() - lse, float("-inf"))
        scratch = self._buffer()
        for tile in self._tiles():
            slope = scratch[: tile.logits.numel()].view_as(tile.logits)
            torch.add(tile.logits, weight[tile.rows, None], out=slope).exp_()
            if self._batch.whole:
                # Row and column anchor the pair; on the diagonal the tile is its own mirror image.
                mirror = tile.logits.add_(weight[tile.columns]).exp_()
                slope += mirror
            dz[tile.rows].addmm_(slope, self._b[tile.columns])
            if dall is not None and (tile.mirrored or not self._batch.whole):
                dall[tile.columns].addmm_(slope.T, self._a[tile.rows])

    def pull_positives(self, lse: Tensor, count: Tensor, dz: Tensor, dall: Tensor | None) -> None:
        """Add what positives j give: ``d/ds_ij = -sigmoid(lse_i - s_ij) / |P_i|``."""
        for row, mate in self._positive_pairs():
            a, b = self._z[row], self._all_z[mate]
            gap = lse[row] - (a * b).sum(1) / self._tau
            step = (gap.sigmoid() / (count[row] * -self._tau))[:, None]
            dz.index_add_(0, row, b.mul_(step))
            if dall is not None:
                dall.index_add_(0, mate, a.mul_(step))

    def add_pair_gradient(
        self, index: Tensor, slope: Tensor, dz: Tensor, dall: Tensor | None
    ) -> None:
        """Add the gradient of ``sum_i slope_i ||z_i - z_index(i)||^2 / 2``, slopes fixed."""
        for rows in _slices(0, len(index), PAIRS_AT_ONCE):
            near = index[rows].clamp(min=0)
            step = (self._z[rows] - self._all_z[near]).mul_(slope[rows, None])
            dz[rows] += step
            if dall is not None:
                dall.index_add_(0, near, step, alpha=-1)

    def _tiles(self) -> Iterator["_Tile"]:
        """Similarity tiles, row by row; the buffer of one is reused by the next."""
        buffer = self._buffer()
        for rows in _slices(0, len(self._a), TILE):
            row, mate = self._mates(rows)
            columns = list(_slices(rows.start if self._batch.whole else 0, len(self._b), TILE))
            bounds = [0, len(mate)]
            if len(columns) > 1:
                mate, order = mate.sort()
                row = row[order]
                edges = torch.tensor([c.start for c in columns] + [len(self._b)])
                bounds = torch.searchsorted(mate, edges.to(mate.device)).tolist()
            elif columns[0].start:  # the last tile of a triangle: earlier columns are not in it
                later = mate >= columns[0].start
                row, mate = row[later], mate[later]
                bounds = [0, len(mate)]
            for number, column in enumerate(columns):
                a, b = self._a[rows], self._b[column]
                logits = buffer[: len(a) * len(b)].view(len(a), len(b))
                torch.addmm(logits, a, b.T, beta=0, alpha=1 / self._tau, out=logits)
                here = slice(bounds[number], bounds[number + 1])
                logits[row[here], mate[here] - column.start] = float("-inf")
                mirrored = self._batch.whole and column.start > rows.start
                yield _Tile(rows, column, logits, mirrored)

    def _mates(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Pairs of a row, counted from the slice's start, and a mate of it in the global batch."""
        return self._runs.pairs(self._batch.sources[rows])

    def _positive_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of a local row and a positive of it in the global batch, a bounded number each."""
        offset = self._batch.row_offset or 0
        for rows in _slices(0, len(self._z), TILE):
            row, mate = self._mates(rows)
            row = row + rows.start
            other = mate != row + offset
            row, mate = row[other], mate[other]
            for part in _slices(0, len(row), PAIRS_AT_ONCE):
                yield row[part], mate[part]

    def _buffer(self) -> Tensor:
        return self._a.new_empty(min(TILE, len(self._a)) * min(TILE, len(self._b)))


def add_positives(sums: Tensor, row: Tensor, cosine: Tensor, lse: Tensor, tau: float) -> None:
    """Add loss, pull, cosine and number of pairs of a row and a positive to ``sums`` (n, 4)."""
    gap = lse[row] - cosine / tau
    loss = torch.logaddexp(gap, gap.new_zeros(()))
    terms = torch.stack([loss, gap.sigmoid(), cosine, torch.ones_like(cosine)], dim=1)
    sums.index_add_(0, row, terms)


def mean_positives(sums: Tensor) -> Positives:
    """The means over each row's positives, from what ``add_positives`` summed."""
    count = sums[:, 3].clone()
    loss, pull, similarity, _ = (sums / count.clamp(min=1)[:, None]).unbind(1)
    return Positives(loss, pull, similarity, count)


@dataclass(frozen=True)
class _Tile:
    rows: slice
    columns: slice
    logits: Tensor  # (rows, columns) similarities, -inf between mates
    mirrored: bool  # its transpose is not visited: serve the columns too


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
            if len(better) == len(top):
                self.index[rows] = logits.argmax(dim) + first
            elif len(better):
                found = logits.index_select(1 - dim, better).argmax(dim)
                self.index[rows][better] = found + first
        top = torch.maximum(top, before)
        if self.total is not None:
            part = self.scratch[: logits.numel()].view_as(logits)
            torch.sub(logits, top.unsqueeze(dim), out=part).exp_()
            self.total[rows].mul_((before - top).exp_()).add_(part.sum(dim))
        before.copy_(top)


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


def _widened(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    for begin in range(start, stop, step):
        yield slice(begin, min(begin + step, stop))
