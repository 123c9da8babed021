"""Thresholds: from images that are not copies, from labelled pairs, and how far to trust them."""

from sscd_vec.normalize.calibration.calibrate import Calibration, calibrate, precision_threshold
from sscd_vec.normalize.calibration.threshold import KINDS, Kind, Threshold, UncalibratedError

__all__ = [
    "KINDS",
    "Calibration",
    "Kind",
    "Threshold",
    "UncalibratedError",
    "calibrate",
    "precision_threshold",
]
