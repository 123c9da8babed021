"""The definitions themselves, on cases one can work out by hand."""

import math

import pytest
import torch
from torch.nn import functional as F

from sscd_vec.kernels import reference


def unmixed(*ids: int) -> torch.Tensor:
    return torch.tensor([[i, i] for i in ids])


def test_gem_of_one_and_two() -> None:
    x = torch.tensor([[[[1.0, 2.0]]]])
    assert reference.gem_pool(x, p=3.0).item() == pytest.approx(4.5 ** (1 / 3))
    assert reference.gem_pool(x, p=1.0).item() == pytest.approx(1.5)
    assert reference.gem_pool(-x).item() == pytest.approx(1e-6)


def test_mates_share_any_source() -> None:
    sources = torch.tensor([[1, 1], [2, 1], [2, 2], [3, 4]])
    expected = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert reference.mates(sources, sources).int().tolist() == expected


def test_koleo_of_orthogonal_and_opposite_rows() -> None:
    orthogonal = torch.eye(2, dtype=torch.float64)
    assert reference.koleo(orthogonal, unmixed(0, 1)).item() == pytest.approx(-math.log(2) / 2)
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert reference.koleo(opposite, unmixed(0, 1)).item() == pytest.approx(-math.log(2))


def test_koleo_of_a_duplicate_is_constant() -> None:
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    loss = reference.koleo(z, unmixed(0, 1))
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(-math.log(1e-3))
    assert z.grad is not None and not z.grad.any()


def test_info_nce_of_two_pairs() -> None:
    z = torch.eye(2).repeat(2, 1)  # positives identical, negatives orthogonal
    for tau in (1.0, 0.5):
        loss = reference.info_nce(z, unmixed(0, 1, 0, 1), tau)
        assert loss.item() == pytest.approx(math.log(1 + 2 * math.exp(-1 / tau)), rel=1e-5)


def test_info_nce_averages_over_the_positives_of_a_mixed_row() -> None:
    # Row 0 mixes sources 1 and 2: rows 1 and 2 are its positives, row 3 its negative.
    z = F.normalize(torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])).double()
    sources = torch.tensor([[1, 2], [1, 1], [2, 2], [3, 3]])
    half = math.sqrt(0.5)
    row0 = math.log(1 + math.exp(-half - half))  # s = +-sqrt(1/2), twice the same
    row1 = math.log(1 + (math.exp(0) + math.exp(-1)) / math.exp(half))
    row2 = math.log(1 + (math.exp(0) + math.exp(0)) / math.exp(half))
    loss = reference.info_nce(z, sources, 1.0)
    assert loss.item() == pytest.approx((row0 + row1 + row2 + 0) / 4)


def test_rows_without_negatives_are_reported() -> None:
    z = F.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    found = reference.nearest_negative(z, unmixed(5, 5, 5))
    assert found.index.tolist() == [-1, -1, -1]
    assert found.distance.isinf().all() and not found.has_negative.any()
    loss = reference.sscd_loss(z.requires_grad_(), unmixed(5, 5, 5))
    torch.autograd.backward(loss.total)
    assert loss.total.item() == 0.0
    assert z.grad is not None and not z.grad.any()
