"""LAMB beside the paper's formula in float64."""

from __future__ import annotations

import copy

import pytest
import torch

from swarm_training.optim.lamb import LAMB


def tensors(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


SHAPES = (20, 10), (10,), (4, 3, 2), ()


def paper(
    weights: list[torch.Tensor], steps: int, lr: float, decay: float, largest: float | None
) -> list[torch.Tensor]:
    """Algorithm 2 of You et al., 2020, with φ(z) = min(z, largest), in float64."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    xs = [weight.double() for weight in weights]
    ms, vs = [torch.zeros_like(x) for x in xs], [torch.zeros_like(x) for x in xs]
    for t in range(1, steps + 1):
        for i, g in enumerate(tensors(t, *SHAPES)):
            g = g.double()
            ms[i] = beta1 * ms[i] + (1 - beta1) * g
            vs[i] = beta2 * vs[i] + (1 - beta2) * g**2
            r = (ms[i] / (1 - beta1**t)) / ((vs[i] / (1 - beta2**t)).sqrt() + eps)
            r = r + decay * xs[i]
            phi = xs[i].norm() if largest is None else xs[i].norm().clamp(max=largest)
            xs[i] = xs[i] - lr * phi / r.norm() * r
    return xs


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("largest", [None, 2.0])
def test_it_is_the_papers(decay: float, largest: float | None) -> None:
    parameters = [torch.nn.Parameter(weight) for weight in tensors(0, *SHAPES)]
    expected = paper([parameter.detach().clone() for parameter in parameters], 10, 0.05, decay, largest)
    optimizer = LAMB(parameters, lr=0.05, weight_decay=decay, max_weight_norm=largest)
    for step in range(1, 11):
        for parameter, gradient in zip(parameters, tensors(step, *SHAPES), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for parameter, reference in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.double(), reference, rtol=1e-5, atol=1e-6)


def test_weights_of_zero_take_steps_of_adam() -> None:
    parameter = torch.nn.Parameter(torch.zeros(10))
    parameter.grad = torch.full((10,), 3.0)
    LAMB([parameter], lr=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.full((10,), -0.1))


def test_groups_have_their_own_values_and_what_has_no_gradient_stays() -> None:
    a, b, idle = (torch.nn.Parameter(torch.ones(5)) for _ in range(3))
    optimizer = LAMB([{"params": [a], "lr": 0.0}, {"params": [b, idle], "weight_decay": 0.0}], lr=0.1)
    a.grad = b.grad = torch.ones(5)
    optimizer.step()
    assert torch.equal(a, idle) and not torch.equal(b, idle)
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_as_the_old_one(dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(weight) for weight in tensors(0, *SHAPES, dtype=dtype)]
    optimizer = LAMB(parameters, lr=0.05)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = LAMB(copies, lr=1.0)

    def step(steps: range, which: torch.optim.Optimizer, own: list[torch.nn.Parameter]) -> None:
        for number in steps:
            for parameter, gradient in zip(own, tensors(number, *SHAPES, dtype=dtype), strict=True):
                parameter.grad = gradient
            which.step()

    step(range(1, 4), optimizer, parameters)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for copied, parameter in zip(copies, parameters, strict=True):
        copied.data.copy_(parameter)
    step(range(4, 7), optimizer, parameters)
    step(range(4, 7), other, copies)
    assert all(torch.equal(copied, parameter) for copied, parameter in zip(copies, parameters, strict=True))
    assert other.state[copies[0]]["exp_avg"].dtype == torch.float32
    assert int(other.state[copies[0]]["step"]) == 6


def test_a_closure_is_called_with_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = LAMB([parameter], lr=0.1)

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    assert optimizer.step(closure) == 3.0
    assert float(parameter[0]) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -1.0}, "lr -1.0 is out of range"),
        ({"lr": float("nan")}, "lr nan is out of range"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"max_weight_norm": 0.0}, "max_weight_norm 0.0 is out of range"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LAMB([torch.nn.Parameter(torch.ones(1))], **wrong)  # type: ignore[arg-type]
