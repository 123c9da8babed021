"""The C allocator's settings while training on a CPU.

Every step asks for the same gigabytes of activations and frees them again. By default glibc takes
large blocks from the kernel and gives them back each time, and the kernel clears every page anew:
a third of a step. Keeping freed memory in the process avoids that. It must be given back now and
then all the same: what threads decode and augment meanwhile lies between the blocks of a step, and
would leave holes that the next steps cannot fill.
"""

import contextlib
import ctypes
import platform
from collections.abc import Iterator

from sscd_vec.encoder.backends.native import return_freed_memory

# Names and defaults of mallopt(3).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
DEFAULTS = {M_TRIM_THRESHOLD: 128 << 10, M_TOP_PAD: 0, M_MMAP_MAX: 65536}
KEEPING = {M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 256 << 20, M_MMAP_MAX: 0}


@contextlib.contextmanager
def freed_memory_kept(wanted: bool = True) -> Iterator[None]:
    """Keep freed memory for the next step; give it back at the end. Without glibc, do nothing.

    Afterwards the limits are glibc's usual ones again, but it no longer adapts them by itself: that
    ends for good when they are first set.
    """
    if not wanted or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    for parameter, value in KEEPING.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in DEFAULTS.items():
            libc.mallopt(parameter, value)
        return_freed_memory()
