"""Run by test_separate.py under the Triton interpreter: the loss kernels against the reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from sscd_vec.kernels import (
    SSCDLoss,
    gem_pool,
    info_nce,
    koleo,
    launch,
    nearest_negative,
    neighbours,
    objective,
    reference,
    sscd_loss,
)
from sscd_vec.kernels.batch import GlobalBatch, global_batch
from sscd_vec.kernels.chunked import ChunkedStep
from sscd_vec.kernels.tiled import TiledStep
from sscd_vec.kernels.tiles import Factors, Runs, mark_tiles, sorted_sources
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


@dataclass(frozen=True)
class Launch:
    """A kernel that was started: its settings, and the device guards around it."""

    kernel: str
    settings: dict[str, object]
    guards: list[int]


AWKWARD = ["awkward 41x401", "duplicates", "lonely rows", "one source", "one row", "local slice"]


def compare(found: Loss, true: Loss, case: Case) -> None:
    """A loss and its gradient against the reference in float64, on the case's own dtype."""
    wide = Case(case.z.double(), case.sources, case.start, case.stop)
    value, gradient = value_and_gradient(found, case, case.z.dtype)
    true_value, true_gradient = value_and_gradient(true, wide, torch.float64)
    assert_near("loss", value, true_value, VALUE_TOLERANCE[case.z.dtype])
    assert_near("dz", gradient, true_gradient, GRADIENT_TOLERANCE[case.z.dtype])


def both(loss: str, case: Case) -> tuple[Loss, Loss]:
    found = losses(koleo, info_nce, sscd_loss, case, TAU)
    true = losses(reference.koleo, reference.info_nce, reference.sscd_loss, case, TAU)
    return found[loss], true[loss]


@pytest.mark.parametrize("name", AWKWARD)
def test_sscd_loss_float32(name: str) -> None:
    case = CASES[name]
    case = Case(case.z.float(), case.sources, case.start, case.stop)
    compare(*both("sscd_loss", case), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["d=17", "local slice"])
def test_sscd_loss_half_precision(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    case = Case(case.z.to(dtype), case.sources, case.start, case.stop)
    compare(*both("sscd_loss", case), case)


@pytest.mark.parametrize("name", ["d=17", "local slice"])
@pytest.mark.parametrize("loss", ["koleo", "info_nce"])
def test_each_loss_alone(loss: str, name: str) -> None:
    case = CASES[name]
    case = Case(case.z.float(), case.sources, case.start, case.stop)
    compare(*both(loss, case), case)


def test_one_row_at_a_time_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED_ROWS", launch.ROWS)
    case = Case(descriptors(9, 8).float(), mixed(9))
    compare(*both("sscd_loss", case), case)


def test_2047_rows() -> None:
    case = Case(descriptors(2047, 17).float(), mixed(2047), 1000, 1041)
    compare(*both("sscd_loss", case), case)


@pytest.mark.parametrize("name", ["five views", "duplicates", "lonely rows", "local slice"])
def test_nearest_negative(name: str) -> None:
    rows = CASES[name].arguments(CASES[name].z.float())
    found = nearest_negative(**rows)
    expected = reference.nearest_negative(**rows)
    assert torch.equal(found.index, expected.index)  # ties go to the lowest row in both
    assert torch.equal(found.has_negative, expected.has_negative)
    torch.testing.assert_close(found.distance, expected.distance)


def test_a_source_that_the_bank_lacks_has_no_mates_there() -> None:
    """Ids that lie between those of the bank are ids of their own."""
    z = descriptors(3, 16, seed=1).float()
    near = F.normalize(z + 0.01 * descriptors(3, 16, seed=2).float())
    bank = torch.cat([near, descriptors(3, 16, seed=3).float()])
    sources = torch.tensor([[5, 5], [8, 12], [20, 3]])
    bank_sources = torch.tensor([[7, 7], [9, 9], [21, 13], [11, 11], [13, 13], [9, 21]])
    found = nearest_negative(z, sources, bank, bank_sources)
    assert found.index.tolist() == [0, 1, 2]
    expected = reference.nearest_negative(z, sources, bank, bank_sources)
    torch.testing.assert_close(found.distance, expected.distance)
    torch.testing.assert_close(
        koleo(z, sources, bank, bank_sources), reference.koleo(z, sources, bank, bank_sources)
    )


def test_orthogonal_pairs_by_hand() -> None:
    z = torch.eye(2).repeat(2, 1)
    sources = torch.tensor([[0, 0], [1, 1], [0, 0], [1, 1]])
    loss = sscd_loss(z, sources, tau=1.0, entropy_weight=10.0)
    torch.testing.assert_close(loss.info_nce, (1 + 2 * torch.tensor(-1.0).exp()).log())
    torch.testing.assert_close(loss.koleo, -torch.tensor(2.0).log() / 2)
    torch.testing.assert_close(loss.total, loss.info_nce + 10 * loss.koleo)
    assert (loss.positive_similarity.item(), loss.negative_similarity.item()) == (1.0, 0.0)


def test_columns_in_parts_join_to_the_same() -> None:
    batch = global_batch(descriptors(300, 8).float(), views(300))
    step = TiledStep(batch, TAU, torch.float32)
    one, parts = (step.scan(lse=True, nearest=True, splits=s) for s in (1, 3))
    assert one.lse is not None and parts.lse is not None
    assert one.index is not None and parts.index is not None
    torch.testing.assert_close(parts.lse, one.lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(parts.index, one.index)
    found = step.positives(one.lse)
    gradients = [torch.zeros(300, 8) for _ in range(2)]
    for gradient, splits in zip(gradients, (1, 3), strict=True):
        kept = (one.lse, found.pull, one.similarity)
        step.push_negatives(*kept, gradient, gradient, splits=splits)
        step.pull_positives(one.lse, found.count, gradient, gradient)
    assert_near("dz", gradients[1], gradients[0], 1e-6)


def test_rows_of_another_rank_push_as_in_plain_torch() -> None:
    """One visit of a ring: local rows and rows they are not among, both getting a gradient."""
    z, sources = descriptors(90, 8).float(), mixed(90)
    batch = GlobalBatch(z[:40], sources[:40], z[40:], sources[40:], None, whole=False)
    gradients = []
    for step in (TiledStep(batch, TAU, torch.float32), ChunkedStep(batch, TAU, torch.float32)):
        found = step.scan(lse=True, nearest=True)
        assert found.lse is not None and found.index is not None
        dz, dall = torch.zeros(40, 8), torch.zeros(50, 8)
        step.push_negatives(found.lse, torch.ones(40), found.similarity, dz, dall)
        step.add_pair_gradient(found.index, torch.ones(40), dz, dall)
        gradients.append((dz, dall))
    for name, ours, plain in zip(("dz", "dall"), *gradients, strict=True):
        assert_near(name, ours, plain, 1e-5)


def test_the_gradient_repeats_bit_by_bit() -> None:
    case = Case(descriptors(90, 4).float(), mixed(90))
    first, second = (value_and_gradient(koleo, case, torch.float32)[1] for _ in "ab")
    assert torch.equal(first, second)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch of an interpreted kernel, and the device guards that were on at that time."""
    guards: list[int] = []
    found: list[Launch] = []
    run = InterpretedFunction.__getitem__

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            guards.append(self.index)

        def __exit__(self, *error: object) -> None:
            guards.pop()

    def recorded(kernel: InterpretedFunction, grid: tuple[int, ...]) -> Callable[..., object]:
        def started(*arguments: object, **settings: object) -> object:
            found.append(Launch(kernel.fn.__name__, settings, list(guards)))
            return run(kernel, grid)(*arguments, **settings) if grid[0] else None

        return started

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", recorded)
    return found


def test_every_kernel_starts_on_the_device_of_its_tensors(launches: list[Launch]) -> None:
    z = descriptors(9, 8).float().requires_grad_()
    torch.autograd.backward(sscd_loss(z, mixed(9)).total)
    for size in (3, 4):
        torch.autograd.backward(gem_pool(torch.rand(1, 2, size, size).requires_grad_()).sum())
    kernels = {"mark", "scan", "positives", "distance", "push", "pull", "pair_gradient"}
    kernels |= {"gem_forward", "gem_backward", "flat_forward", "flat_backward"}
    assert {x.kernel.removesuffix("_kernel") for x in launches} == kernels
    assert all(x.guards == [-1] for x in launches)  # where the guard does nothing
    with FakeTensorMode():
        there = torch.empty(2, device="cuda:1")
    launch.start(neighbours.distance_kernel, (0,), there)
    assert launches[-1].guards == [1]


def test_a_small_batch_decides_nothing_for_a_large_one(launches: list[Launch]) -> None:
    for rows in (300, 20, 300):
        nearest_negative(descriptors(rows, 8).float(), views(rows))
    tiles = [x.settings["BLOCK_M"] for x in launches if x.kernel == "scan_kernel"]
    assert tiles == [128, 64, 128]


def test_small_slopes_survive_float16() -> None:
    """At a loss of 2e-5 the gradient is a sum of slopes that float16 alone would round to 0."""
    z = descriptors(64, 256, seed=4)
    pairs = F.normalize(z.repeat(2, 1) + 1e-3 * descriptors(128, 256, seed=5))
    case = Case(pairs.half(), views(128))
    found, true = both("info_nce", case)
    scale = 2.0**16  # as a gradient scaler multiplies the loss
    gradients = []
    for loss, dtype in ((found, torch.float16), (true, torch.float64)):
        leaf = case.z.to(dtype, copy=True).requires_grad_()
        value = loss(z=leaf, sources=case.sources) * scale
        assert 0 < float(value.detach()) < 2e-5 * scale
        torch.autograd.backward(value)
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert_near("dz", gradients[0], gradients[1], GRADIENT_TOLERANCE[torch.float16])


@pytest.mark.parametrize("products", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_products_of_float32_rows(products: torch.dtype) -> None:
    """Only the products of negatives are rounded: positives and distances stay exact."""
    case = Case(descriptors(150, 64).float(), mixed(150))
    exact = sscd_loss(case.z, case.sources, TAU)
    rounded = sscd_loss(case.z, case.sources, TAU, products=products)
    assert torch.equal(rounded.positive_similarity, exact.positive_similarity)
    assert_near("koleo", rounded.koleo, exact.koleo, 1e-4)  # a tie may go to another neighbour
    bound = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[products]
    gradient = value_and_gradient(
        partial(info_nce, tau=TAU, products=products), case, torch.float32
    )[1]
    true = value_and_gradient(partial(info_nce, tau=TAU), case, torch.float32)[1]
    assert not torch.equal(gradient, true)
    assert_near("dz", gradient, true, bound)


def test_factors_are_rounded_as_tensor_cores_round_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 in two float16 parts holds its error; no product sees a wider operand."""
    seen: set[str] = set()
    dot = InterpreterBuilder.create_dot

    def recorded(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:  # noqa: ANN401
        seen.update({str(a.data.dtype), str(b.data.dtype)})
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", recorded)
    case = Case(descriptors(300, 64).float(), mixed(300))
    compare(*both("info_nce", case), case)
    assert seen == {"float16"}


def test_two_float16_factors_keep_22_bits() -> None:
    """As two tf32 factors do; entries so small that the low part is subnormal lose 2^-37 more."""
    z = descriptors(200, 512).float()
    factors = Factors.of(z, torch.float32)
    kept = (factors.high.double() + factors.low.double()) / factors.scale
    error = (kept - z.double()).abs()
    assert bool((error <= 2.0**-22 * z.double().abs() + 2.0**-25 / factors.scale).all())
    assert bool((factors.high.double() / factors.scale - z.double()).abs().max() > 2.0**-16)


@pytest.mark.parametrize(("local", "searched"), [(60, 4), (20, 6)])
def test_sources_are_sorted_once_a_step(
    monkeypatch: pytest.MonkeyPatch, local: int, searched: int
) -> None:
    """Runs are found once, for both passes; the mates of a slice within them, in its backward."""
    sorts: list[int] = []
    searches: list[int] = []
    sort, search = torch.Tensor.sort, torch.searchsorted

    def counted(self: torch.Tensor, *rest: Any, **more: Any) -> Any:  # noqa: ANN401
        sorts.append(len(self))
        return sort(self, *rest, **more)

    def counted_search(ids: torch.Tensor, *rest: Any, **more: Any) -> Any:  # noqa: ANN401
        searches.append(len(ids))
        return search(ids, *rest, **more)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    monkeypatch.setattr(torch, "searchsorted", counted_search)
    z, sources = descriptors(60, 8).float().requires_grad_(), mixed(60)
    if local == 60:
        loss = sscd_loss(z, sources)
    else:
        own = z.detach()[:local].requires_grad_()
        loss = sscd_loss(own, sources[:local], all_z=z, all_sources=sources, row_offset=0)
    torch.autograd.backward(loss.total)
    assert sorts == [120, local]  # both slots of every row, then the neighbours of KoLeo
    assert len(searches) == searched  # begins and ends: of runs, of neighbours, of local mates


def test_only_tiles_that_hold_mates_are_marked() -> None:
    rows, block = 1024, 64
    runs = Runs.of_slice(sorted_sources(views(rows)), 0, rows)
    flags = mark_tiles(runs, rows, rows, block, block)
    mates = reference.mates(views(rows), views(rows))
    tiles = mates.view(rows // block, block, rows // block, block).any(3).any(1)
    assert torch.equal(flags.bool(), tiles)
    assert int(flags.sum()) == 2 * rows // block  # two in sixteen here, fewer in a larger batch


@pytest.mark.parametrize("collapsed", [True, False])
def test_the_pairs_of_a_hub_are_added_in_chunks(collapsed: bool) -> None:
    """All rows may have one neighbour: nothing else changes than who adds up its pairs."""
    rows = 5 * neighbours.CHUNK + 7
    z = descriptors(rows, 8).float()
    index = torch.zeros(rows, dtype=torch.int64) if collapsed else torch.arange(rows) // 3
    index[0] = 1
    index[5] = -1
    slope = torch.linspace(-1, 1, rows)
    slope[5] = 0
    step = (z - z[index.clamp(min=0)]) * slope[:, None]
    expected = step.double().index_add(0, index.clamp(min=0), step.double(), alpha=-1)
    found = torch.zeros_like(z)
    neighbours.add_pair_gradient(z, z, index, slope, found, found)
    assert_near("dz", found, expected, 1e-6)


def test_a_whole_batch_is_captured_as_one_graph() -> None:
    """Forward and backward as Dynamo and AOTAutograd trace them."""
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(sscd_loss, fullgraph=True, backend=backend)
    gradients = []
    for loss in (sscd_loss, compiled):
        z = descriptors(40, 8).float().requires_grad_()
        torch.autograd.backward(loss(z, mixed(40)).total)
        assert z.grad is not None
        gradients.append(z.grad)
    assert torch.equal(*gradients)
    assert len(graphs) == 2
    assert "sscd_vec.losses.default" in graphs[0]
    assert "sscd_vec.losses_backward.default" in graphs[1]


@pytest.fixture
def cuda_autocast(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Autocast as it is inside ``torch.autocast("cuda")``, which refuses to begin without a GPU."""
    enabled: bool = request.param
    torch.set_autocast_enabled("cuda", enabled)
    yield enabled
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("cuda_autocast", [True, False], indirect=True)
def test_negatives_are_multiplied_in_float16_under_autocast(
    monkeypatch: pytest.MonkeyPatch, cuda_autocast: bool
) -> None:
    used: list[torch.dtype] = []
    true = objective.sscd_loss

    def recorded(batch: GlobalBatch, tau: float, weight: float, products: torch.dtype) -> SSCDLoss:
        used.append(products)
        return true(batch, tau, weight, products)

    monkeypatch.setattr(objective, "sscd_loss", recorded)
    with FakeTensorMode():
        z, sources = torch.empty(64, 32), torch.empty(64, 2, dtype=torch.int64)
        z, sources = (tensor.to("cuda") for tensor in (z, sources))
        sscd_loss(z, sources)
        sscd_loss(z, sources, products=torch.float32)
        sscd_loss(z.bfloat16(), sources)
    default = torch.float16 if cuda_autocast else torch.float32
    assert used == [default, torch.float32, torch.bfloat16]


# torch's own check looks at the gradients of its copies, and warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["d=17", "local slice"])
def test_torch_knows_the_operators(name: str) -> None:
    """Schema, fake tensors, autograd and AOT dispatch, by torch's own check."""
    case = CASES[name]
    rows = case.arguments(case.z.float())
    z = rows["z"].clone().requires_grad_()
    everyone = None if case.whole else rows["all_z"].clone().requires_grad_()
    arguments = (z, everyone, rows["sources"].clone(), rows.get("all_sources"))
    settings = (case.start, TAU, torch.float32, True, True)
    torch.library.opcheck(torch.ops.sscd_vec.losses.default, (*arguments, *settings))
    plain = (rows["z"].clone(), rows.get("all_z"), *arguments[2:])
    torch.library.opcheck(torch.ops.sscd_vec.nearest_negative.default, (*plain, case.start))


def test_the_flop_counter_counts_both_products() -> None:
    z = descriptors(50, 16).float().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(sscd_loss(z, views(50)).total)
    assert counter.get_total_flops() == (2 + 4) * 50 * 50 * 16
