"""Decoding in processes of their own, which can be killed.

A thread that decodes cannot be stopped, and whatever the limits of ``opening`` miss would take the
caller's memory and time. So a few child processes decode instead, each under a memory limit of its
own; one that takes too long is killed, one that dies is replaced, and its image is an error.

A request says how long an encoded image is, how many of its pixels are wanted at most, and whether
it is only to be measured; the image follows. The decoder answers with the image's size, is told
what it will be resized to, and sends the pixels, or how much memory decoding would take; or it
answers with an error in words. An image is reduced where it is decoded: the caller never holds it
at full size.
"""

import contextlib
import importlib
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from io import BufferedReader, BufferedWriter
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar, cast

import numpy as np
from PIL import Image

from sscd_vec.encoder.images import (
    ImageError,
    ImageInput,
    Pixels,
    TargetSize,
    input_name,
    is_encoded,
    load_pixels,
)
from sscd_vec.encoder.opening import (
    BYTES_PER_ALLOWED_PIXEL,
    Refused,
    error_reason,
    open_checked,
    read_encoded,
)

T = TypeVar("T")

_SECONDS = 30.0
_START_SECONDS = 300.0
_END_SECONDS = 10.0
_SLACK = 128 * 2**20  # bytes that Python takes while it decodes
_OPEN_FILES = 64
_READY, _SIZE, _MEMORY, _PIXELS, _ERROR = b"R", b"S", b"M", b"P", b"E"
_REQUEST, _LENGTH, _PAIR = struct.Struct("<QQ?"), struct.Struct("<Q"), struct.Struct("<LL")
_ALL_PIXELS = 2**63
# Memory goes back to the system with every image: blocks above 64 KiB are mapped one by one.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "65536"}
_BEGIN = "from sscd_vec.encoder.isolation import serve; serve()"


class Measured(NamedTuple):
    """What an image's header says.

    Attributes:
        height: In pixels.
        width: In pixels.
        memory: Bytes that decoding it takes, at most.
    """

    height: int
    width: int
    memory: int


class Decoders:
    """A few processes that decode images; started when first needed, ended with this object.

    Any number of threads may use it. ``close``, or the end of a ``with`` block, ends the processes.
    """

    def __init__(
        self,
        number: int = 1,
        *,
        memory: int | None = None,
        seconds: float = _SECONDS,
        patience: int = 0,
    ) -> None:
        """Prepare for ``number`` images at a time.

        Args:
            number: Processes, at most.
            memory: Bytes one image may take; by default 12 per ``PIL.Image.MAX_IMAGE_PIXELS``, 1
                GiB. The system enforces it on Linux; elsewhere it bounds what an image may claim
                to need.
            seconds: How long one image may take before its decoder is killed.
            patience: How much to prefer other processes to these, 0 to 19 (``os.nice``).

        Raises:
            ValueError: One of the first three is not above 0.
        """
        if memory is None:
            memory = BYTES_PER_ALLOWED_PIXEL * (Image.MAX_IMAGE_PIXELS or 89_478_485)
        for name, value in (("number", number), ("memory", memory), ("seconds", seconds)):
            if value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        self._number, self._start = number, (memory, seconds, patience)
        self._running: set[_Decoder] = set()
        self._begin()

    def __enter__(self) -> "Decoders":
        """Use it in a block."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes."""
        self.close()

    def load_pixels(
        self,
        source: ImageInput,
        *,
        name: str | None = None,
        reduce_to: TargetSize | None = None,
        most_pixels: int | None = None,
    ) -> Pixels:
        """Like ``sscd_vec.encoder.images.load_pixels``, but decode in a child process.

        Raises:
            ImageError: Also if it took too long or too much memory, or its decoder died.
        """
        if not is_encoded(source):
            return load_pixels(source, name=name, reduce_to=reduce_to, most_pixels=most_pixels)
        try:
            content = read_encoded(source)
            return self._use(lambda free: free.decode(content, reduce_to, most_pixels))
        except (Refused, OSError) as error:
            raise ImageError(name or input_name(source), error_reason(error)) from None

    def measure(
        self,
        source: ImageInput,
        *,
        name: str | None = None,
        reduce_to: TargetSize | None = None,
        most_pixels: int | None = None,
    ) -> Measured:
        """Read an encoded image's header in a child process; takes what ``load_pixels`` takes.

        Raises:
            ImageError: The header cannot be read, or the image may not be decoded.
        """
        try:
            content = read_encoded(source)
            return self._use(lambda free: free.measure(content, reduce_to, most_pixels))
        except (Refused, OSError) as error:
            raise ImageError(name or input_name(source), error_reason(error)) from None

    def close(self) -> None:
        """End the processes; what they were decoding becomes an error."""
        self._end()
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._free: SimpleQueue[_Decoder | None] = SimpleQueue()
        for _ in range(self._number):
            self._free.put(None)  # not started yet
        self._end = weakref.finalize(self, _kill_all, self._running, self._process)

    def _use(self, work: "Callable[[_Decoder], T]") -> T:
        """Do something with the first process that is free."""
        if self._process != os.getpid():  # after a fork: the decoders are the parent's
            self._running = set()
            self._begin()
        free = self._free
        decoder = free.get()
        try:
            if decoder is None or not decoder.is_alive():
                decoder = _Decoder(*self._start)
                self._running.add(decoder)
            return work(decoder)
        finally:
            if decoder is not None and not decoder.is_alive():
                self._running.discard(decoder)
                decoder = None
            free.put(decoder)


class _Decoder:
    """One process, for one image at a time."""

    def __init__(self, memory: int, seconds: float, patience: int) -> None:
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        heif = "pillow_heif" if "HEIF" in Image.OPEN else ""
        child = subprocess.Popen(
            # -P: nothing is imported from the folder it starts in, which may be a stranger's.
            [sys.executable, "-P", "-c", _BEGIN, *map(str, (memory, seconds, patience)), heif],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **_MALLOC},
            start_new_session=True,  # Ctrl-C is for the parent, which ends it
        )
        self._child, self._seconds, self._late = child, seconds, False
        self._requests = cast(BufferedWriter, child.stdin)
        self._answers = cast(BufferedReader, child.stdout)
        self._within(_START_SECONDS, lambda: self._read(len(_READY)))

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def decode(
        self, content: bytes, reduce_to: TargetSize | None, most_pixels: int | None
    ) -> Pixels:
        def exchange() -> Pixels:
            self._ask(content, reduce_to, most_pixels, measure=False)
            pixels = np.empty((*_PAIR.unpack(self._read(_PAIR.size)), 3), np.uint8)
            self._fill(pixels.data.cast("B"))
            return pixels

        return self._within(self._seconds, exchange)

    def measure(
        self, content: bytes, reduce_to: TargetSize | None, most_pixels: int | None
    ) -> Measured:
        def exchange() -> Measured:
            height, width = self._ask(content, reduce_to, most_pixels, measure=True)
            return Measured(height, width, *_LENGTH.unpack(self._read(_LENGTH.size)))

        return self._within(self._seconds, exchange)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):  # what nobody will read any more
                pipe.close()

    def _within(self, seconds: float, work: Callable[[], T]) -> T:
        """Do ``work``; kill the process if that takes too long or fails half-way."""
        timer = threading.Timer(seconds, self._out_of_time)
        timer.daemon = True
        timer.start()
        try:
            return work()
        except Refused:  # a whole answer
            raise
        except (OSError, EOFError, ValueError) as error:  # a pipe was closed
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_SECONDS)  # to learn how it ended
            self.kill()
            raise Refused(self._why_dead(seconds)) from error
        except BaseException:  # also Ctrl-C: nobody reads the rest of the answer
            self.kill()
            raise
        finally:
            timer.cancel()
            timer.join()
            if self._late:
                self.kill()

    def _out_of_time(self) -> None:
        self._late = True
        self._child.kill()

    def _why_dead(self, seconds: float) -> str:
        if self._late:
            return f"not decoded within {seconds:g} s: its decoder was killed"
        code = self._child.returncode
        with contextlib.suppress(ValueError):
            return f"its decoder was ended by {signal.Signals(-code).name}"
        return f"its decoder ended with exit code {code}"

    def _ask(
        self,
        content: bytes,
        reduce_to: TargetSize | None,
        most_pixels: int | None,
        *,
        measure: bool,
    ) -> tuple[int, int]:
        """Send a request; return the image's size when the answer to it begins."""
        most = _ALL_PIXELS if most_pixels is None else most_pixels
        self._write(_REQUEST.pack(len(content), most, measure), content)
        size, answer = (0, 0), self._read(1)
        if answer == _SIZE:
            size = _PAIR.unpack(self._read(_PAIR.size))
            self._write(_PAIR.pack(*((0, 0) if reduce_to is None else reduce_to(*size))))
            answer = self._read(1)
        if answer == _ERROR:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            raise Refused(self._read(length).decode())
        return size

    def _write(self, *parts: bytes) -> None:
        for part in parts:
            self._requests.write(part)
        self._requests.flush()

    def _read(self, size: int) -> bytes:
        content = bytearray(size)
        self._fill(memoryview(content))
        return bytes(content)

    def _fill(self, room: memoryview) -> None:
        while room:
            received = self._answers.readinto(room)
            if not received:
                raise EOFError
            room = room[received:]


def _kill_all(running: set[_Decoder], process: int) -> None:
    if process == os.getpid():  # not those of the parent, in a fork
        for decoder in list(running):
            decoder.kill()
        running.clear()


def serve() -> None:
    """Decode what comes in on standard input until it ends; the child process's whole life."""
    memory, seconds, patience = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    plugin = sys.argv[4]
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not mix with answers
    if plugin:
        importlib.import_module(plugin).register_heif_opener()
    if patience and sys.platform != "win32":
        os.nice(patience)
    Image.init()
    Image.MAX_IMAGE_PIXELS = memory // BYTES_PER_ALLOWED_PIXEL
    _limit_resources(memory)
    answers.write(_READY)
    answers.flush()

    def ask(height: int, width: int) -> tuple[int, int]:
        answers.write(_SIZE + _PAIR.pack(height, width))
        answers.flush()
        target: tuple[int, int] = _PAIR.unpack(requests.read(_PAIR.size))
        return target if any(target) else (height, width)

    while header := requests.read(_REQUEST.size):
        _limit_time(seconds)
        length, most_pixels, measure = _REQUEST.unpack(header)
        content = requests.read(length)
        try:
            if measure:
                answers.write(_MEMORY + _LENGTH.pack(_memory_of(content, ask, most_pixels)))
            else:
                pixels = load_pixels(content, reduce_to=ask, most_pixels=most_pixels)
                answers.write(_PIXELS + _PAIR.pack(*pixels.shape[:2]))
                answers.write(pixels.data.cast("B"))
                del pixels
        except ImageError as error:
            reason = error.reason.encode(errors="backslashreplace")
            answers.write(_ERROR + _LENGTH.pack(len(reason)) + reason)
        answers.flush()


def _memory_of(content: bytes, reduce_to: TargetSize, most_pixels: int) -> int:
    """How many bytes decoding takes, at most."""
    try:
        image, needed = open_checked(content, reduce_to, most_pixels)
    except Exception as error:  # Pillow's readers raise all kinds on broken files
        raise ImageError("", error_reason(error)) from error
    image.close()
    return needed


def _limit_resources(memory: int) -> None:
    """Have the system refuse more than ``memory`` bytes, and any write to a file."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    with contextlib.suppress(OSError):  # only Linux says how much there is already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory + _SLACK
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(seconds: float) -> None:
    """Have the system end this process if the parent is gone and cannot."""
    if sys.platform == "win32":
        return
    import resource

    used = sum(os.times()[:2])
    allowed = int(used + (os.cpu_count() or 1) * seconds + 5)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, resource.RLIM_INFINITY))
