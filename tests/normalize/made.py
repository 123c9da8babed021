"""Seeded descriptors for the tests: unit rows around a common mean, of unequal variances."""

import numpy as np

from sscd_vec.normalize.descriptors import Float32


def descriptors(count: int, dim: int = 24, seed: int = 0, spread: float = 5.0) -> Float32:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, dim)) * np.linspace(1, spread, dim) + 0.7
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)
