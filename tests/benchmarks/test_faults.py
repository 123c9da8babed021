"""A slice of each campaign: what is attacked in length by hand is attacked a little every time."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import results
from faults import attack, banks, fuzz_images, writers
from faults.bombs import encoded, scan_bomb, tag_bomb, text_bomb, tile_bomb
from faults.thumbnails import open_bank, write_images
from sscd_vec.app.engine import Engine
from sscd_vec.app.metrics import Metrics
from sscd_vec.cli.pictures import draw
from tests.app.running import Running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with open_bank(tmp_path / "known.faiss") as bank:
        bank.add(write_images(tmp_path / "images", 4, 1), show_progress=False)
        with Running(Engine(bank, Metrics())) as running:
            yield running


def test_mutated_images_are_pixels_or_refused() -> None:
    outcomes = [fuzz_images.decode(number, seed=1) for number in range(240)]
    assert set(outcomes) == {"pixels", "refused"}
    assert fuzz_images.mutated(17, 1) == fuzz_images.mutated(17, 1)  # can be looked at again


def test_a_process_that_dies_is_a_fault_and_the_campaign_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dies = "import os; os.write(1, b\"0\\t0.1\\t9\\t'pixels'\\n\"); os.abort()"
    monkeypatch.setattr(results, "RUN", (sys.executable, "-c", dies))
    outcome = fuzz_images.Outcome(seed=1)
    fuzz_images.run(outcome, 2, lambda _: None)
    assert outcome.outcomes["pixels"] == 1 and outcome.images == 2
    assert outcome.faults == ["image 1 ends its process: -6"]


def test_bombs_beside_an_honest_client(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    some = {
        "tile": [tile_bomb(46336)], "tags": [tag_bomb(20_000)], "scans": [scan_bomb(2000)],
        "text": [text_bomb(2**20)], "album": 3 * [encoded(draw(1), "PNG")],
    }  # fmt: skip
    monkeypatch.setattr(attack, "bombs", lambda: some)
    monkeypatch.setattr(attack, "AT_ONCE", 6)
    figures = asyncio.run(attack.attack_with_bombs(server.address, rounds=1, seed=1))
    assert figures["honest_failures"] == 0 and figures["searches_without_bombs"] == 6 * attack.ALONE
    statuses = figures["statuses"]
    assert isinstance(statuses, dict)
    assert {name.split()[-1] for name in statuses} <= {"200", "413", "415", "422", "503"}
    assert "tile 200" not in statuses and "scans 200" not in statuses


def test_bad_neighbours_fail_alone(server: Running) -> None:
    figures = asyncio.run(attack.attack_neighbours(server.address, good=8, bad=3))
    assert figures["good_failed"] == 0
    assert set(figures["bad_statuses"]) <= {"400", "422", "503"}  # type: ignore[call-overload]


def test_silent_connections_leave_room(server: Running) -> None:
    figures = attack.attack_with_silence(server.address, 600)
    assert figures["health_answers"] == 10 and figures["search_status"] == 200


@pytest.mark.parametrize("name", ["a row with a path outside", "uploads as a link"])
def test_a_strangers_bank_touches_nothing(name: str, tmp_path: Path) -> None:
    assert banks.attack_with_a_strange_bank(name, tmp_path) in ("served", "refused")


@pytest.mark.parametrize("kind", ["kill", "server"])
def test_killed_writers_lose_nothing(kind: str, tmp_path: Path) -> None:
    done = writers.Rounds(kind, "faiss", tmp_path, images=8).run(1)
    assert done["found"] == done["acknowledged"]
