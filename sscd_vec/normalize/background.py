"""The background as rows: gathered or sampled from batches, measured, compared with references."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize.descriptors import Descriptors, Float32, batches, lengths, require_unit
from sscd_vec.normalize.errors import OverlapError
from sscd_vec.normalize.neighbours import MEMORY, block_shape

ROUNDING = 1e-5  # of a cosine of the same descriptor with itself


class RowSample:
    """All rows of some batches, or a uniform sample of them, gathered while they pass by.

    A sample holds ``size`` rows and one batch at a time: each row draws a random key, and the
    rows with the smallest keys stay, in their order.
    """

    def __init__(self, size: int | None = None, seed: int = 0) -> None:
        """Keep ``size`` rows, or all."""
        if size is not None and size < 1:
            raise ValueError(f"background_size: expected at least 1, got {size}")
        self._size = size
        self._random = np.random.default_rng(seed)
        self._keys = np.zeros(0)
        self._kept: list[Float32] = []

    def watch(self, rows: Iterable[Float32]) -> Iterator[Float32]:
        """Pass the batches on, remembering what belongs to the sample."""
        for batch in rows:
            self._kept.append(batch)
            if self._size is not None:
                keys = np.concatenate([self._keys, self._random.random(len(batch))])
                if len(keys) > self._size:
                    stay = np.sort(np.argpartition(keys, self._size - 1)[: self._size])
                    keys, self._kept = keys[stay], [np.concatenate(self._kept)[stay]]
                self._keys = keys
            yield batch

    def rows(self) -> Float32:
        """What was gathered.

        Raises:
            ValueError: If there were no rows, or fewer than asked for.
        """
        count = sum(map(len, self._kept))
        wanted = 1 if self._size is None else self._size
        if count < wanted:
            raise ValueError(f"background: expected at least {wanted} rows to keep, got {count}")
        return np.concatenate(self._kept)


def collect(rows: Iterable[Float32], size: int | None = None, seed: int = 0) -> Float32:
    """All rows of the batches, or a uniform sample of ``size`` of them, in their order."""
    sample = RowSample(size, seed)
    for _ in sample.watch(rows):
        pass
    return sample.rows()


def measure(background: Descriptors, unit: bool, max_length: float | None) -> tuple[int, float]:
    """Dimensions and ``R`` (longest vector allowed) of a background that is not whitened.

    Raises:
        ValueError: If rows are not unit although they should be, or longer than ``max_length``, or
            if that is given for unit rows.
    """
    dim_in, longest = 0, 0.0
    for batch in batches(background):
        dim_in = batch.shape[1]
        if unit:
            require_unit(batch, "background")
        longest = max(longest, float(lengths(batch).max(initial=0)))
    if dim_in == 0:
        raise ValueError("background: expected at least one row, got none")
    if unit:
        if max_length is not None:
            raise ValueError(
                f"max_length: expected only with unit=False, got {max_length:g}; unit vectors have "
                "length 1"
            )
        return dim_in, 1.0
    radius = 1.25 * longest if max_length is None else float(max_length)
    if not (longest <= radius < float("inf") and radius > 0):
        raise ValueError(
            f"max_length: expected at least the background's longest, {longest:.6g}, more than 0 "
            f"and finite, got {radius:g}"
        )
    return dim_in, radius


def without_references(rows: Iterable[Float32], references: Float32) -> Iterator[Float32]:
    """Pass the batches of a background on; refuse it at their end if it holds any reference.

    Raises:
        OverlapError: With all duplicated rows in ``pairs``.
    """
    found: list[NDArray[np.int64]] = []
    seen = 0
    for batch in rows:
        found.append(overlapping_pairs(batch, references, ROUNDING) + np.array([seen, 0]))
        seen += len(batch)
        yield batch
    if found:
        refuse_pairs(np.concatenate(found))


def refuse_pairs(pairs: NDArray[np.int64]) -> None:
    """Raise an ``OverlapError`` that names them, if there are any ``overlapping_pairs``."""
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
