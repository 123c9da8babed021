"""Train SSCD encoders: everything in the paper, on one CPU or many GPUs."""

from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.health import TrainingDiverged
from sscd_vec.trainer.trainer import Result, Trainer

__all__ = ["Result", "TrainConfig", "Trainer", "TrainingDiverged"]
