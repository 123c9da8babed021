"""``sscd-vec overlap``: one set of images in another, from images, descriptors and banks."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sscd_vec.bank.overlap import wilson
from sscd_vec.cli import app


def run(*arguments: object, code: int = 0) -> Any:  # noqa: ANN401 - JSON
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture
def sets(tmp_path: Path, drawn: Path) -> tuple[Path, Path]:
    """Copies of 2, 5 (twice) and 7 and an unrelated image; and the ten originals."""
    first, second = tmp_path / "test", tmp_path / "train"
    for folder, pattern in ((first, "c*.jpg"), (second, "photo-*.jpg")):
        folder.mkdir()
        for file in drawn.glob(pattern):
            (folder / file.name).write_bytes(file.read_bytes())
    return first, second


def test_images_against_images(sets: tuple[Path, Path], tmp_path: Path, model: Path) -> None:
    first, second = sets
    to, report = tmp_path / "out", tmp_path / "overlap.html"
    found = run("overlap", first, second, "--to", to, "--report", report, "--model", model)
    best = pq.read_table(to / "best.parquet").to_pylist()
    assert [row["id"] for row in best] == [str(file) for file in sorted(first.iterdir())]
    for row in best:
        if "captioned" not in row["id"]:  # which a random network need not recognise
            number = row["id"].rpartition("-")[2]
            assert row["match"] == str(second / f"photo-{number}") and row["is_copy"]
    assert found["images"] == 4 and found["references"] == 10
    assert found["copies"] == sum(row["is_copy"] for row in best) >= 3
    assert found["share"] == found["copies"] / 4
    assert found["interval"][0] < found["share"] <= found["interval"][1]
    pairs = pq.read_table(to / "pairs.parquet").to_pylist()
    assert len(pairs) == found["pairs"] >= found["copies"]
    assert min(pair["score"] for pair in pairs) >= found["threshold"]
    assert found["complete"]
    page = report.read_text()
    assert "copy-2.jpg" in page and "photo-2.jpg" in page


def test_descriptors_and_banks_give_the_same(
    sets: tuple[Path, Path], tmp_path: Path, model: Path
) -> None:
    first, second = sets
    images = run("overlap", first, second, "--model", model)
    run("encode", first, "--to", tmp_path / "a", "--model", model)
    run("encode", second, "--to", tmp_path / "b", "--model", model)
    run("index", second, "--to", tmp_path / "bank.faiss", "--model", model)
    described = run("overlap", tmp_path / "a", tmp_path / "b", "--model", model)
    banked = run("overlap", tmp_path / "a", tmp_path / "bank.faiss")
    for other in (described, banked):
        for name in ("images", "copies", "share", "pairs", "references", "threshold"):
            assert other[name] == images[name]
        assert [each["image"] for each in other["strongest"]] == [
            each["image"] for each in images["strongest"]
        ]


def test_unreadable_images_are_no_part_of_the_share(sets: tuple[Path, Path], model: Path) -> None:
    (sets[0] / "broken.jpg").write_bytes(b"not an image")
    found = run("overlap", *sets, "--model", model, code=3)
    assert found["images"] == 4
    assert "broken.jpg" in found["unreadable"][0]["path"]


def test_a_place_that_is_not_there_is_an_error(sets: tuple[Path, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["overlap", str(sets[0]), str(tmp_path / "no.faiss")])
    assert done.exit_code == 1 and "there is no bank" in done.output


def test_the_interval_is_wilsons() -> None:
    # Worked out by hand from the formula, z = 1.96: 10 of 100.
    assert wilson(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert wilson(0, 50)[0] == 0 and wilson(50, 50)[1] == 1
