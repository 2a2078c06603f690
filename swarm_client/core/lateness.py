"""How late this client itself is: what it did not hear while it could not run is nobody else's fault."""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf

from swarm_client.core.background import now_s

_TICK_S = 0.5
_USUAL_S = 0.25  # a tick that comes no later than this is in time
_MAX_LOSSES = 64  # that are remembered


class Lateness:
    """Times in which the event loop did not run: it was held up, or the process got no processor."""

    def __init__(self) -> None:
        self._due_s = inf  # when the next tick should come
        self._losses: deque[tuple[float, float]] = deque(maxlen=_MAX_LOSSES)  # (start, end)

    async def watch(self) -> None:
        """Notice losses until this is cancelled."""
        while True:
            self._due_s = now_s() + _TICK_S
            await asyncio.sleep(_TICK_S)
            if now_s() > self._due_s + _USUAL_S:
                self._losses.append((self._due_s, now_s()))

    def awake_s(self, start_s: float) -> float:
        """Return the seconds since ``start_s`` in which the loop could run."""
        now = now_s()
        losses = [*self._losses, *([(self._due_s, now)] if now > self._due_s + _USUAL_S else [])]
        return now - start_s - sum(max(0.0, end - max(start, start_s)) for start, end in losses)
