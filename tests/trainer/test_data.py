import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from sscd_vec.files import find_images
from sscd_vec.trainer.augment.choices import PASTE, draw_pairs, generator
from sscd_vec.trainer.augment.geometry import cut_box
from sscd_vec.trainer.augment.overlay import Overlays
from sscd_vec.trainer.augment.recipe import ADVANCED_MIXUP, NOTHING
from sscd_vec.trainer.data import (
    DRAWN,
    FILLERS,
    Batches,
    check_batch,
    find_training_images,
    hold_out,
    suggested_batch,
)
from sscd_vec.trainer.pixels import MemoryPixels, Storage, StreamedPixels
from tests.trainer.images import encoded, photo, write_folder, write_tar

RECIPE = ADVANCED_MIXUP.with_changes(
    {"mixup": 0.2, "cutmix": 0.1, "paste": 0.2, "compose": 0.5, "distort": 0.3, "drawn": 0.25}
)


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> MemoryPixels:
    folder: Path = write_folder(tmp_path_factory.mktemp("photos"), 30, side=32)
    return MemoryPixels(find_images(folder), Storage(32))


def batches(pixels: MemoryPixels, rank: int = 0, ranks: int = 1) -> Batches:
    return Batches(pixels, RECIPE, Overlays(), 24, 8, seed=3, rank=rank, ranks=ranks)


def test_a_folder_may_hold_subfolders_and_shards(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", 2)
    write_tar(tmp_path / "shard.tar", {"x.jpg": encoded(photo(9), "JPEG")})
    found, unreadable = find_training_images([tmp_path])
    assert [image.member for image in found] == ["", "", "x.jpg"] and not unreadable
    assert found == find_training_images([tmp_path])[0], "the order is fixed"
    both = find_training_images([tmp_path / "a", tmp_path / "shard.tar", tmp_path])[0]
    assert [image.id for image in both] == [image.id for image in found], "each image once"


def test_places_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent: no such file or folder"):
        find_training_images([tmp_path / "absent"])
    write_folder(tmp_path / "full", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images in .*empty: expected files ending in"):
        find_training_images([tmp_path / "full", tmp_path / "empty"])
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(ValueError, match=r"plain \.tar"):
        find_training_images([tmp_path / "x.tar.gz"])


def test_files_that_cannot_be_images_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 2)
    (folder / "nothing.jpg").touch()
    (folder / "layers.psd").write_bytes(b"8BPS")
    found, unreadable = find_training_images([folder])
    assert len(found) == 2
    assert {Path(name).name for name in unreadable} == {"nothing.jpg", "layers.psd"}
    assert all(unreadable.values())


def test_hold_out_is_disjoint_and_complete(tmp_path: Path) -> None:
    images = find_images(write_folder(tmp_path, 20, side=8))
    kept, held = hold_out(images, 0.25, most=100)
    assert (len(kept), len(held)) == (15, 5)
    assert set(kept) | set(held) == set(images)
    assert len(hold_out(images, 0.5, most=3)[1]) == 3
    assert hold_out(images, 0.0, most=3) == (images, [])


def test_a_batch_that_does_not_fit_comes_with_one_that_does() -> None:
    with pytest.raises(ValueError, match=r"only 480 to train on: .* such as 64 \(--batch\)"):
        check_batch(4096, ADVANCED_MIXUP, 480)
    check_batch(640, RECIPE, 480)  # a quarter of them is drawn
    with pytest.raises(ValueError, match="only 479"):
        check_batch(640, RECIPE, 479)
    with pytest.raises(ValueError, match="3 processes"):
        check_batch(8, ADVANCED_MIXUP, 480, ranks=3)
    for images, ranks in ((8, 1), (480, 1), (481, 3), (5000, 2)):
        batch = suggested_batch(images, ranks)
        check_batch(batch, ADVANCED_MIXUP, images, ranks)
        assert images // batch in range(4, 12)


def test_both_views_of_every_image(pixels: MemoryPixels) -> None:
    batch = batches(pixels)(0)
    assert batch.images.shape == (16, 3, 24, 24)
    assert torch.equal(batch.sources[:8, 0], batch.sources[8:, 0])
    assert len(set(batch.sources[:8, 0].tolist())) == 8
    assert not torch.allclose(batch.images[:8], batch.images[8:])


def test_an_epoch_shows_every_image_at_most_once(pixels: MemoryPixels) -> None:
    whole = batches(pixels)
    assert whole.steps_per_epoch == 5, "six images are read at a time, two are drawn"
    first = np.concatenate([whole.numbers(step) for step in range(5)])
    second = np.concatenate([whole.numbers(step) for step in range(5, 10)])
    read, drawn = first[first < DRAWN], first[first >= DRAWN]
    assert len(set(read.tolist())) == 30 and len(set(drawn.tolist())) == 10
    assert not set(drawn.tolist()) & set(second.tolist()), "no image is drawn twice"
    assert not np.array_equal(read, second[second < DRAWN])


def test_fillers_are_images_outside_the_batch(pixels: MemoryPixels) -> None:
    whole = batches(pixels)
    for step in range(7):
        fillers = whole.fillers(step)
        assert len(set(fillers.tolist())) == len(fillers) == 24, "all others: there are only 24"
        assert not set(fillers.tolist()) & set(whole.numbers(step).tolist())
    assert FILLERS > 24


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


def test_drawn_images_join_the_batch_under_numbers_of_their_own(pixels: MemoryPixels) -> None:
    recipe = NOTHING.with_changes({"drawn": 0.5})
    mixed = Batches(pixels, recipe, Overlays(), 24, 8, seed=3)
    assert mixed.steps_per_epoch == 7, "an epoch is one pass over the images that are read"
    numbers = [mixed.numbers(step) for step in range(4)]
    for step in numbers:
        assert (step >= DRAWN).sum() == 4
    batch = mixed(0)
    assert batch.sources[:8, 0].tolist() == numbers[0].tolist()
    read = np.flatnonzero(numbers[0] < DRAWN)
    plain = Batches(pixels, NOTHING, Overlays(), 24, 4, seed=3)
    order = {int(n): i for i, n in enumerate(plain.numbers(0))}
    rows = [order[int(n)] for n in numbers[0][read]]
    torch.testing.assert_close(batch.images[read], plain(0).images[rows])


def test_composed_views_show_images_outside_the_batch(pixels: MemoryPixels) -> None:
    recipe = NOTHING.with_changes({"compose": 1.0})
    batch = Batches(pixels, recipe, Overlays(), 24, 8, seed=3)(0)
    plain = Batches(pixels, NOTHING, Overlays(), 24, 8, seed=3)(0)
    assert torch.equal(batch.sources, plain.sources), "a composed view keeps its one source"
    assert ((batch.images - plain.images).abs().mean(dim=(1, 2, 3)) > 0.01).all()
    everything = Batches(pixels, recipe, Overlays(), 24, 30, seed=3)(0)
    alone = Batches(pixels, NOTHING, Overlays(), 24, 30, seed=3)(0)
    torch.testing.assert_close(everything.images, alone.images, msg="nothing left to compose with")


def test_views_ahead_are_those_in_turn(tmp_path: Path, pixels: MemoryPixels) -> None:
    streamed = StreamedPixels(find_images(write_folder(tmp_path, 30, side=32)), Storage(32))
    ahead = Batches(streamed, RECIPE, Overlays(), 24, 8, seed=3)
    steps = [(step, batch.images) for step, batch in ahead.ahead(range(2, 5))]
    assert [step for step, _ in steps] == [2, 3, 4]
    for (_, early), (_, in_turn) in zip(steps, batches(pixels).ahead(range(2, 5)), strict=True):
        assert torch.equal(early, in_turn.images)
    assert list(ahead.ahead(range(4, 4))) == []
