"""8-bit states: how many bytes, how close to 32 bits, and the same bits on all peers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from swarm_training.optim.lamb import LAMB
from swarm_training.optim.offload import AdamW8bit, LAMB8bit, Offloaded8bit

RULES = pytest.mark.parametrize("eight_bit", [LAMB8bit, AdamW8bit])


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.LayerNorm(64))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """To invert a rotation; returns the last loss."""
    generator = torch.Generator().manual_seed(7)
    rotation = torch.linalg.qr(torch.randn(64, 64, generator=generator))[0]
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (net(x @ rotation) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())


@pytest.mark.parametrize("shape", [(100, 100), (64, 64), (4096,), (4095,), (5,)])
def test_bytes_of_the_state(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = LAMB8bit([parameter])
    for _ in range(3):
        parameter.grad = torch.randn(shape)
        optimizer.step()
    n = parameter.numel()
    expected = 2 * (n + 4 * math.ceil(n / 256)) if n >= 4096 else 2 * 4 * n
    assert state_bytes(optimizer) == expected + 8, "two moments, and the number of steps"
    if n >= 4096:
        assert state_bytes(optimizer) < 0.26 * 8 * n
    held = [value for state in optimizer.state.values() for value in state.values()]
    assert all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in held)


@pytest.mark.parametrize(
    ("eight_bit", "thirty_two_bit", "options", "tolerance"),
    [(AdamW8bit, torch.optim.AdamW, {"eps": 1e-8, "weight_decay": 0.1}, 1e-5), (LAMB8bit, LAMB, {}, 0.0)],
)
def test_where_nothing_is_quantised_it_is_the_usual_optimizer(
    eight_bit: type, thirty_two_bit: type, options: dict[str, float], tolerance: float
) -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 1000)) for _ in range(2))
    a, b = eight_bit([ours], lr=0.01, **options), thirty_two_bit([theirs], lr=0.01, **options)
    for step in range(10):
        ours.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)


@RULES
def test_losses_are_those_of_32_bits(eight_bit: type[Offloaded8bit]) -> None:
    lr, thirty_two_bit = (0.02, LAMB) if eight_bit is LAMB8bit else (0.003, torch.optim.AdamW)
    ours, theirs = model(), model()
    eight, full = eight_bit(ours.parameters(), lr=lr), thirty_two_bit(theirs.parameters(), lr=lr)
    start = train(model(), torch.optim.SGD(model().parameters(), lr=0.0), range(1))
    loss, reference = train(ours, eight, range(150)), train(theirs, full, range(150))
    assert reference < start / 5
    assert loss == pytest.approx(reference, rel=0.1)


@RULES
def test_peers_stay_bit_identical_and_a_joiner_becomes_one(eight_bit: type[Offloaded8bit]) -> None:
    first, second = model(), model()
    a, b = (eight_bit(net.parameters(), lr=0.01) for net in (first, second))
    for net, optimizer in ((first, a), (second, b)):
        train(net, optimizer, range(5))
    joiner = model(seed=1)
    c = eight_bit(joiner.parameters())
    joiner.load_state_dict(first.state_dict())
    c.load_state_dict(copy.deepcopy(a.state_dict()))
    assert state_bytes(c) == state_bytes(a)
    for net, optimizer in ((first, a), (second, b), (joiner, c)):
        train(net, optimizer, range(5, 10))
    for x, y, z in zip(first.parameters(), second.parameters(), joiner.parameters(), strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_a_loaded_state_is_no_view_of_the_old_one() -> None:
    net, other = model(), model()
    a, b = LAMB8bit(net.parameters()), LAMB8bit(other.parameters())
    train(net, a, range(2))
    state = a.state_dict()
    b.load_state_dict(state)
    before = copy.deepcopy(state)
    train(other, b, range(2, 4))
    for index, tensors in before["state"].items():
        assert all(torch.equal(value, state["state"][index][name]) for name, value in tensors.items())


def test_parameters_of_16_bits_keep_their_dtype() -> None:
    parameter = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    optimizer = LAMB8bit([parameter], lr=0.1, weight_decay=0.0)
    parameter.grad = torch.ones(5000, dtype=torch.bfloat16)
    optimizer.step()
    assert parameter.dtype == torch.bfloat16
    torch.testing.assert_close(parameter.float(), torch.full((5000,), 0.9), rtol=0.01, atol=0)
