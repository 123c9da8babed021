"""``sscd-vec encode``: every kind of input, resumed, on Ray, and read by the other commands."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sscd_vec import encoding
from sscd_vec.cli import app
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Normalizer
from sscd_vec.shards import DescriptorFiles, ShardInfo, ShardRows, ShardWriter

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: object, code: int = 0) -> Any:  # noqa: ANN401 - JSON
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def tar(path: Path, images: list[Path], bad: bool = False) -> Path:
    """As img2dataset writes them: an image, its caption and its facts."""
    with tarfile.open(path, "w") as shard:
        for number, image in enumerate(images):
            shard.add(image, f"{number:09}.jpg")
            info = tarfile.TarInfo(f"{number:09}.txt")
            shard.addfile(info, io.BytesIO())
        if bad:
            info = tarfile.TarInfo("broken.jpg")
            info.size = 12
            shard.addfile(info, io.BytesIO(b"not an image"))
    return path


@pytest.fixture
def photos(drawn: Path) -> list[Path]:
    return sorted(drawn.glob("photo-*.jpg"))


def test_every_kind_of_input_gives_the_encoders_descriptors(
    tmp_path: Path, drawn: Path, photos: list[Path], model: Path
) -> None:
    tar(tmp_path / "00000.tar", photos[:3])
    cells = [{"bytes": photo.read_bytes(), "path": photo.name} for photo in photos[3:5]]
    pq.write_table(pa.table({"image": cells, "url": ["u3", "u4"]}), tmp_path / "hub.parquet")
    (tmp_path / "list.txt").write_text("\n".join(map(str, photos[5:7])))
    places = [tmp_path / "00000.tar", tmp_path / "hub.parquet", tmp_path / "list.txt", photos[7]]
    to = tmp_path / "descriptors"
    found = run("encode", *places, "--to", to, "--model", model)
    assert (found["shards"], found["encoded"], found["failed"]) == (4, 8, 0)
    files = DescriptorFiles(to)
    encoder = Encoder.from_pretrained(model, device="cpu")
    assert files.encoder == encoder.fingerprint
    rows = dict(_rows(to))
    hub, shard = tmp_path / "hub.parquet", tmp_path / "00000.tar"
    ids = [f"{shard}/{n:09}.jpg" for n in range(3)] + [f"{hub}#0", f"{hub}#1"]
    ids += [str(photo) for photo in photos[5:8]]
    expected = encoder.encode([*photos[:8]])
    np.testing.assert_allclose([rows[name] for name in ids], expected, atol=1e-6)


def test_an_unreadable_image_is_a_row_with_its_error(
    tmp_path: Path, photos: list[Path], model: Path
) -> None:
    shard = tar(tmp_path / "00000.tar", photos[:2], bad=True)
    found = run("encode", shard, "--to", tmp_path / "d", "--model", model, code=3)
    assert (found["encoded"], found["failed"]) == (3, 1)
    ((name, reason),) = DescriptorFiles(tmp_path / "d").failures
    assert name == f"{shard}/broken.jpg" and reason


def test_a_damaged_tar_is_reported_and_the_others_are_encoded(
    tmp_path: Path, photos: list[Path], model: Path
) -> None:
    tar(tmp_path / "0.tar", photos[:2])
    (tmp_path / "1.tar").write_bytes(b"no tar")
    found = run("encode", tmp_path, "--to", tmp_path / "d", "--model", model, code=3)
    assert found["encoded"] == 2
    assert "1.tar" in found["unreadable"][0]["path"]


def test_a_second_run_encodes_only_what_is_missing(
    tmp_path: Path, photos: list[Path], model: Path
) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        tar(shards / f"{number}.tar", photos[number : number + 2])
    options = ("--to", tmp_path / "d", "--model", model)
    assert run("encode", shards, "--part", "2/3", *options)["encoded"] == 2
    whole = run("encode", shards, *options)
    assert (whole["unchanged"], whole["encoded"]) == (1, 4)
    assert run("encode", shards, *options)["encoded"] == 0
    tar(shards / "1.tar", photos[:4])  # it changed: encoded again, in place of the old one
    assert run("encode", shards, *options)["encoded"] == 4
    assert DescriptorFiles(tmp_path / "d").rows == 2 + 4 + 2


def test_a_folder_that_shrank_leaves_nothing_behind(
    tmp_path: Path, photos: list[Path], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "LOOSE", 2)
    folder = tmp_path / "images"
    folder.mkdir()
    for photo in photos[:5]:
        (folder / photo.name).write_bytes(photo.read_bytes())
    options = ("--to", tmp_path / "d", "--model", model)
    assert run("encode", folder, *options)["shards"] == 3
    for photo in photos[2:5]:
        (folder / photo.name).unlink()
    run("encode", folder, *options)
    names = [name for name, _ in _rows(tmp_path / "d")]
    assert names == [str(folder / photo.name) for photo in photos[:2]]


def _rows(folder: Path) -> list[tuple[str, Any]]:
    parts = DescriptorFiles(folder).parts()
    return [pair for part in parts for pair in zip(part.ids, part.descriptors, strict=True)]


def test_another_encoder_needs_another_folder(
    tmp_path: Path, photos: list[Path], model: Path
) -> None:
    shard = tar(tmp_path / "0.tar", photos[:1])
    run("encode", shard, "--to", tmp_path / "d", "--model", model)
    done = CliRunner().invoke(app, ["encode", str(shard), "--to", str(tmp_path / "d")])
    assert done.exit_code == 1
    assert "encode into another folder" in done.output


def test_a_parquet_file_without_images_names_its_columns(tmp_path: Path, model: Path) -> None:
    pq.write_table(pa.table({"url": ["u"]}), tmp_path / "a.parquet")
    found = run("encode", tmp_path / "a.parquet", "--to", tmp_path / "d", "--model", model, code=3)
    assert "expected a column of images" in found["unreadable"][0]["reason"]
    assert "'url'" in found["unreadable"][0]["reason"]


def test_index_search_and_dedup_read_the_files(
    tmp_path: Path, drawn: Path, photos: list[Path], model: Path
) -> None:
    to, bank = tmp_path / "d", tmp_path / "bank.faiss"
    run("encode", drawn, "--to", to, "--model", model)
    added = run("index", to, "--to", bank, "--model", model)
    assert (added["added"], added["images"]) == (14, 14)
    assert run("index", to, "--to", bank)["unchanged"] == 14
    by_image = run("search", photos[2], "--in", bank, "-k", "2")["results"]
    by_row = run("search", to, "--in", bank, "-k", "2")["results"]
    (same,) = [result for result in by_row if result["image"] == str(photos[2])]
    for one, other in zip(by_image[0]["matches"], same["matches"], strict=True):
        assert one["id"] == other["id"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
    with_images = run("dedup", drawn, "--model", model)
    without = run("dedup", to, "--model", model)
    assert without["groups"] and without["groups"] == with_images["groups"]


def test_fit_and_calibrate_read_the_files(tmp_path: Path, model: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((600, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for name, part in (("fit", rows[:200]), ("held", rows[200:])):
        (tmp_path / name).mkdir()
        with ShardWriter(tmp_path / name / "a.parquet", ShardInfo("e1", 16)) as writer:
            ids = [f"{name}-{row}" for row in range(len(part))]
            writer.write(ShardRows(ids, part, [""] * len(part), [None] * len(part)))
    fitted, done = tmp_path / "fitted.safetensors", tmp_path / "done.safetensors"
    run("normalize", "fit", tmp_path / "fit", "--out", fitted)
    assert Normalizer.load(fitted).encoder == "e1"
    run("calibrate", fitted, "-o", done, "--queries", tmp_path / "held",
        "--false-match-rate", "0.05")  # fmt: skip
    assert "search" in Normalizer.load(done).thresholds


def test_ray_gives_the_same_files(tmp_path: Path, photos: list[Path], model: Path) -> None:
    """Two workers in little memory; in a process of its own, because Ray warns."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(4):
        tar(shards / f"{number}.tar", photos[number : number + 3])
    ray = tmp_path / "on-ray"
    arguments = ["encode", shards, "--to", ray, "--ray", "auto", "--workers", 2, "--model", model]
    script = f"""
import ray
from sscd_vec.cli import app
ray.init(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
app({[*map(str, arguments), "--json"]!r})
"""
    done = _python("-c", script)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    assert (figures["shards"], figures["encoded"]) == (4, 12)
    run("encode", shards, "--to", tmp_path / "here", "--model", model)
    for (name, row), (other, expected) in zip(_rows(ray), _rows(tmp_path / "here"), strict=True):
        assert name == other
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_a_lost_node_loses_and_doubles_nothing(tmp_path: Path, photos: list[Path]) -> None:
    shards, to = tmp_path / "shards", tmp_path / "d"
    shards.mkdir()
    to.mkdir()
    for number in range(10):
        tar(shards / f"{number}.tar", photos[number : number + 1])
    finished = tmp_path / "finished.txt"
    script = REPOSITORY / "tests" / "lost_node.py"
    done = _python(*map(str, (script, shards, to, finished)))
    assert done.returncode == 0, done.stderr
    written = sorted(path.name for path in to.glob("*.parquet"))  # a killed writer leaves a .new
    assert sorted(finished.read_text().split()) == written
    names = [name for name, _ in _rows(to)]
    assert names == [f"{shards / str(number)}.tar/000000000.jpg" for number in range(10)]


def _python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
