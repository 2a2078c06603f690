"""Who comes to a simulated swarm and who goes, and when: drawn once, the same for every policy that is compared."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, inf, pi, sin

import numpy as np
from petals_policy import best_window

from swarm_protocol.span import Span

HOUR_S = 3600.0


@dataclass(frozen=True)
class Scenario:
    """Volunteers come and go by day and night; fleets of preemptible machines lose many at once, zone by zone.

    Attributes:
        shortest, longest: how many blocks a server hosts; it keeps to its number.
        hours: with churn; ``rest_s`` without any follow.
        lifetime_h: of a volunteer, mean of an exponential.
        swing: how far the number of volunteers goes up and down, relative, once in ``hours``: a day in short.
        preemptible: the part of the servers that are in fleets.
        zones: each has one fleet, and its fleet hosts one stretch of the model at first (``--initial-blocks``).
        burst_every_h: mean time between preemptions, from half to one and a half of it; each hits one zone.
        burst_size: which part of the zone's servers vanishes within ``BURST_S``; lowest and highest.
        back_after_s: a new server takes the place of one that was preempted after this time; lowest and highest.
    """

    num_servers: int
    num_blocks: int
    shortest: int
    longest: int
    hours: float
    lifetime_h: float
    swing: float = 0.3
    preemptible: float = 0.5
    zones: int = 4
    burst_every_h: float = 0.33
    burst_size: tuple[float, float] = (0.6, 1.0)
    back_after_s: tuple[float, float] = (300.0, 1200.0)
    rest_s: float = 1800.0

    @property
    def churn_s(self) -> float:
        return self.hours * HOUR_S

    @property
    def end_s(self) -> float:
        return self.churn_s + self.rest_s

    def __str__(self) -> str:
        (low, high), (soonest_s, latest_s) = self.burst_size, self.back_after_s
        return (
            f"{self.num_servers} servers of {self.shortest} to {self.longest} of {self.num_blocks} blocks; "
            f"{self.hours:g} h of churn: {1 - self.preemptible:.0%} volunteers, who stay {self.lifetime_h:g} h in the "
            f"mean, their number ±{self.swing:.0%}; the others preemptible in {self.zones} zones: every "
            f"{60 * self.burst_every_h:.0f} min {low:.0%} to {high:.0%} of a zone vanish, replaced "
            f"{soonest_s / 60:.0f} to {latest_s / 60:.0f} min later"
        )


BURST_S = 30.0
CRASHES = 0.5  # the part of the volunteers that vanish without a word; who is preempted always does


@dataclass(frozen=True)
class Life:
    """One server from its start to its end; speed in blocks x tokens per second.

    Attributes:
        born_s: 0 for those that are there when the run begins.
        zone: None for a volunteer.
        crashes: whether it ends without a word.
    """

    peer_id: str
    num_hosted: int
    speed: float
    born_s: float
    gone_s: float
    zone: int | None
    crashes: bool

    @property
    def loading_s(self) -> float:
        return 2.0 + self.num_hosted


def lives(scenario: Scenario, seed: int) -> list[Life]:
    """By time of birth."""
    chance = random.Random(seed)
    num_preemptible = round(scenario.num_servers * scenario.preemptible)
    found = [*_volunteers(scenario, chance, scenario.num_servers - num_preemptible)]
    bursts = [*_bursts(scenario, chance)]
    for number in range(num_preemptible):
        found += _incarnations(scenario, chance, number % scenario.zones, bursts)
    return sorted(found, key=lambda life: life.born_s)


def _volunteers(scenario: Scenario, chance: random.Random, num_usual: int) -> Iterator[Life]:
    """As many arrivals at each time as keep the expected number at ``num_usual * (1 + swing * sin)``."""
    lifetime_s, day = scenario.lifetime_h * HOUR_S, 2 * pi / scenario.churn_s

    def arrivals_per_s(time: float) -> float:
        expected = 1 + scenario.swing * sin(day * time)
        return max(0.0, num_usual * (expected / lifetime_s + scenario.swing * day * cos(day * time)))

    def life(born_s: float) -> Life:
        gone_s = born_s + chance.expovariate(1 / lifetime_s)
        ends = gone_s if gone_s < scenario.churn_s else inf
        speed = 200 * chance.lognormvariate(0, 0.7)
        return _life(scenario, chance, speed, born_s, ends, None, chance.random() < CRASHES)

    for _ in range(num_usual):
        yield life(0.0)
    highest = num_usual * (1 + scenario.swing) * (1 / lifetime_s + scenario.swing * day)
    time = 0.0
    while num_usual and (time := time + chance.expovariate(highest)) < scenario.churn_s:
        if chance.random() < arrivals_per_s(time) / highest:
            yield life(time)


def _bursts(scenario: Scenario, chance: random.Random) -> Iterator[tuple[float, int, float]]:
    """(when, in which zone, which part of its servers)."""
    time = 0.0
    while (time := time + chance.uniform(0.5, 1.5) * scenario.burst_every_h * HOUR_S) < scenario.churn_s - BURST_S:
        yield time, chance.randrange(scenario.zones), chance.uniform(*scenario.burst_size)


def _incarnations(
    scenario: Scenario, chance: random.Random, zone: int, bursts: list[tuple[float, int, float]]
) -> Iterator[Life]:
    """A preemptible machine, and those that come in its place."""
    speed, born_s = 300 * chance.uniform(0.9, 1.1), 0.0
    for time, where, size in bursts:
        if where == zone and time > born_s and chance.random() < size:
            gone_s = time + chance.uniform(0, BURST_S)
            yield _life(scenario, chance, speed, born_s, gone_s, zone, True)
            born_s = gone_s + chance.uniform(*scenario.back_after_s)
    if born_s < scenario.churn_s:
        yield _life(scenario, chance, speed, born_s, inf, zone, True)


def _life(
    scenario: Scenario,
    chance: random.Random,
    speed: float,
    born_s: float,
    gone_s: float,
    zone: int | None,
    crashes: bool,
) -> Life:
    num_hosted = chance.randint(scenario.shortest, scenario.longest)
    return Life(f"{chance.getrandbits(64):016x}", num_hosted, speed, born_s, gone_s, zone, crashes)


def first_spans(scenario: Scenario, everybody: Sequence[Life]) -> dict[str, Span]:
    """Where those are that are there from the start: fleets in their zone's stretch, volunteers where it is lowest."""
    sums, spans = np.zeros(scenario.num_blocks), {}
    first = [life for life in everybody if life.born_s == 0.0]
    for life in sorted(first, key=lambda life: (life.zone is None, life.peer_id)):
        start, end = 0, scenario.num_blocks
        if life.zone is not None:
            start, end = (round((life.zone + i) * scenario.num_blocks / scenario.zones) for i in (0, 1))
            end = min(scenario.num_blocks, max(end, start + life.num_hosted))
            start = min(start, end - life.num_hosted)
        window = best_window(sums[start:end], life.num_hosted)
        spans[life.peer_id] = Span(start + window.start, start + window.end)
        sums[start + window.start : start + window.end] += life.speed / life.num_hosted
    return spans
