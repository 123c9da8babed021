"""Run by test_separate.py under the Triton interpreter: the GeM kernels against the reference."""

import resource

import pytest
import torch

from sscd_vec.kernels import reference
from sscd_vec.kernels.gem import gem_pool_triton
from tests.kernels.cases import GRADIENT_TOLERANCE, POOLED_TOLERANCE, assert_near

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(2, 41, 9, 9), (3, 17, 7, 5), (1, 401, 1, 1), (2, 130, 3, 3)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def feature_map(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def check(x: torch.Tensor, p: float) -> None:
    leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    pooled, expected = gem_pool_triton(leaf, p), reference.gem_pool(wide, p)
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


def test_a_view_that_is_neither_layout() -> None:
    check(feature_map(2, 5, 8, 20).transpose(2, 3)[:, :, ::2], 3.0)


def test_nothing_above_the_floor_has_no_gradient() -> None:
    x = -feature_map(1, 3, 4, 4).abs()
    x.requires_grad_()
    pooled = gem_pool_triton(x)
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
    pooled = gem_pool_triton(x)
    assert_near("y", pooled, reference.gem_pool(values.double()), POOLED_TOLERANCE[x.dtype])
    check(x, 3.0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 512 << 10, f"{grown >> 10} MiB of memory were touched"


def test_a_second_derivative_is_refused() -> None:
    x = feature_map(1, 2, 3, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(gem_pool_triton(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gem_pool has a first derivative only"):
        torch.autograd.backward(gradient.sum())
