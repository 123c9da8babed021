"""Locks: between processes (files and folders) and between the threads of one (readers, writer).

A lock between processes belongs to the process and ends with it, however it ends.
"""

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sscd_vec.files import PathLike

_PATIENCE = 2.0  # seconds of waiting before saying so

logger = logging.getLogger(__name__)


class LockHeldError(BlockingIOError):
    """Another process holds a lock; the message says which one and since when."""


@contextmanager
def locked(
    path: PathLike, *, shared: bool = False, wait: bool | float = True, purpose: str = ""
) -> Iterator[None]:
    """Hold a lock between processes: alone to write, or shared with other readers.

    The lock ends with the process, however it ends. Do not nest it on one path: it would wait for
    itself.

    Args:
        path: A folder (reading it is enough), or a lock file, which is created and tells others
            who holds it.
        shared: Let other ``shared`` holders in.
        wait: True waits, False does not, a number waits that many seconds.
        purpose: What the holder does, for the message others get.

    Raises:
        LockHeldError: Someone else holds it, and the wait is over.
    """
    place = Path(path)
    if sys.platform == "win32":  # no flock: one exclusive lock file instead
        with _windows_lock(place, wait):
            yield
        return
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    flags = os.O_RDONLY if place.is_dir() or shared and place.exists() else os.O_RDWR | os.O_CREAT
    handle = os.open(place, flags, 0o666)
    noted = not shared and not place.is_dir()
    try:
        _take(handle, kind, place, wait)
        with _holder_noted(handle, purpose) if noted else contextlib.nullcontext():
            yield
    finally:
        os.close(handle)


def holder_of(path: PathLike) -> str:
    """Who wrote itself into a lock file, as a clause for a message; '' if nobody did."""
    try:
        note = json.loads(Path(path).read_text("utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["since"]))
        purpose = f" to {note['purpose']}" if note["purpose"] else ""
        return f"process {note['process']} on {note['host']} holds it since {since}{purpose}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _take(handle: int, kind: int, place: Path, wait: bool | float) -> None:
    import fcntl

    deadline = None if wait is True else time.monotonic() + float(wait)
    started = time.monotonic()
    said = False
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                who = holder_of(place) or "another process holds it"
                raise LockHeldError(error.errno, f"{place} is locked: {who}") from error
            if not said and now - started >= _PATIENCE:
                who = holder_of(place) or "another process"
                logger.warning("%s: waiting for its lock (%s)", place, who)
                said = True
        time.sleep(0.02)


@contextmanager
def _holder_noted(handle: int, purpose: str) -> Iterator[None]:
    """Say in the lock file who holds it; one who did not get the lock must not touch the note."""
    note = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.time(),
        "purpose": purpose,
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(note).encode(), 0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)


@contextmanager
def _windows_lock(place: Path, wait: bool | float) -> Iterator[None]:
    from filelock import FileLock, Timeout

    file = place / ".lock" if place.is_dir() else place
    timeout = -1.0 if wait is True else float(wait)
    try:
        lock = FileLock(f"{file}.guard", timeout=timeout).acquire()
    except Timeout as error:
        raise LockHeldError(f"{place} is locked: another process holds it") from error
    with lock:
        yield


class ReadersWriterLock:
    """Many readers or one writer, among the threads of a process; a waiting writer goes first."""

    def __init__(self) -> None:
        """Nobody holds it."""
        self._condition = threading.Condition()
        self._readers = 0
        self._writers_waiting = 0
        self._writing: int | None = None  # thread that writes
        self._depth = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep writers out; the writing thread itself may read."""
        with self._condition:
            own = self._writing == threading.get_ident()
            if not own:
                self._condition.wait_for(
                    lambda: self._writing is None and not self._writers_waiting
                )
                self._readers += 1
        try:
            yield
        finally:
            if not own:
                with self._condition:
                    self._readers -= 1
                    self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclude all others; the same thread may enter again."""
        me = threading.get_ident()
        with self._condition:
            if self._writing != me:
                self._writers_waiting += 1
                try:
                    self._condition.wait_for(lambda: self._writing is None and not self._readers)
                finally:
                    self._writers_waiting -= 1
                self._writing = me
            self._depth += 1
        try:
            yield
        finally:
            with self._condition:
                self._depth -= 1
                if not self._depth:
                    self._writing = None
                self._condition.notify_all()
