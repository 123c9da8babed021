"""dedup as a user runs it: what it keeps, why, what it leaves alone, and what it is told."""

import csv
import json
import shutil
import socket
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps
from typer.testing import CliRunner

from sscd_vec.bank.decisions import Decision, Decisions
from sscd_vec.cli import app, console
from sscd_vec.files import file_sha256
from sscd_vec.locks import locked
from sscd_vec.progress import ProgressBar
from tests.cli.conftest import small


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """An original with a hard compressed copy; twins that differ in nothing but their format."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed in range(4):
        small(seed).save(folder / f"photo-{seed}.jpg", quality=92)
    with Image.open(folder / "photo-2.jpg") as original:
        original.save(folder / "copy-2.jpg", quality=40)
    small(5).save(folder / "twin-5.png")
    small(5).save(folder / "twin-5.webp", lossless=True)
    return folder


def invoke(*arguments: object, code: int = 0) -> Any:  # noqa: ANN401 - typer's result
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def run(*arguments: object) -> Any:  # noqa: ANN401 - a JSON document
    return json.loads(invoke(*arguments, "--json").stdout)


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        Path(member["path"]).name: member
        for group in document["groups"]
        for member in group["members"]
    }


def test_reason_and_doubt_are_everywhere(photos: Path, model: Path) -> None:
    found = run("dedup", photos, "--model", model, "--csv", "c.csv", "--report", "r.html",
                "--no-heatmaps")  # fmt: skip
    members = by_name(found)
    assert members["photo-2.jpg"]["keep"] and members["photo-2.jpg"]["sure"]
    assert members["copy-2.jpg"]["reason"] == "compressed harder"
    assert not members["twin-5.png"]["sure"]
    [twins] = [group for group in found["groups"] if not group["sure"]]
    assert twins["leave_alone"].startswith("unsure which one to keep: nothing tells 2")
    with open("c.csv", newline="") as file:
        rows = {Path(row["path"]).name: row for row in csv.DictReader(file)}
    assert rows["copy-2.jpg"]["reason"] == "compressed harder"
    assert (rows["copy-2.jpg"]["sure"], rows["twin-5.webp"]["sure"]) == ("1", "0")
    page = Path("r.html").read_text()
    assert "compressed harder" in page and "unsure which one to keep" in page
    piped = invoke("dedup", photos, "--model", model)
    lines = [line.split("\t") for line in piped.stdout.splitlines()]
    assert [line[1] for line in lines] == ["keep", "copy", "unsure", "unsure"]  # doubt comes last
    assert "1 group left alone: unsure which image to keep" in piped.stderr


def test_unsure_groups_stay_unless_a_preference_decides(photos: Path, model: Path) -> None:
    plan = run("dedup", photos, "--model", model, "--move-to", "away")
    assert [Path(action["move"]).name for action in plan["actions"]] == ["copy-2.jpg"]
    told = run("dedup", photos, "--model", model, "--move-to", "away", "--prefer", "format:webp")
    assert {Path(action["move"]).name for action in told["actions"]} == {
        "copy-2.jpg", "twin-5.png"
    }  # fmt: skip
    assert by_name(told)["twin-5.webp"]["reason"] == "preferred: format:webp"
    said = invoke("dedup", photos, "--model", model, "--prefer", "newest", code=1).stderr
    assert "expected largest, oldest, format:heic, path:GLOB" in said


def test_a_dry_run_says_so_in_a_pipe(photos: Path, model: Path) -> None:
    said = invoke("dedup", photos, "--model", model, "--move-to", "away").stderr
    assert "1 file would be moved; nothing was touched. Add --apply to do it." in said


def test_reference_images_are_never_moved(photos: Path, model: Path, tmp_path: Path) -> None:
    """Not even where the original lies outside; groups among references are not shown."""
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    shutil.copy(photos / "photo-1.jpg", inbox / "known.jpg")
    (photos / "photo-3.jpg").rename(inbox / "better-3.jpg")
    with Image.open(inbox / "better-3.jpg") as original:
        original.save(photos / "worse-3.jpg", quality=35)
    done = run("dedup", inbox, "--against", photos, "--model", model, "--move-to", "away",
               "--apply")  # fmt: skip
    assert {name for name in by_name(done) if "2" in name or "5" in name} == set()
    assert [Path(action["move"]).name for action in done["actions"]] == ["known.jpg"]
    assert (photos / "worse-3.jpg").exists() and (inbox / "better-3.jpg").exists()
    assert by_name(done)["better-3.jpg"]["keep"]


def test_decisions_of_a_report_are_respected(photos: Path, model: Path) -> None:
    first, second = (file_sha256(photos / name) for name in ("photo-2.jpg", "copy-2.jpg"))
    made = Decisions(kept={file_sha256(photos / "twin-5.webp")})
    made.add([Decision(first, second, is_copy=False)])
    made.save("d.json")
    found = run("dedup", photos, "--model", model, "--decisions", "d.json")
    members = by_name(found)
    assert set(members) == {"twin-5.png", "twin-5.webp"}
    assert members["twin-5.webp"]["keep"] and members["twin-5.webp"]["sure"]
    assert members["twin-5.webp"]["reason"] == "chosen by a person"


def test_decisions_of_a_bank(photos: Path, model: Path) -> None:
    run("index", photos, "--to", "b.faiss", "--model", model)
    first, second = (file_sha256(photos / name) for name in ("photo-2.jpg", "copy-2.jpg"))
    made = Decisions()
    made.add([Decision(first, second, is_copy=False)])
    made.save("d.json")
    added = run("decisions", "--in", "b.faiss", "--add", "d.json", "--out", "all.json")
    assert len(added["pairs"]) == 1 and added["pairs"][0]["score"] > 0
    assert len(Decisions.load("all.json")) == 1
    matches = run("search", photos / "photo-2.jpg", "--in", "b.faiss")["results"][0]["matches"]
    verdicts = {Path(match["id"]).name: match["copy"] for match in matches}
    assert verdicts["photo-2.jpg"] is True and verdicts["copy-2.jpg"] is False
    listed = invoke("decisions", "--in", "b.faiss")
    assert "not a copy" in listed.stdout and "1 decision, 0 images" in listed.stderr
    said = invoke("calibrate", model / "normalizer.safetensors", "-o", "n", "--from-decisions",
                  "all.json", code=1).stderr  # fmt: skip
    assert "expected at least 20 labelled pairs" in said and not Path("n").exists()


def test_threshold_from_decisions_is_stored(model: Path) -> None:
    from sscd_vec.normalize import Normalizer

    fitted = Normalizer.load(model / "normalizer.safetensors")
    made = Decisions(normalizer=fitted.query_fingerprint)
    for number in range(40):
        made.add([Decision(f"{number:064x}", "a" * 64, number >= 20, number / 40)])
    made.save("d.json")
    found = run("calibrate", model / "normalizer.safetensors", "-o", "n", "--from-decisions",
                "d.json", "--precision", 1.0)  # fmt: skip
    [stored] = [one for one in found["thresholds"] if one["kind"] == "symmetric"]
    assert stored["value"] == pytest.approx(0.4875) and len(stored["interval"]) == 2
    assert Normalizer.load("n").threshold("symmetric") == stored["value"]


# ---------------------------------------------------------------------- people at the terminal


def test_an_empty_folder_is_not_silence(tmp_path: Path, model: Path, photos: Path) -> None:
    (tmp_path / "nothing").mkdir()
    run("index", photos, "--to", "b.faiss", "--model", model)
    for command in (
        ("dedup", "nothing", "--model", model),
        ("index", "nothing", "--to", "b.faiss"),
        ("search", "nothing", "--in", "b.faiss"),
        ("encode", "nothing", "--to", "d", "--model", model),
        ("overlap", "nothing", "b.faiss"),
    ):
        assert "no images in nothing" in invoke(*command).stderr
    said = invoke("normalize", "fit", "nothing", "-o", "n", "--model", model, code=1).stderr
    assert "error: no images in nothing" in said


def test_errors_say_the_next_step(photos: Path) -> None:
    said = invoke("compare", photos, photos / "photo-1.jpg", code=1).stderr
    assert "is a folder" in said and "sscd-vec dedup" in said
    said = invoke("calibrate", "missing", "-o", "n", "--precision", 0.9, code=1).stderr
    assert "sscd-vec normalize fit" in said


def test_a_terminal_is_told_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(console, "say", said.append)
    console.with_exit_codes(lambda: said.append("work"))()
    assert said == ["loading …", "work"]


def test_a_search_of_many_images_shows_how_far_it_is(
    photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sscd_vec.bank import searching

    run("index", photos, "--to", "b.faiss", "--model", model)
    shown: list[bool | None] = []

    def bar(title: str, total: int, show: bool | None) -> AbstractContextManager[ProgressBar]:
        shown.append(show)
        return nullcontext(ProgressBar())

    monkeypatch.setattr(searching, "progress_bar", bar)
    run("search", photos, "--in", "b.faiss")
    assert shown == [None]  # on a terminal


def test_a_bank_in_use_is_one_sentence_that_names_its_holder(photos: Path, model: Path) -> None:
    run("index", photos, "--to", "b.faiss", "--model", model)
    small(7).save(photos / "new.jpg")
    with locked("b.faiss.bank/lock", purpose="add images"):
        for _ in range(2):
            said = invoke("index", photos, "--to", "b.faiss", "--no-wait", code=1).stderr
            assert said.startswith("error: b.faiss.bank/lock is locked: process ")
            assert said.endswith("to add images. Wait until it ends, or stop it\n")


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = invoke("serve", "missing.faiss", "--port", port, code=1).stderr
    assert said == (
        f"error: cannot listen on 127.0.0.1:{port} (Address already in use); choose another "
        "--port, or 0 for a free one\n"
    )


def test_a_report_that_cannot_be_written_fails_before_the_work(
    photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sscd_vec.bank import Bank

    monkeypatch.setattr(Bank, "add", lambda *_, **__: pytest.fail("worked first"))
    Path("file").touch()
    for option in ("--report", "--csv"):
        said = invoke("dedup", photos, "--model", model, option, "file/r.html", code=1).stderr
        assert said.startswith("error: file/r.html cannot be written")
        assert "name another place" in said and "Traceback" not in said
    said = invoke("dedup", photos, "--model", model, "--report", photos, code=1).stderr
    assert "is a folder; name a file" in said


def test_one_of_something_is_singular(photos: Path, model: Path) -> None:
    for path in photos.iterdir():
        if path.name != "photo-1.jpg":
            path.unlink()
    assert "1 image in b.faiss" in invoke("index", photos, "--to", "b.faiss", "--model",
                                          model).stderr  # fmt: skip


def test_links_to_images_are_followed(photos: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    ImageOps.mirror(small(1)).save(tmp_path / "elsewhere.png")
    (tmp_path / "links" / "link.png").symlink_to(tmp_path / "elsewhere.png")
    assert run("index", "links", "--to", "b.faiss", "--model", model)["added"] == 1


def test_version_and_flags_without_types() -> None:
    assert invoke("--version").stdout.startswith("sscd-vec ")
    for command in ((), ("dedup",), ("normalize",), ("normalize", "fit")):
        assert "<bool>" not in invoke(*command, "--help").stdout


@pytest.mark.parametrize("name", ["settings.json", "images.sqlite"])
def test_damaged_files_of_a_bank_are_named(name: str, photos: Path, model: Path) -> None:
    run("index", photos, "--to", "b.faiss", "--model", model)
    Path("b.faiss.bank", name).write_bytes(b"rubbish" * 1000)
    said = invoke("search", photos / "photo-1.jpg", "--in", "b.faiss", code=1).stderr
    assert name in said and "Traceback" not in said and said.count("\n") <= 2
