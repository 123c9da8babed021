"""Kill -9 in the middle of a load, then look: is every acknowledged vector there, and none doubled?

Scenarios (each round has its own file or collection):

- ``faiss``, ``lite``: the process that adds is killed (it holds the index).
- ``client``: the process that adds to a real Milvus server is killed; the server goes on.
- ``server``: the Milvus server is killed and started again; the client must finish its load.

A vector counts as acknowledged when ``add`` returned on Milvus, when ``commit`` returned on FAISS.

    python benchmarks faults/kill --rounds 20 --rows 50000
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import results
from faults.milvus_server import MilvusProcess
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.index import Index
from sscd_vec.adapters.milvus import MilvusCollection
from sscd_vec.normalize import Normalizer

SCENARIOS = ("faiss", "lite", "client", "server")
DIM = 128
BATCH = 500
SAVE_EVERY = 10  # batches, on FAISS
CHECKED = 200  # acknowledged vectors searched for after each round
PATIENCE = 600.0
Round = dict[str, object]  # what is recorded of one


@dataclass
class Load:
    """One load: what is added where, and who is told how far it got."""

    scenario: str
    place: str
    name: str
    rows: int
    seed: int

    def descriptors(self) -> NDArray[np.float32]:
        """The same in every process."""
        rows = np.random.default_rng(self.seed).standard_normal((self.rows, DIM), dtype=np.float32)
        unit: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit

    def ids(self) -> list[str]:
        """One per row."""
        return [f"row-{i:06d}" for i in range(self.rows)]

    def open(self) -> Index:
        """The index as it is now."""
        rules = Normalizer.identity(DIM)
        if self.scenario == "faiss":
            path = Path(self.place) / "index.faiss"
            return FaissIndex.open(path, rules) if path.exists() else FaissIndex(rules, path=path)
        return MilvusCollection(self.place, self.name, rules, retry_for=300)

    def run(self) -> Iterator[int]:
        """Add everything; yield how many rows are acknowledged so far."""
        index, ids, descriptors = self.open(), self.ids(), self.descriptors()
        for n, begin in enumerate(range(0, self.rows, BATCH), 1):
            part = slice(begin, begin + BATCH)
            index.add(ids[part], descriptors[part])
            end = min(begin + BATCH, self.rows)
            if isinstance(index, MilvusCollection):
                yield end
            elif n % SAVE_EVERY == 0 or end == self.rows:
                index.commit()
                yield end
        index.close()


def run_round(load: Load, acks: Path, server: MilvusProcess | None) -> Round:
    """Start a load in a process of its own, kill, look.

    Raises:
        AssertionError: If an acknowledged vector is missing, or one is there twice.
    """
    began = time.monotonic()
    chance = random.Random(load.seed)
    target = int(load.rows * chance.uniform(0.05, 0.9))
    arguments = [load.scenario, load.place, load.name, str(load.rows), str(load.seed), str(acks)]
    acks.write_text("")
    child = subprocess.Popen([*results.RUN, "faults/kill", "--load", *arguments])
    try:
        _wait_for(acks, target, child)
        time.sleep(chance.uniform(0, 0.05))
        if load.scenario == "server" and server is not None:
            server.kill()
            server.start()
            if child.wait(timeout=PATIENCE) != 0:
                raise AssertionError("the load did not survive the server's restart")
        else:
            child.send_signal(signal.SIGKILL)
            child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    acknowledged = _read(acks)
    found = verify(load, acknowledged)
    seconds = round(time.monotonic() - began, 1)
    return {"killed_after": target, "acknowledged": acknowledged, **found, "seconds": seconds}


def verify(load: Load, acknowledged: int) -> dict[str, int]:
    """Look for the acknowledged rows and for doubled ones; then add over the edge once more."""
    index, ids, descriptors = load.open(), load.ids(), load.descriptors()
    present = index.present(ids)
    missing = [i for i in range(acknowledged) if ids[i] not in present]
    if missing:
        raise AssertionError(f"{load}: {len(missing)} acknowledged rows are gone: {missing[:5]}")
    if len(index) != len(present):
        raise AssertionError(f"{load}: {len(index)} rows for {len(present)} ids: doubled")
    chosen = np.random.default_rng(load.seed).choice(
        acknowledged, min(CHECKED, acknowledged), False
    )
    found = index.search(descriptors[chosen], 1)
    wrong = [i for i, row in zip(chosen.tolist(), found, strict=True) if row[0].id != ids[i]]
    if wrong:
        raise AssertionError(f"{load}: rows {wrong[:5]} do not find themselves")
    edge = slice(max(0, acknowledged - 2 * BATCH), acknowledged + BATCH)
    index.add(ids[edge], descriptors[edge])
    expected = len(present | set(ids[edge]))
    if len(index) != expected:
        raise AssertionError(f"{load}: {len(index)} rows after adding again, not {expected}")
    if isinstance(index, MilvusCollection):
        index.drop()
        index.close()
    return {"found": len(present)}


def _wait_for(acks: Path, target: int, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while _read(acks) < target and child.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the load stands still")
        time.sleep(0.002)


def _read(acks: Path) -> int:
    text = acks.read_text()
    whole = text[: text.rfind("\n") + 1].split()
    return int(whole[-1]) if whole else 0


def run_scenario(
    scenario: str,
    rounds: int,
    rows: int,
    folder: Path,
    server: MilvusProcess | None,
    done: list[Round],
) -> None:
    """The rounds of one scenario that are not ``done`` yet; the figures are written after each.

    Raises:
        AssertionError: If a vector was lost or doubled; the round is recorded with what was found.
    """
    for n in range(len(done), rounds):
        place = folder / f"{scenario}{n}"
        place.mkdir(parents=True)
        where = {"faiss": str(place), "lite": str(place / "photos.db")}
        uri = where.get(scenario) or (server.uri if server is not None else "")
        load = Load(scenario, uri, f"{scenario}{n}", rows, seed=n)
        try:
            done.append(run_round(load, place / "acks", server))
        except AssertionError as fault:
            _write(scenario, rows, [*done, {"acknowledged": 0, "found": 0, "fault": str(fault)}])
            raise
        print(scenario, n, done[-1], flush=True)
        shutil.rmtree(place)
        _write(scenario, rows, done)


def _write(scenario: str, rows: int, done: list[Round]) -> None:
    figures = {
        "killed": "server" if scenario == "server" else "client",
        "rounds": len(done),
        "rows": rows,
        "dim": DIM,
        "acknowledged": sum(int(str(each["acknowledged"])) for each in done),
        "found": sum(int(str(each["found"])) for each in done),
        "lost_or_doubled": sum("fault" in each for each in done),  # in so many rounds
        "each": done,
    }
    results.write(f"faults_{scenario}", figures)


def rounds_done(scenario: str, rows: int, folder: Path = results.RESULTS) -> list[Round]:
    """The rounds recorded so far for loads of ``rows``; a round with a fault stays recorded."""
    if not (folder / f"faults_{scenario}.json").exists():
        return []
    figures = cast(dict[str, Any], results.read(f"faults_{scenario}", folder)["figures"])
    return list(figures["each"]) if figures["rows"] == rows else []


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--resume", action="store_true", help="go on after the rounds recorded")
    parser.add_argument("--load", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        scenario, place, name, rows, seed, acks = options.load
        with open(acks, "ab", buffering=0) as file:
            for count in Load(scenario, place, name, int(rows), int(seed)).run():
                os.write(file.fileno(), f"{count}\n".encode())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    with tempfile.TemporaryDirectory() as folder:
        server = None
        if {"client", "server"} & set(options.scenarios):
            server = MilvusProcess(Path(folder) / "milvus")
            server.start()
        try:
            for scenario in options.scenarios:
                done = rounds_done(scenario, options.rows) if options.resume else []
                run_scenario(scenario, options.rounds, options.rows, Path(folder), server, done)
        finally:
            if server is not None:
                server.kill()


if __name__ == "__main__":
    main()
