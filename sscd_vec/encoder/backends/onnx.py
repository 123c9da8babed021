"""ONNX Runtime, on a CPU or a GPU."""

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from sscd_vec.encoder.backends.export import INPUT, OUTPUT, onnx_bytes
from sscd_vec.encoder.model import SSCDModel


class OnnxBackend:
    """A model run by ONNX Runtime; see ``Backend``."""

    def __init__(self, model: SSCDModel, device: torch.device) -> None:
        """Export ``model`` and open a session."""
        options = ort.SessionOptions()
        # Its threads would otherwise spin between batches, on the cores that decode the next one.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        if provider not in ort.get_available_providers():
            raise ValueError(
                f"this onnxruntime has no {provider} for device {str(device)!r}: install "
                "onnxruntime-gpu, or use device='cpu'"
            )
        self._session = ort.InferenceSession(onnx_bytes(model), options, providers=[provider])

    def __call__(self, images: Tensor) -> Tensor:
        """Return the descriptors of ``images``, on the CPU."""
        batch = images.detach().to("cpu", torch.float32).contiguous().numpy()
        (descriptors,) = self._session.run([OUTPUT], {INPUT: batch})
        return torch.from_numpy(np.asarray(descriptors, np.float32))
