"""The client's side of the wire: what a server answers is checked, and its failures become our errors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import grpc
import pytest
import torch

from swarm_client.routing import Hop
from swarm_client.transport import Context, HopSession, WireTensor
from swarm_protocol.errors import BadReply, PeerBusy, PeerError, PeerUnavailable, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from tests.unit.support import run, server_record

HIDDEN = torch.randn(1, 2, 4)


class FakeCall:
    """The stream to a server that gives the answers it is told to, then ends with a status."""

    def __init__(self, replies: Iterable[pb.SessionReply], code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        self.written: list[pb.SessionRequest] = []
        self._replies = iter(replies)
        self._code = code

    async def write(self, request: pb.SessionRequest) -> None:
        self.written.append(request)

    async def read(self) -> pb.SessionReply | object:
        return next(self._replies, grpc.aio.EOF)

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        return "details"


def step(call: FakeCall, hidden: torch.Tensor = HIDDEN) -> WireTensor:
    session = HopSession(Hop(server_record("peer"), Span(0, 4)), call, step_timeout_s=5)
    return run(session.step(3, WireTensor.of(hidden), Context(None, None)))


def failure(status: int) -> pb.SessionReply:
    return pb.SessionReply(failure=pb.Failure(status=status, message="what happened"))


def test_a_step_sends_and_returns_hidden_states() -> None:
    sent, answered = torch.randn(1, 3, 2**18), torch.randn(1, 3, 2**18)
    outgoing, incoming = WireTensor.of(sent), WireTensor.of(answered)
    assert len(outgoing.parts) == len(incoming.parts) == 2
    call = FakeCall([pb.SessionReply(output=incoming.header), *(pb.SessionReply(more=part) for part in incoming.parts)])
    assert torch.equal(step(call, sent).decode(answered), answered)
    assert call.written == [
        pb.SessionRequest(step=pb.Step(start_position=3, hidden=outgoing.header)),
        *(pb.SessionRequest(more=part) for part in outgoing.parts),
    ]


@pytest.mark.parametrize("answer", [HIDDEN[:, :1], HIDDEN[0], HIDDEN.half(), HIDDEN.view(2, 1, 4)])
def test_an_answer_of_another_shape_or_dtype_is_the_fault_of_its_server(answer: torch.Tensor) -> None:
    with pytest.raises(BadReply, match=r"expected \[1, 2, 4\] of FLOAT32") as caught:
        step(FakeCall([pb.SessionReply(output=WireTensor.of(answer).header)]))
    assert (caught.value.peer_id, caught.value.span) == ("peer", Span(0, 4))


def test_an_endless_answer_is_not_read() -> None:
    header = WireTensor.of(HIDDEN).header
    header.size_bytes = 2**40
    with pytest.raises(BadReply, match="broken answer"):
        step(FakeCall([pb.SessionReply(output=header)]))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], PeerBusy),
        (grpc.StatusCode.INVALID_ARGUMENT.value[0], RequestRejected),
        (grpc.StatusCode.INTERNAL.value[0], PeerError),
        (0, PeerError),
        (4_000_000_000, PeerError),  # no status of gRPC
    ],
)
def test_a_refusal_becomes_its_error(status: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="what happened") as caught:
        step(FakeCall([failure(status)]))
    assert type(caught.value) is error
    if isinstance(caught.value, PeerError):
        assert (caught.value.peer_id, caught.value.span) == ("peer", Span(0, 4))


def test_the_end_of_the_stream_becomes_its_error() -> None:
    with pytest.raises(PeerUnavailable, match="details") as caught:
        step(FakeCall([], grpc.StatusCode.UNAVAILABLE))
    assert (caught.value.peer_id, caught.value.span) == ("peer", Span(0, 4))


@pytest.mark.parametrize("reply", [pb.SessionReply(), pb.SessionReply(more=b"x"), pb.SessionReply(opened=pb.Opened())])
def test_an_answer_out_of_turn_is_a_bad_reply(reply: pb.SessionReply) -> None:
    with pytest.raises(BadReply, match="out of turn"):
        step(FakeCall([reply]))


class TestAnswers:
    @pytest.mark.parametrize(
        "answer",
        [HIDDEN[:, :1], HIDDEN[0], HIDDEN.double().long(), HIDDEN.half(), HIDDEN.view(2, 1, 4)],
    )
    def test_of_another_shape_or_dtype_are_bad(self, answer: torch.Tensor) -> None:
        with pytest.raises(BadReply, match=r"expected \[1, 2, 4\] of torch.float32"):
            WireTensor.of(answer).decode(HIDDEN)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_that_are_not_finite_are_bad(self, value: float) -> None:
        answer = HIDDEN.clone()
        answer[0, 1, 2] = value
        with pytest.raises(BadReply, match="not finite"):
            WireTensor.of(answer).decode(HIDDEN)

    def test_that_are_cut_off_or_malformed_are_bad(self) -> None:
        wire = WireTensor.of(HIDDEN)
        cut = pb.Tensor.FromString(wire.header.SerializeToString())
        cut.data = cut.data[:-1]
        for bad in (WireTensor(cut), WireTensor(wire.header, (b"x",)), WireTensor(pb.Tensor(size_bytes=2**60))):
            with pytest.raises(BadReply):
                bad.decode(HIDDEN)
