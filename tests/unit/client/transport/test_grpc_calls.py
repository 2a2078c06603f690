"""Whatever gRPC raises or ends a stream with becomes one of our errors, which names the server and the blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import pytest

from swarm_client.transport.grpc_calls import GrpcStream, error_of, translated
from swarm_protocol.errors import (
    AccessDenied,
    CacheMiss,
    PeerBusy,
    PeerError,
    PeerMoved,
    PeerUnavailable,
    RequestRejected,
    SessionLost,
    SwarmError,
)
from swarm_protocol.span import Span
from tests.unit.support import run, server_record

SERVER, SPAN = server_record("a-long-peer-id", token=b"of a member"), Span(0, 4)
NAME = "server …eer-id"
Code = grpc.StatusCode

ERRORS = {  # with the sentence that a user reads
    Code.UNAVAILABLE: (PeerUnavailable, f"{NAME} at 127.0.0.1:1 cannot be reached: why"),
    Code.CANCELLED: (PeerUnavailable, f"{NAME} at 127.0.0.1:1 cannot be reached: why"),
    Code.DEADLINE_EXCEEDED: (PeerUnavailable, f"{NAME} at 127.0.0.1:1 does not answer"),
    Code.RESOURCE_EXHAUSTED: (PeerBusy, "why"),
    Code.FAILED_PRECONDITION: (PeerMoved, "why"),
    Code.NOT_FOUND: (SessionLost, "why"),
    Code.ABORTED: (CacheMiss, "why"),
    Code.INTERNAL: (PeerError, "why"),
    Code.INVALID_ARGUMENT: (RequestRejected, "why"),
    Code.UNIMPLEMENTED: (RequestRejected, "why"),
    Code.PERMISSION_DENIED: (AccessDenied, "why"),
    Code.UNAUTHENTICATED: (AccessDenied, "why"),
}


def rpc_error(code: grpc.StatusCode, details: str | None = "why") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class FakeCall:
    """A stream that gives these messages, or raises them, and ends with a status; nothing can be written after."""

    def __init__(self, replies: Iterable[object] = (), code: grpc.StatusCode = Code.OK) -> None:
        self.written: list[object] = []
        self.cancelled = False
        self._replies = iter(replies)
        self._code, self._ended = code, False

    async def read(self) -> object:
        reply = next(self._replies, grpc.aio.EOF)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    async def write(self, request: object) -> None:
        if self._ended:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.written.append(request)

    async def done_writing(self) -> None:
        if self._ended:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._ended = True

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        return "why"

    def add_done_callback(self, _callback: object) -> None:
        """gRPC says here what it does not say later; this call says it always."""

    def cancel(self) -> None:
        self.cancelled = True


def stream(call: FakeCall) -> GrpcStream[str, str]:
    return GrpcStream(call, SERVER, SPAN)


def raised(error: BaseException) -> BaseException:
    async def call() -> None:
        async with translated(SERVER, SPAN):
            raise error

    with pytest.raises(BaseException) as caught:
        run(call())
    return caught.value


def assert_of_the_server(error: BaseException) -> None:
    assert isinstance(error, SwarmError)
    if isinstance(error, PeerError):
        assert (error.peer_id, error.span) == (SERVER.peer_id, SPAN)


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: code.name)
def test_a_call_that_fails(code: grpc.StatusCode) -> None:
    error = raised(rpc_error(code))
    assert (type(error), str(error)) == ERRORS[code]
    assert_of_the_server(error)


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (None, "no details"),
        ("", "no details"),
        ("Stream removed (why)", "why"),
        ("why (Stream removed)", "why (Stream removed)"),
    ],
)
def test_what_grpc_says_of_it(details: str | None, expected: str) -> None:
    assert str(raised(rpc_error(Code.INTERNAL, details))) == expected
    assert str(raised(rpc_error(Code.UNAVAILABLE, details))).endswith(f"cannot be reached: {expected}")


@pytest.mark.parametrize("error", [ValueError("ours"), PeerBusy("ours", "somebody"), KeyboardInterrupt()])
def test_what_is_not_of_grpc_passes(error: BaseException) -> None:
    passed = raised(error)
    assert (type(passed), str(passed)) == (type(error), str(error))


def test_who_waits_for_a_call_that_was_cancelled_is_not_taken_for_cancelled() -> None:
    error = raised(asyncio.CancelledError())
    assert type(error) is PeerUnavailable and str(error) == f"the connection to {NAME} is closed"
    assert_of_the_server(error)


async def test_who_is_cancelled_is() -> None:
    async def call() -> None:
        async with translated(SERVER, SPAN):
            await asyncio.Event().wait()

    calling = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await call()


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: code.name)
def test_a_stream_that_ends_with_a_status_while_it_is_read(code: grpc.StatusCode) -> None:
    """gRPC either raises it or says that nothing more comes."""
    for call in (FakeCall([rpc_error(code)]), FakeCall([], code)):
        with pytest.raises(ERRORS[code][0]) as caught:
            run(stream(call).read())
        assert type(caught.value) is ERRORS[code][0] and str(caught.value).endswith(("why", "does not answer"))
        assert_of_the_server(caught.value)


@pytest.mark.parametrize(("code", "error"), [(Code.OK, PeerUnavailable), (Code.RESOURCE_EXHAUSTED, PeerBusy)])
@pytest.mark.parametrize("method", ["write", "done_writing"])
def test_a_stream_that_has_ended_before_all_was_sent(
    method: str, code: grpc.StatusCode, error: type[PeerError]
) -> None:
    async def send() -> None:
        ended = stream(FakeCall([], code))
        await ended.done_writing()
        await (ended.write("late") if method == "write" else ended.done_writing())

    with pytest.raises(error, match="has ended" if code is Code.OK else "why") as caught:
        run(send())
    assert type(caught.value) is error
    assert_of_the_server(caught.value)


@pytest.mark.parametrize("code", [Code.PERMISSION_DENIED, Code.UNAUTHENTICATED])
def test_a_server_of_an_open_swarm_that_denies_access_is_one_that_fails(code: grpc.StatusCode) -> None:
    error = error_of(code, "why", server_record("a-long-peer-id"), SPAN)
    assert type(error) is PeerError
    assert str(error) == f"{NAME} does not accept this client: why"
    assert_of_the_server(error)
