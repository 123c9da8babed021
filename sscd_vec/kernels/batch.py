"""What the losses take and return: checked rows of descriptors in, small named results out."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

UNIT_TOLERANCE = 1e-2  # a bfloat16 row of unit length is within 4e-3 of it


@dataclass(frozen=True)
class GlobalBatch:
    """n local rows and the N rows they are compared with.

    Attributes:
        z: (n, d) local descriptors, unit length.
        sources: (n, 2) int64 source ids; an unmixed image repeats its id.
        all_z: (N, d) descriptors of the global batch.
        all_sources: (N, 2) int64.
        row_offset: Local row i is row ``row_offset + i`` of the global batch; None if the local
            rows need not be in it.
        whole: The local rows are the global batch: ``all_z`` is ``z``.
    """

    z: Tensor
    sources: Tensor
    all_z: Tensor
    all_sources: Tensor
    row_offset: int | None
    whole: bool


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
        lse: (n,) ``log sum e^{s_ik}`` over the row's negatives, -inf without any; None unless
            asked for.
        index: (n,) int64 most similar negative, -1 without any; None unless asked for.
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


def global_batch(
    z: Tensor,
    sources: Tensor,
    all_z: Tensor | None = None,
    all_sources: Tensor | None = None,
    row_offset: int | None = None,
    *,
    knows_self: bool = True,
) -> GlobalBatch:
    """Check the rows and bring them into one form.

    Args:
        z: (n, d) local descriptors.
        sources: (n, 2) their source ids.
        all_z: (N, d) gathered descriptors, or None if ``z`` is the global batch.
        all_sources: (N, 2) their source ids, or None with ``all_z``.
        row_offset: Where the local rows start in the global batch; None is refused if ``all_z``
            is given, because a wrong guess would take each row for its own positive.
        knows_self: Whether it matters which global row is a local row itself. Not among negatives:
            a row is its own mate.

    Raises:
        ValueError: If shapes, devices or the offset do not fit; on a CPU (where looking costs no
            synchronization) also if rows are not unit length or the slice is another one.
        TypeError: If a dtype is not one the kernels take.
    """
    _check_rows("z", z, "sources", sources)
    if all_z is None and all_sources is None:
        if row_offset:
            raise ValueError(
                f"row_offset={row_offset} without all_z: the rows are the whole batch and start at "
                "0; pass all_z and all_sources, or leave row_offset out"
            )
        _check_unit("z", z)
        return GlobalBatch(z, sources, z, sources, 0, whole=True)
    if all_z is None or all_sources is None:
        missing = "all_z" if all_z is None else "all_sources"
        raise ValueError(f"all_z and all_sources belong together, and {missing} is missing")
    _check_rows("all_z", all_z, "all_sources", all_sources)
    if z.shape[1] != all_z.shape[1] or z.dtype != all_z.dtype or z.device != all_z.device:
        raise ValueError(
            "z and all_z must agree in dimension, dtype and device, got "
            f"{z.shape[1]} {z.dtype} {z.device} and {all_z.shape[1]} {all_z.dtype} {all_z.device}"
        )
    _check_unit("all_z", all_z)
    _check_unit("z", z)
    if not knows_self:
        return GlobalBatch(z, sources, all_z, all_sources, None, whole=False)
    if row_offset is None:
        raise ValueError(
            "all_z is given without row_offset: say at which row of all_z the local rows start "
            "(rank * len(z) after a gather of equal slices)"
        )
    if not 0 <= row_offset <= len(all_z) - len(z):
        raise ValueError(
            f"row_offset={row_offset} puts {len(z)} local rows outside the {len(all_z)} rows of "
            f"all_z; expected 0 to {len(all_z) - len(z)}"
        )
    _check_slice(sources, all_sources, row_offset)
    return GlobalBatch(z, sources, all_z, all_sources, row_offset, whole=False)


def check_temperature(tau: float) -> None:
    """Refuse a temperature that is not positive and finite."""
    if not 0.0 < tau < float("inf"):
        raise ValueError(f"tau must be a positive number, got {tau}; the paper uses 0.05")


def _check_rows(z_name: str, z: Tensor, sources_name: str, sources: Tensor) -> None:
    if z.ndim != 2 or len(z) == 0 or z.shape[1] == 0:
        raise ValueError(f"{z_name} must be (rows, d) and not empty, got shape {tuple(z.shape)}")
    if not z.is_floating_point():
        raise TypeError(f"{z_name} must be floating point, got {z.dtype}")
    if sources.dtype != torch.int64:
        raise TypeError(f"{sources_name} must be int64, got {sources.dtype}; call .long() on it")
    if sources.shape != (len(z), 2):
        raise ValueError(
            f"{sources_name} must be ({len(z)}, 2), one pair for each row of {z_name} (an unmixed "
            f"image repeats its id), got shape {tuple(sources.shape)}"
        )
    if sources.device != z.device:
        raise ValueError(f"{sources_name} is on {sources.device}, {z_name} on {z.device}")


def _check_unit(name: str, z: Tensor) -> None:
    if not _can_look(z):
        return
    length = torch.linalg.vector_norm(z.detach(), dim=1, dtype=_wide(z.dtype))
    low, high = length.aminmax()
    if not (1 - UNIT_TOLERANCE <= low and high <= 1 + UNIT_TOLERANCE):  # so it is for NaN
        row = int(((length - 1).abs() <= UNIT_TOLERANCE).int().argmin())
        raise ValueError(
            f"{name} must have rows of unit length, row {row} has length {float(length[row]):.4g}; "
            "apply torch.nn.functional.normalize"
        )


def _check_slice(sources: Tensor, all_sources: Tensor, row_offset: int) -> None:
    if not _can_look(sources):
        return
    if not torch.equal(sources, all_sources[row_offset : row_offset + len(sources)]):
        raise ValueError(
            f"sources are not rows {row_offset} to {row_offset + len(sources)} of all_sources: "
            "row_offset belongs to another slice, or the gather changed the order"
        )


def _can_look(tensor: Tensor) -> bool:
    """Whether reading values costs nothing: a GPU would wait, and a compiler traces no values."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
