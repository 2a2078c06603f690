"""The error taxonomy every peer shares, and its gRPC status codes."""

from __future__ import annotations

import grpc

from swarm_protocol.span import Span


class SwarmError(Exception):
    """Anything the swarm itself reports."""


class CheckpointError(SwarmError, ValueError):
    """A model directory or hub repository cannot be read as expected."""


class UnsupportedModel(SwarmError, ValueError):
    """The model's architecture cannot be split into blocks."""


class NoSwarm(SwarmError):
    """No member of the swarm answered."""


class JoinRefused(NoSwarm):
    """A member of the swarm answered, but this node may not join: its clock is wrong."""


class NoRoute(SwarmError):
    """No online server holds some block."""

    def __init__(self, message: str, missing: tuple[Span, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class RequestRejected(SwarmError, ValueError):
    """The request itself is wrong; sending it again cannot help."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class TrainingDiverged(RequestRejected):
    """What is trained has become so large that numbers overflow: the servers are not to blame."""


class AccessDenied(SwarmError):
    """The server does not accept this client."""

    status = grpc.StatusCode.PERMISSION_DENIED


class PeerError(SwarmError):
    """One server could not do its part; another may.

    ``peer_id`` and ``span`` say which server and which blocks, where known.
    """

    status = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, peer_id: str = "", span: Span | None = None) -> None:
        super().__init__(message)
        self.peer_id = peer_id
        self.span = span


class PeerUnavailable(PeerError):
    """The server cannot be reached or did not answer in time."""

    status = grpc.StatusCode.UNAVAILABLE


class PeerBusy(PeerError):
    """The server has no room at present: its queue or its KV cache is full."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class PeerMoved(PeerError):
    """The server no longer serves these blocks, or serves another revision of the model."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class SessionLost(PeerError):
    """The server does not know this session (any more)."""

    status = grpc.StatusCode.NOT_FOUND


class CacheMiss(PeerError):
    """The server does not have (any more) what the request names, an adapter or a pass: it must be given it again."""

    status = grpc.StatusCode.ABORTED


class BadReply(PeerError):
    """The server's answer has the wrong shape or dtype, or is not finite."""


class NotFinite(BadReply):
    """The server's answer has NaN or infinity in it."""


class RecoveryFailed(PeerError):
    """Other servers could not take the place of those that failed in time.

    A session stands where it stood before the call that raised this, and goes on from there when it is used again.
    ``tried`` says what was tried, one sentence each.
    """

    def __init__(self, message: str, peer_id: str = "", span: Span | None = None, tried: tuple[str, ...] = ()) -> None:
        super().__init__(message, peer_id, span)
        self.tried = tried


_BY_STATUS: dict[grpc.StatusCode, type[SwarmError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerUnavailable,
    grpc.StatusCode.CANCELLED: PeerUnavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PeerBusy,
    grpc.StatusCode.FAILED_PRECONDITION: PeerMoved,
    grpc.StatusCode.NOT_FOUND: SessionLost,
    grpc.StatusCode.ABORTED: CacheMiss,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRejected,
    grpc.StatusCode.UNIMPLEMENTED: RequestRejected,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
}


def from_status(code: grpc.StatusCode, details: str, peer_id: str = "", span: Span | None = None) -> SwarmError:
    """The error a gRPC status stands for; an unexpected status becomes a plain PeerError."""
    error = _BY_STATUS.get(code, PeerError)
    message = details or f"the server answered {code.name}"
    return error(message, peer_id, span) if issubclass(error, PeerError) else error(message)
