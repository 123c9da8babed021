"""The benchmark's GPU part without a GPU: every candidate runs, and every figure is there."""

from collections.abc import Callable

import pytest
import torch

from speed import kernels as benchmark

testing = pytest.importorskip("triton.testing", reason="the stopwatch comes with Triton")


def test_every_kernel_is_measured_against_eager_and_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one_second(run: Callable[[], object]) -> float:
        run()
        return 1e3

    compiled: list[str] = []

    def compile_nothing(plain: Callable[..., object]) -> Callable[..., object]:
        compiled.append(plain.__module__)
        return plain

    monkeypatch.setattr(testing, "do_bench", one_second)
    # The inductor needs a C++ compiler and minutes; what is compiled is the reference.
    monkeypatch.setattr(torch, "compile", compile_nothing)
    found = benchmark.gpu_speed(gem_shapes=((2, 16, 7, 7),), rows=(64,), device="cpu")
    names = ["gem_forward", "gem_backward"] * 2
    names += ["nearest_negative", "sscd_loss forward+backward"] * 2
    assert [figures["name"] for figures in found] == names
    assert all(f["ratio_to_eager"] == f["ratio_to_compile"] == 1 for f in found)
    assert compiled == ["sscd_vec.kernels.reference"] * 3
    forward = benchmark.gem_traffic((2, 16, 7, 7), 4)[0]
    assert found[0]["gigabytes_per_second"] == pytest.approx(forward.least / 1e9)
    scan = benchmark.loss_traffic(64, 4)[0]
    assert found[4]["teraflops"] == pytest.approx(scan.operations / 1e12)
