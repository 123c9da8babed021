import json
from pathlib import Path

import pytest

import copydays
from accuracy.dataset import list_images
from copydays import BLOCKS, SIZES, read_copydays
from tests.benchmarks.conftest import jpeg, synthetic_photo

PICTURES = 2


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every block of two pictures; ``strong`` has two copies of the first."""
    folder = tmp_path_factory.mktemp("copydays")
    for block in BLOCKS:
        (folder / block).mkdir(parents=True)
        for picture in range(PICTURES):
            quality = int(block.split("/")[1]) if block.startswith("jpegqual") else 90
            image = synthetic_photo(100 + picture)
            if block.startswith("crops"):
                image = image.crop((0, 0, 90, 90))
            (folder / block / f"20{picture:02}00.jpg").write_bytes(jpeg(image, quality))
    again = jpeg(synthetic_photo(100).rotate(20))
    (folder / "strong" / "200001.jpg").write_bytes(again)
    return folder


def test_files_of_one_picture_share_four_characters(blocks: Path, photo_folder: Path) -> None:
    data = read_copydays(blocks, list_images(photo_folder))
    assert len(data.strong) == PICTURES + 1
    assert len(data.queries) == PICTURES * len(BLOCKS) + 1
    assert len(data.references) == PICTURES + 40
    assert ("strong/200001", "original/200000") in data.matches
    assert ("crops/80/200100", "original/200100") in data.matches
    assert len(data.matches) == len(data.queries)


def test_a_missing_block_is_named(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    with pytest.raises(FileNotFoundError, match="crops/80 missing"):
        read_copydays(tmp_path, list_images(tmp_path / "original"))


def test_all_four_sizes_are_measured(
    blocks: Path, photo_folder: Path, encoder_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # The same modes at a tenth of the pixels: a network at 800 pixels has no place in a quick test.
    assert [copydays._label(mode, size) for mode, size in SIZES] == list(copydays.PAPER["SSCD"])
    small = tuple((mode, size // 8) for mode, size in SIZES)
    monkeypatch.setattr(copydays, "SIZES", small)
    arguments = ["--copydays", str(blocks), "--distractors", str(photo_folder)]
    arguments += ["--training", str(photo_folder), "--model", str(encoder_folder)]
    arguments += ["--cache", str(tmp_path / "cache"), "--name", "cd", "--results", str(tmp_path)]
    copydays.main(arguments)
    rows = json.loads((tmp_path / "cd.json").read_text())["figures"]
    assert len(rows) == len(SIZES) * 3
    assert len({row["size"] for row in rows}) == 4
    for row in rows:
        assert 0 < row["mAP strong"] <= 100
    # Even an untrained network finds recompressed copies, so µAP is far from chance (2 %).
    assert max(row["µAP"] for row in rows) > 40
