import gc
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from sscd_vec.encoder import EncoderConfig, build_model
from sscd_vec.encoder.backends.native import TorchBackend
from sscd_vec.encoder.workers import Workers


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


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_cores_take_images_of_their_own(four_threads: None) -> None:
    torch.manual_seed(0)
    model = build_model(EncoderConfig(trunk="resnet18", dim=32, size=64)).eval()
    images = torch.randn(11, 3, 64, 80)
    with torch.inference_mode():
        expected = model(images)
    backend = TorchBackend(model, torch.device("cpu"), "float32")
    assert names("sscd-vec-forward") == []
    descriptors = backend(images)
    assert torch.allclose(descriptors, expected, atol=1e-5)
    assert not descriptors.requires_grad
    assert len(names("sscd-vec-forward")) == 4
    # torch's own number of threads is as before: here, and in threads that start later.
    assert torch.get_num_threads() == 4
    later = Workers(1, "test-later")
    assert later.submit(torch.get_num_threads)() == 4
    later.close()

    torch.set_num_threads(2)  # the backend follows
    assert torch.allclose(backend(images), expected, atol=1e-5)
    wait_for(lambda: len(names("sscd-vec-forward")) == 2)

    del backend
    gc.collect()
    wait_for(lambda: names("sscd-vec-forward") == [])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
