"""The exceptions that every peer shares; ``swarm_protocol.wire.status`` maps them to and from gRPC statuses."""

from __future__ import annotations

from swarm_protocol.span import Span


class SwarmError(Exception):
    """Any error that the swarm itself reports."""


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


class TrainingDiverged(RequestRejected):
    """The trained parameters have become so large that numbers overflow: the servers are not to blame."""


class AccessDenied(SwarmError):
    """The server does not accept this client."""


class PeerError(SwarmError):
    """One server could not do its part; another server may be able to.

    ``peer_id`` and ``span`` name the server and the blocks, where they are known.
    """

    def __init__(self, message: str, peer_id: str = "", span: Span | None = None) -> None:
        super().__init__(message)
        self.peer_id = peer_id
        self.span = span

    def name_server(self, peer_id: str) -> None:
        """Say that this server could not do its part, unless the error names one already."""
        self.peer_id = self.peer_id or peer_id


class PeerUnavailable(PeerError):
    """The server cannot be reached, or did not answer in time."""


class PeerBusy(PeerError):
    """The server has no room at present: its queue or its KV cache is full."""


class PeerMoved(PeerError):
    """The server no longer serves these blocks, or serves another revision of the model."""


class SessionLost(PeerError):
    """The server does not know this session, or has forgotten it."""


class CacheMiss(PeerError):
    """The server lacks, or has dropped, the adapter or pass that the request names: the caller must send it again."""


class BadReply(PeerError):
    """The server's answer has the wrong shape or dtype, or is not finite."""


class NotFinite(BadReply):
    """The server's answer contains NaN or infinity."""


class RecoveryFailed(PeerError):
    """Failover did not succeed in time: no other servers could replace those that failed.

    The session keeps the state that it had before the failed call, and continues from there when it is used again.
    ``tried`` lists the attempts, one sentence each.
    """

    def __init__(self, message: str, peer_id: str = "", span: Span | None = None, tried: tuple[str, ...] = ()) -> None:
        super().__init__(message, peer_id, span)
        self.tried = tried
