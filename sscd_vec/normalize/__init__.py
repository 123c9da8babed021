"""Whitening, score normalization, lift and calibrated thresholds: numpy and safetensors only."""

from sscd_vec.normalize.calibration import Calibration, calibrate, precision_threshold
from sscd_vec.normalize.errors import (
    FingerprintMismatch,
    NormalizerFileError,
    OverlapError,
    UncalibratedError,
)
from sscd_vec.normalize.lift import Lift, Metric
from sscd_vec.normalize.neighbours import nearest_neighbours, nearest_similarities
from sscd_vec.normalize.normalizer import Normalizer
from sscd_vec.normalize.score_norm import ScoreNorm
from sscd_vec.normalize.threshold import Kind, Threshold
from sscd_vec.normalize.whitening import Whitening

__all__ = [
    "Calibration",
    "FingerprintMismatch",
    "Kind",
    "Lift",
    "Metric",
    "Normalizer",
    "NormalizerFileError",
    "OverlapError",
    "ScoreNorm",
    "Threshold",
    "UncalibratedError",
    "Whitening",
    "calibrate",
    "nearest_neighbours",
    "nearest_similarities",
    "precision_threshold",
]
