"""The benchmark's GPU part without a GPU: every candidate runs, and every figure is there."""

from collections.abc import Callable

import pytest
import torch

testing = pytest.importorskip("triton.testing", reason="the stopwatch comes with Triton")
from speed import kernels as benchmark  # noqa: E402
from speed import roofline  # noqa: E402


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
    baselines = ("chunked", "eager", "compile", "compile_bf16")
    assert all(f[f"ratio_to_{name}"] == 1 for f in found for name in baselines)
    assert compiled == ["sscd_vec.kernels.reference"] * 3
    forward = roofline.gem_traffic((2, 16, 7, 7), 4)[0]
    assert found[0]["gigabytes_per_second"] == pytest.approx(forward.least / 1e9)
    scan = next(t for t in roofline.loss_traffic(64, 4) if t.kernel == "scan")
    assert found[4]["teraflops"] == pytest.approx(scan.operations / 1e12)
