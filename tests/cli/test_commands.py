"""Each command as a user runs it, in an empty folder."""

import base64
import csv
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sscd_vec.cli import app
from sscd_vec.locks import LockHeldError
from sscd_vec.normalize import Domain, Normalizer
from tests.cli.conftest import small


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path: Path, drawn: Path) -> Path:
    return Path(shutil.copytree(drawn, tmp_path / "photos"))


def run(*arguments: object, code: int = 0) -> Any:  # noqa: ANN401 - a JSON document
    result = CliRunner().invoke(app, [str(a) for a in (*arguments, "--json")])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def fails(*arguments: object, code: int = 1) -> str:
    """What a command that fails says on standard error; it prints no result."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr


def names(matches: list[dict[str, Any]]) -> list[str]:
    return [Path(match["id"]).name for match in matches]


# ---------------------------------------------------------------------- index and search


@pytest.mark.parametrize("bank", ["bank.faiss", "bank.db"])
def test_index_search_change_and_prune(bank: str, photos: Path, model: Path) -> None:
    first = run("index", photos, "--to", bank, "--model", model)
    assert (first["added"], first["unchanged"], first["images"]) == (14, 0, 14)
    again = run("index", photos, "--to", bank)
    assert (again["added"], again["unchanged"]) == (0, 14)

    small(2).resize((90, 70)).save("query.png")
    answer = run("search", "query.png", "--in", bank, "-k", 3)
    matches = answer["results"][0]["matches"]
    assert set(names(matches)[:2]) == {"photo-2.jpg", "copy-2.jpg"}
    assert matches[0]["copy"] and not matches[2]["copy"]

    (photos / "photo-3.jpg").unlink()
    small(77).save(photos / "photo-4.jpg")  # another picture under an old name
    small(78).save(photos / "new.png")
    kept = run("index", photos, "--to", bank)
    assert (kept["added"], kept["removed"], kept["images"]) == (2, 0, 15)
    pruned = run("index", photos, "--to", bank, "--prune")
    assert (pruned["added"], pruned["removed"], pruned["images"]) == (0, 1, 14)
    small(77).save("changed.png")
    best = run("search", "changed.png", "--in", bank)["results"][0]["matches"][0]
    assert Path(best["id"]).name == "photo-4.jpg" and best["copy"]
    small(3).save("removed.png")
    gone = run("search", "removed.png", "--in", bank)["results"][0]["matches"]
    assert "photo-3.jpg" not in names(gone)


def test_prune_spares_what_was_not_asked_for(photos: Path, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    small(50).save(other / "x.png")
    run("index", photos, other, "--to", "bank.faiss", "--model", model)
    shutil.rmtree(other)
    assert run("index", photos, "--to", "bank.faiss", "--prune")["removed"] == 0


def test_prune_spares_what_it_cannot_see(
    photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that may not be entered any more does not say that its files are gone."""
    closed = photos / "closed"
    closed.mkdir()
    small(40).save(closed / "x.png")
    run("index", photos, "--to", "bank.faiss", "--model", model)
    (photos / "photo-3.jpg").unlink()
    listing, looking = os.scandir, Path.stat

    def not_listed(path: Path) -> Any:  # noqa: ANN401 - what os.scandir gives
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    def not_seen(path: Path, **options: Any) -> os.stat_result:  # noqa: ANN401
        if closed in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return looking(path, **options)

    monkeypatch.setattr(os, "scandir", not_listed)
    monkeypatch.setattr(Path, "stat", not_seen)
    pruned = run("index", photos, "--to", "bank.faiss", "--prune", code=3)
    assert (pruned["removed"], pruned["images"]) == (1, 14)
    assert [Path(entry["path"]).name for entry in pruned["unreadable"]] == ["closed"]


def test_interrupted_index_goes_on(
    photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sscd_vec.bank import describe
    from sscd_vec.encoder import Encoder

    monkeypatch.setattr(describe, "PART", 4)
    real, calls = Encoder.encode, []

    def third_time_stopped(self: Encoder, inputs: Any, **options: Any) -> Any:  # noqa: ANN401
        calls.append(len(inputs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, inputs, **options)

    monkeypatch.setattr(Encoder, "encode", third_time_stopped)
    said = fails("index", photos, "--to", "bank.faiss", "--model", model, code=130)
    assert "interrupted" in said
    after = run("index", photos, "--to", "bank.faiss")
    assert (after["added"], after["unchanged"]) == (6, 8)
    assert calls == [4, 4, 4, 4, 2]


def test_cache_spares_encoding(photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("index", photos, "--to", "a.faiss", "--model", model)
    from sscd_vec.encoder import Encoder

    def never(*_: object, **__: object) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(Encoder, "encode", never)
    assert run("index", photos, "--to", "b.faiss", "--model", model)["added"] == 14
    again = ["index", str(photos), "--to", "c.faiss", "--model", str(model), "--no-cache"]
    assert isinstance(CliRunner().invoke(app, again).exception, AssertionError)


def test_messy_folder(photos: Path, model: Path, tmp_path: Path) -> None:
    (photos / "empty.jpg").touch()
    (photos / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200))
    (photos / "text.png").write_text("not an image")
    (photos / "notes.txt").write_text("ignored")
    (photos / "video.mp4").write_bytes(bytes(100))
    (photos / "truncated.jpg").write_bytes((photos / "photo-1.jpg").read_bytes()[:900])
    os.symlink(photos, photos / "loop")
    os.symlink("nowhere.jpg", photos / "dangling.jpg")
    os.mkfifo(photos / "pipe.jpg")
    os.link(photos / "photo-1.jpg", photos / "hardlink.jpg")
    odd = ["ünï 日本.jpg", "new\nline.jpg", "tab\t.jpg", "quote'\".jpg", "-k.jpg", " .jpg"]
    for seed, name in enumerate(odd, 60):
        small(seed).save(photos / name)
    raw = os.path.join(os.fsencode(photos), b"latin-\xe9.jpg")
    shutil.copy(os.fsencode(photos / odd[0]), raw)
    small(90).save(photos / "no_ending", "PNG")
    deep = photos.joinpath(*(["deep"] * 40))
    deep.mkdir(parents=True)
    small(91).save(deep / "x.png")

    done = run("index", photos, "--to", "bank.db", "--model", model, code=3)
    assert done["added"] == 14 + len(odd) + 3
    reasons = {Path(entry["path"]).name: entry["reason"] for entry in done["unreadable"]}
    assert set(reasons) == {
        "empty.jpg", "IMG_1.HEIC", "text.png", "truncated.jpg", "dangling.jpg", "pipe.jpg"
    }  # fmt: skip
    assert all(reasons.values())
    assert run("index", photos, "--to", "bank.db", code=3)["added"] == 0
    small(61).save("q.png")
    best = run("search", "q.png", "--in", "bank.db")["results"][0]["matches"][0]
    assert best["id"].endswith("new\nline.jpg")
    piped = CliRunner().invoke(app, ["search", "q.png", "--in", "bank.db", "-k", "1"])
    assert len(piped.stdout.splitlines()) == 1 and "new\\nline.jpg" in piped.stdout

    found = run("dedup", photos, "--model", model, "--no-heatmaps", code=3)
    grouped = [
        {Path(member["path"]).name for member in group["members"]} for group in found["groups"]
    ]
    assert {odd[0], "latin-\\xe9.jpg"} in grouped
    assert not any("hardlink.jpg" in group and "photo-1.jpg" in group for group in grouped)


def test_unreadable_file_is_tried_again(photos: Path, model: Path) -> None:
    """What was missing (a permission, a plugin) may come without the file changing."""
    content, broken = (photos / "photo-1.jpg").read_bytes(), photos / "broken.jpg"
    broken.write_bytes(bytes(len(content)))
    os.utime(broken, ns=(10**18, 10**18))
    first = run("index", photos, "--to", "bank.faiss", "--model", model, code=3)
    assert [Path(entry["path"]).name for entry in first["unreadable"]] == ["broken.jpg"]
    broken.write_bytes(content)
    os.utime(broken, ns=(10**18, 10**18))
    assert run("index", photos, "--to", "bank.faiss")["added"] == 1


def test_heic_needs_a_plugin_and_says_so(photos: Path, model: Path) -> None:
    if importlib.util.find_spec("pillow_heif") is not None:
        pytest.skip("pillow-heif is installed: HEIC photos are read")
    (photos / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200))
    arguments = ["index", str(photos), "--to", "bank.faiss", "--model", str(model)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3 and "pip install pillow-heif" in result.stderr


def test_search_says_what_is_wrong(photos: Path, model: Path) -> None:
    absent = fails("search", photos, "--in", "nothing.faiss")
    assert absent.startswith("error: there is no bank at nothing.faiss")
    assert "expected NAME.faiss" in fails("index", photos, "--to", "b.txt", "--model", model)
    assert "no such file or folder" in fails("index", "absent", "--to", "b.faiss")
    assert "no model file or folder at 'does/not/exist'" in fails(
        "index", photos, "--to", "b.faiss", "--model", "does/not/exist"
    )
    run("index", photos / "photo-1.jpg", "--to", "bank.faiss", "--model", model)
    other = fails("index", photos, "--to", "bank.faiss", "--tiles", 2)
    assert "made with tiles=1, got 2" in other


def test_exit_code_of_search(photos: Path, model: Path) -> None:
    run("index", photos, "--to", "bank.faiss", "--model", model)
    small(300).save("unknown.png")
    nothing = run("search", "unknown.png", "--in", "bank.faiss", "--exit-code", code=4)
    assert not any(match["copy"] for match in nothing["results"][0]["matches"])
    run("search", photos / "photo-1.jpg", "--in", "bank.faiss", "--exit-code", code=0)
    low = run("search", "unknown.png", "--in", "bank.faiss", "--threshold", -1, "--exit-code")
    assert low["threshold"] == -1 and low["results"][0]["matches"][0]["copy"]


def test_heatmap_that_cannot_be_drawn_is_not_passed_over(photos: Path, model: Path) -> None:
    run("index", photos, "--to", "bank.faiss", "--model", model)
    search = ["search", "--in", "bank.faiss", "--heatmap", "heat.png"]
    several = CliRunner().invoke(app, [*search, str(photos)])
    assert several.exit_code == 0 and several.stderr.startswith("no heatmap: ")
    assert "explains one image, got 14" in several.stderr
    small(3).save("query.png")
    (photos / "photo-3.jpg").unlink()
    gone = CliRunner().invoke(app, [*search, "query.png"])
    assert "photo-3.jpg is not at hand" in gone.stderr and not Path("heat.png").exists()
    assert run(*search, "query.png")["heatmap"] is None


def test_heatmap_of_search_and_compare(photos: Path, model: Path) -> None:
    run("index", photos, "--to", "bank.faiss", "--model", model)
    found = run("search", photos / "copy-5.jpg", "--in", "bank.faiss", "--heatmap", "heat.png")
    assert found["heatmap"] == "heat.png"
    with Image.open("heat.png") as image:
        assert image.height == 480 and image.width > 480
    same = run(
        "compare", photos / "photo-2.jpg", photos / "copy-2.jpg", "--model", model,
        "--heatmap", "pair.jpg",
    )  # fmt: skip
    assert same["copy"] and same["score"] > same["threshold"] and Path("pair.jpg").exists()
    assert same["verdict"] == "copy" and "in a bank of 1 000" in same["reason"]
    assert 0 <= same["false_match_rate"] < 1
    other = run(
        "compare", photos / "photo-2.jpg", photos / "photo-3.jpg", "--model", model,
        "--exit-code", code=4,
    )  # fmt: skip
    assert not other["copy"] and other["score"] < same["score"]


def test_tiles_find_a_part(photos: Path, model: Path) -> None:
    page = Image.new("RGB", (400, 300), (250, 250, 250))
    page.paste(small(8).resize((200, 150)), (0, 0))
    page.paste(small(200).resize((200, 150)), (200, 150))
    page.paste(small(201).resize((200, 150)), (0, 150))
    page.save("collage.png")
    run("index", photos, "--to", "bank.faiss", "--model", model)
    whole = run("search", "collage.png", "--in", "bank.faiss")
    tiled = run("search", "collage.png", "--in", "bank.faiss", "--tiles", 2)
    best = tiled["results"][0]["matches"][0]
    assert Path(best["id"]).name == "photo-8.jpg" and best["copy"]
    calibrated = Normalizer.load(model / "normalizer.safetensors")
    assert tiled["threshold"] == calibrated.threshold("tiled")
    assert whole["threshold"] == calibrated.threshold("search")
    before = {match["id"]: match["score"] for match in whole["results"][0]["matches"]}
    assert best["score"] > before.get(best["id"], -1.0)

    run("index", photos, "--to", "tiled.faiss", "--tiles", 2, "--model", model)
    crop = small(6).crop((0, 0, 100, 75))
    crop.save("crop.png")
    part = run("search", "crop.png", "--in", "tiled.faiss", "-k", 4)["results"][0]["matches"]
    assert Path(part[0]["id"]).name == "photo-6.jpg"
    assert len({match["id"] for match in part}) == len(part) == 4


def test_normalizer_from_folders_of_photos(model: Path, drawn: Path, tmp_path: Path) -> None:
    for name, seeds in {"background": range(1000, 1030), "held-out": range(2000, 2024)}.items():
        (tmp_path / name).mkdir()
        for seed in seeds:
            small(seed).save(tmp_path / name / f"{seed}.png")
    fitted = run("normalize", "fit", "background", "--model", model, "-o", "n", "--shrink")
    assert fitted["background"] == 30
    assert fitted["encoder"] == Normalizer.load(model / "normalizer.safetensors").encoder
    rate: tuple[Any, ...] = ("--false-match-rate", 0.01, "--per", "comparison", "--model", model)
    refused = fails("calibrate", "n", "-o", "no", "--queries", "held-out", *rate)
    assert "552 comparisons of 24 and 24 images are too few" in refused
    assert not (tmp_path / "no").exists()
    rate += ("--force",)
    plain = run("calibrate", "n", "-o", "n", "--queries", "held-out", *rate)
    tiled = run("calibrate", "n", "-o", "n", "--queries", "held-out", *rate, "--kind", "tiled")
    both = run(
        "calibrate", "n", "-o", "both", "--queries", "held-out", *rate, "--kind", "tiled",
        "--reference-tiles", 2,
    )  # fmt: skip
    one, ten, hundred = (
        {t["kind"]: t for t in document["thresholds"]} for document in (plain, tiled, both)
    )
    # The best of many comparisons is larger than one.
    assert one["search"]["value"] < ten["tiled"]["value"] < hundred["tiled"]["value"]
    assert "10 of a query, 1 of a reference" in ten["tiled"]["note"]
    assert "10 of a query, 10 of a reference" in hundred["tiled"]["note"]
    assert ten["tiled"]["samples"] == 12 * 12

    run("index", drawn, "--to", "bank.faiss", "--model", model, "--normalizer", "n")
    found = run("search", drawn / "copy-7.jpg", "--in", "bank.faiss", "--tiles", 2)
    assert found["threshold"] == ten["tiled"]["value"]
    (tmp_path / "held-out" / "empty.png").touch()
    run("calibrate", "n", "-o", "n", "--queries", "held-out", *rate, code=3)


# ---------------------------------------------------------------------- dedup


def grouped(document: dict[str, Any]) -> set[frozenset[str]]:
    return {
        frozenset(Path(member["path"]).name for member in group["members"])
        for group in document["groups"]
    }


EXPECTED = {
    frozenset({"photo-2.jpg", "copy-2.jpg"}),
    frozenset({"photo-5.jpg", "copy-5.jpg", "captioned-5.jpg"}),
    frozenset({"photo-7.jpg", "copy-7.jpg"}),
}


def test_dedup_groups_report_and_csv(photos: Path, model: Path) -> None:
    found = run(
        "dedup", photos, "--model", model, "--report", "out/copies.html", "--csv", "copies.csv"
    )
    assert grouped(found) == EXPECTED
    assert found["scanned"] == 14 and not found["unreadable"]
    for group in found["groups"]:
        kept = [Path(m["path"]).name for m in group["members"] if m["keep"]]
        assert len(kept) == 1 and not kept[0].startswith("copy")
        assert all(m["score"] >= found["threshold"] for m in group["members"] if not m["keep"])
    page = Path("out/copies.html").read_text()
    index = json.loads(re.search(r'id="index">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert len(index["groups"]) == 3 and index["scanned"] == 14
    heat = index["groups"][0]["members"][1]["heatmap"]
    assert max(heat["width"], heat["height"]) == 20
    assert len(base64.b64decode(heat["values"])) == heat["width"] * heat["height"]
    with open("copies.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7 and sum(int(row["keep"]) for row in rows) == 3


@pytest.fixture
def careful(model: Path, tmp_path: Path) -> Path:
    """A normalizer that knows no image of this world: only pixels make a copy."""
    fitted = Normalizer.load(model / "normalizer.safetensors")
    rows = np.eye(8, fitted.dim, dtype=np.float32)
    path = tmp_path / "careful.safetensors"
    fitted.with_domain(Domain(rows[0], -2.0, rows)).save(path)
    return path


def test_dedup_lists_what_it_is_unsure_of_apart_and_leaves_it_alone(
    photos: Path, model: Path, careful: Path
) -> None:
    copies = {
        frozenset({f"photo-{n}.jpg", f"copy-{n}.jpg"}) for n in (2, 5, 7)
    }  # resaved: the pixels agree
    dedup = ("dedup", photos, "--model", model, "--normalizer", careful, "--threshold", "-1",
             "--prefer", "largest")  # fmt: skip
    found = run(*dedup, "--report", "all.html", "--csv", "all.csv", "--move-to", "gone", "--apply")
    assert grouped(found) == copies
    (unsure,) = found["unsure"]
    assert len(unsure["members"]) == 14 and "look alike" in unsure["reason"]
    assert {member["verdict"] for member in unsure["members"]} == {"unsure"}
    assert len(found["actions"]) == len(list(Path("gone").iterdir())) == 3
    assert len(list(photos.iterdir())) == 11 and (photos / "captioned-5.jpg").exists()
    with open("all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["verdict"] for row in rows] == ["copy"] * 6 + ["unsure"] * 14
    page = Path("all.html").read_text()
    index = json.loads(re.search(r'id="index">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert [group["verdict"] for group in index["groups"]] == ["copy"] * 3 + ["unsure"]
    left = run(*dedup, "--hardlink", "--apply")
    assert left["actions"] == [] and left["groups"] == []


def test_search_and_compare_say_unsure_and_why(photos: Path, model: Path, careful: Path) -> None:
    pair = ("compare", photos / "photo-2.jpg", photos / "photo-3.jpg", "--model", model)
    told = (*pair, "--normalizer", careful, "--threshold", "-1")
    assert run(*pair, "--threshold", "-1")["verdict"] == "copy"  # by the score alone
    compared = run(*told, "--exit-code", code=4)
    assert (compared["verdict"], compared["copy"]) == ("unsure", False)
    assert "look alike" in compared["reason"]
    run("index", photos, "--to", "bank.faiss", "--model", model, "--normalizer", careful)
    found = run("search", photos / "copy-2.jpg", "--in", "bank.faiss", "--threshold", "-1")
    first, second, *others = found["results"][0]["matches"]
    assert {first["verdict"], second["verdict"]} == {"copy"}
    assert {match["verdict"] for match in others} == {"unsure"}


def test_dedup_moves_only_when_told(photos: Path, model: Path) -> None:
    before = sorted(path.name for path in photos.iterdir())
    planned = run("dedup", photos, "--model", model, "--move-to", "copies")
    assert planned["dry_run"] and len(planned["actions"]) == 4
    assert sorted(path.name for path in photos.iterdir()) == before and not Path("copies").exists()
    Path("copies").mkdir()
    Path("copies/copy-2.jpg").write_text("precious")
    done = run("dedup", photos, "--model", model, "--move-to", "copies", "--apply")
    assert not done["dry_run"]
    moved = sorted(path.name for path in Path("copies").iterdir())
    assert len(moved) == 5 and "copy-2 (1).jpg" in moved
    assert Path("copies/copy-2.jpg").read_text() == "precious"
    left = sorted(path.name for path in photos.iterdir())
    assert len(left) == 10 and len(left) + len(moved) - 1 == len(before)
    assert grouped(run("dedup", photos, "--model", model)) == set()


def test_dedup_does_not_look_at_what_it_moved(photos: Path, model: Path) -> None:
    aside = photos / "aside"
    done = run("dedup", photos, "--model", model, "--move-to", aside, "--apply")
    moved = sorted(path.name for path in aside.iterdir())
    assert len(moved) == len(done["actions"]) == 4
    again = run("dedup", photos, "--model", model, "--move-to", aside, "--apply")
    assert again["scanned"] == 10 and again["actions"] == []
    assert sorted(path.name for path in aside.iterdir()) == moved
    assert (
        run("dedup", photos, "--model", model)["scanned"] == 14
    )  # without --move-to it is one more
    said = fails("dedup", photos, "--model", model, "--move-to", photos / "aside" / "..")
    assert "is searched itself; choose another folder" in said


def test_dry_run_names_two_files_of_one_name_apart(
    photos: Path, model: Path, tmp_path: Path
) -> None:
    """Names that are no UTF-8 too: what is printed for them is not the name."""
    raw = os.fsdecode(b"latin-\xe9.jpg")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(photos / "copy-2.jpg", tmp_path / folder / raw)
    planned = run("dedup", photos, "a", "b", "--model", model, "--move-to", "copies")
    targets = [action["to"] for action in planned["actions"]]
    assert len(set(targets)) == len(targets) == 6


def test_dedup_leaves_what_cannot_be_moved(
    photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.unlink

    def in_a_read_only_folder(path: Path, missing_ok: bool = False) -> None:
        if path.name == "copy-2.jpg" and path.parent == photos:
            raise PermissionError(13, "Permission denied")
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", in_a_read_only_folder)
    done = run("dedup", photos, "--model", model, "--move-to", "copies", "--apply", code=3)
    assert [Path(entry["path"]).name for entry in done["untouched"]] == ["copy-2.jpg"]
    assert len(done["actions"]) == 3
    moved = {path.name for path in Path("copies").iterdir()}
    assert len(moved) == 3 and "copy-2.jpg" not in moved and (photos / "copy-2.jpg").exists()


def test_dedup_hardlinks_only_equal_files(photos: Path, model: Path) -> None:
    shutil.copy(photos / "photo-1.jpg", photos / "same.jpg")
    done = run("dedup", photos, "--model", model, "--hardlink", "--apply")
    assert len(done["actions"]) == 1
    assert os.path.samefile(photos / "photo-1.jpg", photos / "same.jpg")
    assert not os.path.samefile(photos / "photo-2.jpg", photos / "copy-2.jpg")
    assert (photos / "same.jpg").read_bytes() == (photos / "photo-1.jpg").read_bytes()
    again = run("dedup", photos, "--model", model, "--hardlink")
    assert again["actions"] == [] and grouped(again) == EXPECTED


def test_dedup_of_nothing(tmp_path: Path, model: Path) -> None:
    empty = tmp_path / "nothing"
    empty.mkdir()
    found = run("dedup", empty, "--model", model, "--report", "r.html")
    assert found["groups"] == [] and Path("r.html").exists()


# ---------------------------------------------------------------------- the program


def _program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
    return subprocess.run(
        [sys.executable, "-m", "sscd_vec", *arguments], capture_output=True, text=True, **options
    )


def test_help_is_light_and_teaches() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from sscd_vec.cli import app, main; sys.argv = ['sscd-vec', '--help']\n"
            "try: main()\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'faiss', 'pymilvus', 'PIL') if m in sys.modules])",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.rstrip().endswith("[]")
    for word in ("demo", "dedup", "index", "search", "compare", "serve", "Exit codes"):
        assert word in done.stdout


def test_examples_in_the_help_keep_their_lines_and_options_their_brackets() -> None:
    from sscd_vec.cli import _COMMANDS, _NORMALIZE
    from sscd_vec.cli.console import help_text

    for name, command in {**_COMMANDS, **_NORMALIZE}.items():
        assert "    sscd-vec " in help_text(command), f"{name}: no example"
        for line in help_text(command).splitlines():
            assert line.count("sscd-vec ") <= 1, f"{name}: examples run together: {line}"
            assert len(line) <= 79 or not line.startswith(" "), f"{name}: too wide: {line}"
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            for option in getattr(parameter.annotation, "__metadata__", ()):
                # Square brackets are markup to the help's printer: it would leave them out.
                assert "[" not in (option.help or ""), f"{name} --{parameter.name}"


def test_a_bank_that_another_process_keeps_open_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server never lets go of a Milvus Lite file."""

    def held(location: str, **options: object) -> None:
        assert 0 < float(str(options["wait"])) <= 30
        raise LockHeldError(11, "x.db.bank/lock is locked: process 7 holds it")

    monkeypatch.setattr("sscd_vec.bank.Bank", held)
    said = fails("search", ".", "--in", "x.db")
    assert said.startswith("error: x.db.bank/lock is locked: process 7 holds it. Wait until")


def test_every_command_speaks_json() -> None:
    from sscd_vec.cli import _COMMANDS, _NORMALIZE

    for name, command in {**_COMMANDS, **_NORMALIZE}.items():
        assert "as_json" in inspect.signature(command).parameters, name


def test_train_as_json(drawn: Path) -> None:
    settings = {"trunk": "resnet18", "init_from": None, "dim": 16, "size": 32, "batch": 4}
    Path("s.json").write_text(json.dumps(settings))
    done = run("train", drawn, "--out", "run", "--config", "s.json", "--steps", 1)
    assert (done["out"], done["steps"], done["finished"]) == ("run", 1, True)
    assert run("train", drawn, "--config", "s.json", "--preview", "p.png") == {"preview": "p.png"}
    said = fails("train", "--config", "s.json")
    assert said == "error: no images given: name a folder, .tar shard or list file\n"


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_wait_asleep_unless_told_otherwise(given: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [
            sys.executable, "-c",
            "import os, sys; from sscd_vec.cli import main; sys.argv = ['sscd-vec', '--help']\n"
            "try: main()\nexcept SystemExit: pass\n"
            "print(os.environ['OMP_WAIT_POLICY'])",
        ],
        capture_output=True, text=True, check=True,
        env=env if given is None else {**env, "OMP_WAIT_POLICY": given},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == (given or "PASSIVE")


def test_odd_metadata_is_no_remark(photos: Path, model: Path) -> None:
    """Pillow warns about it; whoever runs a command has nothing to do about it."""
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"  # five entries announced, none there
    small(1).save(photos / "odd.jpg", exif=exif)
    done = _program("dedup", str(photos), "--model", str(model))
    assert done.returncode == 0 and done.stderr == ""
    env = {**os.environ, "SSCD_VEC_DEBUG": "1"}
    assert "EXIF" in _program("dedup", str(photos), "--model", str(model), env=env).stderr


def test_errors_are_one_line_with_exit_codes(tmp_path: Path) -> None:
    missing = _program("search", "x.jpg", "--in", "nothing.faiss")
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: ") and "Traceback" not in missing.stderr
    wrong = _program("index")
    assert wrong.returncode == 2
    full = _program("search", "x.jpg", "--in", "n.faiss", env={**os.environ, "SSCD_VEC_DEBUG": "1"})
    assert "Traceback" in full.stderr


def test_a_reader_that_has_enough_is_no_error() -> None:
    Path("truth.csv").write_text("query_id,reference_id\nq1,r1\n")
    Path("mine.csv").write_text("query_id,reference_id,score\nq1,r1,0.9\n")
    command = [sys.executable, "-m", "sscd_vec", "eval", "truth.csv", "--predictions", "mine.csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stderr is not None
        program.stdout.close()  # as head does
        assert program.stderr.read() == b""


def test_eval_of_predictions_and_of_folders(photos: Path, model: Path, tmp_path: Path) -> None:
    Path("truth.csv").write_text("query_id,reference_id\nq1,r1\nq2,r2\nq3,\n")
    Path("mine.csv").write_text("query_id,reference_id,score\nq1,r1,0.9\nq3,r9,0.8\nq2,r2,0.7\n")
    found = run("eval", "truth.csv", "--predictions", "mine.csv")
    assert found["micro_ap"] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert "give --predictions" in fails("eval", "truth.csv")
    Path("more.csv").write_text(Path("mine.csv").read_text() + "q8,r2,0.95\nq9,r1,0.85\n")
    assert run("eval", "truth.csv", "--predictions", "more.csv") == found | {"queries_left_out": 2}
    Path("others.csv").write_text("query_id,reference_id,score\n1,1,0.9\n")
    assert "lists none of the queries" in fails("eval", "truth.csv", "--predictions", "others.csv")

    for folder, prefix in (("queries", "copy"), ("references", "photo")):
        (tmp_path / folder).mkdir()
        for path in photos.glob(f"{prefix}-*.jpg"):
            shutil.copy(path, tmp_path / folder)
    lines = [f"copy-{n},photo-{n}" for n in (2, 5, 7)]
    Path("truth.csv").write_text("\n".join(["query_id,reference_id", *lines]) + "\n")
    folders = run(
        "eval", "truth.csv", "--queries", "queries", "--references", "references",
        "--model", model, "--write", "out.csv",
    )  # fmt: skip
    assert folders["accuracy_at_1"] == 1.0 and folders["micro_ap"] > 0.9
    assert run("eval", "truth.csv", "--predictions", "out.csv") == folders


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("demo", "here")
    assert found["copies"] == 24 and found["copies_found"] >= 12
    assert found["false_matches"] <= 1
    for match in found["matches"]:
        assert match["score_faiss"] == pytest.approx(match["score_milvus"], abs=2e-4)
    assert found["originals_kept"] == found["groups"] >= 6
    assert (tmp_path / "here" / "report.html").stat().st_size > 50_000
    originals = [m for m in found["matches"] if m["edit"] == "resaved"]
    assert originals and all(match["right"] for match in originals)
