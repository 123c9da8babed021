"""Memory the C library keeps after it was freed."""

import ctypes
import functools
from collections.abc import Callable


def return_freed_memory() -> None:
    """Give what was freed back to the system, where the C library keeps it (glibc).

    It keeps freed blocks in case their sizes are asked for again. Where they are not, or other
    blocks lie between them, that is soon more memory than is used.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return None
    return trim
