import numpy as np
import torch

from sscd_vec.trainer.mix import mix
from sscd_vec.trainer.recipe import CUTMIX, MIXUP, NO_MIX, SIMCLR, draw, generator


def test_mixup_and_cutmix_by_hand() -> None:
    views = torch.stack([torch.full((3, 10, 10), float(v)) for v in (0.0, 1.0, 0.5)])
    choices = draw(SIMCLR, 3, generator(0, 0))
    choices.mix[:] = (MIXUP, CUTMIX, NO_MIX)
    choices.gamma[:] = (0.25, 0.64, 0.9)
    choices.cut_place[1] = (0.0, 1.0)  # top right
    batch = mix(
        views, np.array([7, 8, 9]), choices, rows=np.arange(3), partners=np.array([1, 2, 0])
    )
    # 0.25 * 0 + 0.75 * 1
    assert set(batch.images[0].flatten().tolist()) == {0.75}
    # 1 - 0.64 of the area is a square of side 6, taken from the half-gray view
    assert set(batch.images[1, 0, :6, 4:].flatten().tolist()) == {0.5}
    assert (batch.images[1] == 0.5).float().mean() == 0.36
    assert torch.equal(batch.images[2], views[2])
    assert batch.sources.tolist() == [[7, 8], [8, 9], [9, 9]]
    assert batch.sources.dtype == torch.int64


def test_partners_are_taken_unmixed() -> None:
    views = torch.stack([torch.full((3, 4, 4), float(v)) for v in (0.0, 1.0)])
    choices = draw(SIMCLR, 2, generator(0, 0))
    choices.mix[:] = MIXUP
    choices.gamma[:] = 0.5
    batch = mix(views, np.array([0, 1]), choices, np.arange(2), np.array([1, 0]))
    assert set(batch.images.flatten().tolist()) == {0.5}
    assert set(views[0].flatten().tolist()) == {0.0}, "the unmixed views are left alone"
