"""A faster network with the same output: batch norms folded away, convolutions fused.

Folding is exact algebra. With BN(y) = γ·(y - µ)/√(σ² + ε) + β, BN(W∗x + b) = W'∗x + b' where
W' = W·γ/√(σ² + ε) and b' = (b - µ)·γ/√(σ² + ε) + β. Fusing hands oneDNN the convolution, the
residual and the activation in one call, so that a feature map is written once and not read again
for each of them.
"""

import copy
import operator
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.fusion import fuse_conv_bn_weights

from sscd_vec.encoder.model import SSCDModel

_ADD = (operator.add, operator.iadd, torch.add)
_PROBE_SHAPE = (1, 3, 128, 128)


def inference_copy(model: SSCDModel) -> SSCDModel:
    """Return a copy of ``model`` in eval mode, without gradients, its batch norms folded."""
    folded = copy.deepcopy(model).eval().requires_grad_(False)
    if any(isinstance(module, nn.BatchNorm2d) for module in folded.trunk.modules()):
        out_channels = folded.trunk.out_channels
        folded.trunk = fold_batch_norms(folded.trunk)
        folded.trunk.out_channels = out_channels
    return folded


def fastest_copy(model: SSCDModel, device: torch.device, dtype: torch.dtype) -> SSCDModel:
    """Return a folded copy on ``device``, its trunk in ``dtype``: fused on a CPU in float32."""
    folded = inference_copy(model).to(device)
    fusable = device.type == "cpu" and dtype is torch.float32 and can_fuse()
    if fusable and isinstance(folded.trunk, fx.GraphModule):
        folded.trunk = fuse_convolutions(folded.trunk)
    else:
        folded.trunk = folded.trunk.to(dtype).to(memory_format=torch.channels_last)
    return folded


def fold_batch_norms(trunk: nn.Module) -> fx.GraphModule:
    """Fold every batch norm that directly follows a convolution used nowhere else, in place.

    Tracing leaves ``trunk`` behind in reference cycles, so new convolutions would stand beside the
    old ones until the garbage is collected: its own are given the folded weights instead.
    """
    graph = fx.symbolic_trace(trunk)
    calls = Counter(node.target for node in graph.graph.nodes)
    for node in list(graph.graph.nodes):
        norm = _module(graph, node)
        if not isinstance(norm, nn.BatchNorm2d):
            continue
        source = node.args[0]
        conv = _module(graph, source)
        if not (isinstance(conv, nn.Conv2d) and len(source.users) == 1):
            continue
        if calls[source.target] > 1 or calls[node.target] > 1:
            continue
        conv.weight, conv.bias = _folded(conv, norm)
        node.replace_all_uses_with(source)
        graph.graph.erase_node(node)
    return _recompiled(graph)


def can_fuse() -> bool:
    """Whether this torch has oneDNN's fused convolutions."""
    return bool(torch.backends.mkldnn.enabled) and all(
        hasattr(torch.ops.mkldnn, name)
        for name in ("_convolution_pointwise", "_reorder_convolution_weight")
    )


def fuse_convolutions(graph: fx.GraphModule) -> fx.GraphModule:
    """Replace convolution [+ residual] [+ activation] of a folded CPU trunk by one call each."""
    with torch.inference_mode():
        ShapeProp(graph).propagate(torch.zeros(_PROBE_SHAPE))
    # Latest first: the last convolution before an addition takes the addition along.
    for count, node in enumerate(reversed(list(graph.graph.nodes))):
        conv = _module(graph, node)
        if not (isinstance(conv, nn.Conv2d) and _plain(conv)):
            continue
        last, residual = node, None
        addition = _only_user(node)
        if addition is not None and addition.target in _ADD and _same_shapes(addition):
            left, right = cast(tuple[fx.Node, fx.Node], addition.args)
            last, residual = addition, right if left is node else left
        activation = _activation(graph, _only_user(last))
        if activation is not None and (residual is None or activation[0] == "relu"):
            last = cast(fx.Node, _only_user(last))
        else:
            activation = ("none", [])
        name = f"fused_{count}"
        graph.add_module(name, FusedConvolution(conv, *activation))
        inputs = (node.args[0],) if residual is None else (node.args[0], residual)
        with graph.graph.inserting_after(last):  # where the residual is known, too
            call = graph.graph.call_module(name, inputs)
        last.replace_all_uses_with(call)
        for stale in _chain(node, last):
            graph.graph.erase_node(stale)
    return _recompiled(graph)


class FusedConvolution(nn.Module):
    """``activation(W∗x + b [+ residual])`` in one oneDNN call.

    oneDNN wants the weight in a layout of its own that depends on the input's shape, and reorders
    it at every call unless it comes that way; a layout meant for another shape is worse than none.
    So the reordered weight is kept while the shape stays, which it does within a batch.
    """

    def __init__(self, conv: nn.Conv2d, activation: str, scalars: list[float]) -> None:
        """Take over a convolution."""
        super().__init__()
        self._weight, self._bias = conv.weight.detach().contiguous(), conv.bias
        self._ordered: tuple[list[int], Tensor] | None = None
        self._geometry = (list(cast(tuple[int, ...], conv.padding)), list(conv.stride),
                          list(conv.dilation), conv.groups)  # fmt: skip
        self._activation, self._scalars = activation, scalars

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the activated output."""
        ops: Any = torch.ops.mkldnn
        ordered, shape = self._ordered, list(x.shape)
        if ordered is None or ordered[0] != shape:
            ordered = self._ordered = None  # its memory first, then as much again
            weight = ops._reorder_convolution_weight(self._weight, *self._geometry, shape)
            ordered = self._ordered = shape, weight
        weight = ordered[1]
        if residual is None:
            y = ops._convolution_pointwise(
                x, weight, self._bias, *self._geometry, self._activation, self._scalars, ""
            )
        else:
            y = ops._convolution_pointwise.binary(
                x, residual, weight, self._bias, *self._geometry,
                "add", 1.0, None if self._activation == "none" else self._activation, [], None,
            )  # fmt: skip
        return cast(Tensor, y)


def _folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[nn.Parameter, nn.Parameter]:
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    return fuse_conv_bn_weights(
        conv.weight, conv.bias, mean, variance, norm.eps, norm.weight, norm.bias
    )


def _module(graph: fx.GraphModule, node: object) -> nn.Module | None:
    if isinstance(node, fx.Node) and node.op == "call_module":
        return graph.get_submodule(cast(str, node.target))
    return None


def _plain(conv: nn.Conv2d) -> bool:
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _same_shapes(addition: fx.Node) -> bool:
    operands = [node for node in addition.args if isinstance(node, fx.Node)]
    shapes = {getattr(node.meta.get("tensor_meta"), "shape", None) for node in operands}
    return len(operands) == 2 and len(shapes) == 1 and None not in shapes and not addition.kwargs


def _activation(graph: fx.GraphModule, node: fx.Node | None) -> tuple[str, list[float]] | None:
    """OneDNN's name and scalars of the activation ``node`` computes, if it is one."""
    if node is None:
        return None
    module = _module(graph, node)
    if isinstance(module, nn.ReLU) or node.target in (F.relu, torch.relu):
        return "relu", []
    if isinstance(module, nn.ReLU6) or node.target is F.relu6:
        return "hardtanh", [0.0, 6.0]
    if isinstance(module, nn.SiLU):
        return "swish", []
    if isinstance(module, nn.Hardswish):
        return "hardswish", []
    return None


def _chain(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes from ``last`` back to ``first``, each the only user of the one before it."""
    chain = [first]
    while chain[-1] is not last:
        chain.append(cast(fx.Node, _only_user(chain[-1])))
    return chain[::-1]


def _recompiled(graph: fx.GraphModule) -> fx.GraphModule:
    graph.delete_all_unused_submodules()
    graph.graph.lint()
    graph.recompile()
    return graph
