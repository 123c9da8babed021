"""What runs the network, from pixels to descriptors: torch, OpenVINO, ONNX Runtime.

Every backend runs a copy of the model with its batch norms folded into the convolutions. OpenVINO
and ONNX Runtime are imported only when they are asked for.

Whether bfloat16 is safe here is found out in a process that may die. Some virtual machines promise
AMX in their CPU flags without providing it; the first bfloat16 convolution then ends the process
with SIGILL, and no exception can be caught. So a child process tries it first.
"""

import functools
import signal
import subprocess
import sys
from importlib.util import find_spec
from typing import Literal, Protocol, get_args

import torch
from numpy import float32
from numpy.typing import NDArray
from torch import Tensor

from sscd_vec.encoder.model import SSCDModel

BackendName = Literal["torch", "openvino", "onnx"]
Precision = Literal["float32", "bfloat16"]

_NEEDS = {"torch": "torch", "openvino": "openvino", "onnx": "onnxruntime"}
_PROBE_SECONDS = 180
# Convolutions and a matrix product of the sizes that choose the tile instructions where there are
# any.
_TORCH_PROBE = """
import torch
with torch.inference_mode():
    x = torch.ones(2, 64, 32, 32).to(torch.bfloat16, memory_format=torch.channels_last)
    for kernel in (1, 3):
        conv = torch.nn.Conv2d(64, 64, kernel, padding=kernel // 2).bfloat16()
        y = conv.to(memory_format=torch.channels_last)(x)
        assert torch.isfinite(y).all(), "bfloat16 convolution returned NaN or infinity"
    assert torch.isfinite(torch.nn.Linear(64, 512).bfloat16()(y[:, :, 0, 0])).all()
"""
_OPENVINO_PROBE = """
import numpy as np, openvino as ov
from openvino import opset13 as ops
x = ops.parameter([2, 64, 32, 32], np.float32)
for kernel in (1, 3):
    weight = ops.constant(np.full((64, 64, kernel, kernel), 0.01, np.float32))
    pad = [kernel // 2] * 2
    y = ops.convolution(x if kernel == 1 else y, weight, [1, 1], pad, pad, [1, 1])
compiled = ov.Core().compile_model(ov.Model([y], [x]), "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
result = compiled(np.ones((2, 64, 32, 32), np.float32))[0]
assert np.isfinite(result).all(), "bfloat16 convolution returned NaN or infinity"
"""
_PROBES = {"torch": _TORCH_PROBE, "openvino": _OPENVINO_PROBE}


class Backend(Protocol):
    """uint8 images ``(n, h, w, 3)`` in, unit float32 descriptors ``(n, d)`` out."""

    def __call__(self, images: Tensor) -> NDArray[float32]:
        """Return the descriptors of ``images``."""


class Bfloat16Error(RuntimeError):
    """bfloat16 was asked for where it does not work."""


def check_backend(name: BackendName, device: torch.device, precision: Precision) -> None:
    """Refuse, before any work, what cannot run here.

    Raises:
        ValueError: An unknown name, or a combination that does not exist.
        ImportError: The package is not installed; the message names the extra.
        Bfloat16Error: bfloat16 would fail or kill the process.
    """
    if name not in get_args(BackendName):
        raise ValueError(f"backend must be torch | openvino | onnx, got {name!r}")
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be float32 | bfloat16, got {precision!r}")
    if find_spec(_NEEDS[name]) is None:
        raise ImportError(
            f"backend={name!r} needs {_NEEDS[name]}, which is not installed: "
            f"pip install 'sscd-vec[{name}]'"
        )
    if name == "openvino" and device.type != "cpu":
        raise ValueError(f"backend='openvino' runs on the CPU, got device {str(device)!r}")
    if name == "onnx" and device.type not in ("cpu", "cuda"):
        raise ValueError(f"backend='onnx' runs on cpu or cuda, got device {str(device)!r}")
    if precision == "bfloat16":
        if name == "onnx":
            raise ValueError(
                "backend='onnx' has no bfloat16 on the CPU; use backend='torch' or 'openvino'"
            )
        require_bfloat16(name, device)


def open_backend(
    name: BackendName, model: SSCDModel, device: torch.device, precision: Precision
) -> Backend:
    """Make ``model`` ready to run; its weights are copied, the model itself stays as it is."""
    check_backend(name, device, precision)
    if name == "openvino":
        from sscd_vec.encoder.backends.exported import OpenVINOBackend

        return OpenVINOBackend(model, precision)
    if name == "onnx":
        from sscd_vec.encoder.backends.exported import OnnxBackend

        return OnnxBackend(model, device)
    from sscd_vec.encoder.backends.native import TorchBackend

    return TorchBackend(model, device, precision)


@functools.cache
def bfloat16_problem(backend: Literal["torch", "openvino"] = "torch") -> str | None:
    """Try bfloat16 on this CPU in a child process, once per process.

    Args:
        backend: Whose bfloat16 to try.

    Returns:
        None if it works, otherwise what happened.
    """
    return _try(_PROBES[backend])


def require_bfloat16(backend: Literal["torch", "openvino"], device: torch.device) -> None:
    """Raise unless bfloat16 works for ``backend`` on ``device``.

    Raises:
        Bfloat16Error: It does not; the message says what happened and what to do.
    """
    if device.type == "cuda":
        problem = (
            None if torch.cuda.is_bf16_supported(including_emulation=False) else "the GPU lacks it"
        )
    elif device.type == "cpu":
        problem = bfloat16_problem(backend)
    else:
        problem = f"it is not supported on {device.type}"
    if problem is not None:
        raise Bfloat16Error(
            f"precision='bfloat16' does not work here with backend={backend!r}: {problem}. Use "
            "precision='float32' (the default)."
        )


def _try(code: str) -> str | None:
    """Run ``code`` in a child process; None, or how it failed."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"a test computation did not end within {_PROBE_SECONDS} seconds"
    if probe.returncode < 0:
        try:
            name = signal.Signals(-probe.returncode).name
        except ValueError:
            name = f"signal {-probe.returncode}"
        return f"a test computation was killed by {name} (the CPU promises more than it provides)"
    if probe.returncode > 0:
        lines = probe.stderr.strip().splitlines()
        return f"a test computation failed: {lines[-1] if lines else probe.returncode}"
    return None
