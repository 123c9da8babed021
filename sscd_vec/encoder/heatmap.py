"""Which part of one image matches another: the descriptor map before pooling, against a descriptor.

The paper's appendix on visualizing matches: GeM is left out, so each place of A's activation map
keeps a descriptor of its own, d_hw = g(max(f_hw, ε)) / ‖…‖ with g the projection. Its similarity to
B's global descriptor, d_hw·z_B, is a map of where B is found in A.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional as F  # noqa: N812

from sscd_vec.encoder.images import ImageInput, Pixels, load_pixels
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.preprocess import preprocess

# From no match to a strong one: the paper's blue and yellow, with green between.
_COLOURS = np.array([(24, 32, 140), (32, 144, 140), (250, 230, 36)], np.float32)
_FLOOR = 1e-6


@torch.inference_mode()
def match_heatmap(
    model: SSCDModel, image: Pixels, other: Pixels, device: torch.device | None = None
) -> NDArray[np.float32]:
    """Compare every place of ``image`` with the whole of ``other``.

    Args:
        model: Gives the descriptors, as it is: on ``device``, in eval mode.
        image: Pixels ``(h, w, 3)`` to map.
        other: Pixels of the image to look for.
        device: Where to compute; the CPU by default.

    Returns:
        Cosine similarities, float32 ``(h, w)``: the map's, interpolated bilinearly over ``image``.
    """
    descriptor = model(preprocess(other, model.config).to(device or "cpu"))  # (1, d)
    places = model.descriptor_map(preprocess(image, model.config).to(device or "cpu"))
    similarity = torch.einsum("nhwd,nd->nhw", places, descriptor)
    height, width = image.shape[:2]
    full = F.interpolate(
        similarity[:, None], size=(height, width), mode="bilinear", align_corners=False
    )
    result: NDArray[np.float32] = full[0, 0].float().cpu().numpy()
    return result


def paint_heatmap(
    image: ImageInput, heat: NDArray[np.float32], *, strength: float = 0.6, top: float | None = None
) -> Image.Image:
    """Lay a heatmap over its image: blue is neutral or negative, yellow a strong match.

    Args:
        image: The image ``heat`` was made of.
        heat: From ``Encoder.heatmap``, ``(h, w)``.
        strength: How much of the colour covers the image, 0 to 1.
        top: Similarity that is pure yellow; the map's largest by default.

    Returns:
        An image of the same size.

    Raises:
        ValueError: The heatmap and the image differ in size.
    """
    pixels = load_pixels(image)
    if heat.shape != pixels.shape[:2]:
        raise ValueError(
            f"the heatmap is {heat.shape}, the image {pixels.shape[:2]}: pass the image it is of"
        )
    highest = float(heat.max()) if top is None else top
    level = np.clip(heat / max(highest, _FLOOR), 0, 1) * (len(_COLOURS) - 1)
    below = np.minimum(level.astype(np.int64), len(_COLOURS) - 2)
    part = (level - below)[..., None]
    colours = _COLOURS[below] * (1 - part) + _COLOURS[below + 1] * part
    blended = pixels * (1 - strength) + colours * strength
    return Image.fromarray(np.rint(blended).astype(np.uint8))
