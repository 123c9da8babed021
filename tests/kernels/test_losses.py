"""The losses on a CPU, in tiles and of few rows at once, against the definitions."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import profile

from sscd_vec.kernels import chunked, dense, info_nce, koleo, nearest_negative, reference, sscd_loss
from sscd_vec.kernels.batch import Scan
from tests.kernels.cases import (
    CASES,
    GRADIENT_TOLERANCE,
    VALUE_TOLERANCE,
    Case,
    Loss,
    assert_near,
    descriptors,
    losses,
    mixed,
    value_and_gradient,
    views,
)

TAU = 0.05
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True, params=["tiles", "few rows"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both paths; tiles do not divide the batches: each has several, and a last short one."""
    if request.param == "tiles":
        monkeypatch.setattr(chunked, "TILE", 24)
        monkeypatch.setattr(dense, "FEW_PAIRS", 0)
    yield request.param


def ours(case: Case) -> dict[str, Loss]:
    return losses(koleo, info_nce, sscd_loss, case, TAU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    rounded = Case(case.z.to(dtype).double(), case.sources, case.start, case.stop)
    expected = losses(reference.koleo, reference.info_nce, reference.sscd_loss, case, TAU)
    for loss, function in ours(case).items():
        value, gradient = value_and_gradient(function, case, dtype)
        true_value, true_gradient = value_and_gradient(expected[loss], rounded, torch.float64)
        assert gradient.dtype == dtype
        assert_near(f"{loss} of {name}", value, true_value, VALUE_TOLERANCE[dtype])
        assert_near(f"{loss} dz of {name}", gradient, true_gradient, GRADIENT_TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_nearest_negative_equals_the_reference(name: str) -> None:
    case = CASES[name]
    found = nearest_negative(**case.arguments(case.z))
    expected = reference.nearest_negative(**case.arguments(case.z))
    assert torch.equal(found.index, expected.index)  # ties go to the lowest row in both
    assert torch.equal(found.has_negative, expected.has_negative)
    torch.testing.assert_close(found.distance, expected.distance)


def test_the_nearest_negative_carries_no_gradient() -> None:
    z = descriptors(20, 4).requires_grad_()
    assert not nearest_negative(z, views(20)).distance.requires_grad


def test_logged_similarities() -> None:
    case = CASES["d=17"]
    found, expected = (f(case.z, case.sources) for f in (sscd_loss, reference.sscd_loss))
    torch.testing.assert_close(found.positive_similarity, expected.positive_similarity)
    torch.testing.assert_close(found.negative_similarity, expected.negative_similarity)
    assert (
        not found.positive_similarity.requires_grad and not found.negative_similarity.requires_grad
    )


def test_info_nce_survives_a_tiny_temperature() -> None:
    z = descriptors(30, 4).float()
    value = info_nce(z, views(30), 1e-3)
    torch.testing.assert_close(value, reference.info_nce(z.double(), views(30), 1e-3).float())


@pytest.mark.parametrize("loss", ["koleo", "info_nce", "sscd_loss"])
def test_gradcheck(loss: str) -> None:
    w = descriptors(14, 5).requires_grad_()
    sources = mixed(14)
    function = ours(Case(w, sources))[loss]
    assert torch.autograd.gradcheck(lambda t: function(z=F.normalize(t), sources=sources), w)


def test_gradcheck_of_both_sides_of_a_slice() -> None:
    z, all_z = descriptors(5, 4, seed=1).requires_grad_(), descriptors(12, 4).requires_grad_()
    sources = mixed(12)

    def total(a: Tensor, b: Tensor) -> Tensor:
        return sscd_loss(
            F.normalize(a), sources[3:8], 0.2, 1.0, F.normalize(b), sources, row_offset=3
        ).total

    assert torch.autograd.gradcheck(total, (z, all_z))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    d=st.integers(2, 9),
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=60),
    tau=st.floats(0.02, 1.0),
)
def test_any_batch(seed: int, d: int, pairs: list[tuple[int, int]], tau: float) -> None:
    case = Case(descriptors(len(pairs), d, seed), torch.tensor(pairs))
    for found, expected in (
        (partial(info_nce, tau=tau), partial(reference.info_nce, tau=tau)),
        (koleo, reference.koleo),
    ):
        value, gradient = value_and_gradient(found, case, torch.float64)
        true_value, true_gradient = value_and_gradient(expected, case, torch.float64)
        torch.testing.assert_close(value, true_value)
        torch.testing.assert_close(gradient, true_gradient, rtol=1e-6, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 16), ranks=st.integers(1, 5), local=st.integers(1, 12))
def test_ranks_add_up_to_one_process(seed: int, ranks: int, local: int) -> None:
    """Mean over ranks of the slices' losses, and the gradient a summing gather would bring home."""
    n = ranks * local
    sources = mixed(n)[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]
    z = descriptors(n, 6, seed).requires_grad_()
    torch.autograd.backward(sscd_loss(z, sources).total)
    parts = [descriptors(n, 6, seed)[r * local : (r + 1) * local] for r in range(ranks)]
    gradient = torch.zeros_like(z)
    total = torch.zeros((), dtype=torch.float64)
    for rank, part in enumerate(parts):
        mine, everyone = part.clone().requires_grad_(), torch.cat(parts).requires_grad_()
        rows = slice(rank * local, (rank + 1) * local)
        loss = sscd_loss(
            mine, sources[rows], all_z=everyone, all_sources=sources, row_offset=rows.start
        )
        torch.autograd.backward(loss.total)
        assert mine.grad is not None and everyone.grad is not None
        gradient += everyone.grad
        gradient[rows] += mine.grad
        total += loss.total.detach()
    assert z.grad is not None
    torch.testing.assert_close(total / ranks, sscd_loss(z, sources).total.detach())
    torch.testing.assert_close(gradient / ranks, z.grad, rtol=1e-7, atol=1e-10)


def test_a_bank_without_gradient_gets_none() -> None:
    z, bank = descriptors(6, 4).requires_grad_(), descriptors(20, 4)
    torch.autograd.backward(
        sscd_loss(z, views(20)[:6], all_z=bank, all_sources=views(20), row_offset=0).total
    )
    assert z.grad is not None and z.grad.any() and bank.grad is None


def test_gradients_repeat_bit_by_bit() -> None:
    case = Case(descriptors(90, 4), mixed(90))
    first, second = (value_and_gradient(koleo, case, torch.float32)[1] for _ in range(2))
    assert torch.equal(first, second)


def test_autocast_does_not_touch_the_products() -> None:
    z, sources = descriptors(40, 16).float(), views(40)
    with torch.autocast("cpu", torch.bfloat16):
        under = sscd_loss(z, sources).total
    assert torch.equal(under, sscd_loss(z, sources).total)


def test_a_second_derivative_is_refused() -> None:
    z = descriptors(8, 4).requires_grad_()
    total = sscd_loss(z, views(8)).total
    (gradient,) = torch.autograd.grad(total, z, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.backward(gradient.square().sum())


@pytest.mark.parametrize("engine", ["tiles"], indirect=True)
def test_no_matrix_of_all_pairs_is_ever_made(engine: str) -> None:
    n = 600
    z = descriptors(n, 8).float().requires_grad_()
    with profile(profile_memory=True) as recorded:
        torch.autograd.backward(sscd_loss(z, mixed(n)).total)
    largest = max(event.cpu_memory_usage for event in recorded.events())
    assert 0 < largest < n * n * z.itemsize / 40


def test_few_rows_are_multiplied_at_once_and_many_in_tiles(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    true = chunked.ChunkedStep.scan

    def recorded(step: chunked.ChunkedStep, *, lse: bool, nearest: bool) -> Scan:
        used.append(1)
        return true(step, lse=lse, nearest=nearest)

    monkeypatch.setattr(chunked.ChunkedStep, "scan", recorded)
    sscd_loss(descriptors(40, 8), views(40))
    nearest_negative(descriptors(40, 8), views(40))
    assert len(used) == (2 if engine == "tiles" else 0)
    sscd_loss(descriptors(40, 8).float(), views(40), products=torch.bfloat16)
    sscd_loss(descriptors(1030, 2), views(1030))
    assert len(used) == (4 if engine == "tiles" else 2)


# torch's own check looks at the gradients of its copies, and warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["d=17", "local slice"])
def test_torch_knows_the_operators(name: str) -> None:
    """Schema, fake tensors, autograd and AOT dispatch of this path, by torch's own check."""
    case = CASES[name]
    rows = case.arguments(case.z.float())
    everyone = None if case.whole else rows["all_z"].clone()
    arguments = (rows["z"].clone().requires_grad_(), everyone, rows["sources"].clone())
    settings = (rows.get("all_sources"), case.start, TAU, torch.float32, True, True)
    torch.library.opcheck(torch.ops.sscd_vec.losses.default, (*arguments, *settings))


@pytest.mark.parametrize("engine", ["few rows"], indirect=True)
def test_works_without_triton(engine: str) -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from sscd_vec import kernels\n"
        "kernels.sscd_loss(torch.eye(4), torch.tensor([[0, 0], [1, 1], [0, 0], [1, 1]])).total\n"
        "kernels.gem_pool(torch.ones(1, 1, 2, 2))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_say_what_to_do() -> None:
    z, sources = descriptors(6, 4), views(6)
    with pytest.raises(ValueError, match="unit length, row 2 has length 2"):
        koleo(z * torch.tensor([1.0, 1, 2, 1, 1, 1])[:, None], sources)
    with pytest.raises(ValueError, match=r"sources must be \(6, 2\)"):
        koleo(z, sources[:, 0])
    with pytest.raises(TypeError, match="sources must be int64"):
        koleo(z, sources.int())
    with pytest.raises(ValueError, match="all_sources is missing"):
        koleo(z, sources, all_z=z)
    with pytest.raises(ValueError, match="without row_offset"):
        info_nce(z[:3], sources[:3], TAU, z, sources)
    with pytest.raises(ValueError, match="belongs to another slice"):
        info_nce(z[:2], sources[:2], TAU, z, sources, row_offset=1)
    with pytest.raises(ValueError, match="outside the 6 rows"):
        info_nce(z[:3], sources[:3], TAU, z, sources, row_offset=4)
    with pytest.raises(ValueError, match="tau must be a positive number, got 0"):
        info_nce(z, sources, 0.0)
