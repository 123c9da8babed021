"""Which images a normalizer knows nothing about: documents, charts and screenshots among photos.

A model of photos says little more about an image on a plain ground than "not a photo": two invoices
are as similar as a photo and its copy. Such images are told by a direction ``w`` in the space of
whitened descriptors, fitted on photos and on other images (linear discriminant, Fisher 1936):

    w = C^-1 (mean of others - mean of photos),  C = (1 - s) cov + s tr(cov)/d I,  |w| = 1
    margin(z) = z.w - t;  outside: margin >= 0

``t`` is the quantile of ``z.w`` over photos ``w`` was not fitted on that leaves a stated share of
them outside by mistake. A match is in doubt only if *both* images lie outside: a screenshot that
shows a known photo is a copy of it.

Descriptors of other images also form a background of their own. Between two images outside, the
bias of score normalization is the larger of both,

    shift(q) = max(0, beta mean_{i=n..n_end} s(q, o_i) - bias(q)),  score' = score - shift(q),

which takes away what all invoices have in common. Photos keep their scores: one background for
all would cost them two points of µAP.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sscd_vec.normalize.descriptors import MEMORY, Float32, as_descriptors
from sscd_vec.normalize.score_norm import ScoreNorm

FALSE_ALARM = 0.003  # of photos, taken for something else
SHRINKAGE = 0.3
PREFIX = "domain."
NAMES = (f"{PREFIX}direction", f"{PREFIX}background", f"{PREFIX}limits")
ALARMS = 3  # photos that must lie beyond the threshold for it to mean anything


class Outside(NamedTuple):
    """Which of n images lie outside, and by how much scores between two of them are too high.

    Attributes:
        flags: ``(n,)`` whether each lies outside.
        shifts: ``(n,)`` what its scores with others outside lose; 0 for those inside.
    """

    flags: NDArray[np.bool_]
    shifts: Float32

    @classmethod
    def none(cls, count: int) -> "Outside":
        """All inside."""
        return cls(np.zeros(count, dtype=bool), np.zeros(count, dtype=np.float32))


@dataclass(frozen=True, eq=False)
class Domain:
    """Where the known kind of image ends; made by ``fit``. Immutable.

    All descriptors are whitened ones, as ``Normalizer.whiten`` returns them.

    Attributes:
        direction: ``(dim,)`` float32 ``w``, of unit length; points away from photos.
        threshold: ``t``.
        background: ``(m, dim)`` float32 descriptors of other images.
        false_alarm: Share of photos that lie outside by mistake.
    """

    direction: Float32 = field(repr=False)
    threshold: float
    background: Float32 = field(repr=False)
    false_alarm: float = FALSE_ALARM

    def __post_init__(self) -> None:
        """Check the arrays and freeze them.

        Raises:
            ValueError: If they do not belong together, or hold NaN.
        """
        if self.direction.ndim != 1 or self.background.shape[1:] != self.direction.shape:
            raise ValueError(
                "expected direction (dim,) and background (m, dim), got "
                f"{self.direction.shape} and {self.background.shape}"
            )
        if not np.isfinite(self.direction).all() or not np.isfinite(self.threshold):
            raise ValueError(
                "direction and threshold: expected finite numbers, got NaN or infinity"
            )
        for array in (self.direction, self.background):
            array.setflags(write=False)

    def require_dim(self, dim: int) -> None:
        """Refuse to judge whitened descriptors of another size.

        Raises:
            ValueError: Naming both sizes.
        """
        if len(self.direction) != dim:
            raise ValueError(
                f"domain: expected {dim} dimensions, got {len(self.direction)}; fit it on "
                "descriptors that this normalizer whitened"
            )

    @classmethod
    def fit(
        cls,
        photos: ArrayLike,
        others: ArrayLike,
        *,
        false_alarm: float = FALSE_ALARM,
        seed: int = 0,
    ) -> "Domain":
        """Fit on whitened descriptors.

        Args:
            photos: ``(n, dim)`` of the known kind. One half fits the direction, the other the
                threshold.
            others: ``(m, dim)`` of as many kinds of other images as there are; kept as
                ``background``.
            false_alarm: Share of photos that may lie outside.
            seed: Of the halves.

        Raises:
            ValueError: If there are too few photos for so small a share.
        """
        known = as_descriptors(photos, what="photos")
        other = as_descriptors(others, known.shape[1], what="others")
        order = np.random.default_rng(seed).permutation(len(known))
        half, held = known[order[: len(known) // 2]], known[order[len(known) // 2 :]]
        if not 0 < false_alarm < 1 or len(held) * false_alarm < ALARMS:
            raise ValueError(
                f"false_alarm: expected more than {2 * ALARMS} of {len(known)} photos, less than "
                f"all, got a share of {false_alarm:g}; give more photos or allow a larger share"
            )
        if len(other) < 2 or len(half) < 2:
            raise ValueError(f"others: expected at least two rows, got {len(other)}")
        covariance = (np.cov(half.T) + np.cov(other.T)) / 2
        level = np.trace(covariance) / len(covariance)
        shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * level * np.eye(len(covariance))
        apart = np.linalg.solve(shrunk, other.mean(0, dtype=float) - half.mean(0, dtype=float))
        direction = (apart / np.linalg.norm(apart)).astype(np.float32)
        threshold = float(np.quantile(held @ direction, 1 - false_alarm))
        return cls(direction, threshold, rounded(other), false_alarm)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "Domain":
        """Read what ``arrays`` returned.

        Raises:
            ValueError: If an array is missing or has another shape.
        """
        missing = sorted(set(NAMES) - set(arrays))
        if missing:
            raise ValueError(
                f"domain: expected the arrays {', '.join(NAMES)}, got none of {missing}"
            )
        direction, background, limits = (arrays[name] for name in NAMES)
        if limits.shape != (2,):
            raise ValueError(f"domain.limits: expected two numbers, got shape {limits.shape}")
        threshold, false_alarm = map(float, limits)
        return cls(direction.astype(np.float32), threshold, rounded(background), false_alarm)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What a file keeps, by name: ``from_arrays`` gives the same ``Domain`` again."""
        limits = np.array([self.threshold, self.false_alarm])
        kept = self.direction, self.background.astype(np.float16), limits
        return dict(zip(NAMES, kept, strict=True))

    def margins(self, whitened: ArrayLike) -> Float32:
        """``margin(z)`` of descriptors ``(n, dim)``: 0 or more lies outside."""
        return self._margins(as_descriptors(whitened, len(self.direction)))

    def outside(self, whitened: ArrayLike) -> NDArray[np.bool_]:
        """Which descriptors lie outside: ``(n,)``."""
        found: NDArray[np.bool_] = self.margins(whitened) >= 0
        return found

    def examine(
        self,
        whitened: Float32,
        biases: Callable[[Float32], Float32],
        score_norm: ScoreNorm | None,
    ) -> Outside:
        """``outside`` and ``shifts`` at once; those inside cost one dot product.

        Args:
            whitened: ``(n, dim)``.
            biases: Gives the biases of rows against the normalizer's own background.
            score_norm: Settings of the bias; without one nothing is shifted.
        """
        flags, shifts = self._margins(whitened) >= 0, np.zeros(len(whitened), dtype=np.float32)
        if score_norm is not None and flags.any():
            rows = whitened[flags]
            shifts[flags] = self._shifts(rows, biases(rows), score_norm)
        return Outside(flags, shifts)

    def shifts(
        self,
        whitened: ArrayLike,
        biases: ArrayLike,
        score_norm: ScoreNorm,
        memory: int = MEMORY,
    ) -> Float32:
        """How much lower scores between two images outside count: ``(n,)``, at least 0.

        Args:
            whitened: ``(n, dim)`` queries.
            biases: ``(n,)`` their biases against the normalizer's own background.
            score_norm: Settings of the bias.
            memory: Bytes the search may use.
        """
        rows = as_descriptors(whitened, len(self.direction))
        return self._shifts(rows, np.asarray(biases, dtype=np.float32), score_norm, memory)

    def _margins(self, rows: Float32) -> Float32:
        margins: Float32 = rows @ self.direction - np.float32(self.threshold)
        return margins

    def _shifts(
        self, rows: Float32, biases: Float32, score_norm: ScoreNorm, memory: int = MEMORY
    ) -> Float32:
        if len(self.background) < score_norm.n_end:
            return np.zeros(len(rows), dtype=np.float32)
        own = score_norm.bias(rows, self.background, None, memory)
        shifts: Float32 = np.maximum(own - biases, 0)
        return shifts


def rounded(rows: NDArray[Any]) -> Float32:
    """Rows as a file keeps them, in half precision: rounded at once, saving changes nothing."""
    kept: Float32 = rows.astype(np.float16).astype(np.float32)
    return kept
