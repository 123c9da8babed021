"""The plain definitions: specification, test oracle and benchmark baseline of every kernel.

They build the full n x N similarity matrix and let autograd do the rest. Notation: ``z`` holds the
n local unit descriptors, ``all_z`` the N of the global batch (``z`` itself by default), row i of
``z`` being row ``row_offset + i`` of ``all_z``. Rows i and j are *mates* if their source pairs
intersect; ``P_i`` are the mates of i other than i itself, and the *negatives* of i are all rows
that are not its mates. Similarities are ``s_ij = z_i . z_j / tau``.
"""

import torch
from torch import Tensor

from sscd_vec.kernels.batch import NearestNegative, SSCDLoss

CLAMP = 1e-6  # smallest squared distance KoLeo looks at


def gem_pool(x: Tensor, p: float = 3.0, eps: float = 1e-6) -> Tensor:
    """Generalized mean over the last two axes: ``(mean(clamp(x, eps)^p))^(1/p)``.

    Args:
        x: (n, c, h, w) feature map; half precisions are computed in float32.
        p: Exponent; 1 is the mean, large p approaches the maximum.
        eps: Floor of the activations.

    Returns:
        (n, c) pooled features of ``x``'s dtype.
    """
    wide = x.to(_compute_dtype(x))
    return wide.clamp(min=eps).pow(p).mean(dim=(-2, -1)).pow(1.0 / p).to(x.dtype)


def mates(sources: Tensor, all_sources: Tensor) -> Tensor:
    """(n, N) bool: whether the source pairs of rows i and j intersect."""
    same = torch.zeros(len(sources), len(all_sources), dtype=torch.bool, device=sources.device)
    for a in sources.unbind(1):
        for b in all_sources.unbind(1):
            same |= a[:, None] == b[None, :]
    return same


def nearest_negative(
    z: Tensor, sources: Tensor, all_z: Tensor | None = None, all_sources: Tensor | None = None
) -> NearestNegative:
    """``argmin_j ||z_i - z_j||`` over the negatives j of i; the lowest j among ties.

    For unit descriptors the nearest row is the most similar one, so the similarity finds it; the
    distance is then taken from the difference of the two rows.
    """
    all_z, all_sources = _everyone(z, sources, all_z, all_sources)
    with torch.no_grad():
        z, all_z = _wide(z), _wide(all_z)
        return _nearest(z, all_z, z @ all_z.T, mates(sources, all_sources))


def koleo(
    z: Tensor, sources: Tensor, all_z: Tensor | None = None, all_sources: Tensor | None = None
) -> Tensor:
    """``-(1/n) sum_i log min_j ||z_i - z_j||`` over the negatives j of i.

    The squared distance is clamped at 1e-6 before the root; a row without negatives adds 0.
    """
    all_z, all_sources = _everyone(z, sources, all_z, all_sources)
    nearest = nearest_negative(z, sources, all_z, all_sources)
    return _koleo(_wide(z), _wide(all_z), nearest)


def info_nce(
    z: Tensor,
    sources: Tensor,
    tau: float,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
    row_offset: int = 0,
) -> Tensor:
    """InfoNCE over mixed sources, a mean over the n rows of a mean over each row's positives.

    ``l_ij = -log( e^{s_ij} / (e^{s_ij} + sum_{k negative of i} e^{s_ik}) )`` for j in P_i. A row
    without positives adds 0; a row without negatives has ``l_ij = 0``.
    """
    all_z, all_sources = _everyone(z, sources, all_z, all_sources)
    similarity = _wide(z) @ _wide(all_z).T
    return _info_nce(similarity / tau, mates(sources, all_sources), row_offset)


def sscd_loss(
    z: Tensor,
    sources: Tensor,
    tau: float = 0.05,
    entropy_weight: float = 30.0,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
    row_offset: int = 0,
) -> SSCDLoss:
    """``info_nce + entropy_weight * koleo`` from one similarity matrix."""
    all_z, all_sources = _everyone(z, sources, all_z, all_sources)
    z, all_z = _wide(z), _wide(all_z)
    similarity = z @ all_z.T
    mate = mates(sources, all_sources)
    contrast = _info_nce(similarity / tau, mate, row_offset)
    with torch.no_grad():
        nearest = _nearest(z, all_z, similarity, mate)
        positive = _without_self(mate, row_offset)
        count = positive.sum(1)
        mean_positive = (similarity * positive).sum(1) / count
        closest = similarity.gather(1, nearest.index.clamp(min=0)[:, None])[:, 0]
    spread = _koleo(z, all_z, nearest)
    return SSCDLoss(
        total=contrast + entropy_weight * spread,
        info_nce=contrast,
        koleo=spread,
        positive_similarity=mean_positive[count > 0].mean(),
        negative_similarity=closest[nearest.has_negative].mean(),
    )


def _info_nce(logits: Tensor, mate: Tensor, row_offset: int) -> Tensor:
    positive = _without_self(mate, row_offset)
    negatives = logits.masked_fill(mate, float("-inf")).logsumexp(1, keepdim=True)  # (n, 1)
    per_pair = torch.logaddexp(logits, negatives) - logits  # (n, N)
    per_row = per_pair.masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
    return per_row.mean()


def _nearest(z: Tensor, all_z: Tensor, similarity: Tensor, mate: Tensor) -> NearestNegative:
    has_negative = ~mate.all(1)
    index = similarity.masked_fill(mate, float("-inf")).argmax(1)
    distance = (z - all_z[index]).norm(dim=1)
    return NearestNegative(
        distance=distance.masked_fill(~has_negative, float("inf")),
        index=index.masked_fill(~has_negative, -1),
        has_negative=has_negative,
    )


def _koleo(z: Tensor, all_z: Tensor, nearest: NearestNegative) -> Tensor:
    squared = (z - all_z[nearest.index.clamp(min=0)]).square().sum(1)
    log_distance = 0.5 * squared.clamp(min=CLAMP).log()
    return -log_distance.masked_fill(~nearest.has_negative, 0.0).mean()


def _without_self(mate: Tensor, row_offset: int) -> Tensor:
    positive = mate.clone()
    rows = torch.arange(len(mate), device=mate.device)
    positive[rows, rows + row_offset] = False
    return positive


def _everyone(
    z: Tensor, sources: Tensor, all_z: Tensor | None, all_sources: Tensor | None
) -> tuple[Tensor, Tensor]:
    return (z if all_z is None else all_z, sources if all_sources is None else all_sources)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide(z: Tensor) -> Tensor:
    return z.to(_compute_dtype(z))
