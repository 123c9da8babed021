"""``--verify`` as a user runs it: one score, outlines, and a clear word without the extra."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import empty_folder, fails, run
from tests.verify.scenes import crop, paste, scene

__all__ = ["empty_folder"]  # an autouse fixture


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    folder = tmp_path / "scenes"
    folder.mkdir()
    for seed in range(4):
        Image.fromarray(scene(seed)).save(folder / f"{seed}.png", compress_level=1)
    return folder


def save(pixels: Any, name: str) -> Path:  # noqa: ANN401 - an array
    Image.fromarray(pixels).save(name)
    return Path(name)


def yellow(path: str) -> int:
    """How many pixels have the colour of an outline."""
    with Image.open(path) as image:
        return int((np.asarray(image) == (255, 212, 0)).all(axis=2).sum())


def test_search_outlines_what_was_copied(scenes: Path, model: Path) -> None:
    run("index", scenes, "--to", "bank.faiss", "--model", model, "--local")
    assert Path("bank.faiss.bank/features").exists()
    query = save(crop(scene(2), 0.25, 0, 1, 1), "query.png")
    search = ("search", query, "--in", "bank.faiss", "--heatmap", "heat.png")
    best, *others = run(*search, "--verify")["results"][0]["matches"]
    assert Path(best["id"]).name == "2.png" and best["copy"]
    found = best["verified"]
    assert found["relation"] == "part" and found["mirrored"] is False
    assert np.min(found["region"]["reference"], axis=0) == pytest.approx([0.25, 0], abs=0.03)
    assert not any(match["copy"] or match["verified"]["region"] for match in others)
    assert yellow("heat.png") > 1000
    plain = run(*search)["results"][0]["matches"]
    assert all("verified" not in match for match in plain)
    assert yellow("heat.png") == 0


def test_search_finds_every_image_of_a_collage(scenes: Path, model: Path) -> None:
    run("index", scenes, "--to", "bank.faiss", "--model", model)
    page = paste(scene(1), np.full((480, 640, 3), 255, np.uint8), (10, 10, 310, 235))
    query = save(paste(scene(3), page, (330, 240, 630, 465)), "page.png")
    answer = run("search", query, "--in", "bank.faiss", "--verify", "--candidates", 4)
    copies = {Path(m["id"]).stem for m in answer["results"][0]["matches"] if m["copy"]}
    assert copies == {"1", "3"}


def test_compare_draws_both_outlines(model: Path) -> None:
    whole, part = save(scene(1), "whole.png"), save(crop(scene(1), 0.2, 0.2, 0.9, 0.9), "part.png")
    pair = ("compare", part, whole, "--model", model)
    same = run(*pair, "--verify", "--outlines", "out.png")
    assert same["copy"] and same["score"] >= same["threshold"]
    assert same["verified"]["relation"] == "part"
    with Image.open("out.png") as sheet:
        left = np.asarray(sheet)[:, : sheet.width // 2], np.asarray(sheet)[:, sheet.width // 2 :]
    for side in left:
        assert (side == (255, 212, 0)).all(axis=2).sum() > 500
    other = run("compare", part, save(scene(9), "o.png"), "--model", model, "--verify",
                "--outlines", "none.png", "--exit-code", code=4)  # fmt: skip
    assert not other["copy"] and other["verified"]["region"] is None
    assert yellow("none.png") == 0
    assert "verified" not in run(*pair)
    assert "add --verify" in fails(*pair, "--outlines", "out.png")


def test_dedup_says_which_copy_is_a_part(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    original = save(scene(1), str(folder / "original.png"))
    part = save(crop(scene(1), 0.1, 0.1, 1, 1), str(folder / "crop.png"))
    save(scene(2), str(folder / "other.png"))
    limit = run("compare", original, part, "--model", model)["score"] + 0.02
    dedup = ("dedup", folder, "--model", model, "--threshold", limit, "--no-heatmaps")
    assert run(*dedup)["groups"] == []
    found = run(*dedup, "--verify", "--report", "r.html")
    rows = {Path(row["path"]).stem: row for group in found["groups"] for row in group["members"]}
    assert rows["original"]["keep"] and rows["crop"]["relation"] == "part"
    assert '"region":{"copy":' in Path("r.html").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["search", "0.png", "--in", "bank.faiss", "--verify"],
        ["index", "0.png", "--to", "bank.faiss", "--local"],
        ["compare", "0.png", "0.png", "--verify"],
        ["dedup", "0.png", "--verify"],
    ],
)
def test_without_the_extra_the_reason_is_said(
    command: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(scene(0), "0.png")
    run("index", "0.png", "--to", "bank.faiss", "--model", model)
    monkeypatch.setitem(sys.modules, "cv2", None)  # importing it fails
    said = fails(*command, "--model", model)
    assert "pip install 'sscd-vec[verify]'" in said and "Traceback" not in said
    assert run("search", "0.png", "--in", "bank.faiss")["results"][0]["matches"]
