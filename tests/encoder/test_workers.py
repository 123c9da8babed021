import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sscd_vec.encoder import EncoderConfig, build_model
from sscd_vec.encoder.backends.native import TorchBackend
from sscd_vec.encoder.pipeline import Workers
from sscd_vec.encoder.preprocess import normalize


def names(prefix: str) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(prefix)]


def test_results_come_back_in_the_order_they_are_asked_for() -> None:
    workers = Workers(2, "test-order")
    waiting = [workers.submit(partial(pow, n, 2)) for n in range(20)]
    assert [result() for result in waiting] == [n * n for n in range(20)]
    workers.close()
    assert names("sscd-vec-test-order") == []


def test_an_error_reaches_who_waits_and_the_thread_goes_on() -> None:
    workers = Workers(1, "test-error")

    def fail() -> None:
        raise ValueError("no")

    failed, then = workers.submit(fail), workers.submit(lambda: 1)
    with pytest.raises(ValueError, match="no"):
        failed()
    assert then() == 1
    workers.close()


def test_every_thread_begins_before_work_is_taken() -> None:
    begun: list[str] = []
    workers = Workers(3, "test-begin", lambda: begun.append(threading.current_thread().name))
    assert len(begun) == len(workers) == 3
    workers.close()


def test_a_thread_that_cannot_begin_is_an_error_and_leaves_none() -> None:
    def fail() -> None:
        raise ValueError("no core")

    with pytest.raises(ValueError, match="no core"):
        Workers(2, "test-failing", fail)
    wait_for(lambda: names("sscd-vec-test-failing") == [])


@pytest.mark.parametrize(("dropping", "expected"), [(False, [0, 1, 2]), (True, [])])
def test_stopping_finishes_what_was_given_and_closing_drops_it(
    dropping: bool, expected: list[int]
) -> None:
    workers, done = Workers(1, "test-end"), list[int]()
    begun, gate = SimpleQueue[None](), SimpleQueue[None]()

    def wait_at_gate() -> None:
        begun.put(None)
        gate.get()

    workers.submit(wait_at_gate)
    for n in range(3):
        workers.submit(partial(done.append, n))
    begun.get()
    ending = threading.Thread(target=workers.close if dropping else workers.stop)
    ending.start()
    if dropping:
        wait_for(lambda: workers._dropping)
    gate.put(None)
    ending.join()
    workers.join()
    assert done == expected


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_cores_take_images_of_their_own(four_threads: None) -> None:
    torch.manual_seed(0)
    model = build_model(EncoderConfig(trunk="resnet18", dim=32, size=64)).eval()
    images = torch.randint(0, 256, (11, 64, 80, 3), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model(normalize(images, model.config)).numpy()
    backend = TorchBackend(model, torch.device("cpu"), "float32")
    assert names("sscd-vec-forward") == []
    descriptors = backend(images)
    np.testing.assert_allclose(descriptors, expected, atol=1e-5)
    assert len(names("sscd-vec-forward")) == 4
    # torch's own number of threads is as before: here, and in threads that start later.
    assert torch.get_num_threads() == 4
    later = Workers(1, "test-later")
    assert later.submit(torch.get_num_threads)() == 4
    later.close()

    torch.set_num_threads(2)  # the backend follows
    np.testing.assert_allclose(backend(images), expected, atol=1e-5)
    wait_for(lambda: len(names("sscd-vec-forward")) == 2)

    del backend
    gc.collect()
    wait_for(lambda: names("sscd-vec-forward") == [])


def small_backend() -> TorchBackend:
    torch.manual_seed(0)
    model = build_model(EncoderConfig(trunk="resnet18", dim=8, size=32)).eval()
    return TorchBackend(model, torch.device("cpu"), "float32")


def test_callers_of_different_numbers_of_threads_share_a_backend(four_threads: None) -> None:
    backend = small_backend()
    images = torch.randint(0, 256, (8, 32, 48, 3), dtype=torch.uint8)
    expected = backend(images)

    def call(number: int) -> list[NDArray[np.float32]]:
        torch.set_num_threads(number)  # of this thread; the backend changes its cores for it
        return [backend(images) for _ in range(20)]

    with ThreadPoolExecutor(3) as callers:
        found = [one for part in callers.map(call, (2, 3, 4)) for one in part]
    assert len(found) == 60
    for descriptors in found:
        np.testing.assert_allclose(descriptors, expected, atol=1e-5)


def test_an_error_leaves_nothing_running_and_the_backend_usable(
    four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = small_backend()
    images = torch.randint(0, 256, (8, 32, 48, 3), dtype=torch.uint8)
    expected = backend(images)
    with monkeypatch.context() as patch:
        patch.setattr(backend.model, "pooled", lambda images: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backend(images)
    assert names("sscd-vec-forward") == []
    np.testing.assert_allclose(backend(images), expected, atol=1e-5)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
