"""Pixels to model input: resize, scale to [0, 1], normalize.

x = (resize(pixels) / 255 - mean) / std, resized bilinearly with antialiasing, on eight bits like
the images the models were trained on.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.images import Pixels


def target_size(height: int, width: int, config: EncoderConfig) -> tuple[int, int]:
    """Height and width an image of ``height`` × ``width`` is resized to.

    ``short``: the short side becomes ``size``, the long one ``⌊size · long / short⌋``, as
    torchvision's ``Resize`` has it; ``long``: the long side becomes ``size``; ``square``: both do.
    """
    size = config.size
    if config.size_mode == "square":
        return size, size
    fixed = min(height, width) if config.size_mode == "short" else max(height, width)
    return max(1, size * height // fixed), max(1, size * width // fixed)


def resize(pixels: Pixels, config: EncoderConfig) -> Tensor:
    """Resize ``(h, w, 3)`` uint8 pixels to the model's size; still uint8 and ``(h', w', 3)``."""
    height, width = target_size(pixels.shape[0], pixels.shape[1], config)
    image = torch.from_numpy(pixels if pixels.flags.writeable else np.array(pixels))
    if (height, width) == pixels.shape[:2]:
        return image
    # A permuted view is channels_last in memory: torch's vectorized path for uint8, within one
    # level of Pillow's result and several times faster.
    resized = F.interpolate(
        image.permute(2, 0, 1)[None], size=(height, width), mode="bilinear", antialias=True
    )
    return resized[0].permute(1, 2, 0).contiguous()


def normalize(images: Tensor, config: EncoderConfig) -> Tensor:
    """Turn uint8 ``(n, h, w, 3)`` into the model's input: float32 ``(n, 3, h, w)``, channels_last.

    ``x / (255·std) - mean / std``
    """
    n, height, width, _ = images.shape
    mean, std = torch.tensor(config.mean), torch.tensor(config.std)
    # One value per channel, repeated along a row: the inner loop is a row long, not three values.
    scale = (1 / (255 * std)).repeat(width).to(images.device)
    shift = (-mean / std).repeat(width).to(images.device)
    rows = torch.addcmul(shift, images.reshape(n, height, 3 * width).float(), scale)
    return rows.view(n, height, width, 3).permute(0, 3, 1, 2)


def split_pixels(images: Tensor, most: int, least_parts: int = 1) -> tuple[Tensor, ...]:
    """Cut a batch of either layout into even parts of at most ``most`` pixels, or one image."""
    pixels = images[:1].numel() // 3
    parts = min(len(images), max(least_parts, -(-len(images) * pixels // most)))
    return torch.chunk(images, max(1, parts))


def preprocess(pixels: Pixels, config: EncoderConfig) -> Tensor:
    """Turn the pixels of one image into a model input of batch size one."""
    return normalize(resize(pixels, config)[None], config)
