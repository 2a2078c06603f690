"""Policies of routing to compare with the product's, which takes the least delay by announced speeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from swarm_training.stages.routing.router import Router, RouterBackoff
from swarm_training.stages.routing.speed import SHARES, believed


class WeightedRoundRobin:
    """A trainer's round robin over the peers of all stages; a request's candidates compete for it.

    SWARM's Algorithm 1 (Ryabinin et al., 2023) sends the next request to the peer with the least total of processing
    times, its own included. Totals are those of one trainer, and forget nothing. Hence shares are right however few
    requests each of many trainers has, although it does not know of the others' requests.
    """

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


class WeightedRouter(Router):
    """A router that does not see that a peer is idle."""

    def __init__(self, draw: Callable[[], float], backoff: RouterBackoff | None = None) -> None:
        super().__init__(draw, backoff)
        self._weighted = WeightedRoundRobin(draw)

    def best(self, willing: list[str], candidates: Collection[str], kind: str, now: float, kept_by: str | None) -> str:
        return self._weighted.choose(willing, believed(self._announced, candidates), SHARES[kind])

    def asked(self, peer_id: str, candidates: Collection[str], kind: str, now: float) -> None:
        super().asked(peer_id, candidates, kind, now)
        self._weighted.asked(peer_id, believed(self._announced, candidates)[peer_id], SHARES[kind])


class ReadyTimeRouter(Router):
    """A router that takes the peer that would be ready first by this trainer's own measurements.

    One of many trainers then mistakes the requests of others for slow peers.
    """

    def best(self, willing: list[str], candidates: Collection[str], kind: str, now: float, kept_by: str | None) -> str:
        return min(willing, key=lambda peer: self.ready_s(peer, willing, kind, now))


class QueueRouter(Router):
    """A router that takes the shortest queue of this trainer's requests."""

    def best(self, willing: list[str], candidates: Collection[str], kind: str, now: float, kept_by: str | None) -> str:
        waiting = {peer: self._peer(peer).waiting.total() for peer in willing}
        shortest = [peer for peer in willing if waiting[peer] == min(waiting.values())]
        return shortest[int(self._draw() * len(shortest))]


class RandomRouter(Router):
    """A router that takes any peer."""

    def best(self, willing: list[str], candidates: Collection[str], kind: str, now: float, kept_by: str | None) -> str:
        return willing[int(self._draw() * len(willing))]


ROUTERS: Mapping[str, type[Router]] = {
    "shortest delay": Router,
    "weighted round robin": WeightedRouter,
    "expected ready time": ReadyTimeRouter,
    "shortest queue": QueueRouter,
    "random": RandomRouter,
}
