"""The mapping between this library's errors and gRPC status codes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

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
from swarm_protocol.wire.printable import printable

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
_STATUS_OF: dict[type[SwarmError], grpc.StatusCode] = {
    RequestRejected: grpc.StatusCode.INVALID_ARGUMENT,
    AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    PeerBusy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerMoved: grpc.StatusCode.FAILED_PRECONDITION,
    SessionLost: grpc.StatusCode.NOT_FOUND,
    CacheMiss: grpc.StatusCode.ABORTED,
}
_ERROR_OF: dict[grpc.StatusCode, type[SwarmError]] = {
    **{status: error for error, status in _STATUS_OF.items()},
    # statuses from gRPC itself
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerUnavailable,
    grpc.StatusCode.CANCELLED: PeerUnavailable,
    grpc.StatusCode.UNIMPLEMENTED: RequestRejected,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
}
CUT_OFF = grpc.StatusCode.INTERNAL, "Internal error from Core"  # see ``FirstStatus``
_KNOWS_BETTER_WITHIN_S = 0.5  # how long gRPC may take to learn the true status, see ``FirstStatus``
_ASKED_EVERY_S = 0.005
_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def status_of(error: SwarmError) -> grpc.StatusCode:
    """Return the status of an error, or of its nearest base class that has one; else INTERNAL."""
    return next((_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF), grpc.StatusCode.INTERNAL)


def number_of(error: SwarmError) -> int:
    """Return the number of ``status_of``, as used in messages."""
    number: int = status_of(error).value[0]
    return number


def end_with(context: _Context, status: grpc.StatusCode, details: str) -> None:
    """Set the status with which a call ends once its handler returns.

    ``abort`` would leave an error in a long-lived reference cycle, whose frames keep everything that the handler had.
    """
    context.set_code(status)
    context.set_details(details)


class FirstStatus:
    """The status with which a peer has ended a call, recorded at once.

    gRPC replaces the status by an internal error if the client writes to the call in the meantime:
    https://github.com/grpc/grpc/issues/36066. If the internal error comes first, gRPC learns the true status a moment
    later, without an event, and never before all replies are read. The call is in a reference cycle: a caller that
    drops it has to cancel it.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._call = call
        self._known = CUT_OFF
        call.add_done_callback(self._note)

    async def instead_of(self, code: grpc.StatusCode, details: str | None) -> tuple[grpc.StatusCode, str]:
        """Return the peer's status if gRPC has replaced it by its internal error; else the given status."""
        if (code, details) != CUT_OFF:
            return code, details or ""
        with suppress(TimeoutError):
            async with asyncio.timeout(_KNOWS_BETTER_WITHIN_S):
                while self._known == CUT_OFF:
                    await asyncio.sleep(_ASKED_EVERY_S)
                    if self._call.done():  # writing an end may fail before gRPC knows that the call is over
                        self._note(self._call)
        return CUT_OFF if self._known[0] is grpc.StatusCode.OK else self._known

    def _note(self, call: grpc.aio.Call) -> None:
        if self._known == CUT_OFF:
            self._known = _of_one_that_ended(call.code()), _of_one_that_ended(call.details()) or ""


def _of_one_that_ended(known: Coroutine[Any, Any, T]) -> T:
    """Return what a call knows without waiting, because gRPC may forget it later."""
    try:
        known.send(None)  # a coroutine that has nothing to wait for ends at its first step
    except StopIteration as result:
        found: T = result.value
        return found
    finally:
        known.close()
    raise AssertionError("gRPC has said that a call has ended, and does not know how")


def from_status(status: grpc.StatusCode | int, details: str, peer_id: str = "", span: Span | None = None) -> SwarmError:
    """Return the error for a status or its number; an unexpected status becomes a plain PeerError."""
    code = status if isinstance(status, grpc.StatusCode) else _BY_NUMBER.get(status, grpc.StatusCode.UNKNOWN)
    if (code, details) == CUT_OFF:
        return PeerUnavailable("the stream has ended while it was written to", peer_id, span)
    error = _ERROR_OF.get(code, PeerError)
    message = printable(details) or f"the server answered {code.name}"
    return error(message, peer_id, span) if issubclass(error, PeerError) else error(message)
