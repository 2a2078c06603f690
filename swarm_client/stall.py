"""A generation stands still because a server failed: what was tried, and how long it may last."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_client.background import now_s
from swarm_protocol.errors import PeerBusy, RecoveryFailed
from swarm_protocol.span import Span


@dataclass
class Repair:
    """Hops that took the place of others; the fields are those of ``swarm_client.events.Recovery``."""

    span: Span
    failed: tuple[str, ...]
    reason: str
    replacements: tuple[str, ...]
    replayed_tokens: int
    from_copy: bool


@dataclass
class Stall:
    """From the last sign of progress before a failure, at ``start_s``, to the next answer.

    Attributes:
        deadline_s: when the user has waited long enough, ``timeout_s`` after the failure was noticed.
        peer_id: of the server that failed first.
        tried: what has happened since, one sentence each.
        full: servers without room, by peer id.
        waits: the user was told that nobody can take over at present.
    """

    start_s: float
    deadline_s: float
    timeout_s: float
    peer_id: str = ""
    tried: list[str] = field(default_factory=list)
    full: dict[str, PeerBusy] = field(default_factory=dict)
    repairs: list[Repair] = field(default_factory=list)
    waits: bool = False

    @property
    def time_left_s(self) -> float:
        return max(0.0, self.deadline_s - now_s())

    def check_time(self, span: Span) -> None:
        """Raises RecoveryFailed if it has lasted too long."""
        if self.time_left_s:
            return
        tried = tuple(dict.fromkeys(self.tried))
        raise RecoveryFailed(
            f"blocks {span} could not be moved to other servers within {self.timeout_s:g} s: {'; '.join(tried)}. "
            "Nothing is lost: the session goes on from where it stood when it is used again",
            self.peer_id,
            span,
            tried,
        )
