"""The network in other runtimes: exported as a graph, run by ONNX Runtime or OpenVINO.

Batch, height and width stay free in the graph; a ViT keeps its size.
"""

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import Dim, ExportedProgram

from sscd_vec.encoder.backends import Precision
from sscd_vec.encoder.backends.fold import inference_copy
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.preprocess import normalize
from sscd_vec.encoder.torchvision_trunks import ViTTrunk
from sscd_vec.files import PathLike, write_whole

if TYPE_CHECKING:
    import openvino

INPUT, OUTPUT = "images", "descriptors"
_LARGEST_PIECE = 8


def export_program(model: SSCDModel) -> ExportedProgram:
    """Export a folded copy of ``model``."""
    folded, images, shapes = _prepared(model)
    with torch.no_grad():
        return torch.export.export(folded, (images,), dynamic_shapes=(shapes,))


def export_onnx(model: SSCDModel, path: PathLike) -> None:
    """Write ``model`` as an ONNX file, whole or not at all; its config goes into the metadata."""
    write_whole(path, onnx_bytes(model))


def onnx_bytes(model: SSCDModel) -> bytes:
    """Return ``model`` as a serialized ONNX graph from ``images`` to ``descriptors``."""
    try:
        import onnxscript  # noqa: F401 - torch's exporter needs it and asks less clearly
    except ImportError as error:
        raise ImportError(
            "writing ONNX needs onnx and onnxscript: pip install 'sscd-vec[onnx]'"
        ) from error
    folded, images, shapes = _prepared(model)
    with torch.no_grad():
        program = torch.onnx.export(
            folded, (images,), dynamo=True, dynamic_shapes=(shapes,), input_names=[INPUT],
            output_names=[OUTPUT], verbose=False,
        )  # fmt: skip
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    program.model.metadata_props["sscd_vec.config"] = json.dumps(model.config.to_dict())
    serialized: bytes = program.model_proto.SerializeToString()
    return serialized


class OnnxBackend:
    """A model run by ONNX Runtime, on a CPU or a GPU; see ``Backend``."""

    def __init__(self, model: SSCDModel, device: torch.device) -> None:
        """Export ``model`` and open a session."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        # Its threads would otherwise spin between batches, on the cores that decode the next one.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        if provider not in ort.get_available_providers():
            raise ValueError(
                f"this onnxruntime has no {provider} for device {str(device)!r}: install "
                "onnxruntime-gpu, or use device='cpu'"
            )
        self._config = model.config
        self._session = ort.InferenceSession(onnx_bytes(model), options, providers=[provider])

    def __call__(self, images: Tensor) -> NDArray[np.float32]:
        """Return the descriptors of ``images``."""
        batch = normalize(images, self._config).contiguous().numpy()
        (descriptors,) = self._session.run([OUTPUT], {INPUT: batch})
        return np.asarray(descriptors, np.float32)


class OpenVINOBackend:
    """A model compiled by OpenVINO for a CPU; see ``Backend``."""

    def __init__(self, model: SSCDModel, precision: Precision) -> None:
        """Export, convert and compile ``model``.

        The precision is always named: left alone, OpenVINO picks bfloat16 where the CPU claims to
        have it.
        """
        import openvino as ov

        converted = ov.convert_model(export_program(model))
        settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
            "PERFORMANCE_HINT": "THROUGHPUT",
        }
        self._compiled = ov.Core().compile_model(converted, "CPU", settings)
        self._queue = ov.AsyncInferQueue(self._compiled)
        self._queue.set_callback(_keep)
        self._one_caller = threading.Lock()  # a queue is not for several threads
        self._dim, self._config = model.dim, model.config

    def __call__(self, images: Tensor) -> NDArray[np.float32]:
        """Return the descriptors of ``images``.

        The batch is cut into pieces of 8, 4, 2 and 1 that run side by side, one per stream: few
        sizes, since OpenVINO prepares its kernels anew for each shape it has not seen.
        """
        batch = normalize(images, self._config).contiguous().numpy()
        descriptors = np.empty((len(batch), self._dim), np.float32)
        with self._one_caller:
            for where in pieces(len(batch), len(self._queue)):
                self._queue.start_async({0: batch[where]}, descriptors[where])
            self._queue.wait_all()
        return descriptors


def pieces(count: int, streams: int) -> list[slice]:
    """Cut ``count`` images into powers of two that keep ``streams`` busy."""
    largest = 1
    while 2 * largest * streams <= count and largest < _LARGEST_PIECE:
        largest *= 2
    cuts, start = [], 0
    while start < count:
        size = largest
        while size > count - start:
            size //= 2
        cuts.append(slice(start, start + size))
        start += size
    return cuts


def _keep(request: "openvino.InferRequest", rows: NDArray[np.float32]) -> None:
    """Write where the piece belongs: one that Ctrl-C left behind ends in no later batch."""
    rows[:] = request.get_output_tensor().data


def _prepared(model: SSCDModel) -> tuple[SSCDModel, torch.Tensor, dict[int, Any]]:
    """A folded CPU copy, an example input and which of its axes are free."""
    folded = inference_copy(model).cpu()
    size = model.config.size
    if isinstance(folded.trunk, ViTTrunk):  # its position embeddings are laid out for one size
        return folded, torch.zeros(2, 3, size, size), {0: Dim.DYNAMIC}
    # Two unequal sides, so that the exporter does not take them for one.
    return folded, torch.zeros(2, 3, 224, 288), {axis: Dim.DYNAMIC for axis in (0, 2, 3)}
