"""TrainConfig: everything a training run depends on, in one frozen, readable record.

The defaults are the paper's: ResNet-50, 512 dimensions, tau = 0.05, lambda = 30, LARS at
``0.3 * batch / 256``, weight decay 1e-6, 100 epochs at 224 x 224 of which five warm up.
"""

import json
import math
import os
import tomllib
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sscd_vec.encoder.config import EncoderConfig

AugmentationSet = Literal["simclr", "strong_blur", "advanced", "advanced+mixup"]
OptimizerName = Literal["lars", "adamw"]
HeadInit = Literal["random", "whitened"]
Precision = Literal["float32", "bfloat16", "float16"]
Decoded = Literal["auto", "memory", "stream"]
Crops = Literal["stored", "own"]

ADAMW_LEARNING_RATE = 3e-4
ADAMW_WEIGHT_DECAY = 1e-2
LARS_WEIGHT_DECAY = 1e-6

# Stored pixels per pixel of a view that bilinear sampling shrinks without visible aliasing.
MOST_DETAIL = 1.5

LEAST = dict.fromkeys(
    ("dim", "size", "batch", "inference_size", "keep", "log_every", "max_bad_steps"), 1
) | dict.fromkeys(
    (
        *("entropy_weight", "learning_rate", "clip_norm", "memory_gb", "stored_size", "seed"),
        *("train_gem_p", "memory"),
        *("chunk", "frozen_stages", "epochs", "steps", "validate_every", "checkpoint_every"),
    ),
    0,
)


@dataclass(frozen=True)
class TrainConfig:
    """How to train; saved beside the weights as ``train.json``.

    Attributes:
        trunk: Any trunk name ``EncoderConfig`` knows.
        dim: Descriptor size.
        head: ``"linear"`` (SSCD) or ``"mlp"`` (SimCLR).
        features: Descriptor at inference: ``"projected"`` or ``"trunk"``.
        gem_p: GeM exponent of the encoder that is written.
        train_gem_p: GeM exponent in training; 0 means ``gem_p``. Without KoLeo, average pooling in
            training (1) and GeM at inference is better.
        size: Side of the square training views, in pixels.
        inference_size: Size in the encoder that is written; the paper trains at 224 and infers at
            288.
        size_mode: How that encoder applies ``inference_size``.
        init_from: Start from an encoder folder, any released file, the name of a shipped or
            released model, or ``"imagenet"``.
        head_init: ``"random"`` starts a fresh head where ``init_from`` has none of this shape;
            ``"whitened"`` always starts from the PCA whitening of the trunk's features.
        zero_init_residual: Start residual branches at zero; a large lambda is unstable without it.
        frozen_stages: Number of trunk stages, counted from the input, that are not trained.
        frozen_batch_norm: Keep every BatchNorm at its initial running statistics.
        augmentations: One of the paper's four cumulative sets.
        recipe: Overrides of single fields of that set's ``Recipe``, such as ``{"jpeg": 0.4}``.
        fonts: Folder of fonts for text overlays; ``overlay.py`` says what is used without one.
        emoji: Folder of images for emoji overlays.
        tau: Temperature of InfoNCE.
        entropy_weight: lambda, the weight of KoLeo. 10 is a safer start for new settings.
        entropy_ramp: Fraction of the run over which lambda grows from a tenth to its full value.
        batch: Source images in the global batch (B); the loss sees 2B descriptors.
        memory: Descriptors of earlier steps' first views to use as further negatives; 0 for none.
        chunk: Views encoded at once; 0 encodes a rank's whole share. With a smaller chunk gradients
            are cached, so any batch fits.
        epochs: Passes over the images.
        steps: Optimizer steps; when not 0, used instead of ``epochs``.
        optimizer: ``"lars"`` or ``"adamw"`` (fine-tuning).
        learning_rate: Peak; 0 means ``0.3 * batch / 256`` for LARS, 3e-4 for AdamW.
        weight_decay: Negative means 1e-6 for LARS, 1e-2 for AdamW.
        exempt_norms: Spare biases and norms weight decay and LARS's adaptation, as SimCLR does;
            the authors' code spares none.
        warmup: Fraction of the run with a linearly rising learning rate.
        layer_decay: Learning rate factor per trunk stage away from the head; 1 is uniform.
        clip_norm: Largest gradient norm; 0 does not clip.
        ema: Decay of the averaged weights that are validated and written; 0 uses the raw ones.
        precision: Autocast type of the network. The losses are float32; on a GPU, unless this is
            float32, they multiply the descriptors of negatives in float16.
        exact_negatives: Multiply negatives in float32 too, at several times the cost of the loss.
        ring: Pass the processes' descriptors round instead of gathering them, for batches beyond a
            million descriptors. The loss is the same; takes no ``memory``.
        compile: Run the network through ``torch.compile``.
        seed: Fixes initial weights, order, augmentations and mixing.
        decoded: Keep decoded images in ``"memory"``, ``"stream"`` them, or decide by size.
        crops: ``"stored"`` cuts crops from images squeezed to squares of ``stored_size``: small
            crops are enlarged. ``"own"`` cuts them from the image's own pixels, as the authors do;
            images then take 3 bytes per pixel (0.9 MB at 640 x 480) or are streamed.
        stored_size: Side at which images are stored; 0 means 1.5 * ``size``. With ``crops="own"``
            the longest short side; 0 means no limit.
        memory_gb: Largest decoded set that ``"auto"`` keeps in memory.
        validation: Folder, tar or list to validate on; empty holds out training images.
        holdout: Fraction of the training images to hold out when ``validation`` is empty.
        validate_every: Steps between validations; 0 means once per epoch.
        checkpoint_every: Steps between checkpoints; 0 means twice per epoch.
        keep: Number of checkpoints kept.
        log_every: Steps between lines of ``metrics.jsonl``.
        max_bad_steps: Consecutive steps with non-finite gradients before the run stops.
    """

    trunk: str = "resnet50"
    dim: int = 512
    head: Literal["linear", "mlp"] = "linear"
    features: Literal["projected", "trunk"] = "projected"
    gem_p: float = 3.0
    train_gem_p: float = 0.0
    size: int = 224
    inference_size: int = 288
    size_mode: Literal["short", "square", "long"] = "short"
    init_from: str = ""
    head_init: HeadInit = "random"
    zero_init_residual: bool = True
    frozen_stages: int = 0
    frozen_batch_norm: bool = False
    augmentations: AugmentationSet = "advanced+mixup"
    recipe: dict[str, Any] = field(default_factory=dict)
    fonts: str = ""
    emoji: str = ""
    tau: float = 0.05
    entropy_weight: float = 30.0
    entropy_ramp: float = 0.0
    batch: int = 4096
    memory: int = 0
    chunk: int = 0
    epochs: float = 100.0
    steps: int = 0
    optimizer: OptimizerName = "lars"
    learning_rate: float = 0.0
    weight_decay: float = -1.0
    exempt_norms: bool = True
    warmup: float = 0.05
    layer_decay: float = 1.0
    clip_norm: float = 0.0
    ema: float = 0.0
    precision: Precision = "float32"
    exact_negatives: bool = False
    ring: bool = False
    compile: bool = False
    seed: int = 0
    decoded: Decoded = "auto"
    crops: Crops = "stored"
    stored_size: int = 0
    memory_gb: float = 6.0
    validation: str = ""
    holdout: float = 0.02
    validate_every: int = 0
    checkpoint_every: int = 0
    keep: int = 2
    log_every: int = 1
    max_bad_steps: int = 5

    def __post_init__(self) -> None:
        """Refuse settings that cannot train, naming the setting and the remedy."""
        for name, allowed in (
            ("augmentations", get_args(AugmentationSet)),
            ("optimizer", get_args(OptimizerName)),
            ("head_init", get_args(HeadInit)),
            ("precision", get_args(Precision)),
            ("decoded", get_args(Decoded)),
            ("crops", get_args(Crops)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {allowed}")
        for setting in fields(self):
            default = {} if setting.default is MISSING else setting.default
            _check_type(setting.name, getattr(self, setting.name), default)
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least {least}")
        if self.layer_decay <= 0:
            raise ValueError(f"layer_decay={self.layer_decay}: expected above 0; 1 is uniform")
        if self.batch < 2:
            raise ValueError("batch=1 has no negatives to contrast with: use at least 2")
        if self.tau <= 0:
            raise ValueError(
                f"tau={self.tau}: the temperature must be positive (0.05 in the paper)"
            )
        if self.ring and self.memory:
            raise ValueError(
                f"ring=true with memory={self.memory}: every process would have to hold the memory "
                "whole, which the ring avoids; set one of them"
            )
        if self.head_init == "whitened" and (self.head != "linear" or not self.init_from):
            raise ValueError(
                f"head_init='whitened' with head={self.head!r}, init_from={self.init_from!r}: "
                "expected a linear head on a trained trunk: set init_from, such as 'imagenet'"
            )
        for name in ("warmup", "entropy_ramp", "ema", "holdout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a fraction in [0, 1)")
        if self.steps < 1 and self.epochs <= 0:
            raise ValueError(f"epochs={self.epochs}, steps={self.steps}: one must be positive")
        _ = self.encoder  # refuses a head, features, GeM exponent or size mode it does not know

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder this run writes."""
        return EncoderConfig(
            trunk=self.trunk,
            dim=self.dim,
            head=self.head,
            features=self.features,
            gem_p=self.gem_p,
            size=self.inference_size,
            size_mode=self.size_mode,
        )

    @property
    def peak_learning_rate(self) -> float:
        """``learning_rate``, or the optimizer's default for this batch."""
        if self.learning_rate > 0:
            return self.learning_rate
        return 0.3 * self.batch / 256 if self.optimizer == "lars" else ADAMW_LEARNING_RATE

    @property
    def decay(self) -> float:
        """``weight_decay``, or the optimizer's default."""
        if self.weight_decay >= 0:
            return self.weight_decay
        return LARS_WEIGHT_DECAY if self.optimizer == "lars" else ADAMW_WEIGHT_DECAY

    @property
    def pixels(self) -> int:
        """Side of the squares that store decoded images."""
        return self.stored_size or round(MOST_DETAIL * self.size)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary that JSON and TOML can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> "TrainConfig":
        """Build from a dictionary; an unknown name is an error that lists the known ones.

        A value of None (JSON's ``null``) means the default.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ValueError(f"unknown training setting {unknown}: expected among {sorted(known)}")
        return cls(**{name: value for name, value in settings.items() if value is not None})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "TrainConfig":
        """Read a ``.toml`` or ``.json`` file, or the ``train.json`` inside a run's folder."""
        file = Path(path)
        if file.is_dir():
            file = file / "train.json"
        if not file.is_file():
            raise FileNotFoundError(f"no training settings at {file}: expected a .toml or .json")
        text = file.read_text()
        return cls.from_dict(tomllib.loads(text) if file.suffix == ".toml" else json.loads(text))

    def with_changes(self, **changes: Any) -> "TrainConfig":  # noqa: ANN401  (any field's type)
        """A copy with some settings changed, checked again."""
        return replace(self, **changes)


def _check_type(name: str, value: object, default: object) -> None:
    """Refuse a value whose type differs from the default's."""
    kinds: dict[type, tuple[str, tuple[type, ...]]] = {
        bool: ("true or false", (bool,)),
        int: ("a whole number", (int,)),
        float: ("a finite number", (int, float)),
        str: ("text", (str,)),
        dict: ("fields of a Recipe by name", (dict,)),
    }
    words, allowed = kinds[type(default)]
    fits = isinstance(value, allowed) and isinstance(value, bool) == isinstance(default, bool)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name}={value!r}: expected {words}, such as {default!r}")
