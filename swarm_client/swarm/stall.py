"""A stall, in which work stands still because a server failed: what was tried, and how long the stall may last."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_client.core.background import now_s
from swarm_client.core.events import Recovery
from swarm_protocol.errors import PeerBusy, RecoveryFailed, SwarmError
from swarm_protocol.span import Span

_NOTHING_LOST = ". Nothing is lost: the session goes on from where it stood when it is used again"


@dataclass
class Stall:
    """One stall, from the last progress before a failure, at ``start_s``, to the next answer.

    Attributes:
        deadline_s: the time at which recovery is given up, ``timeout_s`` after the failure was noticed.
        peer_id: the server that failed first.
        tried: the events of the stall, one sentence each.
        full: the servers without room, by peer id.
        repairs: the replacements of hops in the stall; the first one to be reported gets the duration of the stall.
        waits: whether the user was informed that no server can take over now.
    """

    start_s: float
    deadline_s: float
    timeout_s: float
    peer_id: str = ""
    tried: list[str] = field(default_factory=list)
    full: dict[str, PeerBusy] = field(default_factory=dict)
    repairs: list[Recovery] = field(default_factory=list)
    waits: bool = False

    @property
    def time_left_s(self) -> float:
        return max(0.0, self.deadline_s - now_s())

    def check_time(self, span: Span) -> None:
        """Raise RecoveryFailed if the stall has lasted too long."""
        if not self.time_left_s:
            raise self.error(span, "moved to other servers", _NOTHING_LOST)

    def extend(self, seconds: float) -> None:
        """Let recovery take so much longer."""
        self.deadline_s += seconds

    def begin_waiting(self) -> bool:
        """Note that the user is informed of the wait for servers. Return whether that is the first time."""
        was_waiting, self.waits = self.waits, True
        return not was_waiting

    def blame(self, peer_id: str, error: SwarmError) -> None:
        """Note that this server has failed."""
        self.tried.append(str(error))
        self.peer_id = self.peer_id or peer_id

    def error(self, span: Span | None, what: str, advice: str = "") -> RecoveryFailed:
        """Return the error that the blocks could not be ``what``, with all that was tried."""
        tried = tuple(dict.fromkeys(self.tried))
        blocks = "some blocks" if span is None else f"blocks {span}"
        message = f"{blocks} could not be {what} within {self.timeout_s:g} s: {'; '.join(tried)}{advice}"
        return RecoveryFailed(message, self.peer_id, span, tried)
