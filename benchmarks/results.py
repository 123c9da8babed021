"""A benchmark's figures with what repeats them: versions, machine, command, date."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results"
# How another process runs a benchmark: this, its name, its arguments.
RUN = (sys.executable, str(BENCHMARKS))
PACKAGES = (
    "sscd-vec",
    "torch",
    "torchvision",
    "triton",
    "numpy",
    "faiss-cpu",
    "pymilvus",
    "milvus-lite",
)


def write(
    name: str, figures: object, folder: Path = RESULTS, *, encoder: str | None = None
) -> Path:
    """Write ``figures`` to ``folder/name.json`` beside a record of how they were made.

    Args:
        name: File name without its ending.
        figures: Anything JSON can hold.
        folder: Where to write; the repository's results by default.
        encoder: Fingerprint of the encoder that the figures depend on.

    Returns:
        The file written.
    """
    record = {
        "command": _command(sys.argv),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "encoder": encoder,
        "machine": machine(),
        "versions": versions(),
        "figures": figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    partial = path.with_suffix(".json.tmp")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)
    return path


def read(name: str, folder: Path = RESULTS) -> dict[str, object]:
    """Read back what ``write`` wrote."""
    record: dict[str, object] = json.loads((folder / f"{name}.json").read_text())
    return record


def commit() -> str | None:
    """The commit of the code that runs, with a plus where files differ; None outside a clone."""
    words = ["git", "-C", str(BENCHMARKS), "describe", "--always", "--dirty=+", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    return None


def machine() -> dict[str, object]:
    """What kind of machine this is, without naming it."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _command(argv: list[str]) -> str:
    """The command line, with the last part only of every absolute path: those differ anywhere."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv[1:]]
    script = Path(argv[0]).resolve()
    if script.parent.parent == BENCHMARKS.resolve():
        return shlex.join(["python", "benchmarks", f"{script.parent.name}/{script.stem}", *words])
    return shlex.join(["python", f"benchmarks/{script.name}", *words])
