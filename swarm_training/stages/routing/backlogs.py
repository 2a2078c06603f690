"""A trainer's guess of the work that waits at each peer, if all trainers do the same. Pure.

The guess of a single trainer is exact, since all requests are its own. One of many trainers has few requests at a peer
or none, and does not know the requests of the others. It counts each of its own once for every trainer, so that not all
trainers ask the same fast peers. Requests of several trainers that come at once have random places in a queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Backlog:
    """The work that was left at a time."""

    work: float
    at_s: float


class Backlogs:
    """The guessed work at all peers, in micro-batches; speeds are per second. A peer computes one at a time."""

    def __init__(self, draw: Callable[[], float]) -> None:
        """Start without work. ``draw``: returns a number, uniform in [0, 1)."""
        self._draw = draw
        self._backlogs: dict[str, _Backlog] = {}

    def delay_s(self, peer: str, speed: float, work: float, unanswered: float, num_trainers: int, now: float) -> float:
        """Return the seconds until a request of this work would be answered. ``unanswered``: the work of this trainer's
        open requests, which wait even if they should have been computed by now."""
        before = (num_trainers - 1) * self._draw()  # the other trainers' requests that are ahead in the queue
        return (max(self._left(peer, speed, now), unanswered) + (1 + before) * work) / speed

    def asked(self, peer: str, speed: float, work: float, num_trainers: int, now: float) -> None:
        self._backlogs[peer] = _Backlog(self._left(peer, speed, now) + num_trainers * work, now)

    def forget(self, peer: str) -> None:
        self._backlogs.pop(peer, None)

    def _left(self, peer: str, speed: float, now: float) -> float:
        known = self._backlogs.get(peer)
        return 0.0 if known is None else max(0.0, known.work - speed * (now - known.at_s))
