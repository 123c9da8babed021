"""Several processes over gloo, as ``torchrun`` would start them."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def run(script: str, count: int) -> None:
    """Run a script in each of ``count`` processes of a group; all must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    group |= {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
