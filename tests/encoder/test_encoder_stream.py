import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.encoder import Encoder, EncoderConfig, build_model, pipeline
from sscd_vec.encoder.images import ImageError, ImageInput
from sscd_vec.progress import progress_bar


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(build_model(EncoderConfig(trunk="resnet18", dim=16, size=32)), device="cpu")


def decoding_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("sscd-vec-decode")]


class Numbers:
    """Stand-ins for decode and network: an input is a number, its shape and row tell which."""

    def __init__(self, shapes: int) -> None:
        self.shapes = shapes
        self.pulled = 0
        self.batches: list[int] = []

    def inputs(self, count: int) -> Iterator[str]:
        for index in range(count):
            self.pulled += 1
            yield str(index)

    def prepare(self, source: ImageInput, name: str) -> torch.Tensor:
        number = int(str(source))
        if number % 10 == 7:
            raise ImageError(name, "a seven")
        image = torch.zeros(2, 2 + number % self.shapes, 3, dtype=torch.uint8)
        image[0, 0] = torch.tensor([number // 65536, number // 256 % 256, number % 256])
        return image

    def describe(self, images: torch.Tensor) -> NDArray[np.float32]:
        self.batches.append(len(images))
        digits = images[:, 0, 0].long()
        numbers = digits[:, 0] * 65536 + digits[:, 1] * 256 + digits[:, 2]
        return numbers[:, None].float().numpy()

    def run(self, count: int, workers: int, batch_size: int = 4) -> Iterator[pipeline.Encoded]:
        """One input per part."""
        return pipeline.describe(
            self.inputs(count),
            self.describe,
            self.prepare,
            1,
            pipeline.Options(batch_size, workers, 1, "skip", "fast"),
        )


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("shapes", [1, 3, 50])
def test_every_input_has_its_own_outcome_in_order(workers: int, shapes: int) -> None:
    numbers = Numbers(shapes)
    parts = list(numbers.run(203, workers))
    assert len(parts) == 203
    for position, part in enumerate(parts):
        if position % 10 == 7:
            (skipped,) = part.skipped
            assert (skipped.position, skipped.reason) == (position, "a seven") and not len(part)
        else:
            assert part.positions.tolist() == [position] and not part.skipped
            assert part.descriptors.tolist() == [[position]]
    assert max(numbers.batches) <= 4


def test_batches_do_not_depend_on_threads() -> None:
    runs = []
    for workers in (0, 1, 4):
        numbers = Numbers(5)
        list(numbers.run(300, workers))
        runs.append(numbers.batches)
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("shapes", [1, 10_000])
def test_only_a_bounded_number_of_inputs_is_pulled_ahead(shapes: int) -> None:
    numbers = Numbers(shapes)
    ahead = 0
    for position, _ in enumerate(numbers.run(2000, workers=2, batch_size=4)):
        ahead = max(ahead, numbers.pulled - position)
    assert numbers.pulled == 2000
    # Waiting (16 batches), decoding ahead (2 batches) and the batch at hand.
    assert ahead <= (16 + 2 + 1) * 4


def test_a_rare_shape_does_not_hold_back_the_rest() -> None:
    numbers = Numbers(1)
    prepare = numbers.prepare

    def first_is_odd(source: ImageInput, name: str) -> torch.Tensor:
        return torch.zeros(9, 9, 3, dtype=torch.uint8) if source == "0" else prepare(source, name)

    numbers.prepare = first_is_odd  # type: ignore[method-assign]
    first = next(numbers.run(1000, workers=0))
    assert first.positions.tolist() == [0] and numbers.pulled < 80


def test_waiting_images_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_HELD_BYTES", 1000)
    numbers = Numbers(10_000)
    wide = iter(numbers.run(60, workers=0, batch_size=32))
    next(wide)
    assert numbers.pulled < 30  # the widest image is 372 bytes


def test_batches_are_bounded_in_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_BATCH_PIXELS", 12)  # an image has 2 × 2
    numbers = Numbers(1)
    list(numbers.run(30, workers=0, batch_size=8))
    assert max(numbers.batches) == 3
    monkeypatch.setattr(pipeline, "_BATCH_PIXELS", 1)  # one image always goes
    numbers = Numbers(1)
    assert len(list(numbers.run(30, workers=0, batch_size=8))) == 30
    assert set(numbers.batches) == {1}


def test_stream_yields_parts_in_order(encoder: Encoder) -> None:
    generator = np.random.default_rng(0)
    pictures = [
        generator.integers(0, 256, (40, 40 + 8 * (index % 3), 3), dtype=np.uint8)
        for index in range(23)
    ]
    inputs: list[ImageInput] = list(pictures)
    inputs[11] = b"broken"
    parts = list(encoder.encode_stream(inputs, on_error="skip", chunk_size=10, batch_size=4))
    assert [len(part) + len(part.skipped) for part in parts] == [10, 10, 3]
    assert np.concatenate([part.positions for part in parts]).tolist() == [
        index for index in range(23) if index != 11
    ]
    assert parts[1].skipped[0].position == 11
    del inputs[11]
    np.testing.assert_allclose(
        np.concatenate([part.descriptors for part in parts]), encoder.encode(inputs), atol=1e-5
    )


def test_a_reused_buffer_is_read_before_the_next_input(encoder: Encoder) -> None:
    values = [0, 80, 160, 240]

    def frames() -> Iterator[NDArray[np.uint8]]:
        frame = np.zeros((32, 32, 3), np.uint8)
        for value in values:
            frame[:16] = value
            yield frame

    separate = [np.zeros((32, 32, 3), np.uint8) for _ in values]
    for frame, value in zip(separate, values, strict=True):
        frame[:16] = value
    np.testing.assert_allclose(encoder.encode(frames()), encoder.encode(separate), atol=1e-5)


def test_one_lazy_pil_image_given_many_times(encoder: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "noise.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    with Image.open(path) as image:
        z = encoder.encode([image] * 20, num_workers=4)
    np.testing.assert_allclose(z, np.repeat(z[:1], 20, axis=0), atol=1e-5)


def test_stopping_early_leaves_no_thread(encoder: Encoder) -> None:
    picture = np.zeros((40, 40, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    stream = encoder.encode_stream([buffer.getvalue()] * 100, chunk_size=1, batch_size=2)
    next(stream)
    assert decoding_threads()
    del stream
    assert not decoding_threads()
    with pytest.raises(ImageError):
        encoder.encode([buffer.getvalue(), b"", *[buffer.getvalue()] * 50])
    assert not decoding_threads()


def test_interrupt_ends_the_process_soon(tmp_path: Path) -> None:
    code = """
import itertools, signal, sys, threading, torch
from sscd_vec.encoder import Encoder, EncoderConfig, build_model
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
encoder = Encoder(build_model(EncoderConfig(trunk="resnet18", dim=8, size=32)), device="cpu")
def endless():
    for index in itertools.count():
        if index == 200:
            print("running", flush=True)
        yield sys.argv[1]
try:
    encoder.encode(endless())
except KeyboardInterrupt:
    print("threads", [one.name for one in threading.enumerate() if "decode" in one.name])
"""
    path = tmp_path / "picture.png"
    Image.new("RGB", (64, 64), "red").save(path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGINT)
    try:
        output, _ = child.communicate(timeout=600)  # its inputs never end
    finally:
        child.kill()
    assert output == "threads []\n" and child.returncode == 0


def test_progress_is_shown_only_where_somebody_watches(
    encoder: Encoder, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [np.zeros((40, 40, 3), np.uint8)] * 3
    encoder.encode(pictures)
    assert capsys.readouterr() == ("", "")
    encoder.encode(pictures, show_progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "encoding" in shown.err and "3/3" in shown.err


def test_progress_of_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("walking", None, True) as bar:
        bar.advance(2)
    assert "2/?" in capsys.readouterr().err
