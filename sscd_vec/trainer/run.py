"""Run: everything that changes while training, and the one step that changes it."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sscd_vec.encoder.backends import require_bfloat16
from sscd_vec.encoder.checkpoint import write_pretrained
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.trainer.average import AverageWeights
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.distributed import Ranks, synchronize_batch_norm
from sscd_vec.trainer.health import Health
from sscd_vec.trainer.initial import initial_model
from sscd_vec.trainer.lars import LARS
from sscd_vec.trainer.losses import Objective, backward
from sscd_vec.trainer.mix import Batch
from sscd_vec.trainer.pixels import PixelSource
from sscd_vec.trainer.schedule import entropy_factor, learning_rate_factor
from sscd_vec.trainer.stages import SplitModel, parameter_groups
from sscd_vec.trainer.validation import Score, Validation
from sscd_vec.trainer.whitened_head import whiten_head

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A float16 scaler starts at 2**16 and halves at every overflow: that many are no failure.
SCALER_HALVINGS = 16


class Run:
    """A model being trained.

    Attributes:
        model: The model.
        step: Steps taken.
        best: Best validation µAP so far.
        score: The last validation.
    """

    def __init__(self, config: TrainConfig, device: torch.device, ranks: Ranks, steps: int) -> None:
        """Build model and optimizer; ``steps`` is the length of the whole run."""
        if config.precision == "bfloat16":
            require_bfloat16("torch", device)
        self._config, self._device, self._ranks, self._steps = config, device, ranks, steps
        self.model = initial_model(config).to(device)
        for tensor in self.model.parameters():
            if tensor.ndim == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        self._split = SplitModel(self.model, config.frozen_stages)
        if ranks.count > 1 and not config.frozen_batch_norm:
            synchronize_batch_norm(self._split.trained, device.type)
        self._optimizer = _optimizer(self.model, config)
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self._average = AverageWeights(self.model, config.ema) if config.ema else None
        self._objective = Objective(config.tau, ranks)
        patience = config.max_bad_steps + (SCALER_HALVINGS if self._scaler.is_enabled() else 0)
        self._health = Health(patience)
        describe: Callable[[Tensor, torch.dtype], Tensor] = self._split.describe
        self._describe = torch.compile(describe) if config.compile else describe
        self._warned = False
        self.step = 0
        self.best: float | None = None
        self.score: Score | None = None

    def whiten_head(self, photos: PixelSource) -> None:
        """Start the head as the whitening of the trunk's features of these photos."""
        whiten_head(self.model, photos, self._config.size, self._ranks)
        if self._average is not None:
            self._average.load(self.model.state_dict())

    def take_step(self, batch: Batch) -> dict[str, Any]:
        """Train on one batch; returns what to log about it.

        Raises:
            TrainingDiverged: Gradients stayed non-finite.
        """
        config, started = self._config, time.perf_counter()
        torch.manual_seed(_dropout_seed(config.seed, self.step, self._ranks.rank))
        self._split.training_mode(config.frozen_batch_norm)
        rate = config.peak_learning_rate * learning_rate_factor(
            self.step, self._steps, round(config.warmup * self._steps)
        )
        entropy_weight = config.entropy_weight * entropy_factor(
            self.step, self._steps, config.entropy_ramp
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self._optimizer.zero_grad(set_to_none=True)
        statistics = {n: t.clone() for n, t in self.model.named_buffers()}
        loss = backward(
            self._split,
            self._normalized(batch.images),
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
        if self._health.gradient_is_fine(float(norm), self.step, entropy_weight):
            self._scaler.step(self._optimizer)
            if self._average is not None:
                self._average.update(self.model, self.step)
        else:
            # What made the gradient non-finite may have reached BatchNorm's statistics too.
            for name, tensor in self.model.named_buffers():
                tensor.copy_(statistics[name])
        self._scaler.update()
        figures: dict[str, Any] = {name: float(part) for name, part in loss._asdict().items()}
        warning = self._health.collapse(
            figures["positive_similarity"], figures["negative_similarity"]
        )
        if warning:
            figures["warning"] = warning
            if not self._warned:
                log.warning("step %d: %s", self.step, warning)
        self._warned = bool(warning)
        self.step += 1
        return figures | {
            "learning_rate": rate,
            "entropy_weight": entropy_weight,
            "gradient_norm": float(norm),
            "skipped_steps": self._health.skipped,
            "seconds": time.perf_counter() - started,
        }

    def validate(self, validation: Validation, out: Path) -> dict[str, float]:
        """Measure the weights that would be written; write them if they are the best so far."""
        self.score = self.measure(validation)
        if self.best is None or self.score.micro_ap > self.best:
            self.best = self.score.micro_ap
            self.export(out)
        return {
            "micro_ap": self.score.micro_ap,
            "micro_ap_raw": self.score.micro_ap_raw,
            "recall_at_p90": self.score.recall_at_p90,
        }

    def measure(self, validation: Validation) -> Score:
        """Validate the averaged weights if there are any, else the current ones."""
        if self._average is None:
            return validation(self.model)
        current = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self._average.weights)
        try:
            return validation(self.model)
        finally:
            self.model.load_state_dict(current)

    def export(self, out: Path) -> None:
        """Write the folder ``Encoder.from_pretrained`` reads.

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
            "steps": self._steps,
            "model": self.model.state_dict(),
            "average": self._average.weights if self._average is not None else None,
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "best": self.best,
            "health": self._health.state(),
            "config": self._config.to_dict(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from ``state``; settings that differ from the saved ones are named."""
        now = self._config.to_dict() | {"steps": self._steps}
        before = saved["config"] | {"steps": saved["steps"]}
        changed = sorted(name for name in now if before.get(name) != now[name])
        if changed:
            log.warning("resumed with other settings than before: %s", ", ".join(changed))
        self.step, self.best = saved["step"], saved["best"]
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._scaler.load_state_dict(saved["scaler"])
        self._health.load(saved["health"])
        if self._average is not None and saved["average"] is not None:
            self._average.load(saved["average"])

    def _normalized(self, images: Tensor) -> Tensor:
        """``(x - mean) / std``, channels_last."""
        encoder = self.model.config
        mean = torch.tensor(encoder.mean, device=self._device)[:, None, None]
        std = torch.tensor(encoder.std, device=self._device)[:, None, None]
        normal = (images.to(self._device) - mean).div_(std)
        return normal.contiguous(memory_format=torch.channels_last)


def _optimizer(model: SSCDModel, config: TrainConfig) -> torch.optim.Optimizer:
    groups = parameter_groups(model, config.decay, config.layer_decay)
    if config.optimizer == "lars":
        return LARS(groups, lr=0.0)
    return torch.optim.AdamW(groups, lr=0.0)


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """A seed for what the network itself draws, different on every step and rank."""
    return (seed * 1_000_003 + step * 4_099 + rank) & 0x7FFFFFFF
