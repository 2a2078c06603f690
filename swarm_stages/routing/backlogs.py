"""How much work waits at each peer, as one trainer guesses from its own requests: the others are taken to do the same.
Pure.

With one trainer the guess is what a queue of known work takes. With many, each has few requests at a peer or none, and
knows nothing of the others'; that a request of its own stands for one of each of them keeps all from asking the same
fast peers. Requests of several trainers that come at once have their places in a queue by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Backlog:
    """Work that was left at a time."""

    work: float
    at_s: float


class Backlogs:
    """Peers compute one request after another. Work is in micro-batches, speeds are in micro-batches per second."""

    def __init__(self, draw: Callable[[], float]) -> None:
        """``draw``: uniform in [0, 1)."""
        self._draw = draw
        self._backlogs: dict[str, _Backlog] = {}

    def delay_s(self, peer: str, speed: float, work: float, unanswered: float, num_trainers: int, now: float) -> float:
        """Until a request of this work would be answered. ``unanswered``: work of this trainer's requests that are not
        answered yet: they wait, even if they should have been computed by now."""
        before = (num_trainers - 1) * self._draw()  # requests of others like this one
        return (max(self._left(peer, speed, now), unanswered) + (1 + before) * work) / speed

    def asked(self, peer: str, speed: float, work: float, num_trainers: int, now: float) -> None:
        self._backlogs[peer] = _Backlog(self._left(peer, speed, now) + num_trainers * work, now)

    def forget(self, peer: str) -> None:
        self._backlogs.pop(peer, None)

    def _left(self, peer: str, speed: float, now: float) -> float:
        known = self._backlogs.get(peer)
        return 0.0 if known is None else max(0.0, known.work - speed * (now - known.at_s))
