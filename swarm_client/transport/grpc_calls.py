"""Calls of gRPC that raise our errors; the only module of the client that knows its errors and status codes."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar, cast

import grpc

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import AccessDenied, BadReply, PeerError, PeerUnavailable, SwarmError
from swarm_protocol.rpc.shared import is_cancelled
from swarm_protocol.span import Span
from swarm_protocol.wire.status import FirstStatus, from_status

Request = TypeVar("Request")
Reply = TypeVar("Reply")
# Of a call that has ended: by itself, before a message was written, or while its end was.
_ENDED = grpc.RpcError, asyncio.InvalidStateError, grpc.aio.InternalError


def no_answer(server: ServerRecord, span: Span, timeout_s: float) -> PeerUnavailable:
    return PeerUnavailable(f"server {server.short_id} did not answer within {timeout_s:g} s", server.peer_id, span)


def unreadable(server: ServerRecord, span: Span | None = None) -> BadReply:
    """What gRPC stands None for: bytes that are no message."""
    return BadReply(f"server {server.short_id} answered what is no message", server.peer_id, span)


def error_of(code: grpc.StatusCode, details: str, server: ServerRecord, span: Span | None) -> SwarmError:
    """A server of a swarm that is open to all does not end a generation by denying access: others are taken instead."""
    error = from_status(code, details, server.peer_id, span)
    if isinstance(error, AccessDenied) and not server.token:
        return PeerError(f"server {server.short_id} does not accept this client: {error}", server.peer_id, span)
    return error


@asynccontextmanager
async def translated(
    server: ServerRecord, span: Span | None = None, call: grpc.aio.Call | None = None
) -> AsyncIterator[None]:
    """Turns grpc's errors into ours. ``call``: if it is one that is written to; it is cancelled if anything fails."""
    first = None if call is None else FirstStatus(call)
    try:
        yield
    except _ENDED as error:
        raise await _translation(error, server, span, call, first) from None
    except asyncio.CancelledError:
        if call is not None:
            call.cancel()
        if is_cancelled():
            raise
        raise _closed(server, span) from None  # or else, who waits for this would be taken for cancelled
    except BaseException:
        if call is not None:
            call.cancel()
        raise


async def _translation(
    error: Exception,
    server: ServerRecord,
    span: Span | None,
    call: grpc.aio.Call | None,
    first: FirstStatus | None,
) -> SwarmError:
    if isinstance(error, grpc.RpcError):
        code, details = error.code(), error.details()
        if first is not None:
            code, details = await first.instead_of(code, details)
        details = re.sub(r"^Stream removed \((.*)\)$", r"\1", details or "no details")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            details = f"server {server.short_id} at {server.addresses[0]} cannot be reached: {details}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"server {server.short_id} at {server.addresses[0]} does not answer"
        return error_of(code, details, server, span)
    # The server has ended the stream before everything was sent.
    assert call is not None and first is not None, "only streams are sent more than one message"
    code, details = await first.instead_of(await call.code(), await call.details())
    if code is grpc.StatusCode.OK:
        return PeerUnavailable(f"the stream to server {server.short_id} has ended", server.peer_id, span)
    return error_of(code, details, server, span)


def _closed(server: ServerRecord, span: Span | None = None) -> PeerUnavailable:
    """By this client."""
    return PeerUnavailable(f"the connection to server {server.short_id} is closed", server.peer_id, span)


class CallCounter:
    """Begins calls of a stub, as its methods do, and knows how many are under way.

    Attributes:
        idle_since_s: when the last of them has ended, on the loop's clock; infinity while one has not.
    """

    def __init__(self, stub: object, server: ServerRecord) -> None:
        self._stub, self._server = stub, server
        self._under_way: set[int] = set()
        self._numbers = itertools.count()
        self._clock = asyncio.get_running_loop().time
        self.idle_since_s = self._clock()

    def uncounted(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Begins a call of this method. Raises PeerUnavailable if the connection is closed."""
        try:
            return getattr(self._stub, name)(*arguments, **options)
        except grpc.aio.UsageError:
            raise _closed(self._server) from None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            call = self.uncounted(name, *arguments, **options)
            self._under_way.add(number := next(self._numbers))
            self.idle_since_s = math.inf
            call.add_done_callback(lambda _: self._ended(number))
            return call

        return counted

    def _ended(self, number: int) -> None:
        self._under_way.discard(number)
        if not self._under_way:
            self.idle_since_s = self._clock()


class Stream(Generic[Request, Reply]):
    """A call to one server, open in both directions. Whatever gRPC raises becomes one of our errors.

    What waits on a stream that is cancelled here, or with its connection, raises PeerUnavailable.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Reply], server: ServerRecord, span: Span) -> None:
        self._call = call
        self._first = FirstStatus(call)
        self._server = server
        self._span = span

    async def write(self, request: Request) -> None:
        try:  # not ``translated``: an asynchronous context manager takes longer than what it stands around
            await self._call.write(request)
        except _ENDED as error:
            raise await self._translated(error) from None
        except asyncio.CancelledError:
            self._require_cancelled()
            raise

    async def done_writing(self) -> None:
        try:
            await self._call.done_writing()
        except _ENDED as error:
            raise await self._translated(error) from None

    async def read(self) -> Reply:
        """The next reply. Raises the error that the stream ended with; PeerUnavailable if it ended without."""
        try:
            reply = await self._call.read()
            if reply is None:
                raise unreadable(self._server, self._span)
            if reply is not grpc.aio.EOF:
                return cast(Reply, reply)
            code, details = await self._first.instead_of(await self._call.code(), await self._call.details())
        except _ENDED as error:
            raise await self._translated(error) from None
        except asyncio.CancelledError:
            self._require_cancelled()
            raise
        if code is grpc.StatusCode.OK:
            raise self.ended_error()
        raise error_of(code, details, self._server, self._span)

    async def _translated(self, error: Exception) -> SwarmError:
        return await _translation(error, self._server, self._span, self._call, self._first)

    def _require_cancelled(self) -> None:
        """Raises PeerUnavailable if not the task that runs now was cancelled, but the call."""
        if not is_cancelled():
            raise _closed(self._server, self._span) from None

    def cancel(self) -> None:
        self._call.cancel()

    def ended_error(self) -> PeerUnavailable:
        server = self._server
        return PeerUnavailable(f"the stream to server {server.short_id} has ended", server.peer_id, self._span)
