"""The error taxonomy: what a server raises is what its client catches."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from swarm_protocol.errors import (
    AccessDenied,
    BadReply,
    CheckpointError,
    NoRoute,
    PeerBusy,
    PeerError,
    PeerMoved,
    PeerUnavailable,
    RequestRejected,
    SessionLost,
    SwarmError,
    TrainingDiverged,
    UnsupportedModel,
)
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksServicer, BlocksStub, add_BlocksServicer_to_server
from swarm_protocol.rpc.channels import translated
from swarm_protocol.span import Span
from swarm_protocol.wire.status import from_status, number_of, status_of
from tests.unit.support import run


@pytest.mark.parametrize("error", [PeerUnavailable, PeerBusy, PeerMoved, SessionLost, PeerError])
def test_errors_of_a_server_survive_the_wire(error: type[PeerError]) -> None:
    sent = error("what happened")
    caught = from_status(status_of(sent), str(sent), "peer", Span(2, 5))
    assert type(caught) is error
    assert (str(caught), caught.peer_id, caught.span) == ("what happened", "peer", Span(2, 5))


@pytest.mark.parametrize("error", [RequestRejected, AccessDenied])
def test_errors_of_the_client_survive_the_wire_and_blame_no_server(error: type[SwarmError]) -> None:
    caught = from_status(status_of(error("what was wrong")), "what was wrong", "peer", Span(2, 5))
    assert type(caught) is error and str(caught) == "what was wrong"
    assert not isinstance(caught, PeerError)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, PeerUnavailable),
        (grpc.StatusCode.CANCELLED, PeerUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, RequestRejected),
        (grpc.StatusCode.UNAUTHENTICATED, AccessDenied),
    ],
)
def test_statuses_of_grpc_itself_have_a_meaning(status: grpc.StatusCode, error: type[SwarmError]) -> None:
    assert type(from_status(status, "details")) is error


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_status_becomes_one_of_our_errors(status: grpc.StatusCode) -> None:
    error = from_status(status, "")
    assert isinstance(error, SwarmError)
    assert status.name in str(error)
    assert type(from_status(status.value[0], "")) is type(error)


def test_an_error_travels_as_the_status_of_its_base_class() -> None:
    assert status_of(BadReply("x")) is grpc.StatusCode.INTERNAL
    assert status_of(TrainingDiverged("x")) is grpc.StatusCode.INVALID_ARGUMENT
    assert number_of(PeerBusy("x")) == 8


def test_only_what_another_server_may_do_better_is_a_peer_error() -> None:
    peer_errors = {PeerUnavailable, PeerBusy, PeerMoved, SessionLost, BadReply}
    assert all(issubclass(error, PeerError) for error in peer_errors)
    for error in (RequestRejected, AccessDenied, NoRoute, CheckpointError, UnsupportedModel):
        assert issubclass(error, SwarmError) and not issubclass(error, PeerError)


@pytest.mark.parametrize("error", [RequestRejected, CheckpointError, UnsupportedModel])
def test_a_users_mistake_is_a_value_error(error: type[SwarmError]) -> None:
    assert issubclass(error, ValueError)


def test_no_route_carries_the_missing_blocks() -> None:
    assert NoRoute("no server holds blocks 3:5", (Span(3, 5),)).missing == (Span(3, 5),)


def test_a_stream_that_ended_while_it_was_written_to_is_a_peer_that_is_gone() -> None:
    """Over real gRPC, which has a status of its own for that."""

    class Ended(BlocksServicer):
        async def Push(self, requests: Any, context: Any) -> None:
            await anext(aiter(requests))

    async def scenario() -> None:
        server = grpc.aio.server()
        add_BlocksServicer_to_server(Ended(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = BlocksStub(channel).Push()
            with pytest.raises(PeerUnavailable, match="the stream has ended"), translated("peer"):
                while True:
                    await call.write(pb.PushRequest(more=bytes(1 << 20)))
            await server.stop(None)

    run(scenario())
