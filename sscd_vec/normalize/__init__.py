"""Whitening, score normalization, lift and calibrated thresholds: numpy and safetensors only."""

from sscd_vec.normalize.calibration import (
    KINDS,
    Calibration,
    CalibrationError,
    FalseMatchCurve,
    Kind,
    Threshold,
    UncalibratedError,
    calibrate,
    precision_threshold,
)
from sscd_vec.normalize.descriptors import OverlapError
from sscd_vec.normalize.domain import Domain, Outside
from sscd_vec.normalize.lift import Lift, Metric
from sscd_vec.normalize.normalizer import Normalizer
from sscd_vec.normalize.persistence import FingerprintMismatch, NormalizerFileError
from sscd_vec.normalize.score_norm import ScoreNorm, nearest_neighbours, nearest_similarities
from sscd_vec.normalize.verdict import (
    COPY_RATE,
    GRADES,
    LOOK_RATE,
    STANDARD_BANK,
    Grade,
    Proof,
    Verdict,
)
from sscd_vec.normalize.whitening import Whitening

__all__ = [
    "COPY_RATE",
    "GRADES",
    "KINDS",
    "LOOK_RATE",
    "STANDARD_BANK",
    "Calibration",
    "CalibrationError",
    "Domain",
    "FalseMatchCurve",
    "FingerprintMismatch",
    "Grade",
    "Kind",
    "Lift",
    "Metric",
    "Normalizer",
    "NormalizerFileError",
    "Outside",
    "OverlapError",
    "Proof",
    "ScoreNorm",
    "Threshold",
    "UncalibratedError",
    "Verdict",
    "Whitening",
    "calibrate",
    "nearest_neighbours",
    "nearest_similarities",
    "precision_threshold",
]
