"""Mixup and cutmix per view, with the sources that make the losses see both.

mixup (Zhang et al. 2018): ``gamma a + (1 - gamma) b``. cutmix (Yun et al. 2019): a square of
b, of ``1 - gamma`` of the area, put into a at the same place. A mixed view has two sources, and so
has one that another was pasted into (``augment.py``).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sscd_vec.trainer.geometry import cut_box
from sscd_vec.trainer.recipe import CUTMIX, MIXUP, NO_MIX, Choices


class Batch(NamedTuple):
    """What a rank trains on: views ``(n, 3, s, s)`` and their sources int64 ``(n, 2)``."""

    images: Tensor
    sources: Tensor


def mix(
    views: Tensor,
    sources: npt.NDArray[np.int64],
    choices: Choices,
    rows: npt.NDArray[np.int64],
    partners: npt.NDArray[np.int64],
) -> Batch:
    """Mix some views with their partners.

    Partners are taken before they are mixed themselves, so a view never has three sources.

    Args:
        views: (m, 3, s, s) unmixed views; what is pasted into them is there already.
        sources: (m,) the photo of each.
        choices: The choices of the n views wanted.
        rows: (n,) where each view wanted stands in ``views``.
        partners: (n,) where its partner stands; read only for views that are mixed.

    Returns:
        The n views, mixed as chosen, and their sources; an unmixed one repeats its id.
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
