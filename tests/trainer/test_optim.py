import copy
import math

import pytest
import torch

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import build_model
from sscd_vec.trainer import TrainConfig
from sscd_vec.trainer.optim import (
    LARS,
    AverageWeights,
    build_optimizer,
    entropy_factor,
    learning_rate_factor,
    parameter_groups,
)


def slow_step(
    weights: list[float], gradients: list[float], velocity: list[float], *, adapt: bool
) -> tuple[list[float], list[float]]:
    """LARS for one tensor in plain Python: momentum .9, trust .001, eps 1e-8."""
    decay, rate = 0.02, 0.7
    if adapt:
        gradients = [g + decay * w for g, w in zip(gradients, weights, strict=True)]
        weight_norm = sum(w * w for w in weights) ** 0.5
        gradient_norm = sum(g * g for g in gradients) ** 0.5
        if weight_norm > 0 and gradient_norm > 0:
            ratio = 0.001 * weight_norm / (gradient_norm + 1e-8)
            gradients = [ratio * g for g in gradients]
    velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
    return [w - rate * v for w, v in zip(weights, velocity, strict=True)], velocity


def test_ten_steps_equal_the_slow_version() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    bias = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    optimizer = LARS(
        [
            {"params": [weight], "weight_decay": 0.02},
            {"params": [bias], "weight_decay": 0.0, "adapt": False},
        ],
        lr=0.7,
    )
    slow = {p: (p.detach().flatten().tolist(), [0.0] * p.numel()) for p in (weight, bias)}
    for _ in range(10):
        for parameter in (weight, bias):
            parameter.grad = torch.randn_like(parameter)
            slow[parameter] = slow_step(
                slow[parameter][0],
                parameter.grad.flatten().tolist(),
                slow[parameter][1],
                adapt=parameter is weight,
            )
        optimizer.step()
    for parameter in (weight, bias):
        expected = torch.tensor(slow[parameter][0], dtype=torch.float64).view_as(parameter)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-10, atol=1e-12)


def test_a_zero_weight_moves_with_ratio_one() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    LARS([weight], lr=0.5).step()
    assert set(weight.detach().flatten().tolist()) == {-0.5}


def test_state_survives_saving() -> None:
    def fresh() -> tuple[torch.nn.Parameter, LARS]:
        weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        return weight, LARS([weight], lr=0.1)

    weight, optimizer = fresh()
    gradient = torch.ones(2, 3)
    weight.grad = gradient.clone()
    optimizer.step()
    other, resumed = fresh()
    other.data.copy_(weight.data)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, stepper in ((weight, optimizer), (other, resumed)):
        parameter.grad = 2 * gradient
        stepper.step()
    assert torch.equal(weight, other)


def test_warm_up_then_cosine_against_a_slow_version() -> None:
    steps, warmup = 200, 10
    for step in range(steps):
        if step < warmup:
            expected = sum(1 / warmup for _ in range(step + 1))
        else:
            angle = 180 * (step - warmup) / (steps - warmup)
            expected = (1 + math.cos(math.radians(angle))) / 2
        assert learning_rate_factor(step, steps, warmup) == pytest.approx(expected)


def test_landmarks() -> None:
    assert learning_rate_factor(0, 100, 5) == pytest.approx(0.2)
    assert learning_rate_factor(4, 100, 5) == 1
    assert learning_rate_factor(5, 100, 5) == 1
    assert learning_rate_factor(100, 100, 5) == pytest.approx(0, abs=1e-12)
    assert learning_rate_factor(0, 100, 0) == 1


def test_entropy_ramp_from_a_tenth_to_all() -> None:
    assert entropy_factor(0, 100, 0.0) == 1
    assert entropy_factor(0, 100, 0.2) == pytest.approx(0.1)
    assert entropy_factor(10, 100, 0.2) == pytest.approx(0.55)
    assert entropy_factor(20, 100, 0.2) == 1


def test_layer_decay_slows_the_layers_far_from_the_head() -> None:
    model = build_model(EncoderConfig(trunk="resnet18", dim=8))
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    scale = {id(p): group["scale"] for group in groups for p in group["params"]}
    named = {name: scale[id(parameter)] for name, parameter in model.named_parameters()}
    assert named["head.weight"] == 1.0
    assert named["trunk.layer4.0.conv1.weight"] == 0.5
    assert named["trunk.conv1.weight"] == 0.5**5
    assert len(scale) == len(list(model.parameters()))
    plain = {id(p) for group in groups if not group["adapt"] for p in group["params"]}
    assert plain == {id(p) for p in model.parameters() if p.ndim == 1}
    assert all(group["weight_decay"] == 0 for group in groups if not group["adapt"])


@pytest.mark.parametrize("optimizer", ["lars", "adamw"])
def test_biases_and_norms_are_spared_or_not(optimizer: str) -> None:
    model = build_model(EncoderConfig(trunk="resnet18", dim=8))
    settings = {"trunk": "resnet18", "dim": 8, "optimizer": optimizer, "weight_decay": 0.1}
    small = {id(p) for p in model.parameters() if p.ndim == 1}
    for exempt in (True, False):
        config = TrainConfig.from_dict(settings | {"exempt_norms": exempt})
        groups = build_optimizer(model, config).param_groups
        spared = {
            id(p)
            for group in groups
            if group["weight_decay"] == 0 and not group["adapt"]
            for p in group["params"]
        }
        assert spared == (small if exempt else set())
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_the_average_forgets_its_start_and_lends_itself() -> None:
    model = torch.nn.Linear(2, 1)
    average = AverageWeights(model, decay=0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    average.update(model, step=0)  # (1 + 0) / (10 + 0) of the start stays
    torch.testing.assert_close(average.weights["weight"], start + 0.9)
    for step in range(20, 60):
        average.update(model, step)
    torch.testing.assert_close(average.weights["weight"], start + 1)
    with torch.no_grad():
        model.weight += 5
    with average.applied_to(model):
        assert torch.equal(model.weight, average.weights["weight"])
    torch.testing.assert_close(model.weight.detach(), start + 6)
