"""gRPC calls that raise this library's errors; no other client module knows gRPC's errors and status codes."""

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
from swarm_protocol.failures import undone_on_error
from swarm_protocol.rpc.shared import is_cancelled, num_cancellations
from swarm_protocol.span import Span
from swarm_protocol.telemetry.tracing import tracing
from swarm_protocol.wire.status import FirstStatus, from_status

Request = TypeVar("Request")
Reply = TypeVar("Reply")
# Errors of a call that has ended: by itself, before a message was written, or during the write.
_ENDED = grpc.RpcError, asyncio.InvalidStateError, grpc.aio.InternalError


def bad_reply(server: ServerRecord, span: Span | None, what: str) -> BadReply:
    """Return the error that the server has done ``what`` it must not do."""
    return BadReply(f"server {server.short_id} {what}", server.peer_id, span)


def unreadable(server: ServerRecord, span: Span | None = None) -> BadReply:
    """Return the error for a None from gRPC, which stands for bytes that are no message."""
    return bad_reply(server, span, "answered bytes that are no message")


def error_of(code: grpc.StatusCode, details: str, server: ServerRecord, span: Span | None) -> SwarmError:
    """Return the error for a status. An open swarm's AccessDenied becomes PeerError, so that others are tried."""
    error = from_status(code, details, server.peer_id, span)
    if isinstance(error, AccessDenied) and not server.token:
        return PeerError(f"server {server.short_id} does not accept this client: {error}", server.peer_id, span)
    return error


@asynccontextmanager
async def translated(
    server: ServerRecord, span: Span | None = None, call: grpc.aio.Call | None = None
) -> AsyncIterator[None]:
    """Translate gRPC's errors into this library's. ``call``: a written call, which is cancelled on any error."""
    first, num_before = None if call is None else FirstStatus(call), num_cancellations()
    with undone_on_error(lambda: call is not None and call.cancel()):
        try:
            yield
        except _ENDED as error:
            if num_cancellations() > num_before:
                raise asyncio.CancelledError from None  # see ``swarm_protocol.rpc.channels.translated``
            raise await _translation(error, server, span, call, first) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise _closed(server, span) from None  # a CancelledError would make the waiting caller look cancelled


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
    """Return the error for a connection that this client has closed."""
    return PeerUnavailable(f"the connection to server {server.short_id} is closed", server.peer_id, span)


class CallCounter:
    """A stub's counter of calls, which starts calls as the stub does and knows how many are under way.

    A counted call continues the current trace. An uncounted one belongs to no request in particular.

    Attributes:
        idle_since_s: the end of the last call, on the loop's clock; infinity while a call is under way.
    """

    def __init__(self, stub: object, server: ServerRecord) -> None:
        self._stub, self._server = stub, server
        self._under_way: set[int] = set()
        self._numbers = itertools.count()
        self._clock = asyncio.get_running_loop().time
        self.idle_since_s = self._clock()

    def uncounted(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Start a call of this method without counting it. Raise PeerUnavailable if the connection is closed."""
        try:
            return getattr(self._stub, name)(*arguments, **options)
        except grpc.aio.UsageError:
            raise _closed(self._server) from None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if headers := tracing().headers():
                options["metadata"] = headers
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


class GrpcStream(Generic[Request, Reply]):
    """A call to one server that is open in both directions. All errors of gRPC are translated.

    If the stream or its connection is cancelled by this client, pending reads and writes raise PeerUnavailable.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Reply], server: ServerRecord, span: Span) -> None:
        self._call = call
        self._first = FirstStatus(call)
        self._server = server
        self._span = span

    async def write(self, request: Request) -> None:
        try:  # not ``translated``: an asynchronous context manager would cost more than the write
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
        """Return the next reply. Raise the error with which the stream ended, or PeerUnavailable if there was none."""
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
        """Raise PeerUnavailable if the call was cancelled, and not the current task."""
        if not is_cancelled():
            raise _closed(self._server, self._span) from None

    def cancel(self) -> None:
        self._call.cancel()

    def ended_error(self) -> PeerUnavailable:
        server = self._server
        return PeerUnavailable(f"the stream to server {server.short_id} has ended", server.peer_id, self._span)
