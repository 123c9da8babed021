from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from sscd_vec.trainer.batches import Batches
from sscd_vec.trainer.data import find_photos
from sscd_vec.trainer.geometry import cut_box
from sscd_vec.trainer.overlay import Overlays
from sscd_vec.trainer.pixels import MemoryPixels
from sscd_vec.trainer.recipe import ADVANCED_MIXUP, NOTHING, PASTE, draw_pairs, generator
from tests.trainer.photos import write_folder

RECIPE = ADVANCED_MIXUP.with_changes({"mixup": 0.2, "cutmix": 0.2, "paste": 0.2})


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> MemoryPixels:
    folder: Path = write_folder(tmp_path_factory.mktemp("photos"), 30, side=32)
    return MemoryPixels(find_photos(folder), 32)


def batches(pixels: MemoryPixels, rank: int = 0, ranks: int = 1) -> Batches:
    return Batches(pixels, RECIPE, Overlays(), 24, 8, seed=3, rank=rank, ranks=ranks)


def test_both_views_of_every_image(pixels: MemoryPixels) -> None:
    batch = batches(pixels)(0)
    assert batch.images.shape == (16, 3, 24, 24)
    assert torch.equal(batch.sources[:8, 0], batch.sources[8:, 0])
    assert len(set(batch.sources[:8, 0].tolist())) == 8
    assert not torch.allclose(batch.images[:8], batch.images[8:])


def test_an_epoch_shows_every_image_at_most_once(pixels: MemoryPixels) -> None:
    whole = batches(pixels)
    assert whole.steps_per_epoch == 3
    first = np.concatenate([whole.numbers(step) for step in range(3)])
    second = np.concatenate([whole.numbers(step) for step in range(3, 6)])
    assert len(set(first.tolist())) == 24
    assert not np.array_equal(first, second)


def test_ranks_share_exactly_the_one_process_batch(pixels: MemoryPixels) -> None:
    for step in (0, 5):
        whole = batches(pixels)(step)
        assert (whole.sources[:, 0] != whole.sources[:, 1]).any(), "some views are mixed"
        parts = [batches(pixels, rank, 2)(step) for rank in range(2)]
        # Rank-major order, first views before second views on each.
        order = torch.cat([torch.arange(4), torch.arange(8, 12)])
        for rank, part in enumerate(parts):
            rows = order + 4 * rank
            assert torch.equal(part.sources, whole.sources[rows])
            torch.testing.assert_close(part.images, whole.images[rows], atol=1e-5, rtol=0)


def test_pasted_views_show_their_partners_and_name_both(pixels: MemoryPixels) -> None:
    quiet = NOTHING.with_changes({"paste": 0.5})
    batch = Batches(pixels, quiet, Overlays(), 32, 8, seed=3)(0)
    choices = draw_pairs(quiet, 8, generator(3, 0))
    pasted = np.flatnonzero(choices.mix == PASTE)
    assert 0 < len(pasted) < 16
    own = batch.sources[:, 0]
    assert torch.equal(batch.sources[pasted, 1], own[choices.partner[pasted]])
    plain = np.setdiff1d(np.arange(16), pasted)
    assert torch.equal(batch.sources[plain, 1], own[plain])
    photos = torch.from_numpy(pixels.take(own.numpy()).pixels).permute(0, 3, 1, 2) / 255
    for row in pasted:
        box = cut_box(float(choices.gamma[row]), choices.cut_place[row], 32)
        partner = photos[choices.partner[row]][None]
        size = batch.images[row][box].shape[1:]
        inset = F.interpolate(partner, size, mode="bilinear", antialias=True)[0]
        torch.testing.assert_close(batch.images[row][box], inset, atol=1e-4, rtol=0)
        around = torch.ones(3, 32, 32, dtype=torch.bool)
        around[box] = False
        torch.testing.assert_close(
            batch.images[row][around], photos[row][around], atol=1e-4, rtol=0
        )


def test_a_step_does_not_depend_on_those_before(pixels: MemoryPixels) -> None:
    walked = [batches(pixels)(step) for step in range(4)][-1]
    jumped = batches(pixels)(3)
    assert torch.equal(walked.images, jumped.images)
    assert torch.equal(walked.sources, jumped.sources)


def test_impossible_batches_are_refused(pixels: MemoryPixels) -> None:
    with pytest.raises(ValueError, match="only 30"):
        Batches(pixels, RECIPE, Overlays(), 24, 31, seed=0)
    with pytest.raises(ValueError, match="3 processes"):
        Batches(pixels, RECIPE, Overlays(), 24, 8, seed=0, ranks=3)
