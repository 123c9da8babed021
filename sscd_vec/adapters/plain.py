"""Plain descriptors in an adopted index: which normalizers fit them, and how values become scores.

For unit descriptors ``score = s(q, r) - bias(q)``, with ``s`` the inner product or cosine, or
``1 - d^2 / 2``. So a bias needs no change to what is stored. Whitening and centring do: they divide
each reference by its own new length, which no query can know.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.arguments import Float32
from sscd_vec.normalize import Metric, Normalizer

BIAS_STEP = 0.02  # queries whose biases differ by less share one range search
UNIT_TOLERANCE = 1e-2  # half precision and normalized float32 pass, anything else does not


def require_plain(normalizer: Normalizer, dim: int, what: str) -> None:
    """Refuse a normalizer whose scores cannot be had from plain descriptors.

    Raises:
        ValueError: Saying that vectors have to be rewritten, and how.
    """
    if normalizer.dim_in != dim:
        raise ValueError(
            f"adopt: {what} holds vectors of {dim} dimensions, but this normalizer takes "
            f"{normalizer.dim_in}; use the one fitted for the encoder that made them"
        )
    if normalizer.whitening is not None or not normalizer.unit:
        raise ValueError(
            f"adopt: {what} holds plain unit descriptors, and this normalizer "
            f"{'whitens' if normalizer.unit else 'keeps lengths'}: the vectors must be rewritten. "
            "Make a new index with this normalizer and call its migrate(old), where old is this "
            "one adopted without a normalizer. Only a normalizer fitted with whitening=None "
            "(biases and thresholds included) searches it as it is"
        )


def require_unit(vectors: Float32, what: str) -> None:
    """Refuse to adopt vectors that are not of unit length, as descriptors are.

    Raises:
        ValueError: With the lengths found.
    """
    lengths = np.linalg.norm(vectors, axis=1)
    if len(lengths) and np.abs(lengths - 1).max() > UNIT_TOLERANCE:
        raise ValueError(
            f"adopt: expected unit descriptors in {what}, got lengths from {lengths.min():.4g} to "
            f"{lengths.max():.4g}; their inner products and distances are not similarities"
        )


def similarities(values: Float32, metric: Metric) -> NDArray[np.float64]:
    """``s(q, r)`` from what an index of unit vectors returned."""
    exact = values.astype(np.float64)
    return 1 - exact / 2 if metric == "l2" else exact


def ranges(
    bias: Float32, lowest: float, metric: Metric
) -> Iterator[tuple[NDArray[np.int64], float]]:
    """Queries that can share a range search, and the value at which the lowest score begins."""
    steps = np.floor(bias / BIAS_STEP)
    for step in np.unique(steps):
        rows = np.flatnonzero(steps == step)
        similarity = lowest + float(bias[rows].min())
        yield rows, 2 - 2 * similarity if metric == "l2" else similarity
