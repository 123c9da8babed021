"""The network as a graph other runtimes read: batch, height and width stay free."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from sscd_vec.encoder.backends.fold import inference_copy
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.vit import ViTTrunk

INPUT, OUTPUT = "images", "descriptors"


def export_program(model: SSCDModel) -> ExportedProgram:
    """Export a folded copy of ``model``."""
    folded, images, shapes = _prepared(model)
    with torch.no_grad():
        return torch.export.export(folded, (images,), dynamic_shapes=(shapes,))


def export_onnx(model: SSCDModel, path: str | os.PathLike[str]) -> None:
    """Write ``model`` as an ONNX file, whole or not at all; its config goes into the metadata."""
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_bytes(onnx_bytes(model))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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


def _prepared(model: SSCDModel) -> tuple[SSCDModel, torch.Tensor, dict[int, Any]]:
    """A folded CPU copy, an example input and which of its axes are free."""
    folded = inference_copy(model).cpu()
    size = model.config.size
    if isinstance(folded.trunk, ViTTrunk):  # its position embeddings are laid out for one size
        return folded, torch.zeros(2, 3, size, size), {0: Dim.DYNAMIC}
    # Two unequal sides, so that the exporter does not take them for one.
    return folded, torch.zeros(2, 3, 224, 288), {axis: Dim.DYNAMIC for axis in (0, 2, 3)}
