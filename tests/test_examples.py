"""The examples run as a newcomer would run them."""

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from faults.milvus_server import TOKEN, MilvusProcess, running
from sscd_vec.cli.pictures import EDITS, draw

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusProcess]:
    with running(tmp_path_factory.mktemp("milvus"), authorized=True) as process:
        yield process


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed in range(24):
        image = draw(seed)
        image.thumbnail((160, 160))
        image.save(folder / f"{seed:02}.jpg", quality=90)
    EDITS["captioned"](draw(3), np.random.default_rng(0)).save(tmp_path / "upload.jpg")
    return folder


def run(script: str, *arguments: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd,
        env={
            **os.environ,
            "SSCD_VEC_CACHE": str(cwd / "cache"),
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_search(photos: Path, tmp_path: Path) -> None:
    first = run("first_search.py", photos, "upload.jpg", cwd=tmp_path)
    assert "24 added, 0 unchanged, 24 images in known.faiss" in first
    assert first.splitlines()[1].endswith("03.jpg")
    assert "0 added, 24 unchanged" in run("first_search.py", photos, "upload.jpg", cwd=tmp_path)


def test_watch_folder(photos: Path, tmp_path: Path) -> None:
    assert "24 images in the bank" in run("watch_folder.py", photos, cwd=tmp_path)
    (tmp_path / "upload.jpg").rename(photos / "upload.jpg")
    again = run("watch_folder.py", photos, cwd=tmp_path)
    assert "upload.jpg is a copy of " in again
    assert "1 new copies, 25 images in the bank" in again


def test_threshold_from_labels(photos: Path, tmp_path: Path) -> None:
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "reference", "is_copy"])
        for seed in range(20):
            EDITS["resaved"](draw(seed), np.random.default_rng(0)).save(tmp_path / f"q{seed}.jpg")
            writer.writerow([f"q{seed}.jpg", f"photos/{seed:02}.jpg", 1])
            writer.writerow([f"q{seed}.jpg", f"photos/{seed + 1:02}.jpg", 0])
    said = run("threshold_from_labels.py", "pairs.csv", "--precision", 0.9, cwd=tmp_path)
    assert "search: score >= " in said
    assert (tmp_path / "normalizer.safetensors").exists()


def test_fine_tune(photos: Path, tmp_path: Path) -> None:
    small = ("--steps", 2, "--batch", 4, "--size", 64)
    assert "trained: 512 dimensions" in run("fine_tune.py", photos, *small, cwd=tmp_path)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_milvus_server(photos: Path, tmp_path: Path, server: MilvusProcess) -> None:
    said = run(
        "milvus_server.py", photos, "upload.jpg", "--server", server.uri, "--token", TOKEN,
        cwd=tmp_path,
    )  # fmt: skip
    bank, collection = said.splitlines()
    assert (
        bank.removeprefix("bank: ").split(",")[0]
        == collection.removeprefix("collection: ").split(",")[0]
    )
    assert "03.jpg" in bank


def test_every_example_is_run() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{path.name}"' in tested for path in EXAMPLES.glob("*.py"))
