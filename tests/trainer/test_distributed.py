"""Two processes over gloo against one on the same global batch."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import build_model
from sscd_vec.trainer.distributed import Ranks, SyncBatchNorm, synchronize_batch_norm
from sscd_vec.trainer.losses import Objective, backward
from sscd_vec.trainer.model import SplitModel, batch_norms
from tests.trainer import processes, tiny

# (name, frozen BatchNorm, chunk of the two processes)
CASES = (("synchronized", False, 0), ("chunked", True, 2))


@dataclass
class Outcome:
    loss: list[float]
    gradients: dict[str, Tensor]
    statistics: dict[str, Tensor]


def train_once(ranks: Ranks, frozen: bool, chunk: int) -> Outcome:
    """Loss and gradients of one global batch with images mixed across the ranks."""
    torch.manual_seed(0)
    model = build_model(EncoderConfig(trunk=tiny.NAME, dim=16))
    split = SplitModel(model)
    if ranks.count > 1:
        synchronize_batch_norm(split.trained, "cpu")
        assert all(isinstance(norm, SyncBatchNorm) for norm in batch_norms(model))
    split.training_mode(frozen)
    images = torch.randn(12, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    sources = (torch.arange(12) % 6)[:, None].repeat(1, 2)
    sources[2, 1], sources[9, 1] = 5, 0  # mixed with photos of the other rank
    share = 6 // ranks.count
    own = torch.arange(ranks.rank * share, (ranks.rank + 1) * share)
    rows = torch.cat([own, own + 6])
    loss = backward(split, images[rows], sources[rows], Objective(0.05, ranks), 5.0, chunk=chunk)
    ranks.sum_gradients(model.parameters())
    return Outcome(
        [float(part) for part in loss],
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        {n: b.clone() for n, b in model.named_buffers() if "running" in n},
    )


def run_as_rank(out: str) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    tiny.install(pytest.MonkeyPatch())
    ranks = Ranks.join("cpu")
    outcomes = {name: train_once(ranks, frozen, chunk) for name, frozen, chunk in CASES}
    assert ranks.any(ranks.rank == 1), "what happens on one rank is known to all"
    assert not ranks.any(False)
    assert ranks.merged({f"{ranks.rank}.jpg": "bad"}) == {"0.jpg": "bad", "1.jpg": "bad"}
    rows = torch.arange(8.0).view(4, 2) * (ranks.rank + 1)
    summed = 3 * torch.arange(8.0).view(4, 2)
    assert torch.equal(ranks.sum_own_rows(rows), summed[2 * ranks.rank : 2 * ranks.rank + 2])
    weight = torch.nn.Parameter(torch.full((3,), float(ranks.rank)))
    with torch.no_grad():
        assert ranks.from_first(weight).tolist() == [0, 0, 0]
    if ranks.first:
        torch.save({name: vars(outcome) for name, outcome in outcomes.items()}, out)
    ranks.wait()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    out = tmp_path_factory.mktemp("ranks") / "outcomes.pt"
    script = f"from tests.trainer.test_distributed import run_as_rank; run_as_rank({str(out)!r})"
    processes.run(script, 2)
    saved = torch.load(out, weights_only=True)
    return {name: Outcome(**parts) for name, parts in saved.items()}


@pytest.mark.parametrize(("name", "frozen", "chunk"), CASES, ids=[case[0] for case in CASES])
def test_two_processes_equal_one(
    together: dict[str, Outcome],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    frozen: bool,
    chunk: int,
) -> None:
    tiny.install(monkeypatch)
    alone, both = train_once(Ranks(), frozen, chunk=0), together[name]
    assert both.loss == pytest.approx(alone.loss, rel=1e-5, abs=1e-5)
    largest = max(float(g.abs().max()) for g in alone.gradients.values())
    assert largest > 0
    for parameter, gradient in alone.gradients.items():
        worst = float((both.gradients[parameter] - gradient).abs().max())
        assert worst <= 1e-5 * largest, (parameter, worst)
    for buffer, statistic in alone.statistics.items():
        torch.testing.assert_close(both.statistics[buffer], statistic, rtol=1e-5, atol=1e-6)


def test_every_rank_works_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", said.append)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 7)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    assert Ranks.join("cuda") == Ranks(rank=7, count=8, local=3)
    assert said == [3, "nccl"], "the GPU is chosen before the group is made"
    assert Ranks().merged({"a.jpg": "bad"}) == {"a.jpg": "bad"}
