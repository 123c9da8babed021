"""Watch a run for the two ways it dies: gradients that are not numbers, and collapse."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

COLLAPSE_WINDOW = 20  # steps averaged before a collapse is called
SAME_SIMILARITY = 0.99
# Uniform descriptors have copies near cosine 0 and, in a large batch, a nearest other image well
# above it. A model that merely has not learned yet has both about equally near.
UNIFORM_RATIO = 0.5


class TrainingDiverged(RuntimeError):
    """Gradients stayed non-finite; the message says what to change."""


@dataclass
class Health:
    """Counts skipped steps and reads collapse from two logged similarities.

    Attributes:
        max_bad_steps: Consecutive non-finite steps before the run stops.
        skipped: Steps skipped so far.
        consecutive: Of these, how many in a row just now.
    """

    max_bad_steps: int = 5
    skipped: int = 0
    consecutive: int = 0
    _positive: deque[float] = field(default_factory=lambda: deque(maxlen=COLLAPSE_WINDOW))
    _negative: deque[float] = field(default_factory=lambda: deque(maxlen=COLLAPSE_WINDOW))

    def state(self) -> dict[str, Any]:
        """Everything needed to continue the watch."""
        return {
            "skipped": self.skipped,
            "consecutive": self.consecutive,
            "positive": list(self._positive),
            "negative": list(self._negative),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self.skipped, self.consecutive = saved["skipped"], saved["consecutive"]
        self._positive.extend(saved["positive"])
        self._negative.extend(saved["negative"])

    def gradient_is_fine(self, norm: float, step: int, entropy_weight: float) -> bool:
        """Whether to take this step; raises after too many that cannot be taken.

        Raises:
            TrainingDiverged: ``max_bad_steps`` non-finite gradients in a row.
        """
        if math.isfinite(norm):
            self.consecutive = 0
            return True
        self.skipped += 1
        self.consecutive += 1
        log.warning("step %d: the gradient is not finite; step skipped", step)
        if self.consecutive >= self.max_bad_steps:
            raise TrainingDiverged(
                f"{self.consecutive} steps in a row had non-finite gradients (step {step}). "
                f"Usual remedies: a smaller entropy weight (now {entropy_weight:g}; 10 is a safe "
                "start, above 40 is unstable), zero_init_residual=True when training from "
                "scratch, a longer warm-up or a smaller learning rate, float32."
            )
        return False

    def collapse(self, positive: float, negative: float) -> str:
        """Words for a collapse that the last steps' similarities show; empty if there is none.

        Args:
            positive: Mean cosine between copies.
            negative: Mean cosine to the nearest non-copy.
        """
        self._positive.append(positive)
        self._negative.append(negative)
        if len(self._positive) < COLLAPSE_WINDOW:
            return ""
        near = sum(self._positive) / COLLAPSE_WINDOW
        far = sum(self._negative) / COLLAPSE_WINDOW
        if far > SAME_SIMILARITY:
            return (
                f"collapse to a point: even non-copies have cosine {far:.3f}. Raise the entropy "
                "weight or lower the learning rate"
            )
        if near < UNIFORM_RATIO * far:
            return (
                f"collapse to uniform: descriptors are spread evenly, but copies (cosine "
                f"{near:.3f}) are farther than the nearest other image ({far:.3f}). The entropy "
                "weight outweighs the contrastive loss: lower it, ramp it (entropy_ramp=0.2), or "
                "start from trained weights"
            )
        return ""
