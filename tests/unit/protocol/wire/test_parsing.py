"""Bytes of strangers: what is a message is read like protobuf does, what is none or would take much memory is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.parsing import MAX_FIELDS, parse

MANY = 100_000
LARGE = bytes(MANY)
BEHIND = pb.SessionRequest(more=LARGE).SerializeToString()  # a field that a nested message before it runs into


def step(**fields: object) -> pb.SessionRequest:
    return pb.SessionRequest(step=pb.Step(number=3, hidden=pb.Tensor(shape=[1, 2, 3], data=LARGE), **fields))


@pytest.mark.parametrize(
    "message",
    [
        pb.SessionRequest(),
        step(),
        step(changes=[pb.Change(reorder=pb.Reorder(indices=range(4096)))] * 8, outputs_wanted=0),
        pb.ServerRecord(next_hop_rtts_s={"a": 1.0, "b": 2.0}, adapters=["x" * MANY], tokens_per_s=1.5),
        pb.RerouteRequest(resend=[step(position_ids=pb.Tensor(shape=[1, 64], data=bytes(256))).step] * 64),
    ],
    ids=["empty", "step", "changes", "record", "reroute"],
)
def test_messages(message: object) -> None:
    assert parse(type(message), message.SerializeToString()) == message


RECORD = pb.ServerRecord(adapters=["x" * MANY]).SerializeToString()
NO_MESSAGES = {
    "noise": (pb.SessionRequest, b"\xff\xff\xff"),
    "cut-off": (pb.SessionRequest, b"\x12\x05\x08"),
    "much-noise": (pb.SessionRequest, b"\xff" * MANY),
    "cut-off-late": (pb.SessionRequest, pb.SessionRequest(more=LARGE).SerializeToString()[:-1]),
    "groups": (pb.SessionRequest, b"\x0b" * MANY),
    "no-value": (pb.SessionRequest, step().SerializeToString() + b"\x08"),
    "no-unicode": (pb.Contract, b"\x12\x01\xff"),
    "nested-bytes-past-the-end": (pb.SessionRequest, b"\x12\x02\x22\x7f" + BEHIND),
    "nested-number-past-the-end": (pb.SessionRequest, b"\x12\x01\x08" + BEHIND),
    "nested-float-past-the-end": (pb.ServerRecord, b"\x82\x01\x01\x15" + RECORD),
}


@pytest.mark.parametrize(("kind", "data"), NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_refused(kind: type, data: bytes) -> None:
    with pytest.raises(RequestRejected, match=f"the bytes sent are no message: expected a {kind.__name__}"):
        parse(kind, data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (pb.SessionRequest, pb.SessionRequest(step=pb.Step(changes=[pb.Change()] * MANY)).SerializeToString()),
        (pb.RerouteRequest, pb.RerouteRequest(resend=[pb.Step()] * MANY).SerializeToString()),
        (pb.ServerRecord, pb.ServerRecord(addresses=[""] * MANY).SerializeToString()),
        (pb.Reorder, b"\x08\x01" * MANY),
        (pb.Reorder, b"\x78\x01" * MANY),
    ],
    ids=["changes", "resend", "addresses", "not-packed", "unknown"],
)
def test_very_many_fields_are_refused_unread(kind: type, data: bytes) -> None:
    with pytest.raises(RequestRejected, match=f"very many fields: expected at most {MAX_FIELDS}"):
        parse(kind, data)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_protobuf_does_or_refused(noise: bytes) -> None:
    for data in (noise, noise + step().SerializeToString()):
        try:
            message = parse(pb.SessionRequest, data)
        except RequestRejected:
            continue
        assert message == pb.SessionRequest.FromString(data)
