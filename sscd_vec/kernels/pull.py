"""What positives add to InfoNCE, and their part of its gradient.

Row i contributes ``mean_{j in P_i} log(1 + e^{lse_i - s_ij})``, ``lse_i`` from the scan. Positives
are few: both kernels walk them one by one along the sorted source ids, in float32, and read each
pair of descriptors once.
"""

import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.batch import Positives
from sscd_vec.kernels.launch import ROW_OPTIONS, jit, load_rows, row_block, start, store_rows
from sscd_vec.kernels.tiles import Runs


@jit
def softplus(x: tl.tensor) -> tl.tensor:
    """``log(1 + e^x)`` to full relative accuracy (Kahan's log1p); 0 at -inf."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@jit
def is_new_mate(
    rank_ptr: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    slot: tl.constexpr,
    entry: tl.tensor,
) -> tl.tensor:
    """Whether an entry of the run of row i's source ``slot`` is the first to bring its row j.

    j comes twice in a run if it repeats the id, and in both runs if it shares both sources of i; a
    row i that repeats its id has the same run twice. An entry of -1 is past the end of its run.
    """
    valid = entry >= 0
    at = 2 * (entry // 2)
    i0 = tl.load(rank_ptr + 2 * i, mask=inside, other=-1)
    j0 = tl.load(rank_ptr + at, mask=valid, other=-2)
    if slot == 0:
        return valid & ((entry % 2 == 0) | (j0 != i0))
    i1 = tl.load(rank_ptr + 2 * i + 1, mask=inside, other=-1)
    j1 = tl.load(rank_ptr + at + 1, mask=valid, other=-2)
    first = valid & ((entry % 2 == 0) | (j0 != i1))
    return first & (i1 != i0) & (j0 != i0) & (j1 != i0)


@jit
def positives_kernel(
    z_ptr: tl.tensor,
    all_ptr: tl.tensor,
    entry_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    pull_ptr: tl.tensor,
    similarity_ptr: tl.tensor,
    count_ptr: tl.tensor,
    rows: tl.tensor,
    offset: tl.tensor,
    inverse_tau: tl.tensor,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Means over ``j in P_i`` of ``log(1 + e^g)``, ``sigmoid(g)``, ``z_i.z_j``.

    ``g = lse_i - s_ij``; local row i is row ``i + offset`` of the batch.
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
        begin = tl.load(begin_ptr + 2 * (i + offset) + slot, mask=inside, other=0)
        end = tl.load(end_ptr + 2 * (i + offset) + slot, mask=inside, other=0)
        for step in range(0, tl.max(end - begin, axis=0)):
            entry = tl.load(entry_ptr + begin + step, mask=begin + step < end, other=-1)
            j = entry // 2
            new = is_new_mate(begin_ptr, i + offset, inside, slot, entry) & (j != i + offset)
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
def pull_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    entry_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    share_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    rows: tl.tensor,
    a_offset: tl.tensor,
    b_offset: tl.tensor,
    inverse_tau: tl.tensor,
    D: tl.constexpr,
    ANCHORS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``gradient_a -= sum_b slope_ab b`` over positives b, by the sum of the anchors' slopes.

    The slope of an anchor is ``sigmoid(lse - s_ab) / (|P| tau)``, its share being ``1 / |P|``.
    ANCHORS as in ``push_kernel``; a and b are slices of the batch at their offsets.
    """
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = i < rows
    row = i + a_offset
    a = load_rows(a_ptr, i, inside, d, D)
    gradient = load_rows(gradient_ptr, i, inside, d, D)
    for slot in tl.static_range(2):
        begin = tl.load(begin_ptr + 2 * row + slot, mask=inside, other=0)
        end = tl.load(end_ptr + 2 * row + slot, mask=inside, other=0)
        for step in range(0, tl.max(end - begin, axis=0)):
            entry = tl.load(entry_ptr + begin + step, mask=begin + step < end, other=-1)
            mate = entry // 2
            j = mate - b_offset
            new = is_new_mate(rank_ptr, row, inside, slot, entry) & (mate != row)
            b = load_rows(b_ptr, j, new, d, D)
            s = tl.sum(a * b, axis=1) * inverse_tau
            slope = tl.zeros_like(s)
            if ANCHORS != "b":
                lse = tl.load(lse_ptr + i, mask=inside, other=0.0)
                slope += tl.sigmoid(lse - s) * tl.load(share_ptr + i, mask=new, other=0.0)
            if ANCHORS != "a":
                lse = tl.load(lse_ptr + j, mask=new, other=0.0)
                slope += tl.sigmoid(lse - s) * tl.load(share_ptr + j, mask=new, other=0.0)
            gradient -= (slope * inverse_tau)[:, None] * b  # b is 0 where nothing is new
    store_rows(gradient_ptr, i, inside, d, D, gradient)


def positives(z: Tensor, all_z: Tensor, runs: Runs, tau: float, lse: Tensor) -> Positives:
    """Each row's InfoNCE and its derivative by ``lse``, from its positives."""
    found = lse.new_empty(4, len(z)).unbind(0)
    block = row_block(z)
    start(
        positives_kernel,
        (triton.cdiv(len(z), block["BLOCK_R"]),),
        z,
        *(all_z, runs.entry, runs.begin, runs.end, lse, *found, len(z), runs.offset, 1.0 / tau),
        D=z.shape[1],
        **block,
        **ROW_OPTIONS,
    )
    return Positives(*found)


def pull_positives(
    a: Tensor,
    b: Tensor,
    runs: Runs,
    lse: Tensor,
    count: Tensor,
    tau: float,
    gradient: Tensor,
    anchors: str,
) -> None:
    """Subtract from ``gradient`` (n, d) what the positives among rows b do to rows a.

    Args:
        a: The rows that are pulled.
        b: The rows that pull them.
        runs: Who shares a source with whom.
        lse: Of the anchors: log-sum-exp of their negatives.
        count: Of the anchors: number of positives.
        tau: Temperature.
        gradient: (n, d) float32.
        anchors: Which rows are the anchors, and local: "a", "b", or "both" if they are one batch.
    """
    bounds = runs.of_local_mates() if anchors == "b" else (runs.begin, runs.end)
    offsets = (0, runs.offset) if anchors == "b" else (runs.offset, 0)
    block = row_block(a)
    start(
        pull_kernel,
        (triton.cdiv(len(a), block["BLOCK_R"]),),
        a,
        *(b, runs.all_rank, runs.entry, *bounds, lse, 1.0 / count.clamp(min=1), gradient),
        *(len(a), *offsets, 1.0 / tau),
        D=a.shape[1],
        ANCHORS=anchors,
        **block,
        **ROW_OPTIONS,
    )
