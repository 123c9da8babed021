from pathlib import Path

import pytest

from accuracy.dataset import read_disc


def touch(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()


def test_the_authors_layout_judges_every_query(tmp_path: Path) -> None:
    touch(tmp_path / "val_ref", ["R000001.jpg", "R000000.jpg", "notes.txt"])
    touch(tmp_path / "val_query", ["Q00000.jpg", "Q00001.jpg"])
    touch(tmp_path / "training", ["T000000.jpg"])
    truth = tmp_path / "val_groundtruth_matches.csv"
    truth.write_text("query_id,reference_id\nQ00001,R000000\n")
    disc = read_disc(tmp_path)
    assert disc.references.ids == ("R000000", "R000001")
    assert disc.queries.ids == ("Q00000", "Q00001")
    assert disc.matches == {("Q00001", "R000000")}


def test_the_challenge_layout_judges_the_queries_its_ground_truth_lists(tmp_path: Path) -> None:
    touch(tmp_path / "references", ["R000000.jpg"])
    touch(tmp_path / "queries", ["Q00000.jpg", "Q00001.jpg", "Q00002.jpg"])
    touch(tmp_path / "training", ["T000000.jpg"])
    public = tmp_path / "public_ground_truth.csv"
    public.write_text("query_id,reference_id\nQ00000,\nQ00001,R000000\n")
    assert read_disc(tmp_path).queries.ids == ("Q00000", "Q00001")
    dev = tmp_path / "dev_queries_groundtruth.csv"
    dev.write_text("Q00000,\nQ00001,R000000\nQ00002,\n")  # without a header, and preferred
    assert len(read_disc(tmp_path).queries) == 3


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make_disc_like"):
        read_disc(tmp_path)
    touch(tmp_path / "references", ["R000000.jpg"])
    touch(tmp_path / "queries", ["Q00000.jpg"])
    touch(tmp_path / "training", ["T000000.jpg"])
    truth = tmp_path / "public_ground_truth.csv"
    truth.write_text("query_id,reference_id\nQ00000,R000009\n")
    with pytest.raises(ValueError, match="1 of 1 pairs"):
        read_disc(tmp_path)
    truth.write_text("query_id,reference_id\nQ00000\n")
    with pytest.raises(ValueError, match="line 2: expected 2 columns, got 1"):
        read_disc(tmp_path)
