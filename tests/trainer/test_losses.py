import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import build_model
from sscd_vec.kernels import SSCDLoss, sscd_loss
from sscd_vec.trainer import losses
from sscd_vec.trainer.losses import Memory, Objective, backward
from sscd_vec.trainer.model import SplitModel, batch_norms, stages_of
from tests.trainer import tiny

SOURCES = torch.tensor([[0, 0], [1, 1], [2, 0], [0, 0], [1, 1], [2, 2], [3, 3], [3, 1]])


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> SplitModel:
    tiny.install(monkeypatch)
    torch.manual_seed(0)
    return SplitModel(build_model(EncoderConfig(trunk=tiny.NAME, dim=16)))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def run(split: SplitModel, images: Tensor, chunk: int) -> tuple[SSCDLoss, dict[str, Tensor]]:
    loss = backward(split, images, SOURCES, Objective(tau=0.05), entropy_weight=5.0, chunk=chunk)
    return loss, gradients(split)


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_cached_gradients_equal_the_one_shot_ones(split: SplitModel, chunk: int) -> None:
    split.training_mode(frozen_batch_norm=True)
    images = torch.randn(8, 3, 24, 24)
    loss, whole = run(split, images, chunk=0)
    chunked_loss, chunked = run(split, images, chunk=chunk)
    torch.testing.assert_close(chunked_loss.total, loss.total, rtol=1e-6, atol=1e-6)
    assert whole.keys() == chunked.keys() and whole
    largest = max(float(g.abs().max()) for g in whole.values())
    for name, gradient in whole.items():
        assert float((chunked[name] - gradient).abs().max()) <= 1e-5 * largest, name


def test_one_shot_gradient_is_autograd_through_the_loss(split: SplitModel) -> None:
    from sscd_vec.kernels import reference

    split.training_mode()
    images = torch.randn(8, 3, 24, 24)
    _, ours = run(split, images, chunk=0)
    split.training_mode()
    torch.autograd.backward(reference.sscd_loss(split(images), SOURCES, 0.05, 5.0).total)
    expected = gradients(split)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((ours[name] - gradient).abs().max()) <= 1e-5 * largest, name


def test_chunks_record_batch_statistics_once(split: SplitModel) -> None:
    split.training_mode()
    images = torch.randn(8, 3, 24, 24)
    expected = {}
    for part in torch.split(images, 4):
        split(part)
    for i, norm in enumerate(batch_norms(split)):
        expected[i] = norm.state_dict()["running_mean"].clone()
        norm.reset_running_stats()
    run(split, images, chunk=4)
    for i, norm in enumerate(batch_norms(split)):
        torch.testing.assert_close(norm.state_dict()["running_mean"], expected[i])
        assert norm.momentum == 0.1


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("exact", [True, False])
def test_the_loss_is_told_the_precision_of_the_trunk(
    split: SplitModel, monkeypatch: pytest.MonkeyPatch, chunk: int, exact: bool
) -> None:
    """Under autocast a GPU multiplies negatives in half precision, unless that is forbidden."""
    seen: list[tuple[bool, torch.dtype | None]] = []

    def recorded(
        z: Tensor, sources: Tensor, tau: float, weight: float, *, products: torch.dtype | None
    ) -> SSCDLoss:
        seen.append((torch.is_autocast_enabled("cpu"), products))
        return sscd_loss(z, sources, tau, weight, products=products)

    monkeypatch.setattr(losses, "sscd_loss", recorded)
    split.training_mode()
    objective = Objective(tau=0.05, exact_negatives=exact)
    for precision in (torch.float32, torch.float16):
        backward(
            *(split, torch.randn(8, 3, 24, 24), SOURCES, objective, 5.0),
            chunk=chunk,
            precision=precision,
            describe=lambda images, precision: split.describe(images),
        )
    products = torch.float32 if exact else None
    assert seen == [(False, products), (True, products)]


def unit(*degrees: float) -> Tensor:
    turns = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([turns.cos(), turns.sin()], dim=1).float()


def test_both_losses_by_hand() -> None:
    # Two photos, two views each: copies 60 degrees apart, photos opposite each other.
    z = unit(0, 180, 60, 240)
    sources = torch.tensor([[0, 0], [1, 1], [0, 0], [1, 1]])
    loss, _ = Objective(tau=0.5).gradient(z, sources, entropy_weight=2.0)
    # Every row: its copy at cosine 1/2, the others at cosines -1 and -1/2.
    row = -math.log(math.exp(1) / (math.exp(1) + math.exp(-2) + math.exp(-1)))
    # The nearest other image is 120 degrees away: a chord of sqrt(3).
    entropy = -math.log(math.sqrt(3))
    assert float(loss.info_nce) == pytest.approx(row, rel=1e-5)
    assert float(loss.koleo) == pytest.approx(entropy, rel=1e-5)
    assert float(loss.total) == pytest.approx(row + 2 * entropy, rel=1e-5)
    assert float(loss.positive_similarity) == pytest.approx(0.5, rel=1e-5)
    assert float(loss.negative_similarity) == pytest.approx(-0.5, rel=1e-5)


def test_a_mixed_image_has_two_kinds_of_copies_by_hand() -> None:
    # 0 and 2 show photo 0, 1 shows photo 1, 3 mixes both: it has no negatives at all.
    z = unit(0, 90, 0, 45)
    sources = torch.tensor([[0, 0], [1, 1], [0, 0], [0, 1]])
    loss, _ = Objective(tau=1.0).gradient(z, sources, entropy_weight=0.0)
    half = math.sqrt(0.5)

    def term(positive: float, *negatives: float) -> float:
        return math.log(1 + sum(math.exp(n) for n in negatives) / math.exp(positive))

    rows = [
        (term(1, 0) + term(half, 0)) / 2,  # view 0: copies 2 and 3, negative 1
        term(half, 0, 0),  # view 1: copy 3, negatives 0 and 2
        (term(1, 0) + term(half, 0)) / 2,
        0.0,  # view 3: everything is its copy
    ]
    assert float(loss.info_nce) == pytest.approx(sum(rows) / 4, rel=1e-5)


def test_frozen_stages_get_no_gradient_and_keep_their_statistics() -> None:
    torch.manual_seed(0)
    model = build_model(EncoderConfig(trunk="efficientnet_lite0", dim=8))
    split = SplitModel(model, frozen_stages=5)
    split.training_mode()
    stem = stages_of(model.trunk)[0]
    before = {n: t.clone() for n, t in stem.state_dict().items()}
    _, found = run(split, torch.randn(8, 3, 32, 32), chunk=0)
    assert found and not any(name.startswith("frozen.") for name in found)
    assert all(p.grad is None for p in stem.parameters())
    for name, tensor in stem.state_dict().items():
        assert torch.equal(tensor, before[name])
    with torch.no_grad():
        model.eval()
        images = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(split(images), model.training_descriptors(images))


def test_too_many_frozen_stages_are_refused() -> None:
    model = build_model(EncoderConfig(trunk="resnet18", dim=8))
    SplitModel(model, frozen_stages=3)
    with pytest.raises(ValueError, match="0 to 3"):
        SplitModel(model, frozen_stages=4)


def test_both_passes_over_a_chunk_drop_the_same(split: SplitModel) -> None:
    from sscd_vec.kernels import reference

    trunk = split.trained.trunk
    assert isinstance(trunk, nn.Sequential)
    trunk.append(nn.Dropout(0.5))
    split.training_mode(frozen_batch_norm=True)
    images = torch.randn(8, 3, 24, 24)
    torch.manual_seed(3)
    _, cached = run(split, images, chunk=4)
    torch.manual_seed(3)
    z = torch.cat([split(part) for part in torch.split(images, 4)])
    torch.autograd.backward(reference.sscd_loss(z, SOURCES, 0.05, 5.0).total)
    expected = gradients(split)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((cached[name] - gradient).abs().max()) <= 1e-5 * largest, name


def unit_rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, 6, generator=generator), dim=1)


def plain(first: int, count: int) -> Tensor:
    """Sources of ``count`` unmixed images, numbered from ``first``."""
    return torch.arange(first, first + count)[:, None].repeat(1, 2)


def test_the_newest_rows_are_kept_oldest_first() -> None:
    memory = Memory(5)
    memory.add(unit_rows(3, 0), plain(0, 3))
    memory.add(unit_rows(4, 1), plain(10, 4))
    torch.testing.assert_close(memory.z, torch.cat([unit_rows(3, 0)[2:], unit_rows(4, 1)]))
    assert memory.sources[:, 0].tolist() == [2, 10, 11, 12, 13]


def test_mixed_and_broken_rows_are_not_remembered() -> None:
    memory = Memory(5)
    z = unit_rows(3, 0)
    z[1, 0] = torch.nan
    memory.add(z, torch.tensor([[0, 0], [1, 1], [2, 7]]))
    assert memory.sources.tolist() == [[0, 0]]


def test_rows_that_share_a_source_with_the_batch_are_not_strangers() -> None:
    memory = Memory(5)
    memory.add(unit_rows(4, 0), plain(0, 4))
    z, sources = memory.strangers(torch.tensor([[1, 1], [9, 3]]))
    assert sources[:, 0].tolist() == [0, 2]
    torch.testing.assert_close(z, unit_rows(4, 0)[[0, 2]])


def test_a_memory_of_no_size_stays_empty() -> None:
    memory = Memory(0)
    memory.add(unit_rows(4, 0), plain(0, 4))
    assert len(memory.strangers(plain(9, 1))[0]) == 0


def test_state_continues_the_memory() -> None:
    memory, again = Memory(5), Memory(5)
    memory.add(unit_rows(4, 0), plain(0, 4))
    again.load(memory.state(), torch.device("cpu"))
    for one in (memory, again):
        one.add(unit_rows(3, 1), plain(20, 3))
    torch.testing.assert_close(memory.z, again.z, rtol=0, atol=0)
    assert memory.sources.tolist() == again.sources.tolist()
    again.load(None, torch.device("cpu"))
    assert len(again.z) == 5, "a run saved without a memory changes nothing"


def test_gradient_is_that_of_a_batch_with_fixed_further_rows() -> None:
    earlier = unit_rows(7, 3)
    z, sources = unit_rows(8, 4), plain(0, 4).repeat(2, 1)
    memory = Memory(32)
    memory.add(earlier, plain(100, 7))
    loss, gradient = Objective(0.05, memory=memory).gradient(z, sources, 10.0)

    own = z.clone().requires_grad_()
    everyone = torch.cat([own, earlier])
    wanted = sscd_loss(
        own, sources, 0.05, 10.0, everyone, torch.cat([sources, plain(100, 7)]), row_offset=0
    )
    torch.testing.assert_close(loss.total, wanted.total.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.total, own)[0])
    alone = Objective(0.05).gradient(z, sources, 10.0)[0]
    assert loss.info_nce > alone.info_nce, "more negatives make the task harder"


def test_first_views_are_remembered_after_the_step() -> None:
    memory = Memory(32)
    z, sources = unit_rows(8, 4), plain(0, 4).repeat(2, 1)
    before = Objective(0.05, memory=memory).gradient(z, sources, 10.0)[0]
    torch.testing.assert_close(before.total, Objective(0.05).gradient(z, sources, 10.0)[0].total)
    torch.testing.assert_close(memory.z, z[:4])
    again = Objective(0.05, memory=memory).gradient(z, sources, 10.0)[0]
    assert float(again.total) == pytest.approx(float(before.total)), "none of them is a stranger"
