from pathlib import Path

import numpy as np
import pytest
import torch

from sscd_vec.trainer.batches import Batches
from sscd_vec.trainer.data import find_photos
from sscd_vec.trainer.overlay import Overlays
from sscd_vec.trainer.pixels import MemoryPixels
from sscd_vec.trainer.recipe import ADVANCED_MIXUP
from tests.trainer.photos import write_folder

RECIPE = ADVANCED_MIXUP.with_changes({"mixup": 0.2, "cutmix": 0.2})


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
