"""What the kernels return: small named results instead of bare tuples of tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class NearestNegative:
    """The nearest row that shares no source, for each of n rows. Carries no gradient.

    Attributes:
        distance: (n,) Euclidean distance; ``inf`` where a row has no negative.
        index: (n,) int64 row of the global batch; ``-1`` where a row has no negative.
        has_negative: (n,) bool.
    """

    distance: Tensor
    index: Tensor
    has_negative: Tensor


class SSCDLoss(NamedTuple):
    """The SSCD objective and its parts, all scalars.

    Attributes:
        total: ``info_nce + entropy_weight * koleo``; back-propagate this one.
        info_nce: InfoNCE over mixed sources; differentiable.
        koleo: KoLeo, the differential-entropy term; differentiable.
        positive_similarity: Mean over rows that have a positive of their mean cosine to their
            positives; detached, for logging. NaN if no row has one.
        negative_similarity: Mean over rows that have a negative of the cosine to the nearest
            one; detached, for logging. NaN if no row has one.
    """

    total: Tensor
    info_nce: Tensor
    koleo: Tensor
    positive_similarity: Tensor
    negative_similarity: Tensor


@dataclass(frozen=True)
class Scan:
    """What one pass over the similarity tiles finds for each local row.

    Attributes:
        lse: (n,) ``log sum e^{s_ik}`` over the row's negatives, -inf without any; None if not
            asked.
        index: (n,) int64 most similar negative, -1 without any; None if not asked.
        similarity: (n,) cosine to it; of no meaning where the row has no negative.
    """

    lse: Tensor | None
    index: Tensor | None
    similarity: Tensor


@dataclass(frozen=True)
class Positives:
    """What a row's positives contribute to InfoNCE.

    Attributes:
        loss: (n,) mean over positives of ``log(1 + e^{lse_i - s_ij})``, 0 without any.
        pull: (n,) mean over positives of ``sigmoid(lse_i - s_ij)``, 0 without any.
        similarity: (n,) mean cosine to the positives, 0 without any.
        count: (n,) number of positives, in the dtype of the loss.
    """

    loss: Tensor
    pull: Tensor
    similarity: Tensor
    count: Tensor
