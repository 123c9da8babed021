"""InfoNCE over mixed sources: what positives add, and the gradient by recomputed tiles.

Row i contributes ``mean_{j in P_i} log(1 + e^{lse_i - s_ij})``, ``lse_i`` from the scan. Positives
are
few: they are walked one by one along the sorted source ids, in float32, reading each descriptor
pair once. Negatives are many: backward computes their similarity tile again, turns it into slopes
``pull_i e^{s_ik - lse_i} / tau`` in registers and multiplies it with the descriptors at once, so
that no byte of a tile is written. Products: 4 n N d for each side (for a whole batch both sides
share one pass, 4 N^2 d, against 6 N^2 d for recomputing or 4 N^2 d plus an N x N matrix).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.batch import GlobalBatch
from sscd_vec.kernels.launch import FUSED, column_splits, compact, input_precision, jit
from sscd_vec.kernels.results import Positives
from sscd_vec.kernels.rows import OPTIONS, Runs, load_rows, row_block, source_runs, store_rows
from sscd_vec.kernels.scan import add_product, mate_tile, similarity_tile

# One tile each, the largest found that spills no register on any target. BLOCK_D columns of the
# gradient stay in registers through the pass, and every further part of d recomputes the tiles:
# half precisions hold 512 at once, float32 with its three products 256.
FLOAT32_TILE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 16, "BLOCK_D": 256}
HALF_TILE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "BLOCK_D": 512}
WARPS, STAGES = 8, 2


@jit
def positives_kernel(
    z_ptr: tl.tensor,
    all_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    all_sources_ptr: tl.tensor,
    entry_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    pull_ptr: tl.tensor,
    similarity_ptr: tl.tensor,
    count_ptr: tl.tensor,
    rows: tl.tensor,
    row_offset: tl.tensor,
    inverse_tau: tl.tensor,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Means over ``j in P_i`` of ``log(1 + e^g)``, ``sigmoid(g)``, ``z_i.z_j``.

    ``g = lse_i - s_ij``.
    """
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = i < rows
    z = load_rows(z_ptr, i, inside, d, D)
    lse = tl.load(lse_ptr + i, mask=inside, other=0.0)
    loss = tl.zeros((BLOCK_R,), tl.float32)
    pull = tl.zeros((BLOCK_R,), tl.float32)
    similarity = tl.zeros((BLOCK_R,), tl.float32)
    count = tl.zeros((BLOCK_R,), tl.float32)
    for slot in tl.static_range(2):
        begin = tl.load(begin_ptr + 2 * i + slot, mask=inside, other=0)
        end = tl.load(end_ptr + 2 * i + slot, mask=inside, other=0)
        for step in range(0, tl.max(end - begin, axis=0)):
            entry = tl.load(entry_ptr + begin + step, mask=begin + step < end, other=-1)
            j = entry // 2
            new = is_new_mate(sources_ptr, i, inside, slot, all_sources_ptr, entry)
            new = new & (j != i + row_offset)
            cosine = tl.sum(z * load_rows(all_ptr, j, new, d, D), axis=1)
            gap = lse - cosine * inverse_tau
            loss += tl.where(new, softplus(gap), 0.0)
            pull += tl.where(new, tl.sigmoid(gap), 0.0)
            similarity += tl.where(new, cosine, 0.0)
            count += tl.where(new, 1.0, 0.0)
    share = 1.0 / tl.maximum(count, 1.0)
    tl.store(loss_ptr + i, loss * share, mask=inside)
    tl.store(pull_ptr + i, pull * share, mask=inside)
    tl.store(similarity_ptr + i, similarity * share, mask=inside)
    tl.store(count_ptr + i, count, mask=inside)


@jit
def softplus(x: tl.tensor) -> tl.tensor:
    """``log(1 + e^x)`` to full relative accuracy (Kahan's log1p); 0 at -inf."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@jit
def is_new_mate(
    sources_ptr: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    slot: tl.constexpr,
    other_sources_ptr: tl.tensor,
    entry: tl.tensor,
) -> tl.tensor:
    """Whether an entry of the run of row i's source ``slot`` is the first to bring its row j.

    j comes twice in a run if it repeats the id, and in both runs if it shares both sources of i; a
    row i that repeats its id has the same run twice. An entry of -1 is past the end of its run.
    """
    valid = entry >= 0
    at = 2 * (entry // 2)
    i0 = tl.load(sources_ptr + 2 * i, mask=inside, other=-1)
    j0 = tl.load(other_sources_ptr + at, mask=valid, other=-2)
    if slot == 0:
        return valid & ((entry % 2 == 0) | (j0 != i0))
    i1 = tl.load(sources_ptr + 2 * i + 1, mask=inside, other=-1)
    j1 = tl.load(other_sources_ptr + at + 1, mask=valid, other=-2)
    first = valid & ((entry % 2 == 0) | (j0 != i1))
    return first & (i1 != i0) & (j0 != i0) & (j1 != i0)


@jit
def push_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_sources_ptr: tl.tensor,
    b_sources_ptr: tl.tensor,
    a_weight_ptr: tl.tensor,
    b_weight_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    a_count: tl.tensor,
    b_count: tl.tensor,
    b_per_split: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    ANCHORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``gradient_a = sum_b slope_ab b`` over negatives b, ``slope = sum 2^(a.b scale + weight)``.

    ANCHORS says whose weights count, ``log2(pull / tau) - log2(e) lse`` of the anchor of each pair:
    those of the rows "a", of the rows "b", or of "both" in a whole batch, where each pair is
    anchored twice.
    """
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(2)
    a_weight = tl.load(a_weight_ptr + i, mask=i < a_count, other=float("-inf"))
    gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum((split + 1) * b_per_split, b_count)
    for first in range(split * b_per_split, end, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        t = similarity_tile(
            a_ptr, i, a_count, b_ptr, j, end, D, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
        )
        mate = mate_tile(a_sources_ptr, i, a_count, b_sources_ptr, j, end)
        t = tl.where(mate, float("-inf"), t * scale)
        slope = tl.zeros_like(t)
        if ANCHORS != "b":
            slope += tl.exp2(t + a_weight[:, None])
        if ANCHORS != "a":
            b_weight = tl.load(b_weight_ptr + j, mask=j < end, other=float("-inf"))
            slope += tl.exp2(t + b_weight[None, :])
        mask = (j < end)[:, None] & (d < D)[None, :]
        b = tl.load(b_ptr + j.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
        gradient = add_product(slope.to(b.dtype), b, gradient, PRECISION)
    out = (split.to(tl.int64) * a_count + i)[:, None] * D + d[None, :]
    mask = (i < a_count)[:, None] & (d < D)[None, :]
    tl.store(gradient_ptr + out, gradient, mask=mask)


@jit
def pull_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_sources_ptr: tl.tensor,
    b_sources_ptr: tl.tensor,
    entry_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    a_lse_ptr: tl.tensor,
    b_lse_ptr: tl.tensor,
    a_share_ptr: tl.tensor,
    b_share_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    rows: tl.tensor,
    self_offset: tl.tensor,
    inverse_tau: tl.tensor,
    D: tl.constexpr,
    ANCHORS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``gradient_a -= sum_b slope_ab b`` over positives b, by the sum of the anchors' slopes.

    The slope of an anchor is ``sigmoid(lse - s_ab) / (|P| tau)``, its share being ``1 / |P|``.
    ANCHORS as in ``push_kernel``; row b is row a itself if ``b = a + self_offset``.
    """
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = i < rows
    a = load_rows(a_ptr, i, inside, d, D)
    gradient = load_rows(gradient_ptr, i, inside, d, D)
    for slot in tl.static_range(2):
        begin = tl.load(begin_ptr + 2 * i + slot, mask=inside, other=0)
        end = tl.load(end_ptr + 2 * i + slot, mask=inside, other=0)
        for step in range(0, tl.max(end - begin, axis=0)):
            entry = tl.load(entry_ptr + begin + step, mask=begin + step < end, other=-1)
            j = entry // 2
            new = is_new_mate(a_sources_ptr, i, inside, slot, b_sources_ptr, entry)
            new = new & (j != i + self_offset)
            b = load_rows(b_ptr, j, new, d, D)
            s = tl.sum(a * b, axis=1) * inverse_tau
            slope = tl.zeros_like(s)
            if ANCHORS != "b":
                lse = tl.load(a_lse_ptr + i, mask=inside, other=0.0)
                slope += tl.sigmoid(lse - s) * tl.load(a_share_ptr + i, mask=new, other=0.0)
            if ANCHORS != "a":
                lse = tl.load(b_lse_ptr + j, mask=new, other=0.0)
                slope += tl.sigmoid(lse - s) * tl.load(b_share_ptr + j, mask=new, other=0.0)
            gradient -= (slope * inverse_tau)[:, None] * b  # b is 0 where nothing is new
    store_rows(gradient_ptr, i, inside, d, D, gradient)


def positives(batch: GlobalBatch, tau: float, lse: Tensor) -> Positives:
    """Each row's InfoNCE and its derivative by ``lse``, from its positives."""
    z, all_z = batch.z.contiguous(), batch.all_z.contiguous()
    sources, all_sources = compact(batch.sources, batch.all_sources)
    runs = source_runs(sources, all_sources)
    found = lse.new_empty(4, len(z)).unbind(0)
    block = row_block(z)
    positives_kernel[(triton.cdiv(len(z), block["BLOCK_R"]),)](
        *(z, all_z, sources, all_sources, *runs, lse, *found),
        *(len(z), batch.row_offset, 1.0 / tau),
        D=z.shape[1],
        **block,
        **OPTIONS,
    )
    return Positives(*found)


def add_contrast_gradient(
    batch: GlobalBatch,
    tau: float,
    lse: Tensor,
    pull: Tensor,
    count: Tensor,
    dz: Tensor,
    dall: Tensor | None,
    *,
    splits: int | None = None,
) -> None:
    """Fill ``dz`` and ``dall``, zero so far, with the gradient of the *sum* over rows of InfoNCE.

    Args:
        batch: Local rows and global batch.
        tau: Temperature.
        lse: (n,) log-sum-exp of each row's negatives.
        pull: (n,) derivative of each row's loss by ``lse``.
        count: (n,) positives of each row.
        dz: (n, d) float32.
        dall: (N, d) float32; ``dz`` itself for a whole batch, None if nobody asks.
        splits: Parts into which the other side's rows are cut; as many as fill the GPU by default.
    """
    z, all_z = batch.z.contiguous(), batch.all_z.contiguous()
    sources, all_sources = compact(batch.sources, batch.all_sources)
    weight = ((pull / tau).log() - lse) / math.log(2.0)
    # Without negatives lse is -inf and without positives pull is 0: neither pushes anybody.
    weight = weight.where((pull > 0) & (lse > float("-inf")), float("-inf"))
    offset, anchors = batch.row_offset, "both" if batch.whole else "a"
    _push(z, all_z, sources, all_sources, weight, tau, dz, anchors, splits)
    runs = source_runs(sources, all_sources)
    _pull(z, all_z, sources, all_sources, runs, lse, count, offset, tau, dz, anchors)
    if dall is not None and not batch.whole:
        _push(all_z, z, all_sources, sources, weight, tau, dall, "b", splits)
        runs = source_runs(all_sources, sources)
        _pull(all_z, z, all_sources, sources, runs, lse, count, -offset, tau, dall, "b")


def push_tile(dtype: torch.dtype, d: int) -> dict[str, int]:
    """Tile of ``push_kernel`` for descriptors of dimension d."""
    tile = FLOAT32_TILE if dtype == torch.float32 else HALF_TILE
    return {**tile, "BLOCK_D": min(tile["BLOCK_D"], max(16, triton.next_power_of_2(d)))}


def _push(
    a: Tensor,
    b: Tensor,
    a_sources: Tensor,
    b_sources: Tensor,
    weight: Tensor,
    tau: float,
    gradient: Tensor,
    anchors: str,
    splits: int | None,
) -> None:
    n, d = a.shape
    tile = push_tile(a.dtype, d)
    parts = splits or column_splits(n, len(b), tile["BLOCK_M"], a.device)
    partial = gradient if parts == 1 else gradient.new_empty(parts, n, d)
    push_kernel[(triton.cdiv(n, tile["BLOCK_M"]), triton.cdiv(d, tile["BLOCK_D"]), parts)](
        *(a, b, a_sources, b_sources, weight, weight, partial),
        *(n, len(b), triton.cdiv(len(b), parts), 1.0 / (tau * math.log(2.0))),
        D=d,
        ANCHORS=anchors,
        PRECISION=input_precision(a),
        **tile,
        num_warps=WARPS,
        num_stages=STAGES,
        **FUSED,
    )
    if parts > 1:
        torch.sum(partial, 0, out=gradient)


def _pull(
    a: Tensor,
    b: Tensor,
    a_sources: Tensor,
    b_sources: Tensor,
    runs: Runs,
    lse: Tensor,
    count: Tensor,
    self_offset: int,
    tau: float,
    gradient: Tensor,
    anchors: str,
) -> None:
    share = 1.0 / count.clamp(min=1)
    block = row_block(a)
    pull_kernel[(triton.cdiv(len(a), block["BLOCK_R"]),)](
        *(a, b, a_sources, b_sources, *runs, lse, lse, share, share, gradient),
        *(len(a), self_offset, 1.0 / tau),
        D=a.shape[1],
        ANCHORS=anchors,
        **block,
        **OPTIONS,
    )
