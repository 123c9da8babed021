"""One FAISS index, many threads: adds, removals, saves and searches at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from faults.indexes import FACTORIES, run_threads
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.normalize import Normalizer

from .conftest import DIM, Photos, unit


@pytest.mark.parametrize("factory", FACTORIES)
def test_ids_and_vectors_stay_in_step(factory: str, tmp_path: Path) -> None:
    """In a process of its own: without the lock FAISS reads memory that an add has freed."""
    assert run_threads(factory, tmp_path / "a.faiss") == ""


def test_two_threads_cannot_fix_two_types_of_ids(photos: Photos, normalizer: Normalizer) -> None:
    for _ in range(10):
        index = FaissIndex(normalizer)
        ready = threading.Barrier(2)

        def add(ids: list[int] | list[str], ready: threading.Barrier = ready) -> str:
            ready.wait()
            try:
                index.add(ids, photos.references[:50])  # noqa: B023  (the one of this round)
            except TypeError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(add, list(range(50)))
            second = threads.submit(add, photos.ids[:50])
            told = [first.result(), second.result()]
        assert sorted(map(bool, told)) == [False, True]
        assert len(index) == 50 == index.index.ntotal


def test_searches_go_on_while_it_is_saved(
    photos: Photos, normalizer: Normalizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FaissIndex(normalizer, path=tmp_path / "a.faiss")
    index.add(photos.ids, photos.references)
    searched, added = threading.Event(), threading.Event()
    saved: list[bool] = []

    def saving(*_: object) -> str:
        def add() -> None:
            index.add("late", photos.references[0])
            added.set()

        def search() -> None:
            index.search(photos.queries, 1)
            searched.set()

        others = [threading.Thread(target=work) for work in (add, search)]
        for thread in others:
            thread.start()
        assert searched.wait(30), "a search waits for a save"
        saved.append(added.is_set())
        raise OSError("full")

    monkeypatch.setattr("sscd_vec.adapters.faiss.files._write_index", saving)
    with pytest.raises(OSError, match="full"):
        index.commit()
    assert saved == [False], "what is being written does not change"
    assert added.wait(30)
    assert len(index) == 601


def test_a_block_of_a_range_holds_no_lock(normalizer: Normalizer, photos: Photos) -> None:
    index = FaissIndex(normalizer)
    index.add(photos.ids, photos.references)
    blocks = index.iterate_range(photos.queries, 0.0, block=10)
    next(blocks)
    index.add("between", unit(np.ones((1, DIM))))  # would wait forever for a reader that sleeps
    assert len(list(blocks)) == 3 and "between" in index
