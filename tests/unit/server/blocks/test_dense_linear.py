"""Unquantised layers on CPU compute the same with oneDNN as without, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.blocks import dense_linear
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.dense_linear import use_onednn_
from swarm_server.engine.engine import Engine
from tests.zoo import BLOCKS, HIDDEN, save_checkpoint

HOSTED = Span(0, BLOCKS)
needs_onednn = pytest.mark.skipif(not dense_linear.is_available(), reason="this torch does not offer oneDNN's product")


@pytest.fixture
def products(monkeypatch) -> list[torch.Tensor]:
    """Of oneDNN, as they are computed."""
    found, multiply = [], dense_linear._multiply

    def spied(*arguments: torch.Tensor) -> torch.Tensor:
        found.append(multiply(*arguments))
        return found[-1]

    monkeypatch.setattr(dense_linear, "_multiply", spied)
    return found


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_first_caller_s_default_dtype_decides_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[torch.dtype] = []

    def spied(*arguments: torch.Tensor) -> torch.Tensor:
        multiplied.extend(each.dtype for each in arguments)
        return multiply(*arguments)

    multiply = dense_linear._multiply
    monkeypatch.setattr(dense_linear, "_multiply", spied)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert dense_linear.is_available.__wrapped__()
    finally:
        torch.set_default_dtype(before)
    assert multiplied == [torch.float32] * 3


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (2, 5), (2, 0), (70, 3), (2, 3, 4)])
def test_products(shape, bias, products):
    original = nn.Linear(64, 48, bias=bias).requires_grad_(False)
    module = copy.deepcopy(original)
    use_onednn_(module)
    x, grad = torch.randn(*shape, 64, requires_grad=True), torch.randn(*shape, 48)
    found, expected = module(x), original(x)
    (found_grad,), (expected_grad,) = (torch.autograd.grad(output, x, grad) for output in (found, expected))
    if x.numel():
        assert_same(found, expected)
        assert_same(found_grad, expected_grad)
    assert found.shape == expected.shape and found_grad.shape == x.shape
    with torch.inference_mode():
        assert torch.equal(module(x), found)
    assert len(products) == 3


@needs_onednn
def test_gradients_of_a_sum():
    original = nn.Linear(64, 48).requires_grad_(False)
    module = copy.deepcopy(original)
    use_onednn_(module)
    x = torch.randn(5, 64, requires_grad=True)
    grads = [torch.autograd.grad(linear(x).sum(), x)[0] for linear in (module, original)]
    assert_same(*grads)


@needs_onednn
@pytest.mark.parametrize("family", ["llama", "falcon-7b", "opt", "mixtral"])
def test_blocks(family, tmp_path, products):
    save_checkpoint(family, tmp_path)
    plain, fast = (
        Engine(load_blocks(ModelCheckpoint.open(tmp_path), HOSTED, transform=transform)).stateless
        for transform in (None, lambda block, _index: use_onednn_(block))
    )
    hidden, grad = torch.randn(3, 7, HIDDEN), torch.randn(3, 7, HIDDEN)
    products.clear()
    assert_same(fast.forward(HOSTED, BlockInput(hidden)), plain.forward(HOSTED, BlockInput(hidden)))
    assert len(products) >= 4 * BLOCKS
    found, expected = (engine.backward(HOSTED, BlockInput(hidden.clone()), grad)[0] for engine in (fast, plain))
    assert_same(found, expected)


@needs_onednn
def test_other_layers_are_left_alone(products):
    trainable, half = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
    use_onednn_(nn.Sequential(trainable, half))
    trainable(torch.randn(2, 8)).sum().backward()
    assert trainable.weight.grad is not None
    half.bfloat16()(torch.randn(2, 8).bfloat16())
    assert not products


def test_without_the_operator(monkeypatch):
    def gone(*_arguments: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(dense_linear, "_multiply", gone)
    dense_linear.is_available.cache_clear()
    try:
        linear = nn.Linear(8, 8).requires_grad_(False)
        use_onednn_(linear)
        assert linear(torch.randn(2, 8)).shape == (2, 8)
    finally:
        monkeypatch.undo()
        dense_linear.is_available.cache_clear()
