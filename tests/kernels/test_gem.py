"""GeM on a CPU: plain torch, exactly the definition."""

from typing import cast

import pytest
import torch

from sscd_vec.kernels import gem_pool, reference


def feature_map(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [1.0, 3.0])
def test_equals_the_reference_bit_by_bit(p: float, dtype: torch.dtype) -> None:
    x = feature_map(3, 17, 9, 7).to(dtype)
    assert torch.equal(gem_pool(x, p), reference.gem_pool(x, p))


@pytest.mark.parametrize("p", [0.5, 2.5, 40.0])
def test_any_power_stays_finite(p: float) -> None:
    x = (feature_map(2, 5, 6, 6) * 100).requires_grad_()  # 300^40 overflows float32
    wide = x.detach().double().requires_grad_()
    pooled, expected = gem_pool(x, p), reference.gem_pool(wide, p)
    torch.testing.assert_close(pooled.double(), expected, rtol=1e-5, atol=0)
    torch.autograd.backward(pooled.sum())
    torch.autograd.backward(expected.sum())
    assert x.grad is not None and wide.grad is not None
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-7)


NOT_FINITE = {"nan": float("nan"), "inf": float("inf")}


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


@pytest.mark.parametrize("p", [1.0, 3.0, 2.2])
def test_gradcheck(p: float) -> None:
    x = feature_map(2, 3, 4, 5).double().abs().add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: gem_pool(t, p), x)


def test_large_p_approaches_the_maximum() -> None:
    x = feature_map(2, 4, 8, 8).abs()
    torch.testing.assert_close(gem_pool(x, 500.0), x.amax(dim=(2, 3)), rtol=0.01, atol=0)


def test_channels_last_and_one_pixel() -> None:
    x = feature_map(2, 16, 5, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(gem_pool(last), gem_pool(x))
    point = feature_map(2, 16, 1, 1)
    torch.testing.assert_close(gem_pool(point), point.clamp(min=1e-6)[..., 0, 0])


def test_traces_to_the_same_numbers() -> None:
    x = feature_map(2, 4, 6, 6)
    exported = torch.export.export(_Pool(), (x,)).module()
    assert torch.equal(exported(x), gem_pool(x))


def test_errors_name_what_came() -> None:
    with pytest.raises(ValueError, match=r"\(n, c, h, w\).*got shape \(2, 3\)"):
        gem_pool(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"at least one pixel, got shape \(2, 3, 0, 4\)"):
        gem_pool(torch.ones(2, 3, 0, 4))
    with pytest.raises(TypeError, match="floating point, got torch.uint8"):
        gem_pool(torch.ones(1, 1, 2, 2, dtype=torch.uint8))
    for p in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"got p={p}"):
            gem_pool(torch.ones(1, 1, 2, 2), p=p)
    with pytest.raises(ValueError, match="eps=0"):
        gem_pool(torch.ones(1, 1, 2, 2), eps=0)


def test_a_learned_p_is_refused() -> None:
    learned = cast(float, torch.nn.Parameter(torch.tensor(3.0)))
    with pytest.raises(TypeError, match=r"p is fixed .* pass float\(p\)"):
        gem_pool(torch.ones(1, 1, 2, 2), learned)


class _Pool(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gem_pool(x)
