"""Train SSCD encoders as in the paper, on one CPU or many GPUs."""

from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.loop import Result, Trainer
from sscd_vec.trainer.run import TrainingDiverged

__all__ = ["Result", "TrainConfig", "Trainer", "TrainingDiverged"]
