"""Run: everything that changes while training, the one step that changes it, and its health."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sscd_vec.encoder.backends import require_bfloat16
from sscd_vec.encoder.checkpoint import write_pretrained
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.trainer.augment.views import Batch
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.distributed import Ranks, synchronize_batch_norm
from sscd_vec.trainer.losses import Memory, Objective, backward
from sscd_vec.trainer.model import SplitModel, normalize, whiten_head
from sscd_vec.trainer.optim import AverageWeights, build_optimizer, scheduled
from sscd_vec.trainer.pixels import PixelSource
from sscd_vec.trainer.validation import Score, Validation

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A float16 scaler starts at 2**16 and halves at every overflow: that many are not a failure.
SCALER_HALVINGS = 16

COLLAPSE_WINDOW = 20  # steps averaged before a collapse is called
SAME_SIMILARITY = 0.99
# Uniform descriptors have copies near cosine 0 and, in a large batch, a nearest other image well
# above it. In a model that has not learned yet, both are about equally near.
UNIFORM_RATIO = 0.5


class TrainingDiverged(RuntimeError):
    """Gradients stayed non-finite; the message says what to change."""


@dataclass
class Health:
    """Counts skipped steps and reads collapse from two similarities.

    Attributes:
        max_bad_steps: Consecutive non-finite steps before the run stops.
        skipped: Steps skipped so far.
        consecutive: Steps skipped in a row up to now.
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
        """Whether to take this step.

        Raises:
            TrainingDiverged: ``max_bad_steps`` gradients in a row were not finite.
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
        """Describe a collapse that the last steps show; empty if there is none.

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


class Run:
    """A model being trained.

    Attributes:
        model: The model.
        steps: Length of the whole run.
        step: Steps taken.
        initial: Validation µAP before training.
        best: Best validation µAP so far.
        score: The last validation.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: SSCDModel,
        device: torch.device,
        ranks: Ranks,
        steps: int = 0,
    ) -> None:
        """Prepare to train ``model``; ``steps`` may be set once the images are known.

        Raises:
            ValueError: The trunk has fewer stages than ``config.frozen_stages``.
            Bfloat16Error: The device cannot compute in bfloat16.
        """
        if config.precision == "bfloat16":
            require_bfloat16("torch", device)
        self._config, self._device, self._ranks, self.steps = config, device, ranks, steps
        self.model = model.to(device)
        for tensor in self.model.parameters():
            if tensor.ndim == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        self._split = SplitModel(self.model, config.frozen_stages, config.train_gem_p)
        if ranks.count > 1 and not config.frozen_batch_norm:
            synchronize_batch_norm(self._split.trained, device.type)
        self._optimizer = build_optimizer(self.model, config)
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self._average = AverageWeights(self.model, config.ema) if config.ema else None
        self._memory = Memory(config.memory)
        self._objective = Objective(
            config.tau, ranks, self._memory, config.exact_negatives, config.ring
        )
        patience = config.max_bad_steps + (SCALER_HALVINGS if self._scaler.is_enabled() else 0)
        self._health = Health(patience)
        describe: Callable[[Tensor, torch.dtype], Tensor] = self._split.describe
        self._describe = torch.compile(describe) if config.compile else describe
        self._warned = False
        self.step = 0
        self.initial: float | None = None
        self.best: float | None = None
        self.score: Score | None = None

    def whiten_head(self, images: PixelSource) -> None:
        """Start the head as the whitening of the trunk's features of these images."""
        whiten_head(self.model, images, self._config.size, self._ranks)
        if self._average is not None:
            self._average.load(self.model.state_dict())

    def take_step(self, batch: Batch) -> dict[str, Any]:
        """Train on one batch; returns what to log about it.

        Raises:
            TrainingDiverged: Gradients stayed non-finite.
        """
        config, started = self._config, time.perf_counter()
        torch.manual_seed(_dropout_seed(config.seed, self.step, self._ranks.rank))
        rate, entropy_weight = scheduled(config, self.step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        statistics = {name: tensor.clone() for name, tensor in self.model.named_buffers()}
        figures, norm = self._compute_gradients(batch, entropy_weight)
        if self._health.gradient_is_fine(norm, self.step, entropy_weight):
            self._scaler.step(self._optimizer)
            if self._average is not None:
                self._average.update(self.model, self.step)
        else:
            # What made the gradient non-finite may have reached BatchNorm's statistics too.
            for name, tensor in self.model.named_buffers():
                tensor.copy_(statistics[name])
        self._scaler.update()
        self._warn_of_collapse(figures)
        self.step += 1
        return figures | {
            "learning_rate": rate,
            "entropy_weight": entropy_weight,
            "gradient_norm": norm,
            "skipped_steps": self._health.skipped,
            "seconds": time.perf_counter() - started,
        }

    def _compute_gradients(
        self, batch: Batch, entropy_weight: float
    ) -> tuple[dict[str, Any], float]:
        """Set every parameter's gradient of the global loss; returns the losses and its norm."""
        config = self._config
        self._split.training_mode(config.frozen_batch_norm)
        self._optimizer.zero_grad(set_to_none=True)
        loss = backward(
            self._split,
            normalize(self.model, batch.images),
            batch.sources.to(self._device),
            self._objective,
            entropy_weight,
            chunk=config.chunk,
            precision=DTYPES[config.precision],
            describe=self._describe,
            scale=self._scaler.scale if self._scaler.is_enabled() else None,
        )
        trained = [p for p in self.model.parameters() if p.grad is not None]
        self._ranks.sum_gradients(trained)
        self._scaler.unscale_(self._optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        if config.clip_norm:
            nn.utils.clip_grads_with_norm_(trained, config.clip_norm, norm)
        return {name: float(part) for name, part in loss._asdict().items()}, float(norm)

    def _warn_of_collapse(self, figures: dict[str, Any]) -> None:
        similarities = figures["positive_similarity"], figures["negative_similarity"]
        warning = self._health.collapse(*similarities)
        if warning:
            figures["warning"] = warning
            if not self._warned:
                log.warning("step %d: %s", self.step, warning)
        self._warned = bool(warning)

    def keep_start(self, validation: Validation, out: Path) -> None:
        """Measure and write the weights the run starts from: later ones must be better."""
        self.initial = self.best = self._measure(validation).micro_ap
        self.export(out)

    def validate(self, validation: Validation, out: Path) -> dict[str, float]:
        """Measure the weights that would be written; write them if they are the best so far."""
        self.score = self._measure(validation)
        if self.best is None or self.score.micro_ap > self.best:
            self.best = self.score.micro_ap
            self.export(out)
        return {
            "micro_ap": self.score.micro_ap,
            "micro_ap_raw": self.score.micro_ap_raw,
            "recall_at_p90": self.score.recall_at_p90,
        }

    def _measure(self, validation: Validation) -> Score:
        """Validate the averaged weights if there are any, else the current ones."""
        average = self._average
        with nullcontext() if average is None else average.applied_to(self.model):
            return validation(self.model)

    def export(self, out: Path) -> None:
        """Write the folder that ``Encoder.from_pretrained`` reads.

        Raises:
            OSError: It cannot be written; an earlier one and the last checkpoint stay.
        """
        weights = self._average.weights if self._average is not None else self.model.state_dict()
        try:
            write_pretrained(out, self.model.config, {n: t.cpu() for n, t in weights.items()})
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"the encoder cannot be written to {out} ({error}). The last good checkpoint "
                "stays: make room, then resume"
            ) from error

    def state(self) -> dict[str, Any]:
        """Everything needed to continue."""
        return {
            "step": self.step,
            "steps": self.steps,
            "model": self.model.state_dict(),
            "average": self._average.weights if self._average is not None else None,
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "initial": self.initial,
            "best": self.best,
            "health": self._health.state(),
            "memory": self._memory.state(),
            "config": self._config.to_dict(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state``; names the settings that differ from the saved ones."""
        now = self._config.to_dict() | {"steps": self.steps}
        before = TrainConfig.from_dict(saved["config"]).to_dict() | {"steps": saved["steps"]}
        changed = sorted(name for name in now if before[name] != now[name])
        if changed:
            log.warning("resumed with other settings than before: %s", ", ".join(changed))
        self.step, self.best = saved["step"], saved["best"]
        self.initial = saved.get("initial")
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._scaler.load_state_dict(saved["scaler"])
        self._health.load(saved["health"])
        self._memory.load(saved.get("memory"), self._device)
        if self._average is not None and saved["average"] is not None:
            self._average.load(saved["average"])


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """A seed for what the network itself draws, different on every step and rank."""
    return (seed * 1_000_003 + step * 4_099 + rank) & 0x7FFFFFFF
