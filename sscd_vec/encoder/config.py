"""What an encoder is: its trunk, its head and how pixels become its input."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Head = Literal["linear", "mlp"]
Features = Literal["projected", "trunk"]
SizeMode = Literal["short", "square", "long"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# A larger image or descriptor has no use; in a file it is a mistake, or meant to exhaust memory.
MOST_SIZE = 4096
MOST_DIM = 65536


@dataclass(frozen=True)
class EncoderConfig:
    """Everything but the weights: architecture and preprocessing.

    Attributes:
        trunk: ``resnet18``, ``resnet50``, ``resnext101_32x4d``, ``efficientnet_lite0`` … ``4``, or
            the name of any torchvision CNN or ViT.
        dim: Size of the projected descriptor, at most 65536.
        head: ``linear``, the paper's projection, or ``mlp``, SimCLR's two layers.
        features: What the descriptor is at inference: the ``projected`` features, or those of the
            ``trunk`` with the head left out (SimCLR's way).
        gem_p: Exponent of the generalized-mean pooling: 1 is the mean, a large one the maximum.
        size: Side in pixels that ``size_mode`` names, at most 4096.
        size_mode: ``short`` or ``long`` side resized to ``size`` with the aspect ratio kept, or a
            skewed ``square``.
        mean: Per-channel mean subtracted from RGB in [0, 1].
        std: Per-channel deviation divided by.
    """

    trunk: str = "resnet50"
    dim: int = 512
    head: Head = "linear"
    features: Features = "projected"
    gem_p: float = 3.0
    size: int = 288
    size_mode: SizeMode = "short"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        """Refuse fields that no model can have, by name."""
        if not isinstance(self.trunk, str) or not self.trunk:
            raise ValueError(f"trunk must be the name of an architecture, got {self.trunk!r}")
        for name, most in (("dim", MOST_DIM), ("size", MOST_SIZE)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be an integer from 1 to {most}, got {value!r}")
        for name, kind in (("head", Head), ("features", Features), ("size_mode", SizeMode)):
            if getattr(self, name) not in get_args(kind):
                known = " | ".join(get_args(kind))
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        object.__setattr__(self, "gem_p", _number("gem_p", self.gem_p))
        if self.gem_p <= 0:
            raise ValueError(
                f"gem_p must be above 0 (1 is the mean, 3 the paper), got {self.gem_p}"
            )
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 3:
                raise ValueError(f"{name} must be three numbers (red, green, blue), got {value!r}")
            object.__setattr__(self, name, tuple(_number(name, number) for number in value))
        if min(self.std) <= 0:
            raise ValueError(f"std must be above 0 in every channel, got {self.std}")

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict that JSON can hold."""
        plain = asdict(self)
        plain["mean"], plain["std"] = list(self.mean), list(self.std)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "EncoderConfig":
        """Build a config from ``to_dict``'s output; absent fields take their defaults.

        Raises:
            ValueError: A field is unknown or its value cannot be used.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(plain) - set(known))
        if unknown:
            raise ValueError(
                f"unknown encoder config field(s) {', '.join(map(repr, unknown))}; known: "
                f"{', '.join(known)}. A file of a newer sscd-vec needs that version to read it."
            )
        return cls(**plain)

    def replace(self, **changes: object) -> "EncoderConfig":
        """Return a copy with some fields changed."""
        return self.from_dict({**self.to_dict(), **changes})

    @classmethod
    def vit_baseline(cls, trunk: str = "vit_b_16") -> "EncoderConfig":
        """The paper's DINO baseline: CLS ⊕ GeM(p=4) of the patch tokens, 224×224 without crop."""
        return cls(trunk=trunk, features="trunk", gem_p=4.0, size=224, size_mode="square")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)
