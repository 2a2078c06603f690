"""Sends hand-made messages to a server, such as no honest client would send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import grpc

from swarm_client.core import background
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.failures import Closing
from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.wire.constants import CLIENT_OPTIONS
from swarm_protocol.wire.status import FirstStatus
from tests.quick_keys import new_identity
from tests.swarm.waiting import DEADLINE_S


@cache
def own_credentials() -> ClientCredentials:
    """Those of the tests of this process."""
    return ClientCredentials(new_identity())


class RawClient(Closing):
    """Sends hand-made messages to one server."""

    def __init__(self, record: ServerRecord, credentials: ClientCredentials | None = None) -> None:
        self.record = record
        address, fingerprint = record.addresses[0], record.tls_fingerprint
        options = [*{**dict(CLIENT_OPTIONS), "grpc.max_send_message_length": -1}.items()]
        connecting = pinned_channel(credentials or own_credentials(), address, fingerprint, options, DEADLINE_S)
        self._channel = background.run(connecting)
        self._stub = ServiceStub(BLOCKS, self._channel)

    def describe(self) -> ServerRecord:
        """The server's record as it is now."""
        return ServerRecord.from_proto(background.run(_unary(self._stub.Describe, pb.DescribeRequest())))

    def ask(self, method: str, request: Any) -> Answer:
        """A call with one request and one reply, such as ``Progress``."""
        return background.run(_asked(getattr(self._stub, method), request))

    def forward(self, *requests: pb.ForwardRequest) -> Answer:
        return background.run(_talk(self._stub.Forward, requests))

    def backward(self, *requests: pb.BackwardRequest) -> Answer:
        return background.run(_talk(self._stub.Backward, requests))

    def put_adapter(self, *requests: pb.PutAdapterRequest) -> Answer:
        """Sends all requests, then ends the stream."""
        return background.run(_put(self._stub.PutAdapter, requests))

    def reroute(self, *requests: pb.RerouteRequest) -> Answer:
        """Sends all requests, then ends the stream."""
        return background.run(_put(self._stub.Reroute, requests))

    def session(self, *requests: pb.SessionRequest) -> Answer:
        """Sends all requests, then reads until the server ends the stream."""
        return background.run(_talk(self._stub.Session, requests))

    def push(self, *requests: pb.PushRequest) -> Answer:
        return background.run(_talk(self._stub.Push, requests))

    def send_bytes(self, method: str, data: bytes) -> Answer:
        """What the server answers to bytes that need be no message."""
        path = f"/swarm.v1.Blocks/{method}"
        return background.run(_talk(self._channel.stream_stream(path), (data,)))

    @contextmanager
    def stream(self, method: str) -> Iterator[RawStream]:
        """An open stream of a method with streams in both directions; it ends without a goodbye."""
        stream = RawStream(background.run(_called(getattr(self._stub, method))))
        try:
            yield stream
        finally:
            background.run(_cancel(stream.call))

    @contextmanager
    def open_session(self, request: pb.SessionRequest) -> Iterator[None]:
        """Keeps a session open meanwhile; it ends without a goodbye."""
        call = background.run(_opened(self._stub.Session, request))
        try:
            yield
        finally:
            background.run(_cancel(call))

    def close(self) -> None:
        background.run(self._channel.close())


class RawStream:
    """Sends a request and reads a reply at a time."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call, self._first = call, FirstStatus(call)

    def send(self, request: Any) -> None:
        background.run(_write(self.call, request))

    def read(self) -> Any:
        """The next reply; ``grpc.aio.EOF`` at the end."""
        return background.run(_read(self.call))

    @property
    def ended(self) -> bool:
        return self.call.done()

    def offer(self, request: Any) -> bool:
        """Sends a request, unless the server ends the stream, and returns whether it has."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            self.send(request)
        return self.ended

    def answer(self) -> Answer:
        """Waits until the server ends the stream; what comes before is not kept."""
        return background.run(_answer([], self.call, self._first))


class Answer:
    """What a server answered to a stream of requests, and the status that ended it."""

    def __init__(self, replies: list, status: grpc.StatusCode, details: str) -> None:
        self.replies, self.status, self.details = replies, status, details

    def __repr__(self) -> str:
        return f"Answer({len(self.replies)} replies, {self.status.name}: {self.details})"


async def _unary(method: Callable, request: Any) -> Any:
    return await method(request, timeout=DEADLINE_S)


async def _asked(method: Callable, request: Any) -> Answer:
    call = method(request, timeout=DEADLINE_S)
    try:
        replies = [await call]
    except grpc.RpcError:
        replies = []
    return Answer(replies, await call.code(), await call.details())


async def _called(method: Callable) -> grpc.aio.StreamStreamCall:
    return method(timeout=DEADLINE_S)


async def _write(call: grpc.aio.StreamStreamCall, request: Any) -> None:
    await call.write(request)


async def _read(call: grpc.aio.StreamStreamCall) -> Any:
    return await call.read()


async def _opened(method: Callable, request: Any) -> Any:
    """An open stream whose first request has been answered."""
    call = method(timeout=DEADLINE_S)
    await call.write(request)
    assert await call.read() is not grpc.aio.EOF, await call.details()
    return call


async def _talk(method: Callable, requests: tuple) -> Answer:
    """Keeps the stream open after the last request: a server that waits for more would hang the test, not pass it."""
    call = method(timeout=DEADLINE_S)
    replies, first = [], FirstStatus(call)

    async def read() -> None:
        async for reply in call:
            replies.append(reply)

    reading = asyncio.ensure_future(read())
    try:
        for request in requests:
            await call.write(request)
        await reading
    except (grpc.RpcError, asyncio.InvalidStateError):
        await asyncio.wait([reading])
        reading.exception()
    return await _answer(replies, call, first)


async def _put(method: Callable, requests: tuple) -> Answer:
    call = method(iter(requests), timeout=DEADLINE_S)
    first = FirstStatus(call)
    try:
        replies = [await call]
    except grpc.RpcError:
        replies = []
    return await _answer(replies, call, first)


async def _answer(replies: list, call: grpc.aio.Call, first: FirstStatus) -> Answer:
    return Answer(replies, *await first.instead_of(await call.code(), await call.details()))


async def _cancel(call: grpc.aio.Call) -> None:
    call.cancel()
