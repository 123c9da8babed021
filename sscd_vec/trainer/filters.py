"""Filters of photo programs: what ``Recipe.filter`` draws from, one per view.

Colour operations of RandAugment (Cubuk et al. 2020), and a few more that leave a picture
recognizable. Each takes one view, ``(3, s, s)`` in [0, 1], and a strength from 0 to 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)
from torchvision.transforms.v2 import functional as vision

Filter = Callable[[Tensor, float], Tensor]


def invert(image: Tensor, strength: float) -> Tensor:
    """A negative."""
    return 1 - image


def solarize(image: Tensor, strength: float) -> Tensor:
    """A negative of all that is brighter than 0.3 to 0.9."""
    return torch.where(image >= 0.9 - 0.6 * strength, 1 - image, image)


def posterize(image: Tensor, strength: float) -> Tensor:
    """9 to 2 levels of each colour."""
    steps = 8 - round(7 * strength)
    return (image * steps).round_().div_(steps)


def equalize(image: Tensor, strength: float) -> Tensor:
    """All levels equally often."""
    levels = image.mul(255).round_().to(torch.uint8)
    equal: Tensor = vision.equalize(levels)
    return equal.to(image.dtype).div_(255)


def bend(image: Tensor, strength: float) -> Tensor:
    """A gamma of 1/3 to 3."""
    return image.pow(3 ** (2 * strength - 1))


def turn_channels(image: Tensor, strength: float) -> Tensor:
    """Red becomes green or blue, and so on."""
    return image.roll(1 if strength < 0.5 else 2, dims=0)


def sharpen(image: Tensor, strength: float) -> Tensor:
    """Add 1 to 5 times what the mean of the neighbours lacks."""
    return (image + (1 + 4 * strength) * (image - _mean_of_neighbours(image))).clamp_(0, 1)


def relief(image: Tensor, strength: float) -> Tensor:
    """Half of it and more replaced by its slopes, lit from a corner."""
    slope = image - image.roll((1, 1), dims=(1, 2))
    share = 0.5 + 0.4 * strength
    return torch.lerp(image, (0.5 + 2 * slope).clamp_(0, 1), share)


FILTERS: tuple[Filter, ...] = (
    invert,
    solarize,
    posterize,
    equalize,
    bend,
    turn_channels,
    sharpen,
    relief,
)


def _mean_of_neighbours(image: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(image[None], (2, 2, 2, 2), mode="replicate"), 5, stride=1)[0]
