"""Measures how late this client itself is, so that servers are not blamed for answers that it could not receive."""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf

from swarm_client.core.background import now_s

_TICK_S = 0.5  # the time between two looks at the clock
_USUAL_S = 0.25  # a tick that comes no later than this is in time
_MAX_LOSSES = 64  # the most losses that are remembered


class Lateness:
    """A record of the times in which the event loop did not run: it was blocked, or the process got no processor."""

    def __init__(self) -> None:
        self._due_s = inf  # the time of the next tick
        self._losses: deque[tuple[float, float]] = deque(maxlen=_MAX_LOSSES)  # (start, end)

    async def watch(self) -> None:
        """Record the loop's pauses until this is cancelled."""
        while True:
            self._due_s = now_s() + _TICK_S
            await asyncio.sleep(_TICK_S)
            if now_s() > self._due_s + _USUAL_S:
                self._losses.append((self._due_s, now_s()))

    def awake_s(self, start_s: float) -> float:
        """Return the seconds since ``start_s`` in which the loop could run."""
        now = now_s()
        # After a pause, this may run before ``watch`` has recorded it.
        losses = [*self._losses, *([(self._due_s, now)] if now > self._due_s + _USUAL_S else [])]
        return now - start_s - sum(max(0.0, end - max(start, start_s)) for start, end in losses)
