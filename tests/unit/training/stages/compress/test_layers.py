"""Layers between stages: against the formulas, against one graph for both stages, and a model that learns with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from swarm_training.stages.compress.layers import BoundaryCompression, boundary

HIDDEN = 24
NAMES = ["none", "bottleneck:4", "bottleneck:3", "maxout:2", "maxout:8"]


def halves(name: str, hidden_size: int = HIDDEN, seed: int = 7) -> tuple[nn.Module, nn.Module]:
    """In float64, with norms that are not at their first values."""
    generator = torch.Generator().manual_seed(seed)
    down, up = boundary(name, hidden_size, seed)
    for module in (*down.modules(), *up.modules()):
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3, generator=generator)
            nn.init.normal_(module.bias, 0.0, 0.3, generator=generator)
    return down.double(), up.double()


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def by_formula(name: str, down: nn.Module, up: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What travels, and what comes out."""
    kind, factor = BoundaryCompression.parse(name).kind, BoundaryCompression.parse(name).factor
    if kind == "none":
        return hidden, hidden
    first, narrow, second = down
    normal = norm(hidden, first.weight, first.bias)
    if kind == "bottleneck":
        mixed = torch.einsum("bnh,wh->bnw", normal, narrow.weight)
    else:
        mixed = torch.stack([normal[..., i : i + factor].amax(-1) for i in range(0, HIDDEN, factor)], -1)
    travels = norm(mixed, second.weight, second.bias)
    return travels, torch.einsum("bnw,hw->bnh", travels, up.weight)


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_formulas(name: str) -> None:
    down, up = halves(name)
    parameters = [*down.parameters(), *up.parameters()]
    hidden, grad = random(2, 5, HIDDEN).requires_grad_(), random(2, 5, HIDDEN, seed=2)
    travels = down(hidden)
    out = up(travels)
    expected_travels, expected = by_formula(name, down, up, hidden)
    assert travels.shape == (2, 5, BoundaryCompression.parse(name).width(HIDDEN))
    torch.testing.assert_close(travels, expected_travels)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out, [hidden, *parameters], grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [hidden, *parameters], grad))


def test_of_equal_neighbours_the_first_has_the_gradient() -> None:
    down, _ = boundary("maxout:2", 4)
    inputs = torch.tensor([3.0, 3.0, -1.0, 2.0], requires_grad=True)
    (found,) = torch.autograd.grad(down[1](inputs), inputs, torch.tensor([5.0, 7.0]))
    assert found.tolist() == [5.0, 0.0, 0.0, 7.0]


@pytest.mark.parametrize("name", NAMES)
def test_each_half_is_the_same_wherever_it_is_made(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    ours = boundary(name, HIDDEN, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    theirs, others = boundary(name, HIDDEN, seed=3), boundary(name, HIDDEN, seed=4)
    for half, same, other in zip(ours, theirs, others, strict=True):
        pairs = zip(half.state_dict().values(), same.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert not half.state_dict() or name.startswith("maxout") or str(half.state_dict()) != str(other.state_dict())


@pytest.mark.parametrize("name", ["bottleneck:4", "maxout:4"])
def test_variance_is_kept_at_first(name: str) -> None:
    down, up = boundary(name, 512)
    hidden = 30 * random(64, 512).float()
    travels = down(hidden)
    assert travels.std().item() == pytest.approx(1.0, rel=0.05)
    assert up(travels).std().item() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("name", ["", "bottle:4", "bottleneck", "bottleneck:1", "maxout:-2", "maxout:2.0", "none:2"])
def test_layers_that_are_unknown_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected none, or bottleneck or maxout with the factor"):
        boundary(name, HIDDEN)


def test_a_factor_must_divide_the_hidden_size() -> None:
    with pytest.raises(ValueError, match="maxout:7 cannot stand between stages of hidden size 24"):
        boundary("maxout:7", HIDDEN)
