"""An image to model input: load, resize, scale to [0, 1], normalize.

x = (resize(pixels) / 255 - mean) / std, resized bilinearly with antialiasing, on eight bits like
the images the models were trained on.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.images import ImageInput, Pixels, load_pixels


def prepare(
    source: ImageInput,
    name: str,
    config: EncoderConfig,
    *,
    exact: bool = False,
    load: Callable[..., Pixels] = load_pixels,
) -> Tensor:
    """Load an image and resize it to the model's size: uint8 ``(h, w, 3)``.

    Args:
        source: The image.
        name: What to call it in an error.
        config: Names the size.
        exact: Decode every pixel of a JPEG that will be resized to a fraction.
        load: ``load_pixels``, or another that does the same elsewhere.

    Raises:
        ImageError: It is not a usable image.
    """
    reduce_to = None if exact else (lambda height, width: target_size(height, width, config))
    return resize(load(source, name=name, reduce_to=reduce_to), config)


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
    """Turn images into the model's input: float32 ``(n, 3, h, w)``, channels_last.

    ``x·scale + shift`` with ``scale = 1 / (white·std)`` and ``shift = -mean / std``

    Args:
        images: uint8 ``(n, h, w, 3)`` (white is 255), or float ``(n, 3, h, w)`` (white is 1).
        config: Names mean and std.
    """
    white = 255 if images.dtype == torch.uint8 else 1
    mean, std = torch.tensor(config.mean), torch.tensor(config.std)
    scale, shift = (1 / (white * std)).to(images.device), (-mean / std).to(images.device)
    if white == 1:
        normal = torch.addcmul(shift[:, None, None], images.float(), scale[:, None, None])
        return normal.contiguous(memory_format=torch.channels_last)
    n, height, width, _ = images.shape
    # One value per channel, repeated along a row: the inner loop is a row long, not three values.
    rows = torch.addcmul(
        shift.repeat(width), images.reshape(n, height, 3 * width).float(), scale.repeat(width)
    )
    return rows.view(n, height, width, 3).permute(0, 3, 1, 2)


def preprocess(pixels: Pixels, config: EncoderConfig) -> Tensor:
    """Turn the pixels of one image into a model input of batch size one."""
    return normalize(resize(pixels, config)[None], config)
