"""Batches, tolerances and comparisons shared by the kernel tests."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sscd_vec.kernels import SSCDLoss

# Relative RMS error allowed against the float64 reference on the same (rounded) input. float32 sums
# are exact to a few units of 6e-8; a half-precision gradient is rounded on output, 2^-11 or 2^-8.
VALUE_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-6,
    torch.bfloat16: 2e-6,
}
POOLED_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 5e-7,
    torch.float16: 5e-4,
    torch.bfloat16: 4e-3,
}
GRADIENT_TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 3e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 6e-3,
}


@dataclass(frozen=True)
class Case:
    """A global batch and the slice of it that is local."""

    z: Tensor
    sources: Tensor
    start: int = 0
    stop: int | None = None

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop is None

    def arguments(self, z: Tensor) -> dict[str, Tensor]:
        """The local rows of ``z`` and, if these are a slice, the global batch around them."""
        if self.whole:
            return {"z": z, "sources": self.sources}
        local = slice(self.start, self.stop)
        return {
            "z": z[local],
            "sources": self.sources[local],
            "all_z": z,
            "all_sources": self.sources,
        }


def descriptors(n: int, d: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64))


def views(n: int, per_source: int = 2) -> Tensor:
    """(n, 2) unmixed sources, each shared by up to ``per_source`` rows that lie far apart."""
    ids = torch.arange(n) % -(-n // per_source)
    return torch.stack([ids, ids], dim=1) + (1 << 40)  # ids beyond int32


def mixed(n: int) -> Tensor:
    """Two views each; some rows mixed with another source, some pairs sharing both."""
    sources = views(n)
    sources[::7, 1] = sources[min(3, n - 1), 0]
    sources[1::11] = sources[1::11].flip(1)
    sources[: min(3, n)] = torch.stack([sources[0, 0], sources[min(5, n - 1), 0]])
    return sources


def lonely(n: int) -> Tensor:
    """Row 0 is a mate of everybody (no negative); the last rows have no positive."""
    sources = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.int64)], dim=1)
    sources[n // 2 :, 1] = sources[n // 2 :, 0]
    sources[0] = 0
    return sources


def duplicated(n: int, d: int) -> Tensor:
    """Descriptors with exact duplicates under different sources: distance 0, and ties."""
    z = descriptors(n, d)
    z[n // 3] = z[0]
    z[n // 2] = z[0]
    z[-1] = z[1]
    return z


CASES = {
    "two views": Case(descriptors(64, 32), views(64)),
    "awkward 41x401": Case(descriptors(41, 401), mixed(41)),
    "d=17": Case(descriptors(77, 17), mixed(77)),
    "five views": Case(descriptors(60, 8), views(60, per_source=5)),
    "duplicates": Case(duplicated(50, 16), views(50)),
    "lonely rows": Case(descriptors(30, 16), lonely(30)),
    "one source": Case(descriptors(20, 8), torch.zeros(20, 2, dtype=torch.int64)),
    "one row": Case(descriptors(1, 8), torch.zeros(1, 2, dtype=torch.int64)),
    "local slice": Case(descriptors(150, 16), mixed(150), 40, 95),
}

Loss = Callable[..., Tensor]


def value_and_gradient(loss: Loss, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss of the case's local rows, and its gradient by the whole batch."""
    z = case.z.to(dtype, copy=True).requires_grad_()
    value = loss(**case.arguments(z))
    torch.autograd.backward(value)
    assert z.grad is not None
    return value.detach(), z.grad


def losses(
    koleo: Loss, info_nce: Loss, sscd_loss: Callable[..., SSCDLoss], case: Case, tau: float
) -> dict[str, Loss]:
    """The three losses by name, knowing the temperature and where the case's slice starts."""
    offset: dict[str, Any] = {} if case.whole else {"row_offset": case.start}
    return {
        "koleo": koleo,
        "info_nce": partial(info_nce, tau=tau, **offset),
        "sscd_loss": lambda **rows: sscd_loss(**rows, tau=tau, **offset).total,
    }


def assert_near(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare by the RMS of the error over the RMS of what is expected (or 1e-6, if that is 0)."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape} instead of {expected.shape}"
    assert bool(actual.isfinite().all()), f"{name} is not finite"
    error = (actual.double() - expected.double()).square().mean().sqrt()
    size = expected.double().square().mean().sqrt().clamp(min=1e-6)
    assert float(error / size) <= tolerance, f"{name}: {float(error / size):.2e} > {tolerance:.0e}"
