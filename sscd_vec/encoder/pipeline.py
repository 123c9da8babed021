"""Many inputs to descriptors: decoded by threads, batched by shape, returned in input order.

inputs ──pulled lazily──► decoded (threads, a little ahead) ──► a bucket per shape ──► forward

Images of different shapes never share a batch, so nothing is padded and batch-mates cannot matter.
Nobody waits long: a bucket that has waited for too many inputs, or too many bytes, is run as it
is, and so what is held back behind it is bounded too. Everything is deterministic: which images
meet in a batch depends on the inputs alone, not on the threads.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sscd_vec.encoder.backends import Backend
from sscd_vec.encoder.images import ImageError, ImageInput, input_name, is_open_file
from sscd_vec.progress import progress_bar

# How long an image waits for others of its shape: in bytes of all that wait, and in batches of
# inputs that came after it.
_HELD_BYTES = 64 * 2**20
_HELD_BATCHES = 16
# Pixels of a batch, so that one of very long images stays affordable as float input.
_BATCH_PIXELS = 32 * 288 * 384

OnError = Literal["raise", "skip"]
Decode = Literal["fast", "exact"]
Prepare = Callable[[ImageInput, str], Tensor]

T = TypeVar("T")
_Result: TypeAlias = tuple[T] | BaseException


@dataclass(frozen=True)
class Options:
    """How images are encoded; see ``Encoder.encode`` and ``encode_stream``."""

    batch_size: int
    num_workers: int | None
    chunk_size: int
    on_error: OnError
    decode: Decode
    isolate: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse impossible settings by name."""
        for name in ("batch_size", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(f"num_workers must be 0 (no threads) or more, got {self.num_workers}")
        if not 0.1 <= self.scale <= 10:
            raise ValueError(f"scale must be between 0.1 and 10, got {self.scale}")
        for name, kind in (("on_error", OnError), ("decode", Decode)):
            if getattr(self, name) not in get_args(kind):
                known = " | ".join(get_args(kind))
                raise ValueError(f"{name} must be {known}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Skipped:
    """An input without a descriptor.

    Attributes:
        position: Where it was in the input, from 0.
        name: Its path, or its kind and position.
        reason: What is wrong with it.
    """

    position: int
    name: str
    reason: str


@dataclass(frozen=True)
class Encoded:
    """Descriptors, and which inputs they belong to.

    Attributes:
        descriptors: float32 ``(m, d)``, unit length, in input order.
        positions: int64 ``(m,)``: row ``i`` describes input ``positions[i]``.
        names: Name of the input of each row: its path, or its kind and position.
        skipped: The inputs that have no row.
    """

    descriptors: NDArray[np.float32]
    positions: NDArray[np.int64]
    names: tuple[str, ...]
    skipped: tuple[Skipped, ...]

    def __len__(self) -> int:
        """Return the number of descriptors."""
        return len(self.descriptors)


@dataclass(frozen=True)
class _Item:
    """One input on its way: a resized uint8 image, then a descriptor ``(d,)``, or an error."""

    position: int
    name: str
    result: Tensor | NDArray[np.float32] | ImageError


def describe(
    inputs: Iterable[ImageInput], backend: Backend, prepare: Prepare, dim: int, options: Options
) -> Iterator[Encoded]:
    """Yield the descriptors of ``chunk_size`` inputs at a time, in input order.

    Args:
        inputs: Pulled one by one, never more than a few batches ahead.
        backend: uint8 ``(n, h, w, 3)`` to float32 ``(n, d)``.
        prepare: An input and its name to a uint8 image ``(h, w, 3)``; raises ``ImageError``.
        dim: Size of a descriptor.
        options: Sizes, threads, and whether to raise the first ``ImageError``.
    """
    waiting: dict[int, _Item] = {}  # by position, until those before it are done
    chunk: list[_Item] = []
    expected = 0
    workers = cores() if options.num_workers is None else options.num_workers
    prepared = _prepare_all(inputs, prepare, workers, ahead=2 * options.batch_size)
    try:
        for group in _by_shape(prepared, options.batch_size):
            for item in _described(group, backend):
                if options.on_error == "raise" and isinstance(item.result, ImageError):
                    raise item.result
                waiting[item.position] = item
            while expected in waiting:
                chunk.append(waiting.pop(expected))
                expected += 1
                if len(chunk) == options.chunk_size:
                    yield _encoded(chunk, dim)
                    chunk = []
    finally:
        prepared.close()
    if chunk:
        yield _encoded(chunk, dim)


def watched(parts: Iterator[Encoded], total: int | None, show: bool | None) -> Iterator[Encoded]:
    """Pass parts on, with a progress bar on a terminal and in a notebook, or as ``show`` says."""
    with progress_bar("encoding", total, show) as bar:
        for part in parts:
            bar.advance(len(part) + len(part.skipped))
            yield part


def concatenate(parts: list[Encoded], dim: int) -> Encoded:
    """Join consecutive parts."""
    return Encoded(
        np.concatenate([np.empty((0, dim), np.float32), *(part.descriptors for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.positions for part in parts)]),
        tuple(name for part in parts for name in part.names),
        tuple(skipped for part in parts for skipped in part.skipped),
    )


class Workers:
    """A few threads with one queue of work, which survive a Ctrl-C at any moment.

    A thread pool of the standard library can deadlock on Ctrl-C: its semaphore is written in
    Python, and an interrupt in the middle of it leaves a lock taken that the workers wait for. All
    that is shared here is ``SimpleQueue``, which is written in C and cannot be interrupted
    half-way.
    """

    def __init__(self, number: int, name: str, begin: Callable[[], object] = lambda: None) -> None:
        """Start ``number`` threads; each has called ``begin`` when this returns."""
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._dropping = False
        begun: SimpleQueue[_Result[object]] = SimpleQueue()

        def serve() -> None:
            begun.put(_attempt(begin))
            while (work := self._work.get()) is not None:
                if not self._dropping:
                    work()
                del work  # or all it worked on stays alive until the next one comes

        self._threads = [
            Thread(target=serve, name=f"sscd-vec-{name}_{index}", daemon=True)
            for index in range(number)
        ]
        try:
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                _value(begun.get())
        except BaseException:  # also Ctrl-C: nobody would ever end these threads
            self.stop()
            raise

    def __len__(self) -> int:
        """Return the number of threads."""
        return len(self._threads)

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Hand ``work`` to a thread; return a function that waits for its result, once."""
        answer: SimpleQueue[_Result[T]] = SimpleQueue()
        self._work.put(lambda: answer.put(_attempt(work)))
        return lambda: _value(answer.get())

    def stop(self) -> None:
        """Tell the threads to end once their work is done; do not wait for them."""
        for _ in self._threads:
            self._work.put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Drop work that has not begun, and wait for work that has."""
        self._dropping = True
        self.stop()
        self.join()


def _attempt(work: Callable[[], T]) -> _Result[T]:
    try:
        return (work(),)
    except BaseException as error:  # handed to the thread that waits
        return error


def _value(result: _Result[T]) -> T:
    if isinstance(result, BaseException):
        raise result
    return result[0]


def _prepare_all(
    inputs: Iterable[ImageInput], prepare: Prepare, num_workers: int, ahead: int
) -> Generator[_Item, None, None]:
    """Decode in threads, at most ``ahead`` inputs before the one that is asked for."""

    def attempt(position: int, source: ImageInput) -> _Item:
        name = input_name(source, position)
        try:
            return _Item(position, name, prepare(source, name))
        except ImageError as error:
            return _Item(position, name, error)

    if num_workers == 0:
        for position, source in enumerate(inputs):
            yield attempt(position, source)
        return
    decoders = Workers(num_workers, "decode")
    pending: deque[_Item | Callable[[], _Item]] = deque()

    def first() -> _Item:
        item = pending.popleft()
        return item if isinstance(item, _Item) else item()

    try:
        for position, source in enumerate(inputs):
            work = partial(attempt, position, source)
            if isinstance(source, np.ndarray | Tensor) or is_open_file(source):
                # A generator may reuse its buffer for the next frame, and a file has one position:
                # these are taken before the next input is pulled.
                pending.append(work())
            else:
                pending.append(decoders.submit(work))
            if len(pending) > ahead:
                yield first()
        while pending:
            yield first()
    finally:  # also on Ctrl-C and on a caller who stops early: nothing is left running
        decoders.close()


def _by_shape(prepared: Iterable[_Item], batch_size: int) -> Iterator[list[_Item]]:
    """Group images of one shape; errors pass at once, in a group of their own."""
    buckets: dict[tuple[int, ...], list[_Item]] = {}  # oldest first: dicts keep their order
    held_bytes = 0

    def flush(shape: tuple[int, ...]) -> list[_Item]:
        nonlocal held_bytes
        group = buckets.pop(shape)
        held_bytes -= sum(one.result.nbytes for one in group if isinstance(one.result, Tensor))
        return group

    for item in prepared:
        if isinstance(item.result, ImageError):
            yield [item]
        else:
            height, width, _ = shape = tuple(item.result.shape)
            buckets.setdefault(shape, []).append(item)
            held_bytes += item.result.nbytes
            if len(buckets[shape]) >= min(batch_size, _BATCH_PIXELS // (height * width)):
                yield flush(shape)
        # A rare shape must not hold back everything behind it, however small its bucket is.
        oldest_allowed = item.position - _HELD_BATCHES * batch_size
        while buckets:
            oldest = next(iter(buckets))
            if held_bytes <= _HELD_BYTES and buckets[oldest][0].position > oldest_allowed:
                break
            yield flush(oldest)
    yield from buckets.values()


def _described(group: list[_Item], backend: Backend) -> Iterator[_Item]:
    """Descriptors of a group of images; a group that is an error passes as it is."""
    images = [item.result for item in group if isinstance(item.result, Tensor)]
    if not images:
        yield from group
        return
    for item, descriptor in zip(group, backend(torch.stack(images)), strict=True):
        yield _Item(item.position, item.name, descriptor)


def _encoded(chunk: list[_Item], dim: int) -> Encoded:
    kept = [item for item in chunk if not isinstance(item.result, ImageError)]
    return Encoded(
        np.array([item.result for item in kept], np.float32).reshape(len(kept), dim),
        np.array([item.position for item in kept], np.int64),
        tuple(item.name for item in kept),
        tuple(
            Skipped(item.position, item.name, item.result.reason)
            for item in chunk
            if isinstance(item.result, ImageError)
        ),
    )


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
