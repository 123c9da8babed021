"""Run by test_separate.py under the interpreter: the bytes the benchmark states are those moved."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from speed import roofline as benchmark
from sscd_vec.kernels import gem_pool, sscd_loss
from tests.kernels.cases import descriptors, views

ROWS, DIMENSION = 200, 16


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the bytes of every element that a kernel's loads and stores do not mask out."""
    count: Counter[str] = Counter()
    for name in ("create_masked_load", "create_masked_store"):
        true = getattr(InterpreterBuilder, name)

        def counted(self, pointers, *rest, true=true, name=name):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202  (Triton has no types)
            mask = rest[0] if name == "create_masked_load" else rest[1]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            count["bytes"] += int(mask.data.sum()) * size
            return true(self, pointers, *rest)

        monkeypatch.setattr(InterpreterBuilder, name, counted)
    yield count


@pytest.mark.parametrize("shape", [(2, 19, 7, 5), (2, 19, 4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gem(moved: Counter[str], dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    forward, backward = benchmark.gem_traffic(shape, dtype.itemsize)
    x = torch.rand(shape).to(dtype).requires_grad_()
    pooled = gem_pool(x)
    assert moved["bytes"] == forward.moved
    torch.autograd.backward(pooled.sum())
    assert moved["bytes"] == forward.moved + backward.moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sscd_loss(moved: Counter[str], dtype: torch.dtype) -> None:
    traffic = {t.kernel: t.moved for t in benchmark.loss_traffic(ROWS, dtype.itemsize, DIMENSION)}
    z = descriptors(ROWS, DIMENSION).to(dtype).requires_grad_()
    loss = sscd_loss(z, views(ROWS))
    marks = traffic.pop("mark") // 2  # once for the tiles of each matrix kernel
    forward = marks + traffic["scan"] + traffic["positives"] + traffic["distance"]
    assert moved["bytes"] == forward
    torch.autograd.backward(loss.total)
    assert moved["bytes"] == 2 * marks + sum(traffic.values())
