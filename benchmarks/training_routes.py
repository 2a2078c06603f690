"""Micro-batches on their way through stages in virtual time: what of the stages' speeds each policy of routing reaches.

Each trainer has a router of its own, which knows its own requests alone and what peers announce, and keeps a number of
micro-batches under way. A peer computes one request at a time, in the order in which they come, and announces every
few seconds how fast it has done so. No peer fails. Batches have no end, or the next one begins when one is computed.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from routing_policies import ROUTERS

from swarm_training.stages.routing.router import Router
from swarm_training.stages.routing.speed import BACKWARD, FORWARD, SHARES, ComputeSpeed
from swarm_training.stages.routing.turns import window

LATENCY_S = 0.02  # one way, where a usual peer needs a second for both passes of a micro-batch
JITTER = 0.1  # of computing times, standard deviation of their logarithm
PER_PEER = 2.0  # micro-batches under way for each peer of the run, all trainers together
WARM_UP_S, MEASURED_S = 200.0, 200.0
ANNOUNCED_S = 5.0  # between two announcements of a peer's speed


@dataclass(frozen=True)
class Crew:
    """Peers of a run.

    Attributes:
        stages: of each the speeds of its peers, in micro-batches per second.
    """

    stages: tuple[tuple[float, ...], ...]
    num_trainers: int

    @property
    def carried(self) -> float:
        """Micro-batches per second that the slowest stage can compute."""
        return min(map(sum, self.stages))


@dataclass
class _Request:
    trip: _Trip
    kind: str
    asked_s: float


@dataclass
class _Trip:
    """A micro-batch, forward through all stages and back."""

    trainer: int
    place: int = 0  # of 2 x stages


class Traffic:
    """One crew under one policy of routing."""

    def __init__(self, crew: Crew, policy: type[Router], seed: int, batch: int | None = None) -> None:
        """``batch``: micro-batches that must all be computed before the next step begins; None: there are no steps."""
        self._crew, self._chance = crew, random.Random(seed)
        self._now, self._numbers, self.num_done = 0.0, count(), 0
        self._batch, self._num_begun, self._waiting = batch, 0, list[_Trip]()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._names = [[f"{stage}-{i}" for i in range(len(peers))] for stage, peers in enumerate(crew.stages)]
        self._speeds = {
            name: speed
            for names, peers in zip(self._names, crew.stages, strict=True)
            for name, speed in zip(names, peers, strict=True)
        }
        self._queues: dict[str, deque[_Request]] = {name: deque() for name in self._speeds}
        self._measured = {name: ComputeSpeed() for name in self._speeds}
        self._routers = [policy(self._chance.random) for _ in range(crew.num_trainers)]
        self._announce()
        each = window(len(self._speeds), crew.num_trainers, PER_PEER, most=100_000)
        for trainer in range(crew.num_trainers):
            for _ in range(each):
                self._at(self._chance.random(), lambda trainer=trainer: self._begin(_Trip(trainer)))

    def run(self) -> float:
        """Micro-batches per second, as a share of what the slowest stage can compute."""
        self._run_until(WARM_UP_S)
        before = self.num_done
        self._run_until(WARM_UP_S + MEASURED_S)
        return (self.num_done - before) / MEASURED_S / self._crew.carried

    def _run_until(self, end_s: float) -> None:
        while self._events[0][0] < end_s:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._numbers), event))

    def _announce(self) -> None:
        announced = {name: measured.per_s for name, measured in self._measured.items()}
        for router in self._routers:
            router.hear(announced, self._crew.num_trainers)
        self._at(ANNOUNCED_S, self._announce)

    def _begin(self, trip: _Trip) -> None:
        """Now, or with the next step."""
        if self._batch is not None and self._num_begun == self.num_done + self._batch - self.num_done % self._batch:
            self._waiting.append(trip)
        else:
            self._num_begun += 1
            self._ask(trip)

    def _ask(self, trip: _Trip) -> None:
        num_stages = len(self._names)
        kind = FORWARD if trip.place < num_stages else BACKWARD
        candidates = self._names[min(trip.place, 2 * num_stages - 1 - trip.place)]
        router = self._routers[trip.trainer]
        peer = router.choose(candidates, kind, self._now)
        assert peer is not None  # no peer fails here
        router.asked(peer, candidates, kind, self._now)
        request = _Request(trip, kind, self._now)
        self._at(LATENCY_S, lambda: self._arrive(peer, request))

    def _arrive(self, peer: str, request: _Request) -> None:
        self._queues[peer].append(request)
        if len(self._queues[peer]) == 1:
            self._compute(peer)

    def _compute(self, peer: str) -> None:
        share = SHARES[self._queues[peer][0].kind]
        took_s = share / self._speeds[peer] * self._chance.lognormvariate(0, JITTER)
        self._measured[peer].note(share, took_s)
        self._at(took_s, lambda: self._finish(peer))

    def _finish(self, peer: str) -> None:
        request = self._queues[peer].popleft()
        self._at(LATENCY_S, lambda: self._answer(peer, request))
        if self._queues[peer]:
            self._compute(peer)

    def _answer(self, peer: str, request: _Request) -> None:
        trip = request.trip
        self._routers[trip.trainer].answered(peer, request.kind, request.asked_s, self._now)
        trip.place += 1
        if trip.place < 2 * len(self._names):
            self._ask(trip)
            return
        self.num_done += 1
        starting = [_Trip(trip.trainer)]
        if self.num_done == self._num_begun:  # a step has ended
            starting, self._waiting = starting + self._waiting, []
        for each in starting:
            self._begin(each)


def reached(crew: Crew, seed: int, batch: int | None = None) -> dict[str, float]:
    """The share of each policy."""
    return {name: Traffic(crew, policy, seed, batch).run() for name, policy in ROUTERS.items()}
