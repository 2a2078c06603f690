"""The gRPC status codes by which our errors travel."""

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
    # what gRPC itself says
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerUnavailable,
    grpc.StatusCode.CANCELLED: PeerUnavailable,
    grpc.StatusCode.UNIMPLEMENTED: RequestRejected,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
}
CUT_OFF = grpc.StatusCode.INTERNAL, "Internal error from Core"  # see ``FirstStatus``
_KNOWS_BETTER_WITHIN_S = 0.5
_ASKED_EVERY_S = 0.005
_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def status_of(error: SwarmError) -> grpc.StatusCode:
    """The status that stands for an error, or for the nearest of its base classes that has one; else INTERNAL."""
    return next((_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF), grpc.StatusCode.INTERNAL)


def number_of(error: SwarmError) -> int:
    """The number of ``status_of``, as it stands in messages."""
    number: int = status_of(error).value[0]
    return number


def end_with(context: _Context, status: grpc.StatusCode, details: str) -> None:
    """What a call ends with, once its handler returns.

    ``abort`` would leave an error in a cycle of references that lives on: its frames keep all that the handler had.
    """
    context.set_code(status)
    context.set_details(details)


class FirstStatus:
    """What a peer has ended a call with, noted at once.

    gRPC forgets it if the call was written to meanwhile, and has an internal error of its own from then on:
    https://github.com/grpc/grpc/issues/36066. If that comes first, it takes a moment until gRPC knows better, which
    nothing tells; before all replies were read, it never does. The call is in a cycle of references: whoever drops it
    cancels it.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._call = call
        self._known = CUT_OFF
        call.add_done_callback(self._note)

    async def instead_of(self, code: grpc.StatusCode, details: str | None) -> tuple[grpc.StatusCode, str]:
        """What the peer has said, if gRPC has put its internal error in its place; else this."""
        if (code, details) != CUT_OFF:
            return code, details or ""
        with suppress(TimeoutError):
            async with asyncio.timeout(_KNOWS_BETTER_WITHIN_S):
                while self._known == CUT_OFF:
                    await asyncio.sleep(_ASKED_EVERY_S)
                    if self._call.done():  # to end a stream may fail before gRPC knows that it has ended
                        self._note(self._call)
        return CUT_OFF if self._known[0] is grpc.StatusCode.OK else self._known

    def _note(self, call: grpc.aio.Call) -> None:
        if self._known == CUT_OFF:
            self._known = _of_one_that_ended(call.code()), _of_one_that_ended(call.details()) or ""


def _of_one_that_ended(known: Coroutine[Any, Any, T]) -> T:
    """What a call tells without waiting: later, it may be forgotten."""
    try:
        known.send(None)
    except StopIteration as result:
        found: T = result.value
        return found
    finally:
        known.close()
    raise AssertionError("gRPC has said that a call has ended, and does not know how")


def from_status(status: grpc.StatusCode | int, details: str, peer_id: str = "", span: Span | None = None) -> SwarmError:
    """The error that a status, or its number, stands for; an unexpected one becomes a plain PeerError."""
    code = status if isinstance(status, grpc.StatusCode) else _BY_NUMBER.get(status, grpc.StatusCode.UNKNOWN)
    if (code, details) == CUT_OFF:
        return PeerUnavailable("the stream has ended while it was written to", peer_id, span)
    error = _ERROR_OF.get(code, PeerError)
    message = printable(details) or f"the server answered {code.name}"
    return error(message, peer_id, span) if issubclass(error, PeerError) else error(message)
