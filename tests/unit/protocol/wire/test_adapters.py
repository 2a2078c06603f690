"""Adapters on the wire: what comes back is what was sent, and what is no adapter is refused with a sentence."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import MAX_PARTS, Adapter, LowRank, Prompt, adapter_key
from swarm_protocol.wire.codec import encode

SALT = bytes(16)
WHOLE = Adapter(
    SALT,
    tuple(LowRank(block, "self_attn.q_proj", 1.5, torch.randn(2, 8), torch.randn(6, 2), 0.25) for block in range(4)),
    tuple(Prompt(block, torch.randn(3, 8)) for block in (0, 2)),
)


def test_there_and_back():
    data, key = WHOLE.serialize()
    parsed = Adapter.parse(data)
    assert parsed.salt == SALT and key == adapter_key(data) == WHOLE.serialize()[1]
    assert [(p.block, p.module, p.scaling, p.dropout) for p in parsed.low_rank] == [
        (block, "self_attn.q_proj", 1.5, 0.25) for block in range(4)
    ]
    assert [prompt.block for prompt in parsed.prompts] == [0, 2]
    assert all(map(torch.equal, parsed.tensors, WHOLE.tensors))
    assert len(parsed.tensors) == len(WHOLE.tensors) == 10


def test_over_a_span_in_order():
    part = WHOLE.over(Span(1, 3))
    assert [p.block for p in part.low_rank] == [1, 2] and [p.block for p in part.prompts] == [2]
    assert len(part.tensors) == 5 and part.tensors[1] is WHOLE.low_rank[1].b
    assert part.serialize()[1] != WHOLE.serialize()[1]
    assert WHOLE.over(Span(9, 10)).is_empty


def test_another_salt_is_another_key():
    assert Adapter(bytes(15) + b"1", WHOLE.low_rank).serialize()[1] != Adapter(SALT, WHOLE.low_rank).serialize()[1]


def message(**fields) -> bytes:
    part = dict(block=1, module="q", scaling=1.0, a=tensor(2, 8), b=tensor(6, 2)) | fields
    return pb.Adapter(salt=SALT, low_rank=[pb.LowRank(**part)]).SerializeToString()


def tensor(*shape: int, value: float = 0.0, **fields) -> pb.Tensor:
    wire = encode(torch.full(shape, value))[0]
    wire.MergeFrom(pb.Tensor(**fields))
    return wire


BAD = {
    "no message": (b"\xff\xff\xff", "cannot be read"),
    "cut off": (message()[:-3], "cannot be read"),
    "bytes that are no text": (message().replace(b"\x12\x01q", b"\x12\x01\xff"), "cannot be read"),
    "nothing": (b"", "salt has 0 bytes: expected 16"),
    "short salt": (pb.Adapter(salt=b"123").SerializeToString(), "salt has 3 bytes: expected 16"),
    "ranks": (message(b=tensor(6, 3)), r"shapes \[2, 8\] and \[6, 3\]: no rank fits"),
    "no matrix": (message(a=tensor(2, 8, 1)), "no matrix in float32"),
    "other dtype": (message(a=encode(torch.zeros(2, 8).half())[0]), "no matrix in float32"),
    "no tensors": (message(a=None), "DTYPE|dtype 0 is unknown"),
    "incomplete": (message(a=pb.Tensor(dtype=pb.FLOAT32, shape=[2, 8], size_bytes=64)), "is incomplete"),
    "other size": (message(a=pb.Tensor(dtype=pb.FLOAT32, shape=[2, 8], size_bytes=9)), "takes 64 bytes, not 9"),
    "nan": (message(a=tensor(2, 8, value=float("nan"))), "is not finite"),
    "infinity": (message(b=tensor(6, 2, value=float("inf"))), "is not finite"),
    "scaling": (message(scaling=float("nan")), "scaling nan or dropout 0.0 is out of range"),
    "dropout": (message(dropout=1.0), "dropout 1.0 is out of range"),
    "negative dropout": (message(dropout=-0.5), "dropout -0.5 is out of range"),
    "prompt": (
        pb.Adapter(salt=SALT, prompts=[pb.Prompt(values=tensor(8))]).SerializeToString(),
        "no matrix in float32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    data, sentence = BAD[name]
    with pytest.raises(RequestRejected, match=sentence):
        Adapter.parse(data)


@given(st.binary(max_size=200))
def test_whatever_bytes_come(data):
    with pytest.raises(RequestRejected):
        Adapter.parse(data + b"\x00")


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_spoiled_adapter_is_refused_or_read(position, change):
    data = bytearray(WHOLE.serialize()[0])
    data[position % len(data)] ^= change
    with contextlib.suppress(RequestRejected):
        Adapter.parse(bytes(data))


@pytest.mark.slow
def test_many_tiny_parts_take_no_memory():
    empty = pb.Prompt(values=tensor(1, 1)).SerializeToString()
    data = b"\x1a" + bytes([len(empty)]) + empty
    tracemalloc.start()
    try:
        with pytest.raises(RequestRejected, match=f"more than {MAX_PARTS} parts"):
            Adapter.parse(data * (2 * MAX_PARTS))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
