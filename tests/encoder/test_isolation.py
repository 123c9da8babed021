"""Decoding in child processes: the same pixels, and no image can hold or harm the caller."""

import gc
import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sscd_vec.encoder import Encoder, EncoderConfig, build_model, isolation
from sscd_vec.encoder.images import ImageError, load_pixels
from sscd_vec.encoder.isolation import Decoders

# What a decoder does to images with these names for contents.
MISBEHAVING = """
import os, signal, time
from sscd_vec.encoder import isolation, opening
good = isolation.load_pixels
def load_pixels(content, **options):
    if content == b"sleep":
        time.sleep(3600)
    if content == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if content == b"leave":
        os._exit(3)
    if content.startswith(b"write "):
        os.write(os.open(content[6:], os.O_CREAT | os.O_WRONLY), b"x")
    return good(content, **options)
isolation.load_pixels = load_pixels
isolation._SLACK = 0
opening._check_bytes = lambda *_: None
isolation.serve()
"""


def encoded(height: int, width: int, kind: str = "PNG", **options: object) -> bytes:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    with Decoders(2, seconds=300) as processes:
        yield processes


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoders]:
    monkeypatch.setattr(isolation, "_BEGIN", MISBEHAVING)
    with Decoders(1, seconds=300, memory=64 * 2**20) as processes:
        yield processes


def reason_of(decoders: Decoders, content: bytes) -> str:
    with pytest.raises(ImageError) as caught:
        decoders.load_pixels(content)
    return caught.value.reason


def test_pixels_are_those_of_the_caller_itself(decoders: Decoders, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(encoded(400, 600, "JPEG"))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(40, 60, "JPEG", exif=exif)
    for source in (path, str(path), path.read_bytes(), turned, encoded(30, 50, "WEBP")):
        np.testing.assert_array_equal(decoders.load_pixels(source), load_pixels(source))
    with path.open("rb") as file:
        assert decoders.load_pixels(file).shape == (400, 600, 3)
    small = decoders.load_pixels(path, reduce_to=lambda height, width: (height // 8, width // 8))
    assert small.shape == (100, 150, 3)


def test_an_image_is_reduced_where_it_is_decoded(decoders: Decoders) -> None:
    rng = np.random.default_rng(5)
    image = Image.fromarray(rng.integers(0, 256, (1031, 1700, 3), np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    pixels = decoders.load_pixels(buffer.getvalue(), most_pixels=200_000)
    np.testing.assert_array_equal(pixels, np.asarray(image.reduce(3)))
    np.testing.assert_array_equal(
        decoders.load_pixels(buffer.getvalue(), most_pixels=1031 * 1700), np.asarray(image)
    )


def test_measuring_tells_size_and_memory(decoders: Decoders) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (300, 200)).save(buffer, "PNG")
    content = buffer.getvalue()
    whole = decoders.measure(content)
    assert whole[:2] == (200, 300)
    assert 200 * 300 * 7 < whole.memory < 200 * 300 * 9 + len(content)
    assert decoders.measure(content, most_pixels=100).memory < whole.memory
    with pytest.raises(ImageError, match="x: not an image"):
        decoders.measure(b"nothing of the kind", name="x")


def test_what_needs_no_decoding_stays_here(decoders: Decoders) -> None:
    pixels = np.zeros((20, 30, 3), np.uint8)
    assert decoders.load_pixels(pixels).shape == (20, 30, 3)
    assert decoders.load_pixels(torch.zeros(3, 20, 30)).shape == (20, 30, 3)
    assert decoders.load_pixels(Image.fromarray(pixels)).shape == (20, 30, 3)


def test_errors_are_those_of_the_caller_itself(decoders: Decoders, tmp_path: Path) -> None:
    for source in (b"", b"no image", encoded(64, 64)[:500], tmp_path / "none.jpg", tmp_path):
        with pytest.raises(ImageError) as here:
            load_pixels(source)
        with pytest.raises(ImageError) as there:
            decoders.load_pixels(source)
        assert str(there.value) == str(here.value)
    with pytest.raises(ImageError, match="mine: empty"):
        decoders.load_pixels(b"", name="mine")


def test_threads_share_the_processes(decoders: Decoders) -> None:
    contents = [encoded(20 + number, 30) for number in range(12)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(decoders.load_pixels, contents))
    assert [pixels.shape[0] for pixels in found] == list(range(20, 32))
    assert len(decoders._running) <= 2


def test_one_that_takes_too_long_is_killed_and_replaced(misbehaving: Decoders) -> None:
    good = encoded(20, 30)
    assert misbehaving.load_pixels(good).shape == (20, 30, 3)
    (first,) = misbehaving._running
    first._seconds = 0.2
    assert "not decoded within 0.2 s: its decoder was killed" in reason_of(misbehaving, b"sleep")
    assert not first.is_alive() and not misbehaving._running
    assert misbehaving.load_pixels(good).shape == (20, 30, 3)


def test_one_that_dies_is_an_error_and_replaced(misbehaving: Decoders) -> None:
    assert "ended by SIGSEGV" in reason_of(misbehaving, b"crash")
    assert "exit code 3" in reason_of(misbehaving, b"leave")
    assert misbehaving.load_pixels(encoded(20, 30)).shape == (20, 30, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="the system limits memory on Linux only")
def test_the_system_refuses_more_memory(misbehaving: Decoders) -> None:
    # 10 million pixels of 7 bytes, with the library's own check left out.
    large = io.BytesIO()
    Image.new("RGB", (5000, 2000)).save(large, "PNG", compress_level=1)
    assert reason_of(misbehaving, large.getvalue()) == "not enough memory to decode it"
    assert misbehaving.load_pixels(encoded(20, 30)).shape == (20, 30, 3)


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_a_decoder_cannot_write_files(misbehaving: Decoders, tmp_path: Path) -> None:
    path = tmp_path / "written"
    assert "its decoder ended" in reason_of(misbehaving, b"write " + os.fsencode(path))
    assert path.stat().st_size == 0
    assert misbehaving.load_pixels(encoded(20, 30)).shape == (20, 30, 3)


def test_memory_bounds_what_an_image_may_claim() -> None:
    with Decoders(memory=2**20, seconds=300) as decoders:
        assert "too many pixels" in reason_of(decoders, encoded(400, 400))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_processes_end_with_their_owner() -> None:
    decoders = Decoders(seconds=300)
    decoders.load_pixels(encoded(20, 30))
    (one,) = decoders._running
    process = one._child.pid
    assert is_running(process)
    del one, decoders
    gc.collect()
    wait_for(lambda: not is_running(process))


def test_closing_ends_them_and_a_later_call_starts_new_ones() -> None:
    decoders = Decoders(seconds=300)
    decoders.load_pixels(encoded(20, 30))
    decoders.close()
    assert not decoders._running
    assert decoders.load_pixels(encoded(20, 30)).shape == (20, 30, 3)
    decoders.close()


def test_an_interrupt_does_not_mix_up_answers(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(height: int, width: int) -> tuple[int, int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoders.load_pixels(encoded(40, 60), reduce_to=interrupted)
    assert decoders.load_pixels(encoded(20, 30)).shape == (20, 30, 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_starts_its_own(decoders: Decoders) -> None:
    decoders.load_pixels(encoded(20, 30))
    before = {one._child.pid for one in decoders._running}
    child = os.fork()
    if child == 0:
        fine = decoders.load_pixels(encoded(25, 30)).shape[0] == 25
        own = {one._child.pid for one in decoders._running}
        decoders.close()
        os._exit(0 if fine and not own & before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert decoders.load_pixels(encoded(20, 30)).shape == (20, 30, 3)
    assert before <= {one._child.pid for one in decoders._running}


@pytest.mark.parametrize("name", ["number", "memory", "seconds"])
def test_numbers_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
        Decoders(**{name: 0})


def test_an_encoder_isolates_when_asked() -> None:
    torch.manual_seed(0)
    encoder = Encoder(build_model(EncoderConfig(trunk="resnet18", dim=8, size=32)), device="cpu")
    contents = [encoded(40, 60 + number, "JPEG") for number in range(5)]
    wanted = encoder.encode(contents)
    assert encoder._decoders is None
    np.testing.assert_array_equal(encoder.encode(contents, isolate=True), wanted)
    result = encoder.encode([*contents, b"broken"], isolate=True, on_error="skip")
    assert len(result) == 5 and [one.position for one in result.skipped] == [5]
    (part,) = encoder.encode_stream(contents, isolate=True)
    np.testing.assert_array_equal(part.descriptors, wanted)
    twin = pickle.loads(pickle.dumps(encoder))
    np.testing.assert_allclose(twin.encode(contents[:1], isolate=True), wanted[:1], atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "getpgid"), reason="no groups of processes here")
def test_ctrl_c_on_a_terminal_is_for_the_parent_alone(decoders: Decoders) -> None:
    decoders.load_pixels(encoded(20, 30))
    assert decoders._running
    for one in decoders._running:
        assert os.getpgid(one._child.pid) != os.getpgid(0)
