"""Is this install whole, and what can this machine do?

Every library is loaded in a subprocess of its own: one that dies on import (an illegal
instruction, a missing symbol) becomes a failed line and not a dead doctor.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

PROBE_TIMEOUT = 180.0  # seconds; importing torch for the first time on a cold disk is slow
MIN_MILVUS_LITE = (3, 2)  # earlier releases return unsquared L2 distances

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ``ok``; ``note``, something to know that breaks nothing; ``fail``, a broken install.
        detail: What was found.
        remedy: What to do about it, empty when there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


class ProbeError(Exception):
    """A probe died or printed no answer; the message is its last line."""


def examine(cache_dir: Path | None = None) -> list[Check]:
    """Run every check, in the order a reader wants them."""
    checks = [
        Check("sscd-vec", "ok", f"{_version('sscd-vec')} on Python {platform.python_version()}")
    ]
    for probe in (_torch, _devices, _triton, _faiss, _milvus, _bf16):
        checks += _guarded(probe)
    checks += _guarded(_cache, cache_dir)
    checks += _extras()
    return checks


def faiss_verdict(
    loaded: str, gpu_build: bool, gpus: int, cpu_dist: str | None, gpu_dist: str | None
) -> Check:
    """Judge which FAISS is really loaded.

    faiss-cpu and faiss-gpu write the same ``faiss/`` folder: whichever came last wins, silently.

    Args:
        loaded: Version of the ``faiss`` module that imports.
        gpu_build: Whether that module was compiled with GPU support.
        gpus: Devices it sees.
        cpu_dist: Installed version of the distribution faiss-cpu, if any.
        gpu_dist: Installed version of the distribution faiss-gpu, if any.
    """
    build = f"GPU build, {gpus} device(s)" if gpu_build else "CPU build"
    detail = f"{loaded}, {build}"
    if gpu_dist and not gpu_build:
        return Check(
            "faiss",
            "fail",
            f"{detail}; faiss-gpu {gpu_dist} is installed but faiss-cpu overwrote its files",
            f"pip install --force-reinstall --no-deps faiss-gpu=={gpu_dist}",
        )
    if gpu_dist and cpu_dist and cpu_dist != gpu_dist:
        return Check(
            "faiss",
            "note",
            f"{detail}; faiss-cpu {cpu_dist} and faiss-gpu {gpu_dist} share one folder",
            f"pip install --force-reinstall --no-deps faiss-gpu=={cpu_dist}",
        )
    return Check("faiss", "ok", detail)


def _torch() -> list[Check]:
    found = _probe(
        "import torch, torchvision; torch.ops.torchvision.nms; "
        "answer = {'torch': torch.__version__, 'torchvision': torchvision.__version__}"
    )
    return [Check("torch", "ok", f"{found['torch']}, torchvision {found['torchvision']}")]


def _devices() -> list[Check]:
    found = _probe(
        "import torch; answer = {'threads': torch.get_num_threads(), "
        "'mps': torch.backends.mps.is_available(), "
        "'cuda': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}"
    )
    devices = [f"cuda:{i} {name}" for i, name in enumerate(found["cuda"])]
    devices += ["mps"] if found["mps"] else []
    devices += [f"cpu ({found['threads']} threads)"]
    return [Check("devices", "ok", ", ".join(devices))]


def _triton() -> list[Check]:
    if _version("triton") is None:
        return [Check("triton", "note", "not installed: GPU tensors need it, CPU tensors do not")]
    found = _probe("import triton; answer = {'version': triton.__version__}")
    return [Check("triton", "ok", found["version"])]


def _faiss() -> list[Check]:
    found = _probe(
        "import faiss; answer = {'version': faiss.__version__, "
        "'gpu': 'GPU' in faiss.get_compile_options(), "
        "'gpus': faiss.get_num_gpus() if hasattr(faiss, 'get_num_gpus') else 0}"
    )
    return [
        faiss_verdict(
            found["version"],
            found["gpu"],
            found["gpus"],
            _version("faiss-cpu"),
            _version("faiss-gpu"),
        )
    ]


def _milvus() -> list[Check]:
    found = _probe("import pymilvus; answer = {'version': pymilvus.__version__}")
    lite = _version("milvus-lite")
    if lite is None:
        detail = f"pymilvus {found['version']}; no milvus-lite: servers work, local files do not"
        return [Check("milvus", "note", detail, "pip install milvus-lite")]
    detail = f"pymilvus {found['version']}, milvus-lite {lite}"
    if tuple(int(part) for part in lite.split(".")[:2]) < MIN_MILVUS_LITE:
        floor = ".".join(map(str, MIN_MILVUS_LITE))
        remedy = f"pip install -U 'milvus-lite>={floor}'"
        return [Check("milvus", "fail", f"{detail}; below {floor} L2 is not squared", remedy)]
    _probe("import milvus_lite; answer = {}")
    return [Check("milvus", "ok", detail)]


def _bf16() -> list[Check]:
    found = _probe(
        "from sscd_vec.encoder.backends import bfloat16_problem; "
        "answer = {'problem': bfloat16_problem()}"
    )
    if found["problem"] is None:
        return [Check("bfloat16", "ok", "safe on this CPU: precision='bfloat16' may be asked for")]
    return [Check("bfloat16", "note", f"not safe here: {found['problem']}; float32 is the default")]


def _cache(cache_dir: Path | None) -> list[Check]:
    asked = repr(None if cache_dir is None else str(cache_dir))
    found = _probe(
        "from sscd_vec.models import cache_folder, present; "
        f"answer = {{'folder': str(cache_folder({asked})), 'models': present({asked})}}"
    )
    folder = Path(found["folder"])
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        remedy = "set SSCD_VEC_CACHE to a folder you can write to"
        return [Check("cache", "fail", f"{folder} cannot be written to", remedy)]
    free = shutil.disk_usage(nearest).free / 2**30
    models = ", ".join(found["models"]) or "none yet"
    return [
        Check("cache", "ok", f"{folder}, {free:.0f} GiB free"),
        Check("models", "ok", f"present: {models}"),
    ]


def _extras() -> list[Check]:
    extras = {
        "onnx": "onnxruntime",
        "openvino": "openvino",
        "plot": "matplotlib",
        "train": "tensorboard",
        "app": "starlette",
        "verify": "opencv-python-headless",
        "parquet": "pyarrow",
        "ray": "ray",
        "threatexchange": "threatexchange",
    }
    here = [
        f"{extra} ({_version(package)})" for extra, package in extras.items() if _version(package)
    ]
    missing = [extra for extra, package in extras.items() if not _version(package)]
    remedy = f"pip install 'sscd-vec[{','.join(missing)}]'" if missing else ""
    return [Check("extras", "ok", ", ".join(here) or "none", remedy)]


def _guarded(probe: Callable[..., list[Check]], *arguments: object) -> list[Check]:
    try:
        return probe(*arguments)
    except ProbeError as error:
        name = probe.__name__.strip("_")
        remedy = "pip install --force-reinstall sscd-vec; a CPU-only torch does not fit torchvision"
        return [Check(name, "fail", str(error), remedy)]


def _probe(code: str) -> dict[str, Any]:
    """Run ``code``, which assigns ``answer``, in a fresh interpreter and return the answer."""
    script = f"import json\n{code}\nprint('\\nanswer:' + json.dumps(answer))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=PROBE_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"no answer within {PROBE_TIMEOUT:.0f} s") from error
    if done.returncode < 0:
        raise ProbeError(f"the process was killed by signal {-done.returncode}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("answer:")]
    if done.returncode or not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ProbeError(said[-1] if said else f"exit code {done.returncode}, nothing printed")
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix("answer:"))
    return answer


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
