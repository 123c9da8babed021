import copy

import torch

from sscd_vec.trainer.lars import LARS


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
