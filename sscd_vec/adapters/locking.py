"""A folder's lock: one process at a time saves into it."""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 2.0  # seconds of waiting before it is worth a word

logger = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder: alone to save, or shared by readers who keep savers out.

    Not twice in one process: it would wait for itself.

    Args:
        folder: Must exist; reading it is enough.
        shared: Let other readers in.
        wait: Until whoever has it is done.

    Raises:
        BlockingIOError: If somebody else has it and ``wait`` is false.
    """
    if sys.platform == "win32":  # folders cannot be opened there
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            why = f"{folder}: waiting for another process that saves or trains into it"
            late = threading.Timer(PATIENCE, logger.warning, [why])
            late.start()
            try:
                fcntl.flock(handle, kind)
            finally:
                late.cancel()
        yield
    finally:
        os.close(handle)
