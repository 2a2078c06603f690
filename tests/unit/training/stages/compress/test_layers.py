"""Layers between stages: against the formulas, against one graph for both stages, and a model that learns with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import decode, encode
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


@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_two_graphs_are_those_of_one(name: str) -> None:
    """As stages do it: the second gives the gradient of what it was sent, the first goes on with it."""
    down, up = halves(name)
    before, after = nn.Linear(6, HIDDEN).double(), nn.Linear(HIDDEN, 3).double()
    first, second = nn.Sequential(before, down), nn.Sequential(up, after)
    inputs, grad = random(4, 6), random(4, 3, seed=2)
    whole = torch.autograd.grad(second(first(inputs)), [*first.parameters(), *second.parameters()], grad)
    arrived = first(inputs).detach().requires_grad_()
    *seconds, sent_back = torch.autograd.grad(second(arrived), [*second.parameters(), arrived], grad)
    firsts = torch.autograd.grad(first(inputs), list(first.parameters()), sent_back)
    assert all(torch.equal(a, b) for a, b in zip(whole, [*firsts, *seconds], strict=True))


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


# ---------------------------------------------------------------- learning

VOCAB, LENGTH, ROWS, SIZE = 16, 24, 16, 48


class Sent(torch.autograd.Function):
    """What another stage makes of what it is sent, in both directions."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, codec: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.codec = codec  # type: ignore[attr-defined]
        return codec(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.codec(grad), None  # type: ignore[attr-defined]


def int8(x: Tensor) -> Tensor:
    wire, parts = encode(x, pb.INT8_BLOCKS)
    assert not parts
    return decode(wire)


def batch(index: int) -> Tensor:
    """int64 [ROWS, LENGTH]: a token follows from the two before it."""
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(index))
    for place in range(2, LENGTH):
        ids[:, place] = (3 * ids[:, place - 1] + 5 * ids[:, place - 2] + 7) % VOCAB
    return ids


class Block(nn.TransformerEncoderLayer):
    """A Transformer block of pre-norm causal attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__(SIZE, 4, 4 * SIZE, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        return super().forward(hidden, src_mask=causal, is_causal=True)


class TwoStages(nn.Module):
    def __init__(self, layers: str, codec: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.codec = codec
        self.embedding = nn.Embedding(VOCAB, SIZE)
        self.positions = nn.Parameter(torch.randn(LENGTH, SIZE) * 0.02)
        self.first, self.second = Block(), Block()
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, VOCAB)
        self.down, self.up = boundary(layers, SIZE, seed=5)

    def loss(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids[:, :-1]) + self.positions[: LENGTH - 1]
        arrived: Tensor = Sent.apply(self.down(self.first(hidden)), self.codec)
        logits = self.head(self.norm(self.second(self.up(arrived))))
        return functional.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, 2:].flatten())


def trained(layers: str, codec: Callable[[Tensor], Tensor] = lambda x: x, steps: int = 200) -> float:
    """The loss of batches that were not trained on; chance is log(16) = 2.77."""
    torch.manual_seed(0)
    model = TwoStages(layers, codec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(batch(step)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(torch.stack([model.loss(batch(10**6 + i)) for i in range(4)]).mean())


@pytest.mark.long
def test_a_model_learns_nearly_as_well_with_them() -> None:
    plain = trained("none")
    assert plain < 0.5
    assert trained("maxout:2") < plain + 0.15
    assert trained("maxout:2", int8) < plain + 0.15
    assert trained("bottleneck:2") < plain + 0.3
    assert trained("bottleneck:4", int8) < plain + 0.5
