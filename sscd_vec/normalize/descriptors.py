"""Descriptor arrays: checked, read in batches, brought to unit length."""

from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Descriptors = ArrayLike | Iterable[ArrayLike]  # one (n, d) array, or (n_i, d) batches of it

BATCH_ROWS = 8192
UNIT_TOLERANCE = 1e-3  # float16 descriptors of 512 dimensions are unit to about 1e-5


def as_descriptors(z: ArrayLike, dim: int | None = None, what: str = "descriptors") -> Float32:
    """Return ``z`` as a finite, C-contiguous float32 ``(n, d)`` array, or say what is wrong.

    A single descriptor ``(d,)`` becomes ``(1, d)``. Nothing is copied that is already right.

    Raises:
        TypeError: If ``z`` does not hold floating point numbers.
        ValueError: If the shape is wrong or a value is NaN or infinite.
    """
    array = np.asarray(z)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(
            f"{what}: expected floating point numbers, got dtype {array.dtype}; "
            "pass what Encoder.encode returns"
        )
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise ValueError(f"{what}: expected shape (n, d), got {array.shape}")
    if dim is not None and array.shape[1] != dim:
        raise ValueError(
            f"{what}: expected {dim} dimensions, got {array.shape[1]}; "
            "use the encoder this was fitted with, or fit again"
        )
    array = np.ascontiguousarray(array, dtype=np.float32)
    # One NaN or inf makes the sum non-finite; a sum of huge numbers may overflow to it as well.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(array.sum())
    if suspicious and len(rows := np.flatnonzero(~np.isfinite(array).all(axis=1))):
        raise ValueError(
            f"{what}: NaN or infinity in {len(rows)} of {len(array)} rows (first: row {rows[0]}); "
            "drop or re-encode these images"
        )
    return array


def batches(z: Descriptors, dim: int | None = None, what: str = "background") -> Iterator[Float32]:
    """Yield checked batches of at most ``BATCH_ROWS`` rows, from one array or several."""
    parts = [np.asarray(z)] if is_array(z) else cast(Iterable[ArrayLike], z)
    for part in parts:
        rows = np.asarray(part)
        if rows.ndim == 1:
            rows = rows[None]
        for start in range(0, len(rows), BATCH_ROWS):
            batch = as_descriptors(rows[start : start + BATCH_ROWS], dim, what)
            dim = batch.shape[1]
            yield batch


def is_array(z: Descriptors) -> bool:
    """Whether ``z`` is one array, as opposed to an iterable of batches."""
    return hasattr(z, "__array__")


def lengths(z: Float32) -> Float32:
    """Euclidean length of each row."""
    length: Float32 = np.sqrt(np.einsum("nd,nd->n", z, z))
    return length


def unit(z: Float32, what: str = "descriptors", out: Float32 | None = None) -> Float32:
    """Rows divided by their length, ``z / |z|``; into ``out``, which may be ``z``, if given.

    Raises:
        ValueError: If a row has no direction (length zero).
    """
    length = lengths(z)
    if not length.all():
        rows = np.flatnonzero(length == 0)
        raise ValueError(
            f"{what}: {len(rows)} of {len(z)} rows have length zero (first: row {rows[0]}) "
            "and therefore no direction; drop these images"
        )
    scaled: Float32 = np.divide(z, length[:, None], out=out)
    return scaled


def is_unit(z: Float32) -> bool:
    """Whether all rows have unit length, to ``UNIT_TOLERANCE``."""
    return bool((np.abs(lengths(z) - 1) <= UNIT_TOLERANCE).all())


def require_unit(z: Float32, what: str = "descriptors") -> None:
    """Refuse rows that are not of unit length.

    Raises:
        ValueError: Naming the shortest and longest row.
    """
    length = lengths(z)
    if (np.abs(length - 1) > UNIT_TOLERANCE).any():
        raise ValueError(
            f"{what}: expected unit length, got lengths from {length.min():.4g} to "
            f"{length.max():.4g}; L2-normalize them first (Encoder.encode does), or fit with "
            "l2_before=True (whitening) or unit=False (none)"
        )
