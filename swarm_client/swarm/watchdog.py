"""How long a step may take until its server counts as stalled: many times the expected duration, up to a limit."""

from __future__ import annotations

from collections.abc import Iterable

from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Costs
from swarm_client.transport.hops import HopSession
from swarm_client.transport.steps import OutgoingStep
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.span import Span

SLOW_BYTES_PER_S = 125e3  # the assumed rate of an unknown line, 1 Mbit/s
TIMES_EXPECTED = 10.0
_TIMES_SENT = 3.0  # tolerance for sending at the known rate, because others may use the line too
_TIMES_SEEN = 3.0  # a multiple of the longest wait for an answer so far
_FADING = 0.9  # the factor by which the longest wait decays with each further one
_MAX_SEEN_S = 10.0  # the cap keeps a server that answers later and later from winning ever more time
_MAX_DOUBLINGS = 4  # more alarms than this do not raise the limit
_CALM_S = 30.0  # how long an alarm counts


class Stalled(PeerUnavailable):
    """The error that a server answers, but computes nothing. ``since_s``: the time of the call's last progress."""

    def __init__(self, message: str, peer_id: str, span: Span, since_s: float = 0.0) -> None:
        super().__init__(message, peer_id, span)
        self.since_s = since_s


def after_alarms(usual_s: float, alarms: int, config: ClientConfig) -> float:
    """Return the limit for a server while this many others stall: each alarm doubles the usual one."""
    return min(config.step_timeout_s, usual_s * float(1 << min(alarms, _MAX_DOUBLINGS)))


class StallAlarms:
    """The recent stalls of proven servers, as seen by any session of this client.

    If several servers stall, all may be slow now, so each one doubles how long the others may take. Moving a session
    costs the swarm a prompt, so a client must not move its sessions about among overloaded servers.
    """

    def __init__(self) -> None:
        self._times_s: dict[str, float] = {}  # keys: peer ids

    def add(self, peer_id: str, now_s: float) -> None:
        self._times_s[peer_id] = now_s

    def num_others(self, peer_id: str, now_s: float) -> int:
        """Return how many other servers counted as stalled recently."""
        self._times_s = {p: time_s for p, time_s in self._times_s.items() if now_s - time_s <= _CALM_S}
        return len(self._times_s.keys() - {peer_id})


class Watchdog:
    """A record of how long one session's servers have taken."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._longest_s = 0.0

    def answered(self, waited_s: float) -> None:
        """Note that a step's outputs have come ``waited_s`` after the call's last progress."""
        self._longest_s = max(min(waited_s, _MAX_SEEN_S), _FADING * self._longest_s)

    def allowed_s(
        self,
        hop: HopSession,
        number: int,
        steps: Iterable[OutgoingStep],
        rtt_s: float,
        alarms: int,
        bytes_per_s: float | None,
    ) -> float:
        """Return how long the hop may go without progress after the step ``number``.

        Args:
            number: the last step that the hop has computed.
            alarms: see ``StallAlarms``; each alarm doubles the limit.
            bytes_per_s: the rate of the line to the hop; None if it is unknown.
        """
        left = [step for step in (*hop.replayed.values(), *steps) if step.number > number]
        sizes = [(step.num_positions, step.end - step.start) for step in left]
        expected_s = max((self._expected_s(hop, *size) for size in sizes), default=0.0) + rtt_s
        usual_s = max(self._config.timeouts.stall_s, TIMES_EXPECTED * expected_s)
        if hop.due_batches is None:  # the step may be on its way: allow as long as earlier steps took
            usual_s = max(usual_s, _TIMES_SEEN * self._longest_s)
            # A server that claims an even slower line does not win more time.
            rate = SLOW_BYTES_PER_S if bytes_per_s is None else max(bytes_per_s, SLOW_BYTES_PER_S) / _TIMES_SENT
            usual_s += max((step.message.hidden.size_bytes for step in left), default=0) / rate
        return after_alarms(usual_s, alarms, self._config)

    @staticmethod
    def _expected_s(hop: HopSession, num_positions: int, length: int) -> float:
        """Return the expected seconds for one step of ``length`` positions in each row."""
        server, num_blocks = hop.hop.server, len(hop.span)
        # Servers announce a speed of decoding and one of prompts. For decode steps of many rows, the slower one counts.
        sizes = {1, num_positions} if length == 1 else {num_positions}
        return max(Costs({}, num_tokens=size).block_s(server) for size in sizes) * num_blocks
