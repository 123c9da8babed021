"""The ring against the gathered loss, in groups of two and three processes."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from sscd_vec.kernels import SSCDLoss, sscd_loss
from sscd_vec.trainer import TrainConfig, run
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.losses import Objective
from sscd_vec.trainer.model import initial_model
from sscd_vec.trainer.ring import Ring
from tests.trainer import processes, tiny

TAU, WEIGHT = 0.05, 5.0
LOCAL = 8  # rows of a rank
Step = tuple[SSCDLoss, Tensor]


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Two views of every image, float64, with all that is awkward."""
    rows = count * LOCAL
    z = normalize(torch.randn(rows, 6, generator=torch.Generator().manual_seed(count)).double())
    ids = torch.arange(rows) // 2
    sources = torch.stack([ids, ids], dim=1)
    sources[1, 1] = ids[-1]  # mixed with another rank's image: a positive far away
    sources[-3] = torch.tensor([0, 4])  # shares both sources of nobody, one of several
    sources[5] = 1000  # no positive anywhere
    z[LOCAL + 2] = z[2]  # the nearest negative is an exact copy, at another rank
    z[3] = z[LOCAL + 4] = z[LOCAL + 6]  # two nearest negatives at one distance
    return z, sources


def run_as_rank(out: str) -> None:
    """What each process does: the loss in a ring, and gathered."""
    torch.set_num_threads(1)
    ranks = Ranks.join("cpu")
    gathered: list[torch.dtype] = []
    gather = torch.distributed.all_gather

    def recorded(parts: list[Tensor], tensor: Tensor) -> None:
        gathered.append(tensor.dtype)
        gather(parts, tensor)

    z, sources = batch(ranks.count)
    own = slice(ranks.rank * LOCAL, (ranks.rank + 1) * LOCAL)
    found = Objective(TAU, ranks).gradient(z[own], sources[own], WEIGHT)
    with patch.object(torch.distributed, "all_gather", recorded):
        ring = Objective(TAU, ranks, ring=True).gradient(z[own], sources[own], WEIGHT)
    assert gathered == [torch.int64], "sources are gathered, descriptors are not"
    exact = Ring(z[own], sources, TAU, ranks, torch.float64).gradient(WEIGHT)
    broken = z[own].clone()
    broken[0, 0] = torch.nan if ranks.rank == 1 else broken[0, 0]
    loss, gradient = Objective(TAU, ranks, ring=True).gradient(broken, sources[own], WEIGHT)
    assert bool(loss.total.isnan()) and bool(gradient.isnan().all()), "every rank skips the step"
    torch.save([(tuple(loss), rows) for loss, rows in (found, ring, exact)], f"{out}.{ranks.rank}")
    ranks.wait()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """The losses, means over ranks, and all ranks' gradients: gathered, ring, ring in float64."""
    out = tmp_path_factory.mktemp("ring") / "steps"
    script = f"from tests.trainer.test_ring import run_as_rank; run_as_rank({str(out)!r})"
    processes.run(script, request.param)
    return joined(out, request.param)


def joined(out: Path, count: int) -> list[Step]:
    ranks = [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(count)]
    found = []
    for parts in zip(*ranks, strict=True):
        losses = torch.stack([torch.stack(loss) for loss, _ in parts])
        gradient = torch.cat([rows for _, rows in parts])
        found.append((SSCDLoss(*losses.mean(0).unbind()), gradient))
    return found


def test_the_ring_equals_the_gathered_loss(steps: list[Step]) -> None:
    (loss, gradient), (ring_loss, ring_gradient), _ = steps
    torch.testing.assert_close(torch.stack(ring_loss), torch.stack(loss), rtol=1e-6, atol=1e-6)
    worst = (ring_gradient - gradient).abs().max() / gradient.abs().max()
    assert 0 < gradient.abs().max() and worst <= 2e-6  # float32, sums in another order


def test_the_ring_equals_one_process_in_float64(steps: list[Step]) -> None:
    _, _, (loss, gradient) = steps
    count = len(gradient) // LOCAL
    z, sources = batch(count)
    alone = sscd_loss(z.requires_grad_(), sources, TAU, WEIGHT)
    torch.autograd.backward(alone.total)
    for name in ("total", "info_nce", "koleo"):
        torch.testing.assert_close(getattr(loss, name), getattr(alone, name).detach())
    assert z.grad is not None
    torch.testing.assert_close(gradient / count, z.grad, rtol=1e-12, atol=1e-13)


def test_one_process_needs_no_ring() -> None:
    z, sources = batch(2)
    found = [Objective(TAU, ring=ring).gradient(z, sources, WEIGHT)[1] for ring in (True, False)]
    assert torch.equal(*found)


def test_the_setting_reaches_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.install(monkeypatch)
    made: list[Objective] = []

    def recorded(*settings: Any) -> Objective:  # noqa: ANN401  (whatever a loss takes)
        made.append(Objective(*settings))
        return made[-1]

    monkeypatch.setattr(run, "Objective", recorded)
    for ring in (True, False):
        config = TrainConfig(trunk=tiny.NAME, dim=16, ring=ring)
        run.Run(config, initial_model(config), torch.device("cpu"), Ranks(), 9)
    assert [objective.ring for objective in made] == [True, False]
