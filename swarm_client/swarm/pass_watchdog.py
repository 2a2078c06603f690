"""How long a pass without a session may take until its server counts as stalled.

The limit is many times the expected duration, as in ``watchdog``. Passes are large, however, and many wait in a
server's queue at a time. The limit therefore allows for all passes of this client at the server. It counts from the
last time that one of them came back.
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
from swarm_client.swarm.watchdog import SLOW_BYTES_PER_S, TIMES_EXPECTED, Stalled, after_alarms

T = TypeVar("T")
BACKWARD = 3.0  # cost in forward passes: the blocks are computed again, then each product costs two more
_MAX_QUEUE_S = 3.0  # the longest queue that a server is believed to have
_LEAST_S = 1e-3  # the least expected computing time, because every pass has fixed costs that are larger
_FADING = 0.95  # the factor by which a server's slowness decays with each further pass
_POLL_S = 1.0  # the interval between checks: other passes end, and new servers come


@dataclass(eq=False)
class PassUnderWay:
    """One request to a server.

    Attributes:
        expected_s: the expected duration by the server's announced speed, without its queue.
        size_bytes: the bytes that are sent and that come back.
        sent_before: the bytes of all passes that had come back, at all servers, when this one was sent.
        since_s: the time at which this one was sent.
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
    """A record of one client's passes under way, and of how slow servers were. Used on the background loop."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._under_way: set[PassUnderWay] = set()
        self._sent_bytes = 0  # total bytes of all passes
        self._progress_s: dict[str, float] = {}  # the time of the last result, by peer id
        self._slowness: dict[str, float] = {}  # the largest recent duration relative to the expected one

    def allowed_s(self, work: PassUnderWay, alarms: int) -> float:
        """Return how long the server may go without an answer.

        ``alarms``: the number of proven servers that counted as stalled in this pass. All servers may be slow now, so
        each alarm doubles the limit.
        """
        here = sum(other.expected_s for other in self._under_way if other.peer_id == work.peer_id)
        slowness = self._slowness.get(work.peer_id)
        queue_s = min(work.hop.server.queue_delay_s, _MAX_QUEUE_S)
        usual_s = max(self._config.timeouts.stall_s, TIMES_EXPECTED * (here * max(1.0, slowness or 0.0) + queue_s))
        if slowness is None:  # no pass has come back: its line may be slow, and all passes may share it
            usual_s += (self._sent_bytes - work.sent_before) / SLOW_BYTES_PER_S
        return after_alarms(usual_s, alarms, self._config)

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
        """Return the result of a pass, unless its server stalls and another server can compute it.

        Args:
            times: the cost of the pass, in forward passes of so many positions.

        Raises:
            Stalled: the server stalled, and the pass was cancelled. Errors of the job are raised unchanged.
        """
        computing_s = Costs({}, num_tokens=num_positions).block_s(hop.server) * len(hop.span) * times
        back = self._sent_bytes - sum(other.size_bytes for other in self._under_way)
        work = PassUnderWay(hop, max(computing_s, _LEAST_S), size_bytes, back, now_s())
        self._under_way.add(work)
        self._sent_bytes += size_bytes
        task = asyncio.ensure_future(job)
        try:
            while not task.done():
                allowed_s = self.allowed_s(work, alarms)
                left_s = self._last_s(work) + allowed_s - now_s()
                if left_s <= 0.0 and can_replace():
                    reason = f"server {hop.server.short_id} did not finish a pass within {allowed_s:.3g} s"
                    raise Stalled(reason, hop.server.peer_id, hop.span)
                await asyncio.wait([task], timeout=min(left_s, _POLL_S) if left_s > 0.0 else _POLL_S)
            result = task.result()
            self._answered(work)
            return result
        finally:
            task.cancel()
            self._under_way.discard(work)

    def _last_s(self, work: PassUnderWay) -> float:
        """Return the time since which the server has had only this pass to do, as far as is known."""
        return max(work.since_s, self._progress_s.get(work.peer_id, -inf))

    def _answered(self, work: PassUnderWay) -> None:
        slowness = (now_s() - self._last_s(work)) / work.expected_s
        self._slowness[work.peer_id] = max(slowness, _FADING * self._slowness.get(work.peer_id, 0.0))
        self._progress_s[work.peer_id] = now_s()
