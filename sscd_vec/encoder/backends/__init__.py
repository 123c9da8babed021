"""What runs the network, from normalized NCHW to descriptors: torch, OpenVINO, ONNX Runtime.

Every backend runs a copy of the model with its batch norms folded into the convolutions. OpenVINO
and ONNX Runtime are imported only when they are asked for.
"""

from importlib.util import find_spec
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.precision import Precision, require_bfloat16

BackendName = Literal["torch", "openvino", "onnx"]

_NEEDS = {"torch": "torch", "openvino": "openvino", "onnx": "onnxruntime"}


class Backend(Protocol):
    """Normalized float32 ``(n, 3, h, w)`` in, unit float32 descriptors ``(n, d)`` out."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return the descriptors of ``images``."""


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
        from sscd_vec.encoder.backends.openvino import OpenVINOBackend

        return OpenVINOBackend(model, precision)
    if name == "onnx":
        from sscd_vec.encoder.backends.onnx import OnnxBackend

        return OnnxBackend(model, device)
    from sscd_vec.encoder.backends.native import TorchBackend

    return TorchBackend(model, device, precision)
