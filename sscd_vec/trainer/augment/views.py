"""Apply chosen edits to a batch of images, as tensor operations over groups of views.

Flip, turns, rotation and crop are one bilinear resample (``geometry.py``); colour jitter and
grayscale one 3 x 4 matrix per view; blur two matrix products. Every other edit touches only the few
views that drew it. Nothing here is random: ``choices.py`` has drawn everything.

mixup (Zhang et al. 2018): ``gamma a + (1 - gamma) b``. cutmix (Yun et al. 2019): a square of b,
``1 - gamma`` of the area, replaces the same square of a. A mixed view has two sources, and so has a
view that another one was pasted into.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.trainer.augment.choices import CUTMIX, MIXUP, NO_JITTER, NO_MIX, Choices
from sscd_vec.trainer.augment.colour import (
    FILTERS,
    add_noise,
    blur,
    compress,
    jitter_exactly,
    pixelize,
    recolour,
)
from sscd_vec.trainer.augment.compose import compose
from sscd_vec.trainer.augment.distort import distort
from sscd_vec.trainer.augment.geometry import (
    Views,
    as_tensor,
    cut_box,
    pixel_centres,
    resample,
    resample_own,
    views_of,
)
from sscd_vec.trainer.augment.overlay import Overlays, paste_overlays, scribble

GROUP = 64  # views at once: enough to fill the vector units, few enough to stay in cache
BLUR_SIZE = 224  # blur sigmas are pixels at this image size, and scale with the training size


class Batch(NamedTuple):
    """What a rank trains on: views ``(n, 3, s, s)`` and their sources, int64 ``(n, 2)``."""

    images: Tensor
    sources: Tensor


def augment(
    pixels: Tensor | Sequence[Tensor],
    aspects: npt.NDArray[np.float32],
    choices: Choices,
    size: int,
    overlays: Overlays,
    rows: npt.NDArray[np.int64] | None = None,
    insets: Tensor | None = None,
    fillers: Tensor | None = None,
) -> Tensor:
    """Edit images into training views.

    Args:
        pixels: uint8 ``(m, side, side, 3)``, or m images ``(h, w, 3)`` of any shape, on the device
            to work on.
        aspects: (m,) width / height of each image before it was stored.
        choices: The edits of n views.
        size: Side of the views.
        overlays: Fonts and emoji.
        rows: (n,) the image of each view; None if m = n, one view each.
        insets: (n, 3, size, size) finished views, pasted into these where ``cut_box`` says before
            colour, text and later edits.
        fillers: (k, 3, size, size) other images for composed views; None composes nothing.

    Returns:
        float32 ``(n, 3, size, size)`` in [0, 1].
    """
    rows = np.arange(len(choices)) if rows is None else rows
    views = []
    for start in range(0, len(choices), GROUP):
        here = np.arange(start, min(start + GROUP, len(choices)))
        chosen = choices.take(here)
        looks = views_of(chosen, aspects[rows[here]])
        images = _look(pixels, rows[here], looks, size)
        inset = None if insets is None else insets[start : start + GROUP]
        views.append(_edit(images, looks, chosen, overlays, inset, fillers))
    return torch.cat(views)


def mix(
    views: Tensor,
    sources: npt.NDArray[np.int64],
    choices: Choices,
    rows: npt.NDArray[np.int64],
    partners: npt.NDArray[np.int64],
) -> Batch:
    """Apply mixup and cutmix.

    Partners are taken before they are mixed themselves, so a view never has three sources.

    Args:
        views: (m, 3, s, s) unmixed views, insets already pasted.
        sources: (m,) the image of each.
        choices: The choices of the n views wanted.
        rows: (n,) index of each wanted view in ``views``.
        partners: (n,) index of its partner; read only for mixed views.

    Returns:
        The n views, mixed as chosen, and their sources; an unmixed view repeats its own.
    """
    images = views[torch.from_numpy(rows).to(views.device)]
    for i in np.flatnonzero((choices.mix == MIXUP) | (choices.mix == CUTMIX)):
        other = views[partners[i]]
        gamma = float(choices.gamma[i])
        if choices.mix[i] == MIXUP:
            images[i] = gamma * views[rows[i]] + (1 - gamma) * other
        else:
            box = cut_box(gamma, choices.cut_place[i], images.shape[-1])
            images[i][box] = other[box]
    mixed = choices.mix != NO_MIX
    first = sources[rows]
    second = np.where(mixed, sources[np.where(mixed, partners, 0)], first)
    return Batch(images, torch.from_numpy(np.stack([first, second], axis=1)).to(views.device))


def _look(
    pixels: Tensor | Sequence[Tensor], rows: npt.NDArray[np.int64], looks: Views, size: int
) -> Tensor:
    """Views before any edit but flip, turns, rotation and crop."""
    if not isinstance(pixels, Tensor):
        return resample_own([pixels[row] for row in rows], looks.to_image, size)
    stored = pixels[torch.from_numpy(rows).to(pixels.device)]
    return resample(stored.permute(0, 3, 1, 2).float().div_(255), looks.to_image, size)


def _edit(
    images: Tensor,
    looks: Views,
    choices: Choices,
    overlays: Overlays,
    insets: Tensor | None,
    fillers: Tensor | None,
) -> Tensor:
    """Everything after the resample, in order."""
    size = images.shape[-1]
    _lay_on_canvas(images, looks, choices)
    if insets is not None:
        _paste_insets(images, insets, choices)
    if fillers is not None:
        for row in np.flatnonzero(choices.compose >= 0):
            images[row] = compose(images[row], fillers, int(choices.compose[row]))
    paste_overlays(images, looks, choices, overlays)
    for row in np.flatnonzero(choices.scribble >= 0):
        layer = as_tensor(scribble(int(choices.scribble[row]), size), images).permute(2, 0, 1)
        images[row].mul_(1 - layer[3]).add_(layer[:3])
    images = _recolour(images, choices)
    for row in np.flatnonzero(choices.filter >= 0):
        images[row] = FILTERS[choices.filter[row]](images[row], float(choices.filter_strength[row]))
    for row, slot in np.argwhere(choices.distort >= 0):
        images[row] = distort(images[row], int(choices.distort[row, slot]))
    _blur_some(images, choices.blur_sigma * (size / BLUR_SIZE))
    for row in np.flatnonzero(choices.noise_sigma > 0):
        sigma, seed = float(choices.noise_sigma[row]), int(choices.noise[row])
        images[row] = add_noise(images[row], sigma, seed)
    for row in np.flatnonzero(choices.cells > 0):
        images[row] = pixelize(images[row], int(choices.cells[row]))
    for row in np.flatnonzero(choices.jpeg >= 0):
        images[row] = compress(images[row], int(choices.jpeg[row]))
    return images


def _recolour(images: Tensor, choices: Choices) -> Tensor:
    """Colour jitter and grayscale: one matrix per view, or torchvision's operations."""
    factors = choices.colour
    exact = np.flatnonzero((choices.exact_jitter == 1) & (factors != NO_JITTER).any(axis=1))
    if len(exact):
        factors = factors.copy()
        factors[exact] = NO_JITTER
        for row in exact:
            edits = choices.colour[row].tolist(), choices.colour_order[row].tolist()
            images[row] = jitter_exactly(images[row], *edits)
    arrays = factors, choices.colour_order, choices.grayscale
    return recolour(images, *(torch.from_numpy(array).to(images.device) for array in arrays))


def _lay_on_canvas(images: Tensor, looks: Views, choices: Choices) -> None:
    """Fill what lies outside the crop or the image with the canvas colour."""
    centres = pixel_centres(images.shape[-1], images.device)
    for row in np.flatnonzero(choices.zoom[:, 0] > 0):
        maps = as_tensor(np.concatenate([looks.to_crop[row], looks.to_image[row]]), images)
        outside = ((centres @ maps.T).abs() > 1).any(dim=2)
        ground = as_tensor(choices.ground[row], images)[:, None, None]
        images[row] = torch.where(outside, ground, images[row])


def _paste_insets(images: Tensor, insets: Tensor, choices: Choices) -> None:
    """Shrink each inset into its view's square."""
    for image, inset, gamma, place in zip(
        images, insets, choices.gamma.tolist(), choices.cut_place, strict=True
    ):
        part = image[cut_box(gamma, place, image.shape[-1])]
        part[:] = F.interpolate(inset[None], part.shape[1:], mode="bilinear", antialias=True)[0]


def _blur_some(images: Tensor, sigmas: npt.NDArray[np.float32]) -> None:
    rows = torch.from_numpy(np.flatnonzero(sigmas > 0)).to(images.device)
    if len(rows):
        images[rows] = blur(images[rows], torch.from_numpy(sigmas).to(images.device)[rows])
