"""A bank on a real Milvus server: index, change, prune and search from the command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faults.milvus_server import TOKEN, MilvusProcess, running
from sscd_vec.cli import app
from tests.cli.conftest import small
from tests.cli.test_commands import fails, names, run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusProcess]:
    with running(tmp_path_factory.mktemp("milvus"), authorized=True) as process:
        yield process


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SSCD_VEC_MILVUS_TOKEN", TOKEN)


def test_index_search_change_and_prune(server: MilvusProcess, model: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for seed in range(8):
        small(seed).save(photos / f"photo-{seed}.jpg", quality=92)
    made = run("index", photos, "--to", server.uri, "--model", model)
    assert (made["added"], made["images"]) == (8, 8)
    again = run("index", photos, "--to", server.uri)
    assert (again["added"], again["unchanged"]) == (0, 8)

    small(2).resize((90, 70)).save("query.png")
    answer = run("search", "query.png", "--in", server.uri, "-k", 3)
    matches = answer["results"][0]["matches"]
    assert names(matches)[0] == "photo-2.jpg" and matches[0]["copy"] and not matches[1]["copy"]

    (photos / "photo-2.jpg").unlink()
    small(50).save(photos / "photo-3.jpg")
    changed = run("index", photos, "--to", server.uri, "--prune")
    assert (changed["added"], changed["removed"], changed["images"]) == (1, 1, 7)
    gone = run("search", "query.png", "--in", server.uri, "-k", 8)["results"][0]["matches"]
    assert len(gone) == 7 and "photo-2.jpg" not in names(gone)
    small(50).resize((90, 70)).save("changed.png")
    new = run("search", "changed.png", "--in", server.uri)["results"][0]["matches"]
    assert names(new)[0] == "photo-3.jpg" and new[0]["copy"]


def test_tiled_collection_beside_a_plain_one(
    server: MilvusProcess, model: Path, drawn: Path
) -> None:
    bank = ("--collection", "tiled")
    run("index", drawn, "--to", server.uri, *bank, "--tiles", 2, "--model", model)
    small(6).crop((0, 0, 100, 75)).save("crop.png")
    part = run("search", "crop.png", "--in", server.uri, *bank, "-k", 4)["results"][0]["matches"]
    assert names(part)[0] == "photo-6.jpg"
    assert len({match["id"] for match in part}) == len(part) == 4


def test_server_that_is_not_there(drawn: Path, model: Path) -> None:
    """It is said at once, before a model is loaded, and without the password."""
    said = fails("index", drawn, "--to", "http://me:secret@127.0.0.1:9", "--model", model)
    assert said.startswith("error: no Milvus answers at http://127.0.0.1:9/images ")
    absent = fails("search", drawn, "--in", "http://me:secret@127.0.0.1:9")
    assert "no bank at http://127.0.0.1:9/images " in absent and "--state" in absent
    assert "secret" not in said + absent


def test_wrong_token(
    server: MilvusProcess, drawn: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSCD_VEC_MILVUS_TOKEN", "root:guess")
    arguments = ["index", str(drawn), "--to", server.uri, "--model", str(model)]
    result = CliRunner().invoke(app, [*arguments, "--collection", "other"])
    assert result.exit_code == 1 and "guess" not in result.output
    assert result.stderr.startswith("error: ")
