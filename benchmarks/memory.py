"""Memory of a process, as Linux counts it.

Not ``ru_maxrss``, which a child inherits from the process that started it.
"""

import os
from pathlib import Path


def resident_mib(pid: int | None = None) -> float:
    """What a process, this one by default, has in memory now."""
    return _status("VmRSS", os.getpid() if pid is None else pid)


def peak_mib() -> float:
    """The most this process has had in memory."""
    return _status("VmHWM", os.getpid())


def _status(field: str, pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}: memory is measured on Linux only")
