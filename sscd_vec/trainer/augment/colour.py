"""Colours and texture: colour jitter, grayscale, blur, noise, JPEG, and one-click filters.

The jitter and the blur work on a group of views at once; everything else on one view, ``(3, s, s)``
in [0, 1].
"""

import io
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)
from torchvision.transforms.v2 import functional as vision

LUMA = (0.299, 0.587, 0.114)
# YIQ: hue is a rotation of the (I, Q) plane, so all of the jitter is linear in RGB.
RGB_TO_YIQ = torch.tensor([LUMA, (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135)])
YIQ_TO_RGB = torch.linalg.inv(RGB_TO_YIQ.double()).float()

Filter = Callable[[Tensor, float], Tensor]

_TORCHVISION: tuple[Filter, ...] = (
    vision.adjust_brightness,
    vision.adjust_contrast,
    vision.adjust_saturation,
    vision.adjust_hue,
)


def recolour(images: Tensor, factors: Tensor, order: Tensor, grayscale: Tensor) -> Tensor:
    """Colour jitter in each view's own order, then grayscale: ``clamp(A x + b)``.

    Brightness ``f x``; contrast ``f x + (1 - f) mean(luma)``; saturation
    ``f x + (1 - f) luma``; hue a rotation of the IQ plane. All are linear, so they become one
    matrix per view, clamped once at the end. ``jitter_exactly`` is torchvision's version.

    Args:
        images: (n, 3, s, s) in [0, 1].
        factors: (n, 4) brightness, contrast, saturation, and turns of hue; 1, 1, 1, 0 is off.
        order: (n, 4) the order in which these four apply.
        grayscale: (n,) whether a view ends in grayscale.
    """
    luma = torch.tensor(LUMA, device=images.device)
    gray, identity = luma.expand(3, 3), torch.eye(3, device=images.device)
    linear = _jitter_matrices(factors, gray, identity)
    means = images.mean(dim=(2, 3))  # (n, 3)
    matrix = identity.repeat(len(images), 1, 1)
    shift = torch.zeros_like(means)
    rows = torch.arange(len(images), device=images.device)
    for kind in order.unbind(1):
        now = linear[rows, kind]
        mean_luma = ((matrix @ means[:, :, None]).squeeze(2) + shift) @ luma
        offset = torch.where(kind == 1, (1 - factors[:, 1]) * mean_luma, 0.0)
        matrix = now @ matrix
        shift = (now @ shift[:, :, None]).squeeze(2) + offset[:, None]
    last = torch.where(grayscale.bool()[:, None, None], gray, identity)
    flat = torch.baddbmm(last @ shift[:, :, None], last @ matrix, images.flatten(2))
    return flat.clamp_(0, 1).view_as(images)


def jitter_exactly(image: Tensor, factors: Sequence[float], order: Sequence[int]) -> Tensor:
    """Colour jitter of one view as torchvision's ``ColorJitter`` does it.

    It clamps after each operation and turns hue in HSV (and the other way round, which a range
    around 0 makes irrelevant). Slower than ``recolour``.
    """
    for kind in order:
        image = _TORCHVISION[kind](image, factors[kind])
    return image


def _jitter_matrices(factors: Tensor, gray: Tensor, identity: Tensor) -> Tensor:
    """The linear parts (n, 4, 3, 3) of brightness, contrast, saturation and hue."""
    brightness, contrast, saturation, hue = factors[:, :, None, None].unbind(1)
    turn = hue.flatten() * (2 * math.pi)
    rotation = torch.zeros(len(factors), 3, 3, device=factors.device)
    rotation[:, 0, 0] = 1
    rotation[:, 1, 1] = rotation[:, 2, 2] = turn.cos()
    rotation[:, 1, 2], rotation[:, 2, 1] = -turn.sin(), turn.sin()
    return torch.stack(
        [
            brightness * identity,
            contrast * identity,
            saturation * identity + (1 - saturation) * gray,
            YIQ_TO_RGB.to(factors.device) @ rotation @ RGB_TO_YIQ.to(factors.device),
        ],
        dim=1,
    )


def blur(images: Tensor, sigmas: Tensor) -> Tensor:
    """Gaussian blur with each view's own sigma and mirrored edges: ``K X K^T``.

    ``K[i, j] = g(i - j) + g(i + j) + g(2 (s - 1) - i - j)`` for a side s: the Gaussian g of a
    pixel and of its mirror images, rows scaled to sum 1. Mirroring does not repeat the edge, so
    edge pixels have no mirror image of their own. On small squares two matrix products beat a
    convolution with a kernel per view.
    """
    side = images.shape[-1]
    last = side - 1
    distance = torch.arange(2 * side - 1, device=images.device, dtype=images.dtype)
    gauss = torch.exp(-0.5 * (distance / sigmas[:, None]).square())  # (n, 2 side - 1)
    # Toeplitz and Hankel matrices are strided views of one row.
    both_ways = torch.cat([gauss[:, 1:side].flip(1), gauss[:, :side]], dim=1)
    kernel = both_ways.unfold(1, side, 1).flip(1).clone()  # g(i - j)
    mirrored = gauss.unfold(1, side, 1)  # g(i + j)
    kernel[:, :, 1:] += mirrored[:, :, 1:]
    kernel[:, :, :last] += mirrored.flip(1, 2)[:, :, :last]
    kernel = (kernel / kernel.sum(dim=2, keepdim=True))[:, None]  # (n, 1, side, side)
    return kernel @ images @ kernel.transpose(2, 3)


def add_noise(image: Tensor, sigma: float, seed: int) -> Tensor:
    """Add noise: Gaussian for an even seed; for an odd one, salt and pepper.

    Salt and pepper turn a fraction ``sigma / 2`` of the pixels black or white.
    """
    random = torch.Generator().manual_seed(seed)
    if seed % 2:
        draw = torch.rand(image.shape[1:], generator=random, dtype=image.dtype).to(image.device)
        return torch.where(draw < sigma / 2, (draw < sigma / 4).to(image.dtype), image)
    noise = torch.randn(image.shape, generator=random, dtype=image.dtype)
    return noise.to(image.device).mul_(sigma).add_(image).clamp_(0, 1)


def pixelize(image: Tensor, cells: int) -> Tensor:
    """Replace ``cells x cells`` squares by their mean colours."""
    size = image.shape[-1]
    means = F.interpolate(image[None], size=(min(cells, size),) * 2, mode="area")
    return F.interpolate(means, size=(size, size), mode="nearest")[0]


def compress(image: Tensor, quality: int) -> Tensor:
    """Compress to JPEG and back; libjpeg treats quality 0 as 1."""
    file = io.BytesIO()
    to_pil(image).save(file, "JPEG", quality=max(quality, 1))
    decoded = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)
    return decoded.to(image.device, image.dtype).div_(255)


def to_pil(image: Tensor) -> Image.Image:
    """Turn a view into a Pillow image."""
    return Image.fromarray(image.mul(255).round_().to(torch.uint8).permute(1, 2, 0).cpu().numpy())


def random_colour(random: np.random.Generator, like: Tensor) -> Tensor:
    """Black, white or any colour, (3,), each a third of the time."""
    kind = int(random.integers(3))
    colour = random.random(3) if kind == 2 else np.full(3, float(kind))
    return torch.from_numpy(colour).to(like.device, like.dtype)


def invert(image: Tensor, strength: float) -> Tensor:
    """Turn into a negative."""
    return 1 - image


def solarize(image: Tensor, strength: float) -> Tensor:
    """Invert everything brighter than a threshold of 0.9 down to 0.3."""
    return torch.where(image >= 0.9 - 0.6 * strength, 1 - image, image)


def posterize(image: Tensor, strength: float) -> Tensor:
    """Reduce each channel to 9 down to 2 levels."""
    steps = 8 - round(7 * strength)
    return (image * steps).round_().div_(steps)


def equalize(image: Tensor, strength: float) -> Tensor:
    """Equalize the histogram of each channel."""
    levels = image.mul(255).round_().to(torch.uint8)
    equal: Tensor = vision.equalize(levels)
    return equal.to(image.dtype).div_(255)


def adjust_gamma(image: Tensor, strength: float) -> Tensor:
    """Apply a gamma of 1/3 to 3."""
    return image.pow(3 ** (2 * strength - 1))


def roll_channels(image: Tensor, strength: float) -> Tensor:
    """Move red to green or to blue, and so on."""
    return image.roll(1 if strength < 0.5 else 2, dims=0)


def sharpen(image: Tensor, strength: float) -> Tensor:
    """Add 1 to 5 times the difference from the neighbours' mean."""
    return (image + (1 + 4 * strength) * (image - _mean_of_neighbours(image))).clamp_(0, 1)


def relief(image: Tensor, strength: float) -> Tensor:
    """Replace 50 to 90 % of the view by its slopes, lit from a corner."""
    slope = image - image.roll((1, 1), dims=(1, 2))
    share = 0.5 + 0.4 * strength
    return torch.lerp(image, (0.5 + 2 * slope).clamp_(0, 1), share)


# What ``Recipe.filter`` draws from: colour operations of RandAugment (Cubuk et al. 2020) and some
# more that leave an image recognizable. Strengths go from 0 to 1.
FILTERS: tuple[Filter, ...] = (
    invert,
    solarize,
    posterize,
    equalize,
    adjust_gamma,
    roll_channels,
    sharpen,
    relief,
)


def _mean_of_neighbours(image: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(image[None], (2, 2, 2, 2), mode="replicate"), 5, stride=1)[0]
