"""Fitting a ``Normalizer``: read a background once, whiten, keep what the bias needs.

A background must not hold the images that are searched: copies of these would be normalized away.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.normalize import persistence
from sscd_vec.normalize.descriptors import (
    ROUNDING,
    Descriptors,
    Float32,
    as_descriptors,
    batches,
    is_array,
    lengths,
    overlapping_pairs,
    refuse_overlap,
    require_unit,
)
from sscd_vec.normalize.score_norm import ScoreNorm
from sscd_vec.normalize.whitening import ROWS_PER_DIMENSION, Mode, Moments, Whitening

if TYPE_CHECKING:
    from sscd_vec.normalize.normalizer import Normalizer

Precision = Literal["float32", "float16"]

_log = logging.getLogger(__name__)


def fit_normalizer(
    kind: "type[Normalizer]",
    background: Descriptors,
    *,
    whitening: Mode | Whitening | Literal["auto"] | None,
    dim: int | None,
    eps: float | Literal["oas"],
    l2_before: bool,
    score_norm: ScoreNorm | None,
    encoder: str | None,
    keep_background: Precision,
    background_size: int | None,
    unit: bool,
    max_length: float | None,
    references: ArrayLike | None,
    seed: int,
) -> "Normalizer":
    """Fit on descriptors of background images; see ``Normalizer.fit``."""
    sample = RowSample(background_size, seed)
    # A generator can be read once: whiten on all of it, keep what the bias needs.
    keep = None if score_norm is None or is_array(background) else sample
    rows = read_once(background, references, keep)
    shipped, domain = persistence.shipped_whitening(encoder)
    transform = fit_whitening(rows, whitening, dim, eps, l2_before, shipped)
    if transform is None:
        dim_in, radius = measure(rows, unit, max_length)
    elif unit and max_length is None:
        dim_in, radius = transform.dim_in, 1.0
    else:
        raise ValueError(
            "unit=False and max_length: expected only with whitening=None; whitened vectors "
            "have unit length"
        )
    if isinstance(rows, Iterator):
        deque(rows, maxlen=0)  # whatever a fitted whitening left unread
    fitted = kind(dim_in, transform, None, None, encoder, unit, radius)
    if transform is not None and transform is shipped:
        fitted = fitted.with_domain(domain)
    if score_norm is None:
        return fitted
    kept = background if keep is None else sample.rows()
    size = background_size if keep is None else None
    return fitted.with_background(
        kept, score_norm=score_norm, keep=keep_background, size=size, seed=seed
    )


def whitened_background(
    background: Descriptors,
    whiten: Callable[[Float32], Float32],
    dim_in: int,
    keep: Precision,
    size: int | None,
    seed: int,
) -> Float32:
    """A background as the bias needs it: whitened, sampled, rounded as it will be kept.

    Raises:
        ValueError: ``keep`` is not a precision, or there are too few rows.
    """
    if keep not in ("float32", "float16"):
        raise ValueError(f"keep_background: expected 'float32' or 'float16', got {keep!r}")
    if size is not None:
        background = collect(batches(background, dim_in), size, seed)
    rows = collect(map(whiten, batches(background, dim_in)))
    return rows.astype(keep).astype(np.float32)


def fit_whitening(
    rows: Descriptors,
    wanted: Mode | Whitening | Literal["auto"] | None,
    dim: int | None,
    eps: float | Literal["oas"],
    l2_before: bool,
    shipped: Whitening | None,
) -> Whitening | None:
    """The whitening ``Normalizer.fit`` was asked for.

    Args:
        rows: The background.
        wanted: A fitted one, None, a mode, or ``"auto"``: whiten, but with fewer than
            ``ROWS_PER_DIMENSION`` rows per dimension take the shipped one, if there is one.
        dim: As in ``Whitening.fit``; asking for any of the three asks to fit.
        eps: As in ``Whitening.fit``.
        l2_before: As in ``Whitening.fit``.
        shipped: The whitening shipped for the encoder of these rows, if there is one.

    Raises:
        ValueError: If settings of a fit are given for a whitening that is not fitted.
    """
    asked = dim is not None or l2_before or bool(eps)
    if not isinstance(wanted, str):
        if asked:
            raise ValueError(
                "dim, eps and l2_before: expected only with whitening='whiten' or 'centre', "
                f"got whitening={'None' if wanted is None else 'a fitted one'}"
            )
        return wanted
    moments = Moments.of(rows, l2_before)
    if wanted != "auto":
        return Whitening.from_moments(moments, wanted, dim, eps)
    if not asked and moments.count < ROWS_PER_DIMENSION * moments.dim:
        if shipped is not None:
            _log.warning(
                "%d rows are too few to fit a whitening of %d dimensions, which takes %d: the "
                "shipped whitening stays, the bias comes from these rows. whitening='whiten' "
                "fits on them anyway",
                moments.count,
                moments.dim,
                ROWS_PER_DIMENSION * moments.dim,
            )
            return shipped
    return Whitening.from_moments(moments, "whiten", dim, eps)


class RowSample:
    """All rows of some batches, or a uniform sample of them, gathered as the batches pass.

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
        """Pass the batches on and keep what belongs to the sample."""
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


def read_once(
    background: Descriptors, references: ArrayLike | None, sample: RowSample | None
) -> Descriptors:
    """A background that is compared with references, and sampled, as it is read.

    Raises:
        OverlapError: At its end, if it holds any reference.
    """
    rows = background
    if references is not None:
        bank = as_descriptors(references, what="references")
        rows = _without_references(batches(rows, bank.shape[1]), bank)
    return rows if sample is None else sample.watch(batches(rows))


def _without_references(rows: Iterable[Float32], references: Float32) -> Iterator[Float32]:
    """Pass the batches of a background on; refuse it at their end if it holds any reference."""
    found: list[NDArray[np.int64]] = []
    seen = 0
    for batch in rows:
        found.append(overlapping_pairs(batch, references, ROUNDING) + np.array([seen, 0]))
        seen += len(batch)
        yield batch
    if found:
        refuse_overlap(np.concatenate(found))
