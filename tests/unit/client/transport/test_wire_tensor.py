"""Tensors in wire form: what comes back is what was sent, and answers that do not fit are refused."""

from __future__ import annotations

import math

import pytest
import torch

from swarm_client.adapters.snapshots import NOTHING, ActiveAdapter, AdapterSnapshot
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_protocol.errors import BadReply, NotFinite
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.codec import decode, decode_mask
from swarm_protocol.wire.constants import PART_BYTES

HIDDEN = torch.randn(1, 2, 4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 0, 5), (1, 3, PART_BYTES // 4)], ids=["small", "empty", "in-parts"])
def test_raw_tensors_come_back_as_they_were(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    wire = WireTensor.of(tensor)
    assert len(wire.parts) == max(0, -(-tensor.numel() * dtype.itemsize // PART_BYTES) - 1)
    assert torch.equal(wire.decode(shape, dtype), tensor)


# ---------------------------------------------------------------- answers that do not fit


@pytest.mark.parametrize(
    "answer",
    [HIDDEN[:, :1], HIDDEN[0], HIDDEN.double().long(), HIDDEN.half(), HIDDEN.view(2, 1, 4)],
)
def test_another_shape_or_dtype_is_refused(answer: torch.Tensor) -> None:
    with pytest.raises(BadReply, match=r"expected \[1, 2, 4\] of torch.float32"):
        WireTensor.of(answer).decode(HIDDEN.shape, HIDDEN.dtype)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    answer = HIDDEN.clone()
    answer[0, 1, 2] = value
    with pytest.raises(NotFinite, match="not finite"):
        WireTensor.of(answer).decode(HIDDEN.shape, HIDDEN.dtype)


def test_what_is_cut_off_or_malformed_is_refused() -> None:
    wire = WireTensor.of(HIDDEN)
    cut = pb.Tensor.FromString(wire.header.SerializeToString())
    cut.data = cut.data[:-1]
    for bad in (WireTensor(cut), WireTensor(wire.header, (b"x",)), WireTensor(pb.Tensor(size_bytes=2**60))):
        with pytest.raises(BadReply):
            bad.decode(HIDDEN.shape, HIDDEN.dtype)


# ---------------------------------------------------------------- what accompanies them


def test_the_context_of_hidden_states_alone_is_empty() -> None:
    assert Context.of(BlockInput(HIDDEN)) == Context(None, None, NOTHING, 0, packed=False)


def test_the_context_is_what_the_blocks_need_beside_hidden_states() -> None:
    mask, positions = torch.tensor([[0, 1, 1]]), torch.tensor([[4, 5]], dtype=torch.int32)
    adapter = AdapterSnapshot(ActiveAdapter(name="polite"))
    context = Context.of(BlockInput(HIDDEN, mask, positions, packed=True), adapter, dropout_seed=3)
    assert torch.equal(decode_mask(context.attention_mask, 1, 3), mask)
    assert torch.equal(decode(context.position_ids), positions.int())
    assert (context.adapter, context.dropout_seed, context.packed) == (adapter, 3, True)


def test_a_mask_of_ones_travels_empty() -> None:
    context = Context.of(BlockInput(HIDDEN, torch.ones(1, 3, dtype=torch.bool)))
    assert context.attention_mask == pb.AttentionMask()
