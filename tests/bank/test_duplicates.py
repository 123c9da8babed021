"""Copies among files, without a bank: the same groups, each image once, from Parquet files too."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sscd_vec.bank import duplicates
from sscd_vec.bank.duplicates import find_copies_in
from sscd_vec.bank.results import Copies
from sscd_vec.bank.setup import Setup
from sscd_vec.files import ImageFile, find_images
from sscd_vec.normalize import Normalizer
from sscd_vec.shards import ShardInfo, ShardRows, ShardWriter
from tests.bank.conftest import OpenBank
from tests.tiny_encoder import TinyEncoder


@pytest.fixture
def setup(encoder: TinyEncoder, normalizer: Normalizer) -> Setup:
    return Setup.without_bank(encoder, normalizer)


@pytest.fixture
def copied(images: Path) -> Path:
    """The images, and resaved copies of two of them."""
    for number in (0, 3):
        Image.open(images / f"image-{number:02}.png").save(images / f"copy-{number}.jpg")
    return images


def found(copies: Copies) -> list[list[tuple[str, float]]]:
    """Names and scores of each group, the one to keep first."""
    return [
        [(Path(one.image.id).name, round(one.score, 5)) for one in group.members]
        for group in copies.groups
    ]


def test_files_have_the_groups_of_a_bank_that_holds_them(
    copied: Path, setup: Setup, open_bank: OpenBank
) -> None:
    with open_bank() as bank:
        bank.add(copied)
        expected = bank.duplicates(show_progress=False)
    files = find_copies_in([copied], setup, show_progress=False)
    assert found(files) == found(expected) != []
    assert (files.scanned, files.pairs) == (expected.scanned, expected.pairs)


def test_many_files_go_through_a_file_and_lists(
    copied: Path, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = find_copies_in([copied], setup, show_progress=False)
    monkeypatch.setattr(duplicates, "MOST_COMPARED", 4)
    lists = find_copies_in([copied], setup, show_progress=False)
    assert lists.recall == 1 and sorted(found(lists)) == sorted(found(whole)) != []


def shard(path: Path, images: Path, encoder: TinyEncoder) -> list[ImageFile]:
    """Write the descriptors of a folder of images."""
    files = find_images(images)
    rows = np.asarray(encoder.encode([file.path for file in files]), np.float32)
    ids = [file.id for file in files]
    info = ShardInfo(encoder.fingerprint, encoder.dim, "source", "state")
    with ShardWriter(path, info, "float32") as writer:
        writer.write(ShardRows(ids, rows, [""] * len(ids), list(files)))
    return files


def test_images_of_parquet_files_are_compared_and_not_encoded_again(
    copied: Path, setup: Setup, encoder: TinyEncoder, tmp_path: Path
) -> None:
    expected = found(find_copies_in([copied], setup, show_progress=False))
    files = shard(tmp_path / "a.parquet", copied, encoder)
    encoder.batches.clear()
    shards = find_copies_in([tmp_path / "a.parquet"], setup, show_progress=False)
    both = find_copies_in([tmp_path / "a.parquet", copied], setup, show_progress=False)
    assert encoder.batches == []
    assert found(shards) == found(both) == expected != []
    assert shards.scanned == both.scanned == len(files)


def test_a_file_changed_since_it_was_described_is_encoded_again(
    copied: Path, setup: Setup, encoder: TinyEncoder, tmp_path: Path
) -> None:
    files = shard(tmp_path / "a.parquet", copied, encoder)
    (copied / "copy-0.jpg").write_bytes((copied / "copy-3.jpg").read_bytes())
    encoder.batches.clear()
    copies = find_copies_in([tmp_path / "a.parquet", copied], setup, show_progress=False)
    assert encoder.batches == [1] and copies.scanned == len(files)
    (group,) = copies.groups
    names = {Path(one.image.id).name for one in group.members}
    assert names == {"image-03.png", "copy-0.jpg", "copy-3.jpg"}


def test_an_image_that_two_parquet_files_hold_counts_once(
    copied: Path, setup: Setup, encoder: TinyEncoder, tmp_path: Path
) -> None:
    files = [shard(tmp_path / name, copied, encoder) for name in ("a.parquet", "b.parquet")][0]
    places = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    copies = find_copies_in(places, setup, show_progress=False)
    assert copies.scanned == len(files)
    assert [len(group.members) for group in copies.groups] == [2, 2]


def test_unreadable_files_are_named(copied: Path, setup: Setup) -> None:
    (copied / "broken.png").write_bytes(b"no image")
    copies = find_copies_in([copied], setup, show_progress=False)
    assert [problem.path.name for problem in copies.unreadable] == ["broken.png"]
    assert len(copies.groups) == 2
