"""Bytes of a token, against what is really encoded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[5] / "benchmarks"))

from link_cost import LinkCost

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import encode
from swarm_training.stages.compress.layers import boundary

TOKENS = 32


def encoded_bytes(travels: torch.Tensor, codec: str) -> int:
    if codec == "bf16":
        travels = travels.bfloat16()
    wire, parts = encode(travels, pb.INT8_BLOCKS if codec == "int8" else pb.RAW)
    assert len(wire.data) + sum(map(len, parts)) == wire.size_bytes
    return wire.size_bytes


@pytest.mark.parametrize("layers", ["none", "bottleneck:4", "maxout:2"])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_bytes_are_those_of_the_wire(layers: str, codec: str) -> None:
    down, up = boundary(layers, 256)
    travels = down(torch.randn(2, TOKENS // 2, 256, generator=torch.Generator().manual_seed(1)))
    cost = LinkCost.of(layers, 256, codec)
    assert TOKENS * cost.activation_bytes == encoded_bytes(travels, codec)
    assert TOKENS * cost.gradient_bytes == encoded_bytes(torch.zeros_like(travels), codec)
    assert up(travels).shape == (2, TOKENS // 2, 256)


def test_a_middle_stage_receives_three_tensors_and_sends_two() -> None:
    cost = LinkCost.of("bottleneck:4", 1024, "int8", "bf16")
    activations, gradients = 256 * 68 / 64, 256 * 2
    assert (cost.activation_bytes, cost.gradient_bytes) == (activations, gradients)
    assert cost.received_bytes == 2 * activations + gradients and cost.sent_bytes == activations + gradients
    assert cost.alone_s(100e6) == pytest.approx(8 * (3 * activations + 2 * gradients) / 100e6)
    assert cost.overlapped_s(100e6) == pytest.approx(8 * (2 * activations + gradients) / 100e6)


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="codec 'int4' is unknown: expected one of fp64, fp32, bf16, int8"):
        LinkCost.of("none", 64, "int4")
    with pytest.raises(ValueError, match="expected a factor that divides it"):
        LinkCost.of("maxout:3", 64)
