"""One round of each fault of ``faults/kill``: kill -9, reopen, nothing lost or doubled."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import results
from faults import kill
from faults.kill import Load, run_round, verify
from faults.milvus_server import MilvusProcess, running
from sscd_vec.adapters.faiss import FaissIndex

ROWS = 5000


@pytest.mark.parametrize("scenario", ["faiss", "lite"])
def test_killing_the_process_that_holds_the_index(scenario: str, tmp_path: Path) -> None:
    place = str(tmp_path) if scenario == "faiss" else str(tmp_path / "photos.db")
    figures = run_round(Load(scenario, place, "photos", ROWS, seed=3), tmp_path / "acks", None)
    assert 0 < int(str(figures["acknowledged"])) <= int(str(figures["found"])) <= ROWS


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusProcess]:
    with running(tmp_path_factory.mktemp("fragile")) as server:
        yield server


@pytest.mark.parametrize("scenario", ["client", "server"])
def test_killing_one_side_of_a_real_server(
    scenario: str, fragile: MilvusProcess, tmp_path: Path
) -> None:
    load = Load(scenario, fragile.uri, scenario, ROWS, seed=4)
    figures = run_round(load, tmp_path / "acks", fragile)
    found = int(str(figures["found"]))
    if scenario == "server":
        assert found == ROWS, "the load finishes although its server was restarted"
    assert int(str(figures["acknowledged"])) <= found


def test_a_loss_would_be_noticed(tmp_path: Path) -> None:
    load = Load("faiss", str(tmp_path), "photos", 1000, seed=5)
    for _ in load.run():
        pass
    index = load.open()
    assert isinstance(index, FaissIndex)
    index.remove(["row-000007"])
    index.save(tmp_path / "index.faiss")
    with pytest.raises(AssertionError, match=r"1 acknowledged rows are gone: \[7\]"):
        verify(load, 1000)


def test_rounds_go_on_where_they_stopped_and_a_fault_stays_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def one(load: Load, acks: Path, server: MilvusProcess | None) -> kill.Round:
        seeds.append(load.seed)
        if load.seed == 3:
            raise AssertionError("7 acknowledged rows are gone")
        return {"acknowledged": 10, "found": 10}

    monkeypatch.setattr(kill, "run_round", one)
    monkeypatch.setattr(results, "write", partial(results.write, folder=tmp_path))
    assert kill.rounds_done("faiss", 100, tmp_path) == []
    kill.run_scenario("faiss", 2, 100, tmp_path / "a", None, [])
    done = kill.rounds_done("faiss", 100, tmp_path)
    assert len(done) == 2 and kill.rounds_done("faiss", 200, tmp_path) == []
    with pytest.raises(AssertionError, match="7 acknowledged"):
        kill.run_scenario("faiss", 5, 100, tmp_path / "b", None, done)
    assert seeds == [0, 1, 2, 3]
    figures = results.read("faults_faiss", tmp_path)["figures"]
    assert isinstance(figures, dict)
    assert (figures["rounds"], figures["lost_or_doubled"], figures["found"]) == (4, 1, 30)
