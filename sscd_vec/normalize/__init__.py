"""Whitening, score normalization, lift and calibrated thresholds: numpy and safetensors only."""

from sscd_vec.normalize.calibration import (
    Calibration,
    Kind,
    Threshold,
    UncalibratedError,
    calibrate,
    precision_threshold,
)
from sscd_vec.normalize.descriptors import OverlapError
from sscd_vec.normalize.lift import Lift, Metric
from sscd_vec.normalize.normalizer import FingerprintMismatch, Normalizer
from sscd_vec.normalize.persistence import NormalizerFileError
from sscd_vec.normalize.score_norm import ScoreNorm, nearest_neighbours, nearest_similarities
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
