"""The stage whose computing is measured, and what shares of time are made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[5] / "benchmarks"))

from square_cube import COMPUTED, GIVEN, HIDDEN, LENGTH, Cell, Cost, costs, power
from square_cube_stage import MiddleStage, Shape, packed, unpacked


@pytest.mark.parametrize("layers", ["none", "bottleneck:4"])
def test_a_backward_pass_gives_the_gradient_of_what_the_stage_was_sent(layers: str) -> None:
    stage = MiddleStage(Shape(64, 2, layers))
    inputs = torch.randn(1, 5, 64 if layers == "none" else 16, generator=torch.Generator().manual_seed(1))
    grad = torch.randn_like(inputs)
    whole = inputs.clone().requires_grad_()
    (stage(whole) * grad).sum().backward()
    torch.testing.assert_close(stage.backward(inputs, grad), whole.grad)


def test_operations_are_two_for_each_weight_and_pass() -> None:
    """Of linear layers: forward twice, and backward twice as much; attention's own products come on top."""
    shape = Shape(128, 2, "none")
    weights = sum(parameter.numel() for parameter in MiddleStage(shape).trained if parameter.ndim == 2)
    assert shape.flops(0) == 4 * 2 * weights
    assert shape.flops(10) - shape.flops(0) == 4 * 2 * 2 * 10 * 128
    assert Shape.parse(str(shape)) == shape


def test_shares_are_those_of_bytes_and_seconds() -> None:
    """1 ms of computing; five tensors of 1024 × 4 bytes at 100 Mbit/s are 1.6384 ms, three of them 0.98304."""
    cell = Cell(Cost(Shape(1024, 1, "none"), 1e-3, GIVEN), "fp32", 100)
    assert cell.share == pytest.approx(1.6384 / 2.6384)
    assert cell.busy == 1.0
    half = Cell(Cost(Shape(1024, 1, "none"), 0.49152e-3, GIVEN), "fp32", 100)
    assert half.busy == pytest.approx(0.5)


def test_beyond_what_is_measured_operations_decide() -> None:
    found = list(costs("none", 1, largest=HIDDEN[0], rounds=1, gflops=None))
    assert [cost.source for cost in found[1:]] == [COMPUTED] * (len(HIDDEN) - 1)
    first, last = found[0], found[-1]
    ratio = last.shape.flops(LENGTH) / first.shape.flops(LENGTH)
    assert last.computing_s / first.computing_s == pytest.approx(ratio)
    given = list(costs("none", 1, largest=0, rounds=1, gflops=100.0))
    assert power([Cell(cost, "fp32", 100) for cost in given]) == pytest.approx(-1.0, abs=0.02)


@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 0.0), ("bf16", 0.01), ("int8", 0.02)])
def test_what_is_packed_comes_out(codec: str, tolerance: float) -> None:
    tensor = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    assert (unpacked(packed(tensor, codec)) - tensor).abs().max() <= tolerance * tensor.abs().max()
