"""The error taxonomy: what a server raises is what its client catches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from swarm_client.transport.grpc_calls import GrpcStream
from swarm_client.transport.grpc_calls import translated as calls_translated
from swarm_protocol.errors import (
    AccessDenied,
    BadReply,
    CacheMiss,
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
from swarm_protocol.rpc.channels import translated
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import MIB
from swarm_protocol.wire.status import CUT_OFF, FirstStatus, end_with, from_status, number_of, status_of
from tests.unit.support import run, server_record
from tests.worlds.partial_service import serve_methods
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)
OVER_GRPC = pytest.mark.run_by(function=run)


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


class Ending:
    """Ends a stream with this status once it has begun."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    async def Push(self, requests: Any, context: Any) -> None:
        await anext(aiter(requests))
        end_with(context, self._status, "why")


@asynccontextmanager
async def one_that_ends(status: grpc.StatusCode) -> AsyncIterator[ServiceStub]:
    """Over real gRPC, which has a status of its own if a stream ends while it is written to."""
    server = grpc.aio.server()
    serve_methods(Ending(status), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield ServiceStub(BLOCKS, channel)
    finally:
        await server.stop(None)


@OVER_GRPC
@pytest.mark.parametrize("size_bytes", [10, MIB])
async def test_who_writes_hears_what_the_stream_has_ended_with(size_bytes: int) -> None:
    async with one_that_ends(grpc.StatusCode.ABORTED) as stub:
        for _ in range(20):
            call = stub.Push()
            with pytest.raises(CacheMiss, match=r"^why$"):
                async with translated("peer", FirstStatus(call)):
                    for _ in range(40):
                        await call.write(pb.PushRequest(more=bytes(size_bytes)))
                    await call.done_writing()
                    await anext(aiter(call))


@OVER_GRPC
@pytest.mark.parametrize("size_bytes", [10, MIB])
async def test_so_do_those_who_write_to_servers(size_bytes: int) -> None:
    async with one_that_ends(grpc.StatusCode.ABORTED) as stub:
        for is_stream in 10 * [False, True]:
            with pytest.raises(CacheMiss, match=r"^why$"):
                call = stub.Push()
                if is_stream:
                    stream: GrpcStream[pb.PushRequest, pb.PushReply] = GrpcStream(call, server_record(), Span(0, 4))
                    for _ in range(40):
                        await stream.write(pb.PushRequest(more=bytes(size_bytes)))
                    await stream.read()
                async with calls_translated(server_record(), Span(0, 4), call):
                    for _ in range(40):
                        await call.write(pb.PushRequest(more=bytes(size_bytes)))
                    await call.done_writing()
                    await anext(aiter(call))


@OVER_GRPC
async def test_a_stream_that_ended_well_while_it_was_written_to_is_a_peer_that_is_gone() -> None:
    async with one_that_ends(grpc.StatusCode.OK) as stub:
        call = stub.Push()
        with pytest.raises(PeerUnavailable, match="the stream has ended"):
            async with translated("peer", FirstStatus(call)):
                while True:
                    await call.write(pb.PushRequest(more=bytes(MIB)))


@pytest.mark.parametrize("translate", [translated, lambda: calls_translated(server_record())])
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_who_is_cancelled_while_a_call_fails_ends(translate: Callable[[], Any], is_cancelled: bool) -> None:
    async def call() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1.0)
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def ask() -> None:
        async with translate():
            await call()

    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(0.5)
    if is_cancelled:
        asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() if is_cancelled else isinstance(asking.exception(), PeerUnavailable)


class Forgetful:
    """A call that has ended, of which gRPC knows only after some time how."""

    def __init__(self, known_after: int, done_after: int) -> None:
        self._unknown, self._going_on = known_after, done_after

    def done(self) -> bool:
        self._going_on -= 1
        return self._going_on < 0

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done():
            callback(self)

    async def code(self) -> grpc.StatusCode:
        if self._going_on >= 0:
            await asyncio.Event().wait()
        self._unknown -= 1
        return CUT_OFF[0] if self._unknown >= 0 else grpc.StatusCode.ABORTED

    async def details(self) -> str:
        return CUT_OFF[1] if self._unknown >= 0 else "why"


@pytest.mark.parametrize("done_after", [0, 3])
@pytest.mark.parametrize(("known_after", "told"), [(0, True), (1, True), (20, True), (10**9, False)])
async def test_what_grpc_knows_only_later_is_waited_for(known_after: int, told: bool, done_after: int) -> None:
    call: Any = Forgetful(known_after, done_after)
    known = await FirstStatus(call).instead_of(*CUT_OFF)
    assert known == ((grpc.StatusCode.ABORTED, "why") if told else CUT_OFF)
