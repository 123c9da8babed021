"""From what a client sent to pixels: decoded elsewhere, and never written as it came.

Only plain raster formats are taken (no SVG, no PDF, nothing that starts another program). A file
that is also something else (a page, a script, an archive, a PDF) is refused; what is kept is
encoded anew from its pixels anyway. Child processes with a memory and a time limit read the size
from the header and, if that is small enough, decode the image: what goes wrong there, goes wrong
there, and a thread that cannot be stopped never decodes.

Limits on bytes and on each image are not enough: an image of one colour is a thousand times larger
decoded than sent, one request brings several, and many requests many. So every image is reduced to
a few megapixels where it is decoded. Requests with images that take long or much memory go one at a
time, in lanes of their own where few may wait, holding one image each; their images are decoded by
processes that leave the processor to others, with one budget of memory. Small ones go on beside
them, with a budget for their pixels.
"""

import asyncio
import io
import os
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from sscd_vec.app.answers import LONGEST_NAME
from sscd_vec.app.limits import Limits, Refused
from sscd_vec.encoder.images import ImageError, ImageInput, TargetSize
from sscd_vec.encoder.isolation import Decoders, Measured
from sscd_vec.encoder.opening import NOT_AN_IMAGE, TOO_LARGE
from sscd_vec.files import ImageFile

T = TypeVar("T")
Pixels = NDArray[np.uint8]  # (height, width, 3)
Work: TypeAlias = Callable[[int, Pixels], Awaitable[T]]

MARKUP = (b"<script", b"<html", b"<!doctype", b"<?php", b"<svg")
ICON = b"\0\0\1\0"  # holds an image of any size, whatever its own header says
PDF_WITHIN = 1024  # a PDF may start this late in a file
KEPT_PIXELS = 2**22  # of an image once it is decoded: more show nothing more to any model
DRAFT_SIDE = 512  # large JPEGs are decoded at a fraction, not below twice that
MEDIUM, LARGE = 4_000_000, 16_000_000  # pixels, or what takes as long; above, one at a time
SMALL_BYTES = 64 * 2**20  # what decoding a small image may take
BYTES_PER_PIXEL = 7  # of ``Limits.pixels``: what decoding may take, and all slow images together
PATIENCE = 10  # niceness of the processes that decode slow images
FAST_LANE = min(4, max(2, os.cpu_count() or 1))
JPEG, SCAN = b"\xff\xd8\xff", b"\xff\xda"
JPEG_SPEED, COMMON_SCANS = 4, 10  # times as fast as others, with no more than so many scans
HELD_IMAGES = 3  # at full ``KEPT_PIXELS``; of all requests in the fast lane


@dataclass
class Upload:
    """What one request brought.

    Attributes:
        contents: The encoded images.
        names: For each, the file name it was sent with, or its position.
        fields: The other fields of the form.
    """

    contents: list[bytes] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    def add(self, content: bytes, name: str | None) -> None:
        """Take one image."""
        self.contents.append(content)
        # The name is only echoed; a codec of the client's choice may leave half characters in it.
        plain = (name or "").encode("utf-8", "replace").decode()[:LONGEST_NAME]
        self.names.append(plain or str(len(self.contents)))


async def read_upload(request: Request, limits: Limits) -> Upload:
    """The images and fields of a request.

    Raises:
        Refused: 400 for a form that cannot be read or has no image, 413 for too many images, 415
            for a body of another kind.
    """
    upload = Upload()
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "multipart/form-data":
        await _read_form(request, limits, upload)
    elif kind.startswith("image/") or kind == "application/octet-stream":
        upload.add(await request.body(), None)
    else:
        raise Refused(415, "expected multipart/form-data with image files, or one image/* body")
    if not upload.contents:
        raise Refused(400, "expected an image in the form field 'image'")
    return upload


async def _read_form(request: Request, limits: Limits, upload: Upload) -> None:
    parser = MultiPartParser(
        request.headers,
        request.stream(),
        max_files=limits.files,
        max_fields=16,
        max_part_size=4096,
    )
    parser.spool_max_size = limits.body  # in memory, as the body is: a full disk refuses no search
    try:
        form = await parser.parse()
    except MultiPartException as error:
        status = 413 if "Too many" in error.message else 400
        raise Refused(status, f"the form cannot be read: {error.message}") from error
    except (ValueError, KeyError) as error:
        raise Refused(400, f"the form cannot be read: {error}") from error
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            upload.add(await value.read(), value.filename)
        else:
            upload.fields[name] = value
    await form.close()


class Lane:
    """So many at a time; others wait, but not too many of them."""

    def __init__(self, number: int, waiting: int) -> None:
        """Set both numbers."""
        self._free = asyncio.Semaphore(number)
        self._left = number + waiting

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Take a place.

        Raises:
            Refused: 503, too many wait already.
        """
        if not self._left:
            raise Refused(503, "too many large images are waiting; try again in a second")
        self._left -= 1
        try:
            async with self._free:
                yield
        finally:
            self._left += 1


class Decoding:
    """Turns uploads, and images of the bank, into pixels."""

    def __init__(self, limits: Limits) -> None:
        """Prepare; the processes start when they are first needed."""
        self._limits = limits
        memory, seconds = BYTES_PER_PIXEL * limits.pixels, limits.decoding
        self._fast = Decoders(FAST_LANE, memory=memory, seconds=seconds)
        self._slow = Decoders(2, memory=memory, seconds=seconds, patience=PATIENCE)
        self._memory = Budget(memory)  # of slow images that are being decoded
        self._held = Budget(HELD_IMAGES * KEPT_PIXELS)  # of requests with small images only
        # Whoever waits holds a slot of the server: some slots are always left for small images.
        self._small = Lane(FAST_LANE, limits.concurrent + limits.waiting)
        self._medium = Lane(1, limits.concurrent // 2)
        self._large = Lane(1, limits.concurrent // 5)

    def close(self) -> None:
        """End the processes."""
        self._fast.close()
        self._slow.close()

    async def each(self, contents: Sequence[bytes], work: Work[T]) -> list[T]:
        """What ``work`` makes of a request's images, given the position and pixels of each.

        Small images are decoded first and worked on together. If any is slow, the request takes its
        turn with all of them, and holds the pixels of one at a time.

        Raises:
            Refused: 413 for too many pixels, 415 for what is not an image or more than one thing,
                422 for a broken one, 503 if too many large ones wait.
        """
        found = [await self._measure(content) for content in contents]
        together = sum(each.pixels for each in found)
        if together > self._limits.together:
            raise Refused(
                413,
                f"the images of a request may have {self._limits.together} pixels together, these "
                f"have {together}; send fewer at once",
            )
        images = enumerate(zip(contents, found, strict=True))
        lane = self._lane(found)
        if lane is not None:
            async with lane.enter():
                return [await work(n, await self._decode(*one, DRAFT_SIDE)) for n, one in images]
        async with self._held.take(sum(min(each.pixels, KEPT_PIXELS) for each in found)):
            decoded = [(n, await self._decode(*one, DRAFT_SIDE)) for n, one in images]
            return await asyncio.gather(*(work(n, pixels) for n, pixels in decoded))

    async def show(self, file: ImageFile, side: int) -> Pixels:
        """Decode an image of the bank; a large JPEG at a fraction, not below twice ``side``.

        Raises:
            ImageError: Its header cannot be read.
            Refused: Its pixels cannot, or 503 if too many large ones wait.
        """
        async with self._small.enter():
            measured = await run_in_threadpool(self._fast.measure, file, **_reduced(side))
        cost = Cost.of(measured)
        lane = self._lane([cost])
        async with nullcontext() if lane is None else lane.enter():
            return await self._decode(file, cost, side)

    async def _measure(self, content: bytes) -> "Cost":
        if not content:
            raise Refused(422, "the image is empty")
        if content.startswith(ICON):
            raise Refused(415, "an icon; send its image as PNG or JPEG")
        try:
            async with self._small.enter():
                measured = await run_in_threadpool(self._inspect, content)
        except ImageError as error:
            raise _refusal(error) from error
        cost = Cost.of(measured, content)
        if cost.pixels > self._limits.pixels:
            raise Refused(
                413,
                f"an image may have {self._limits.pixels} pixels, this one has {cost.pixels}; send "
                "it smaller",
            )
        return cost

    def _inspect(self, content: bytes) -> Measured:
        """Read a header; what may be decoded is then searched for what else it may be."""
        measured = self._fast.measure(content, **_reduced(DRAFT_SIDE))
        if _is_polyglot(content):
            raise Refused(415, "the file is an image and something else at once; send only one")
        return measured

    def _lane(self, costs: "Sequence[Cost]") -> Lane | None:
        """Where a request with these images waits for its turn; None if all of them are small."""
        slow = [cost.work for cost in costs if cost.is_slow]
        if not slow:
            return None
        return self._medium if max(slow) <= LARGE else self._large

    async def _decode(self, source: ImageInput, cost: "Cost", side: int) -> Pixels:
        if cost.is_slow:
            async with self._memory.take(cost.memory):
                return await run_in_threadpool(_decode, self._slow, source, side)
        async with self._small.enter():
            return await run_in_threadpool(_decode, self._fast, source, side)


class Budget:
    """Pixels or bytes that may be held at once: each takes its share whole, in order."""

    def __init__(self, total: int) -> None:
        """Set how many there are."""
        self.total = total
        self._free = total
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def take(self, wanted: int) -> AsyncIterator[None]:
        """Hold so many, once they are free; all of them at most."""
        share = min(wanted, self.total)
        # One waits at a time, so that many small requests do not keep a large one out.
        async with self._turn:
            while self._free < share:
                self._returned.clear()
                await self._returned.wait()
            self._free -= share
        try:
            yield
        finally:
            self._free += share
            self._returned.set()


@dataclass(frozen=True)
class Cost:
    """What decoding an image takes.

    Attributes:
        pixels: Width times height.
        work: How many pixels of a PNG take as long.
        memory: Bytes, at most.
    """

    pixels: int
    work: int
    memory: int

    @property
    def is_slow(self) -> bool:
        """Whether small images must not wait for it."""
        return self.work > MEDIUM or self.memory > SMALL_BYTES

    @classmethod
    def of(cls, measured: Measured, content: bytes = b"") -> "Cost":
        """A JPEG is faster than others, one with many scans slower."""
        pixels = work = measured.height * measured.width
        if content.startswith(JPEG):
            work = int(pixels / JPEG_SPEED * max(1.0, content.count(SCAN) / COMMON_SCANS))
        return cls(pixels, work, measured.memory)


class _Reduced(TypedDict):
    reduce_to: TargetSize
    most_pixels: int


def _reduced(side: int) -> _Reduced:
    return {"reduce_to": lambda *_: (side, side), "most_pixels": KEPT_PIXELS}


def _decode(decoders: Decoders, source: ImageInput, side: int) -> Pixels:
    try:
        return decoders.load_pixels(source, **_reduced(side))
    except ImageError as error:
        raise _refusal(error) from error


def _refusal(error: ImageError) -> Refused:
    """The status that fits what is wrong with an image."""
    status = 422
    if error.reason.startswith(TOO_LARGE):
        status = 413
    elif error.reason.startswith(NOT_AN_IMAGE):
        status = 415
    return Refused(status, f"the image: {error.reason}")


def _is_polyglot(content: bytes) -> bool:
    lowered = content.lower()
    if any(tag in lowered for tag in MARKUP) or b"%PDF-" in content[:PDF_WITHIN]:
        return True
    return zipfile.is_zipfile(io.BytesIO(content))
