"""What the normalizer refuses, by name."""


class FingerprintMismatch(ValueError):
    """Two things that must come from the same encoder or normalizer do not."""


class NormalizerFileError(ValueError):
    """A file is not a normalizer this version can read: truncated, foreign, altered or newer."""


class OverlapError(ValueError):
    """The background holds images that are also references.

    Attributes:
        pairs: ``(k, 2)`` int64 rows ``(background row, reference row)`` of the duplicates.
    """

    def __init__(self, message: str, pairs: object = None) -> None:
        """Keep the offending pairs beside the message."""
        super().__init__(message)
        self.pairs = pairs


class UncalibratedError(ValueError):
    """A calibrated threshold was asked for and none is stored."""
