"""Interleaved weighted round robin: each peer has a trainer's requests in proportion to its speed. Pure.

SWARM's Algorithm 1 (Ryabinin et al., 2023) sends the next request to the peer with the least total of processing times,
its own included. Totals are those of one trainer, and forget nothing. Hence shares are right however few requests each
of many trainers has, although it does not know of the others' requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping


class WeightedRoundRobin:
    """A trainer's round robin over the peers of all stages; a request's candidates compete for it."""

    def __init__(self, draw: Callable[[], float]) -> None:
        """Start without totals. ``draw``: returns a number in [0, 1), so that trainers begin at different peers."""
        self._draw = draw
        self._totals_s: dict[str, float] = {}

    def choose(self, willing: Collection[str], speeds: Mapping[str, float], share: float) -> str:
        """Return one of the willing peers. ``speeds``: of all candidates, above 0. ``share``: the part of a
        micro-batch.

        A peer that is new, or was not willing for a while, takes part from now on, and does not catch up.
        """
        newest_s = max((self._totals_s[peer] for peer in speeds if peer in self._totals_s), default=0.0)
        for peer in willing:
            turn_s = 1 / speeds[peer]
            total_s = self._totals_s.get(peer)
            if total_s is None:
                self._totals_s[peer] = newest_s - turn_s * self._draw()
            elif total_s < newest_s - turn_s:  # no peer that has always taken part is so far behind
                self._totals_s[peer] = newest_s - turn_s
        return min(willing, key=lambda peer: (self._totals_s[peer] + share / speeds[peer], peer))

    def asked(self, peer: str, speed: float, share: float) -> None:
        self._totals_s[peer] = self._totals_s.get(peer, 0.0) + share / speed

    def forget(self, peer: str) -> None:
        self._totals_s.pop(peer, None)
