"""Descriptor arrays: checked, read in batches, brought to unit length, compared."""

from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Descriptors = ArrayLike | Iterable[ArrayLike]  # one (n, d) array, or (n_i, d) batches of it

BATCH_ROWS = 8192
UNIT_TOLERANCE = 1e-3  # float16 descriptors of 512 dimensions are unit to about 1e-5
ROUNDING = 1e-5  # of a cosine of the same descriptor with itself
HALF_ROUNDING = 1e-4  # the same if one of them was kept in 16 bits
MEMORY = 64 << 20  # bytes of products held at once beside arguments and results
QUERY_ROWS, BACKGROUND_ROWS = 4096, 1024  # of a block of products, if memory allows


class OverlapError(ValueError):
    """The background holds images that are also references.

    Attributes:
        pairs: ``(k, 2)`` int64 rows ``(background row, reference row)`` of the duplicates.
    """

    def __init__(self, message: str, pairs: object = None) -> None:
        """Keep the offending pairs beside the message."""
        super().__init__(message)
        self.pairs = pairs


def as_descriptors(
    z: ArrayLike, dim: int | None = None, what: str = "descriptors", *, unit: bool = False
) -> Float32:
    """Return ``z`` as a finite, C-contiguous float32 ``(n, d)`` array, or say what is wrong.

    A single descriptor ``(d,)`` becomes ``(1, d)``. An array that is already right is not copied.

    Raises:
        TypeError: If ``z`` does not hold floating point numbers.
        ValueError: If the shape is wrong, a value is NaN or infinite, or a row is not of unit
            length although ``unit`` asks for it.
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
    if unit:
        require_unit(array, what)
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
        ValueError: If a row has length zero and so no direction.
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


def refuse_overlap(pairs: NDArray[np.int64]) -> None:
    """Refuse a background that has ``overlapping_pairs`` with references.

    Raises:
        OverlapError: Naming the first pair, with all of them in ``pairs``.
    """
    if len(pairs):
        raise OverlapError(
            f"{len(pairs)} background rows are also among the references (first: background "
            f"row {pairs[0, 0]} is reference row {pairs[0, 1]}); copies of these would be "
            "normalized away. Fit on a background without them",
            pairs,
        )


def overlapping_pairs(
    background: Float32, references: Float32, slack: float, memory: int = MEMORY
) -> NDArray[np.int64]:
    """Rows ``(i, j)`` where background ``i`` and reference ``j`` are the same vector.

    Same means ``|b - r|^2 <= 2 slack max(|b|^2, |r|^2)``, that is a cosine of at least
    ``1 - slack`` for unit vectors: the rounding of the precision the background is kept in.
    """
    b_square = np.einsum("nd,nd->n", background, background)
    r_square = np.einsum("nd,nd->n", references, references)
    found: list[NDArray[np.int64]] = [np.zeros((0, 2), dtype=np.int64)]
    # Three arrays of a block's size live at once below: the product, the distance, the limit.
    b_rows, r_rows = block_shape(len(background), len(references), memory // 3)
    for i in range(0, len(background), b_rows):
        for j in range(0, len(references), r_rows):
            bb, rr = b_square[i : i + b_rows, None], r_square[None, j : j + r_rows]
            product = background[i : i + b_rows] @ references[j : j + r_rows].T
            same = bb + rr - 2 * product <= 2 * slack * np.maximum(bb, rr)
            found.append(np.argwhere(same) + np.array([i, j]))
    return np.concatenate(found)


def block_shape(queries: int, background: int, memory: int = MEMORY) -> tuple[int, int]:
    """Rows of queries and of background whose products fit in ``memory`` bytes."""
    cells = max(memory // 4, 1)
    background_rows = max(min(BACKGROUND_ROWS, background, cells), 1)
    query_rows = max(min(QUERY_ROWS, queries, cells // background_rows), 1)
    return query_rows, background_rows
