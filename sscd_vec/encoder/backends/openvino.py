"""OpenVINO on a CPU."""

import threading

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from sscd_vec.encoder.backends.export import export_program
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.precision import Precision

_LARGEST_PIECE = 8


class OpenVINOBackend:
    """A model compiled by OpenVINO; see ``Backend``."""

    def __init__(self, model: SSCDModel, precision: Precision) -> None:
        """Export, convert and compile ``model``.

        The precision is always named: left alone, OpenVINO picks bfloat16 where the CPU claims to
        have it.
        """
        converted = ov.convert_model(export_program(model))
        settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
            "PERFORMANCE_HINT": "THROUGHPUT",
        }
        self._compiled = ov.Core().compile_model(converted, "CPU", settings)
        self._queue = ov.AsyncInferQueue(self._compiled)
        self._queue.set_callback(_keep)
        self._one_caller = threading.Lock()  # a queue is not for several threads
        self._dim = model.dim

    def __call__(self, images: Tensor) -> Tensor:
        """Return the descriptors of ``images``.

        The batch is cut into pieces of 8, 4, 2 and 1 that run side by side, one per stream: few
        sizes, since OpenVINO prepares its kernels anew for each shape it has not seen.
        """
        batch = images.detach().to("cpu", torch.float32).contiguous().numpy()
        descriptors = np.empty((len(batch), self._dim), np.float32)
        with self._one_caller:
            for where in pieces(len(batch), len(self._queue)):
                self._queue.start_async({0: batch[where]}, descriptors[where])
            self._queue.wait_all()
        return torch.from_numpy(descriptors)


def _keep(request: ov.InferRequest, rows: NDArray[np.float32]) -> None:
    """Write where the piece belongs: one that Ctrl-C left behind ends in no later batch."""
    rows[:] = request.get_output_tensor().data


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
