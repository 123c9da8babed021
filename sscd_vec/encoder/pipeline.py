"""Many inputs to descriptors: decoded by threads, batched by shape, returned in input order.

inputs ──pulled lazily──► decoded (threads, a little ahead) ──► a bucket per shape ──► forward

Images of different shapes never share a batch, so nothing is padded and batch-mates cannot matter.
Nobody waits long: a bucket that has waited for too many inputs, or too many bytes, is run as it
is, and so what is held back behind it is bounded too. Everything is deterministic: which images
meet in a batch depends on the inputs alone, not on the threads.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sscd_vec.encoder.images import ImageError, ImageInput, describe
from sscd_vec.encoder.workers import Workers

# How long an image waits for others of its shape: in bytes of all that wait, and in batches of
# inputs that came after it.
_HELD_BYTES = 64 * 2**20
_HELD_BATCHES = 16

Prepare = Callable[[ImageInput, str], Tensor]
Describe = Callable[[Tensor], NDArray[np.float32]]


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
class Outcome:
    """What became of one input: a descriptor ``(d,)`` or an error."""

    position: int
    name: str
    result: NDArray[np.float32] | ImageError


@dataclass(frozen=True)
class _Prepared:
    """One input as a resized uint8 image ``(h, w, 3)``, or as the error it ended in."""

    position: int
    name: str
    result: Tensor | ImageError


def run(
    inputs: Iterable[ImageInput],
    *,
    prepare: Prepare,
    describe_batch: Describe,
    batch_size: int,
    num_workers: int,
    stop_at_error: bool,
) -> Iterator[Outcome]:
    """Yield one outcome per input, in input order.

    Args:
        inputs: Pulled one by one, never more than a few batches ahead.
        prepare: An input and its name to a uint8 image ``(h, w, 3)``; raises ``ImageError``.
        describe_batch: uint8 ``(n, h, w, 3)`` to float32 ``(n, d)``.
        batch_size: Images per call of ``describe_batch``, at most.
        num_workers: Decoding threads; 0 decodes in the calling thread.
        stop_at_error: Raise the first ``ImageError`` as soon as it is met.
    """
    waiting: dict[int, Outcome] = {}
    expected = 0
    prepared = _prepare_all(inputs, prepare, num_workers, ahead=2 * batch_size)
    try:
        for group in _by_shape(prepared, batch_size):
            for outcome in _outcomes(group, describe_batch):
                if stop_at_error and isinstance(outcome.result, ImageError):
                    raise outcome.result
                waiting[outcome.position] = outcome
            while expected in waiting:
                yield waiting.pop(expected)
                expected += 1
    finally:
        prepared.close()


def collect(outcomes: Iterable[Outcome], dim: int, size: int) -> Iterator[Encoded]:
    """Gather outcomes into ``Encoded`` of ``size`` inputs each."""
    group: list[Outcome] = []
    for outcome in outcomes:
        group.append(outcome)
        if len(group) == size:
            yield _encoded(group, dim)
            group = []
    if group:
        yield _encoded(group, dim)


def concatenate(parts: list[Encoded], dim: int) -> Encoded:
    """Join consecutive parts."""
    return Encoded(
        np.concatenate([np.empty((0, dim), np.float32), *(part.descriptors for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.positions for part in parts)]),
        tuple(name for part in parts for name in part.names),
        tuple(skipped for part in parts for skipped in part.skipped),
    )


def _prepare_all(
    inputs: Iterable[ImageInput], prepare: Prepare, num_workers: int, ahead: int
) -> Generator[_Prepared, None, None]:
    """Decode in threads, at most ``ahead`` inputs before the one that is asked for."""

    def attempt(position: int, source: ImageInput, name: str) -> _Prepared:
        try:
            return _Prepared(position, name, prepare(source, name))
        except ImageError as error:
            return _Prepared(position, name, error)

    if num_workers == 0:
        for position, source in enumerate(inputs):
            yield attempt(position, source, describe(source, position))
        return
    decoders = Workers(num_workers, "decode")
    pending: deque[_Prepared | Callable[[], _Prepared]] = deque()

    def first() -> _Prepared:
        item = pending.popleft()
        return item if isinstance(item, _Prepared) else item()

    try:
        for position, source in enumerate(inputs):
            work = partial(attempt, position, source, describe(source, position))
            if isinstance(source, np.ndarray | Tensor) or hasattr(source, "read"):
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


def _by_shape(prepared: Iterable[_Prepared], batch_size: int) -> Iterator[list[_Prepared]]:
    """Group images of one shape; errors pass at once, in a group of their own."""
    buckets: dict[tuple[int, ...], list[_Prepared]] = {}  # oldest first: dicts keep their order
    held_bytes = 0

    def flush(shape: tuple[int, ...]) -> list[_Prepared]:
        nonlocal held_bytes
        group = buckets.pop(shape)
        held_bytes -= sum(one.result.nbytes for one in group if isinstance(one.result, Tensor))
        return group

    for item in prepared:
        if isinstance(item.result, ImageError):
            yield [item]
        else:
            shape = tuple(item.result.shape)
            buckets.setdefault(shape, []).append(item)
            held_bytes += item.result.nbytes
            if len(buckets[shape]) == batch_size:
                yield flush(shape)
        # A rare shape must not hold back everything behind it, however small its bucket is.
        oldest_allowed = item.position - _HELD_BATCHES * batch_size
        while buckets:
            oldest = next(iter(buckets))
            if held_bytes <= _HELD_BYTES and buckets[oldest][0].position > oldest_allowed:
                break
            yield flush(oldest)
    yield from buckets.values()


def _outcomes(group: list[_Prepared], describe_batch: Describe) -> Iterator[Outcome]:
    images = [item.result for item in group if isinstance(item.result, Tensor)]
    if len(images) < len(group):
        for item in group:
            if isinstance(item.result, ImageError):
                yield Outcome(item.position, item.name, item.result)
        return
    for item, descriptor in zip(group, describe_batch(torch.stack(images)), strict=True):
        yield Outcome(item.position, item.name, descriptor)


def _encoded(group: list[Outcome], dim: int) -> Encoded:
    kept = [outcome for outcome in group if not isinstance(outcome.result, ImageError)]
    return Encoded(
        np.array([outcome.result for outcome in kept], np.float32).reshape(len(kept), dim),
        np.array([outcome.position for outcome in kept], np.int64),
        tuple(outcome.name for outcome in kept),
        tuple(
            Skipped(outcome.position, outcome.name, outcome.result.reason)
            for outcome in group
            if isinstance(outcome.result, ImageError)
        ),
    )
