"""Run by test_separate.py under the Triton interpreter: the GeM kernels against the reference."""

import resource
from collections.abc import Callable
from typing import cast

import pytest
import torch

from sscd_vec.kernels import gem_pool, reference
from tests.kernels.cases import GRADIENT_TOLERANCE, POOLED_TOLERANCE, assert_near

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(2, 41, 9, 9), (3, 17, 7, 5), (1, 401, 1, 1), (2, 130, 3, 3)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def feature_map(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def check(x: torch.Tensor, p: float) -> None:
    leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    pooled, expected = gem_pool(leaf, p), reference.gem_pool(wide, p)
    dy = feature_map(*pooled.shape).to(x.dtype)
    torch.autograd.backward(pooled, dy)
    torch.autograd.backward(expected, dy.double())
    assert leaf.grad is not None and wide.grad is not None
    assert pooled.dtype == leaf.grad.dtype == x.dtype
    assert_near("y", pooled.detach(), expected.detach(), POOLED_TOLERANCE[x.dtype])
    assert_near("dx", leaf.grad, wide.grad, GRADIENT_TOLERANCE[x.dtype])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_shapes_layouts(
    dtype: torch.dtype, shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    check(feature_map(*shape).to(dtype).contiguous(memory_format=layout), 3.0)


def test_a_map_of_41x401_pixels() -> None:
    check(feature_map(1, 2, 41, 401), 3.0)


@pytest.mark.parametrize("p", [1.0, 0.5, 2.5, 20.0])
def test_powers(p: float) -> None:
    check(feature_map(2, 19, 7, 7) + 1.0, p)


NOT_FINITE = {"nan": float("nan"), "inf": float("inf")}


# inf / inf and log2(0) are meant here; numpy, which interprets them, warns.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("p", [1.0, 3.0, 2.5, 0.5])
def test_values_that_are_not_finite_stay_so(p: float, bad: str) -> None:
    """Where the definition gives NaN or infinity, so does the pooling: training must notice."""
    x = feature_map(2, 3, 3, 3)
    x[0, 1, 1, 1] = NOT_FINITE[bad]
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    pooled, expected = gem_pool(ours, p), reference.gem_pool(plain, p)
    torch.autograd.backward(pooled.sum())
    torch.autograd.backward(expected.sum())
    assert ours.grad is not None and plain.grad is not None
    assert not pooled[0, 1].isfinite() and pooled.isfinite().sum() == pooled.numel() - 1
    torch.testing.assert_close(pooled, expected, equal_nan=True)
    torch.testing.assert_close(ours.grad, plain.grad, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_a_view_that_is_neither_layout() -> None:
    check(feature_map(2, 5, 8, 20).transpose(2, 3)[:, :, ::2], 3.0)


def test_nothing_above_the_floor_has_no_gradient() -> None:
    x = -feature_map(1, 3, 4, 4).abs()
    x.requires_grad_()
    pooled = gem_pool(x)
    torch.autograd.backward(pooled.sum())
    torch.testing.assert_close(pooled.detach(), torch.full((1, 3), 1e-6))
    assert x.grad is not None and not x.grad.any()


def test_offsets_beyond_int32() -> None:
    """The last image starts at element 2^31 + 7 of a storage that is reserved and never touched."""
    far = (1 << 31) + 7
    storage = torch.empty(far + 64, dtype=torch.float16)
    x = storage.as_strided((2, 4, 3, 5), (far, 15, 5, 1))
    values = feature_map(2, 4, 3, 5).half()
    x.copy_(values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pooled = gem_pool(x)
    assert_near("y", pooled, reference.gem_pool(values.double()), POOLED_TOLERANCE[x.dtype])
    check(x, 3.0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 512 << 10, f"{grown >> 10} MiB of memory were touched"


# torch's own check looks at the gradients of its copies, and warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("size", [3, 4])
def test_torch_knows_the_operator(size: int) -> None:
    """Schema, fake tensors, autograd and AOT dispatch, by torch's own check."""
    x = torch.rand(2, 3, size, size, requires_grad=True)
    gem_pool(x)  # imports the operator
    torch.library.opcheck(torch.ops.sscd_vec.gem_pool.default, (x, 3.0, 1e-6))


def test_a_traced_pooling_is_plain_torch() -> None:
    """A compiler can then fuse it with what precedes it."""
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph.code)
        return graph.forward

    x = torch.rand(2, 3, 4, 4)
    compiled = torch.compile(gem_pool, fullgraph=True, backend=keep)
    torch.testing.assert_close(compiled(x), gem_pool(x))
    assert len(graphs) == 1 and "clamp" in graphs[0] and "sscd_vec" not in graphs[0]


def test_a_second_derivative_is_refused() -> None:
    x = feature_map(1, 2, 3, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(gem_pool(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gem_pool has a first derivative only"):
        torch.autograd.backward(gradient.sum())


def test_a_learned_p_is_refused() -> None:
    learned = cast(float, torch.nn.Parameter(torch.tensor(3.0)))
    with pytest.raises(TypeError, match=r"p is fixed .* pass float\(p\)"):
        gem_pool(torch.ones(1, 1, 2, 2), learned)
