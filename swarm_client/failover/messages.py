"""The events of a failover, and the instructions that answer them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm_client.failover.replay import HopProgress, Replay
from swarm_protocol.errors import SwarmError
from swarm_protocol.span import Span


@dataclass(frozen=True)
class FailoverHop:
    """A hop as failover sees it.

    Attributes:
        number: distinguishes the hop from all other hops of the session.
        span: the hop's blocks; ``peer_id`` and ``name`` are those of its server.
        replayed_number: the last step from before the call that was replayed to the hop, 0 if there was none. Once the
            server has taken this step, it has the history that it needs.
    """

    number: int
    span: Span
    peer_id: str
    name: str = "?"
    replayed_number: int = 0


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Failed:
    """The event that hops cannot go on. ``is_late``: the time for recovery is over."""

    errors: Mapping[int, SwarmError]
    is_late: bool = False


@dataclass(frozen=True)
class HopsAsked:
    """The event that each of the other hops has reported its progress, or has failed as well."""

    standings: Mapping[int, HopProgress]
    errors: Mapping[int, SwarmError]
    is_late: bool = False


@dataclass(frozen=True)
class ReplicaAsked:
    """The event that the standby replica has reported its progress, ``standing``. None: there is no such replica now.

    ``next_number``: the hop that gets the replica's outputs. ``max_step_tokens``: rows x positions that the replica
    takes in one step.
    """

    standing: HopProgress | None
    next_number: int | None = None
    max_step_tokens: int = 1


@dataclass(frozen=True)
class ReplicaLost:
    """The event that the standby replica could not take over."""


@dataclass(frozen=True)
class HopsOpened:
    """The event that there are hops for the gap: the standby replica, or new ones."""


@dataclass(frozen=True)
class ServersFull:
    """The event that all servers are full: the session must give up its hops, and wait."""


@dataclass(frozen=True)
class Connected:
    """The event that the new hops are receiving what they need; ``links`` describes these hops."""

    links: tuple[FailoverHop, ...]


@dataclass(frozen=True)
class NotConnected:
    """The event that the new hops could not be given what they need.

    ``errors``: the error of the hop before the gap; empty if the call's steps, or the replay, are too large.
    """

    errors: Mapping[int, SwarmError] = field(default_factory=dict)
    is_late: bool = False


Event = Failed | HopsAsked | ReplicaAsked | ReplicaLost | HopsOpened | ServersFull | Connected | NotConnected


# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Blame:
    """An instruction to report the errors to the user. ``avoid``: also avoid these servers for a while."""

    errors: Mapping[int, SwarmError]
    avoid: bool


@dataclass(frozen=True)
class Ask:
    """An instruction to ask hops for their progress; the hops in ``hold`` pause until they are rerouted."""

    hops: tuple[int, ...]
    hold: frozenset[int]


@dataclass(frozen=True)
class AskReplica:
    """An instruction to ask the standby replica of this hop, if there is one, for its progress."""

    of: int


@dataclass(frozen=True)
class UseReplica:
    """An instruction to use the standby replica.

    ``reroute``: the replica must send its outputs to ``after`` from now on, beginning with those of ``resend``.
    """

    after: int | None
    reroute: bool
    resend: tuple[int, ...]


@dataclass(frozen=True)
class OpenHops:
    """An instruction to open hops over ``span`` that send to ``after``, preferably on servers like that of ``instead``.

    ``instead``: the first hop that the new ones replace. ``replay`` says what they will get.
    """

    span: Span
    instead: int
    after: int | None
    replay: Replay


@dataclass(frozen=True)
class Connect:
    """An instruction to replay from ``before`` (None: the client) to the new hops, in steps from ``number`` on."""

    before: int | None
    replay: Replay
    number: int


@dataclass(frozen=True)
class Splice:
    """An instruction to put the new hops into the chain in place of ``gap``."""

    gap: range
    error: SwarmError
    replayed_tokens: int
    from_replica: bool


@dataclass(frozen=True)
class Abandon:
    """An instruction to end the streams of these hops."""

    hops: tuple[int, ...]


@dataclass(frozen=True)
class AbandonNew:
    """An instruction to end the streams of the new hops, or of the replica."""


@dataclass(frozen=True)
class Resume:
    """An instruction to resume the call, because the chain is whole."""


@dataclass(frozen=True)
class StartOver:
    """An instruction to replace all hops and begin the call again, with other steps or once there is room."""


@dataclass(frozen=True)
class GiveUp:
    """An instruction to raise an error, because no time is left to replace ``span``."""

    span: Span


Instruction = (
    Blame
    | Ask
    | AskReplica
    | UseReplica
    | OpenHops
    | Connect
    | Splice
    | Abandon
    | AbandonNew
    | Resume
    | StartOver
    | GiveUp
)
