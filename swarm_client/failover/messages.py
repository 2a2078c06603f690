"""What happens in a failover, and what is to be done about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm_client.failover.replay import Replay, Standing
from swarm_protocol.errors import SwarmError
from swarm_protocol.span import Span


@dataclass(frozen=True)
class Link:
    """A hop as failover sees it.

    Attributes:
        number: tells it apart from all other hops of the session.
        span: its blocks; ``peer_id`` and ``name`` of their server.
        replayed_number: of the last step from before the call that was replayed to it, 0 if there was none: the server
            has what it needs once it has taken that one.
    """

    number: int
    span: Span
    peer_id: str
    name: str = "?"
    replayed_number: int = 0


# ---------------------------------------------------------------- what has happened


@dataclass(frozen=True)
class Failed:
    """Hops cannot go on. ``is_late``: the time for recovery is over."""

    errors: Mapping[int, SwarmError]
    is_late: bool = False


@dataclass(frozen=True)
class Asked:
    """The other hops have said where they stand, or have failed as well."""

    standings: Mapping[int, Standing]
    errors: Mapping[int, SwarmError]
    is_late: bool = False


@dataclass(frozen=True)
class ReplicaAsked:
    """Where the standby replica stands; None if there is none, or it is gone.

    ``next_number``: the hop its outputs go to. ``max_step_tokens``: rows x positions that it takes in a step.
    """

    standing: Standing | None
    next_number: int | None = None
    max_step_tokens: int = 1


@dataclass(frozen=True)
class ReplicaLost:
    """The standby replica could not take over."""


@dataclass(frozen=True)
class Opened:
    """There are new hops for the gap: the standby replica, or others."""


@dataclass(frozen=True)
class NoRoom:
    """All servers are full: the session must give up what it has, and wait."""


@dataclass(frozen=True)
class Connected:
    """The new hops are given what they need; ``links`` describes them."""

    links: tuple[Link, ...]


@dataclass(frozen=True)
class NotConnected:
    """The hop before the gap, or nobody in particular, kept the new hops from what they need.

    ``errors``: of the hop before; none: the call's steps are too long for the new hops.
    """

    errors: Mapping[int, SwarmError] = field(default_factory=dict)
    is_late: bool = False


Event = Failed | Asked | ReplicaAsked | ReplicaLost | Opened | NoRoom | Connected | NotConnected


# ---------------------------------------------------------------- what is to be done


@dataclass(frozen=True)
class Blame:
    """Tells the user of the errors. ``avoid``: and takes other servers for a while."""

    errors: Mapping[int, SwarmError]
    avoid: bool


@dataclass(frozen=True)
class Ask:
    """Asks hops where they stand; those of ``hold`` get no further until they are rerouted."""

    hops: tuple[int, ...]
    hold: frozenset[int]


@dataclass(frozen=True)
class AskReplica:
    """Asks the standby replica of this hop, if it has one, where it stands."""

    of: int


@dataclass(frozen=True)
class UseReplica:
    """Takes the standby replica; if ``reroute``, it sends to ``after`` from now on, these steps' outputs first."""

    after: int | None
    reroute: bool
    resend: tuple[int, ...]


@dataclass(frozen=True)
class Open:
    """Opens hops over ``span`` that send to ``after``."""

    span: Span
    instead: int
    after: int | None
    replay: Replay


@dataclass(frozen=True)
class Connect:
    """Lets ``before``, or the client where it is None, replay to the new hops; ``number``: the history's first step."""

    before: int | None
    replay: Replay
    number: int


@dataclass(frozen=True)
class Splice:
    """Puts the new hops into the chain, where ``gap`` is now."""

    gap: range
    error: SwarmError
    replayed_tokens: int
    from_replica: bool


@dataclass(frozen=True)
class Abandon:
    """Ends the streams of these hops."""

    hops: tuple[int, ...]


@dataclass(frozen=True)
class AbandonNew:
    """Ends the streams of the new hops, or of the replica."""


@dataclass(frozen=True)
class Resume:
    """The chain is whole: the call goes on."""


@dataclass(frozen=True)
class StartOver:
    """All hops are to be replaced, and the call begins again: with other steps, or once there is room."""


@dataclass(frozen=True)
class GiveUp:
    """There is no time left to replace ``span``."""

    span: Span


Instruction = (
    Blame | Ask | AskReplica | UseReplica | Open | Connect | Splice | Abandon | AbandonNew | Resume | StartOver | GiveUp
)
