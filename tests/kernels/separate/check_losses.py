"""Run by test_separate.py under the Triton interpreter: the loss kernels against the reference."""

import pytest
import torch

from sscd_vec.kernels import (
    info_nce,
    koleo,
    launch,
    nearest_negative,
    pull,
    reference,
    scan,
    sscd_loss,
    tiled,
)
from sscd_vec.kernels.batch import global_batch
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
    one, parts = (scan.scan(batch, TAU, lse=True, nearest=True, splits=s) for s in (1, 3))
    assert one.lse is not None and parts.lse is not None
    assert one.index is not None and parts.index is not None
    torch.testing.assert_close(parts.lse, one.lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(parts.index, one.index)
    found = pull.positives(batch, TAU, one.lse)
    gradients = [torch.zeros(300, 8) for _ in range(2)]
    for gradient, splits in zip(gradients, (1, 3), strict=True):
        tiled.add_contrast_gradient(
            batch, TAU, one.lse, found.pull, found.count, gradient, gradient, splits=splits
        )
    assert_near("dz", gradients[1], gradients[0], 1e-6)


def test_the_gradient_repeats_bit_by_bit() -> None:
    case = Case(descriptors(90, 4).float(), mixed(90))
    first, second = (value_and_gradient(koleo, case, torch.float32)[1] for _ in "ab")
    assert torch.equal(first, second)


def test_autotuning_picks_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner's own way through every configuration, with a stopwatch that prefers the last."""
    tuner = scan.TUNED[scan.FLOAT32_CONFIGS]
    ticks = iter([2.0, 1.0])
    monkeypatch.setattr(tuner, "_do_bench", lambda call, quantiles: (call(), [next(ticks)] * 3)[1])
    batch = global_batch(descriptors(70, 8).float(), views(70))
    plain = scan.scan(batch, TAU, lse=True, nearest=True)
    monkeypatch.setattr(scan, "_kernel_for", lambda z: (tuner, {}))
    picked = scan.scan(batch, TAU, lse=True, nearest=True)
    assert tuner.best_config is scan.FLOAT32_CONFIGS[1]
    assert plain.lse is not None and picked.lse is not None
    torch.testing.assert_close(picked.lse, plain.lse, rtol=1e-6, atol=1e-6)
