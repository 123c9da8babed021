"""Thresholds: from images that are not copies, from labelled pairs, and how far to trust them."""

from sscd_vec.normalize.calibration.false_matches import Options, calibrate
from sscd_vec.normalize.calibration.precision import precision_threshold
from sscd_vec.normalize.calibration.thresholds import (
    KINDS,
    Calibration,
    CalibrationError,
    FalseMatchCurve,
    Kind,
    Threshold,
    UncalibratedError,
)

__all__ = [
    "KINDS",
    "Calibration",
    "CalibrationError",
    "FalseMatchCurve",
    "Kind",
    "Options",
    "Threshold",
    "UncalibratedError",
    "calibrate",
    "precision_threshold",
]
