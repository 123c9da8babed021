"""Locks between processes and between threads."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sscd_vec import locks
from sscd_vec.locks import LockHeldError, ReadersWriterLock, holder_of, locked

HOLD = """
import sys
from sscd_vec.locks import locked
with locked(sys.argv[1], purpose="add images"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["folder", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path if request.param == "folder" else tmp_path / "bank.lock"


def holding(place: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_process_at_a_time_and_a_killed_one_lets_go(place: Path) -> None:
    with holding(place) as process:
        with pytest.raises(LockHeldError, match="is locked"), locked(place, wait=False):
            pass
        with pytest.raises(LockHeldError), locked(place, shared=True, wait=0.05):
            pass
        process.kill()
        process.wait()
        with locked(place, wait=30.0):
            pass


def test_a_lock_file_says_who_holds_it_and_why(tmp_path: Path) -> None:
    place = tmp_path / "bank.lock"
    with holding(place) as process:
        who = holder_of(place)
        assert f"process {process.pid} on " in who
        assert who.endswith("to add images")
        for _ in range(2):  # whoever is refused leaves the note as it is
            with pytest.raises(LockHeldError, match=f"process {process.pid} "):
                locked(place, wait=False).__enter__()
        process.kill()
    with locked(place):
        assert f"process {os.getpid()}" in holder_of(place)
    assert holder_of(place) == ""


def test_readers_share(place: Path) -> None:
    with locked(place, shared=True), locked(place, shared=True, wait=False):
        with pytest.raises(LockHeldError), locked(place, wait=False):
            pass
    with locked(place, wait=False):
        pass


def test_waiting_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.0)
    with caplog.at_level(logging.WARNING), holding(place) as process:
        with pytest.raises(LockHeldError), locked(place, wait=0.1):
            pass
        process.kill()
    assert [record.getMessage().startswith(f"{place}: waiting") for record in caplog.records] == [
        True
    ]


def test_threads_read_together_and_write_alone() -> None:
    lock = ReadersWriterLock()
    inside = threading.Barrier(3)

    def read() -> None:
        with lock.reading():
            inside.wait(30)  # passes only if both readers are in at once

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(30)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()

    count = 0
    overlaps = []

    def write() -> None:
        nonlocal count
        for _ in range(200):
            with lock.writing():
                before = count
                with lock.reading(), lock.writing():  # the writer may do both
                    count = before + 1

    def watch() -> None:
        for _ in range(200):
            with lock.reading():
                first = count
                overlaps.append(first != count)

    threads = [threading.Thread(target=work) for work in (write, write, watch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert count == 400
    assert not any(overlaps)
