"""Validation: find edited copies among images, with whitening and score normalization.

Half of the images are references. Queries are seeded edits of every second reference, and of the
images that are not references and must not match. Background descriptors come from training images,
which are neither.
"""

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sscd_vec.encoder.model import SSCDModel
from sscd_vec.metrics import evaluate
from sscd_vec.normalize import Normalizer
from sscd_vec.predictions import GroundTruth, Predictions
from sscd_vec.trainer.augment.choices import draw, generator
from sscd_vec.trainer.augment.overlay import Overlays
from sscd_vec.trainer.augment.recipe import ADVANCED
from sscd_vec.trainer.augment.views import augment, mix
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.model import encode
from sscd_vec.trainer.pixels import PixelSource, as_squares

log = logging.getLogger(__name__)

FEWEST_IMAGES = 8
ENOUGH_IMAGES = 50  # with fewer, µAP moves by several points from one split to another
FEWEST_QUERIES = 300  # few images are edited several times, so that µAP depends less on luck
MOST_BACKGROUND = 4000
NEIGHBOURS = 10
ROWS_PER_DIMENSION = 10
# Unit descriptors in float32: smaller variation is rounding and cannot be whitened.
NO_SPREAD = 1e-6
FLAT = 1e-4
SEED = 20220221  # the edits are the same in every run, whatever its own seed
# Milder than training in colour, harder in what is common in real copies: overlays, partial copies,
# turns and compression.
EDITS = ADVANCED.with_changes(
    {
        "crop_area": (0.3, 1.0),
        "jitter": 0.5,
        "brightness": 0.4,
        "contrast": 0.4,
        "saturation": 0.4,
        "hue": 0.1,
        "grayscale": 0.1,
        "blur": 0.25,
        "quarter_turn": 0.1,
        "rotation": 0.1,
        "text": 0.3,
        "emoji": 0.3,
        "jpeg": 0.4,
        "cutmix": 0.25,
    }
)


@dataclass(frozen=True)
class Score:
    """How well copies were found.

    Attributes:
        micro_ap: µAP with whitening and score normalization.
        micro_ap_raw: µAP of the raw cosines.
        recall_at_p90: Recall at 90 % precision, normalized.
        copies: Raw cosines of true pairs.
        others: Raw cosine of each query's nearest wrong reference.
        spectrum: Principal values of the background descriptors, largest first.
    """

    micro_ap: float
    micro_ap_raw: float
    recall_at_p90: float
    copies: npt.NDArray[np.float32]
    others: npt.NDArray[np.float32]
    spectrum: npt.NDArray[np.float32]


class Validation:
    """A fixed set of references, edited queries and background, measured again and again.

    Attributes:
        references: uint8 ``(n, 3, size, size)``.
        queries: Edited images, float in [0, 1].
        truth: Which query is a copy of which reference; a partial copy may be one of two.
    """

    def __init__(
        self, images: PixelSource, background: PixelSource, size: int, overlays: Overlays
    ) -> None:
        """Edit the queries once.

        Args:
            images: Images that are never trained on.
            background: Training images.
            size: Side of the images to encode.
            overlays: Fonts and emoji.

        Raises:
            ValueError: There are fewer than 8 images.
        """
        count = len(images)
        if count < FEWEST_IMAGES:
            raise ValueError(f"validation needs at least {FEWEST_IMAGES} images, got {count}")
        self._size = size
        decoded = images.take(np.arange(count))
        queried = np.flatnonzero((np.arange(count) % 4 == 0) | (np.arange(count) % 2 == 1))
        chosen = np.tile(queried, max(1, -(-FEWEST_QUERIES // len(queried))))
        choices = draw(EDITS, len(chosen), generator(SEED, 0))
        pixels = decoded.tensors()
        edited = augment(pixels, decoded.aspects, choices, size, overlays, rows=chosen)
        rows = np.arange(len(chosen))
        self.queries, sources = mix(edited, chosen.astype(np.int64), choices, rows, choices.partner)
        self.references = as_squares(pixels[::2], size)
        pairs = {
            (query, int(source))
            for query, both in enumerate(sources.tolist())
            for source in both
            if source % 2 == 0
        }
        self.truth = GroundTruth.from_pairs(sorted((q, s // 2) for q, s in pairs))
        spread = np.linspace(0, len(background) - 1, min(len(background), MOST_BACKGROUND))
        self._background = as_squares(background.take(spread.astype(np.int64)).tensors(), size)

    def __call__(self, model: SSCDModel) -> Score:
        """Measure a model; if it has collapsed to a point, by its raw cosines."""
        queries = encode(model, self.queries)
        references = encode(model, self.references)
        background = encode(model, self._background)
        centred = background - background.mean(axis=0, dtype=np.float64)
        spectrum = np.linalg.svd(centred / len(centred) ** 0.5, compute_uv=False)
        raw = queries @ references.T
        normalized = raw
        if spectrum[0] > NO_SPREAD:
            # Few rows, or a collapse to few dimensions, leave small variances: shrink them.
            enough = len(background) >= ROWS_PER_DIMENSION * background.shape[1]
            full = spectrum[-1] > FLAT * spectrum[0]
            normalizer = Normalizer.fit(background, eps=0.0 if enough and full else "oas")
            normalized = normalizer.queries(queries) @ normalizer.references(references).T
        summary = evaluate(_best(normalized), self.truth)
        true = np.zeros(raw.shape, dtype=bool)
        true[self.truth.query_ids.astype(int), self.truth.reference_ids.astype(int)] = True
        return Score(
            micro_ap=summary.micro_ap,
            micro_ap_raw=evaluate(_best(raw), self.truth).micro_ap,
            recall_at_p90=summary.recall_at_p90,
            copies=raw[true],
            others=np.where(true, -2, raw).max(axis=1),
            spectrum=spectrum.astype(np.float32),
        )


def _best(scores: npt.NDArray[np.float32]) -> Predictions:
    """The best references of each query."""
    count = min(NEIGHBOURS, scores.shape[1])
    best = np.argpartition(-scores, count - 1, axis=1)[:, :count]
    queries = np.repeat(np.arange(len(scores)), count)
    return Predictions(queries, best.ravel(), np.take_along_axis(scores, best, axis=1).ravel())


def validation_of(
    images: PixelSource, background: PixelSource, config: TrainConfig, overlays: Overlays
) -> Validation | None:
    """The validation on held-out images; None, with a warning, if they are too few."""
    if len(images) >= FEWEST_IMAGES:
        if len(images) < ENOUGH_IMAGES:
            log.warning("µAP on %d images is rough: raise holdout", len(images))
        return Validation(images, background, config.size, overlays)
    log.warning(
        "no validation, and so the last weights are written, not the best: it needs %d "
        "readable images and has %d. Raise holdout (now %g) or name others as validation",
        FEWEST_IMAGES,
        len(images),
        config.holdout,
    )
    return None
