"""How long a pass without a session may take until its server is taken for stalled.

As in ``watchdog``, that is many times what it should take. But passes are large, and many of them wait in a server's
queue at a time: what counts is all that this client has under way there, and how long ago any of it came back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Costs, Hop
from swarm_client.swarm.watchdog import SLOW_BYTES_PER_S, Stalled

T = TypeVar("T")
BACKWARD = 3.0  # times what a forward pass takes: it is computed again, and then two products for each of its own
_TIMES_EXPECTED = 10.0
_MAX_QUEUE_S = 3.0  # that a server's word is taken for
_LEAST_S = 1e-3  # of computing; what a pass costs besides is more than that
_FADING = 0.95  # of how slow a server was, with each further pass
_MAX_DOUBLINGS = 4
_POLL_S = 1.0  # between two looks: other passes end, and other servers come


@dataclass(eq=False)
class PassUnderWay:
    """One request to a server.

    Attributes:
        expected_s: by what the server says of its speed, without its queue.
        size_bytes: of what is sent and of what comes back.
        sent_before: bytes of all passes that had come back when it was sent.
        since_s: when that was.
    """

    hop: Hop
    expected_s: float
    size_bytes: int
    sent_before: int
    since_s: float

    @property
    def peer_id(self) -> str:
        return self.hop.server.peer_id


class PassWatchdog:
    """Knows the passes that one client has under way, and how slow servers were. Used on the background loop."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._under_way: set[PassUnderWay] = set()
        self._sent_bytes = 0  # of all passes so far
        self._progress_s: dict[str, float] = {}  # when a pass came back last, by peer id
        self._slowness: dict[str, float] = {}  # times what was expected, the most lately

    def allowed_s(self, work: PassUnderWay, alarms: int) -> float:
        """Without any answer of the server.

        ``alarms``: how many servers that are known to work were taken for stalled in this pass. It may be that all are
        slow at present, and each time doubles what is allowed.
        """
        here = sum(other.expected_s for other in self._under_way if other.peer_id == work.peer_id)
        slowness = self._slowness.get(work.peer_id)
        queue_s = min(work.hop.server.queue_delay_s, _MAX_QUEUE_S)
        usual_s = max(self._config.timeouts.stall_s, _TIMES_EXPECTED * (here * max(1.0, slowness or 0.0) + queue_s))
        if slowness is None:  # all passes may share one line
            usual_s += (self._sent_bytes - work.sent_before) / SLOW_BYTES_PER_S
        return min(self._config.step_timeout_s, usual_s * float(1 << min(alarms, _MAX_DOUBLINGS)))

    async def watch(
        self,
        job: Coroutine[Any, Any, T],
        hop: Hop,
        num_positions: int,
        size_bytes: int,
        times: float,
        alarms: int,
        can_replace: Callable[[], bool],
    ) -> T:
        """The result of a pass, unless its server stalls and somebody else can compute it.

        Args:
            times: what it takes, in forward passes of so many positions.

        Raises:
            Stalled: it was cancelled. Besides, whatever the job raises.
        """
        computing_s = Costs({}, num_tokens=num_positions).block_s(hop.server) * len(hop.span) * times
        back = self._sent_bytes - sum(other.size_bytes for other in self._under_way)
        work = PassUnderWay(hop, max(computing_s, _LEAST_S), size_bytes, back, now_s())
        self._under_way.add(work)
        self._sent_bytes += size_bytes
        task = asyncio.ensure_future(job)
        try:
            while not task.done():
                left_s = self._last_s(work) + self.allowed_s(work, alarms) - now_s()
                if left_s <= 0.0 and can_replace():
                    raise self._stalled(work, alarms)
                await asyncio.wait([task], timeout=min(left_s, _POLL_S) if left_s > 0.0 else _POLL_S)
            result = task.result()
            self._answered(work)
            return result
        finally:
            task.cancel()
            self._under_way.discard(work)

    def _stalled(self, work: PassUnderWay, alarms: int) -> Stalled:
        server, allowed_s = work.hop.server, self.allowed_s(work, alarms)
        reason = f"server {server.short_id} did not finish a pass within {allowed_s:.3g} s"
        return Stalled(reason, server.peer_id, work.hop.span)

    def _last_s(self, work: PassUnderWay) -> float:
        """When the server began to have nothing to do but this, as far as is known."""
        return max(work.since_s, self._progress_s.get(work.peer_id, -inf))

    def _answered(self, work: PassUnderWay) -> None:
        slowness = (now_s() - self._last_s(work)) / work.expected_s
        self._slowness[work.peer_id] = max(slowness, _FADING * self._slowness.get(work.peer_id, 0.0))
        self._progress_s[work.peer_id] = now_s()
