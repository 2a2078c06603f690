"""The simulation that rebalancing of stages is measured with: the same events for all, a bound that holds, rest."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[5] / "benchmarks"))

from metrics import Metrics
from routing_policies import ROUTERS, RandomRouter, WeightedRoundRobin, WeightedRouter
from simulate_training import SCENARIOS, crew_of, hours_of, lost_share, peer_lives, simulate
from training_policies import assigned, most_of_all_assignments
from training_routes import Crew, Traffic

from swarm_server.placement.capacity import Coverage
from swarm_training.stages.routing.router import Router
from swarm_training.stages.routing.speed import BACKWARD, FORWARD, SHARES

SMALL = replace(SCENARIOS[100], num_servers=24, num_blocks=4, zones=2, hours=2, burst_every_h=0.2)


def layout(num_stages: int, speeds: list[float]) -> Coverage:
    zeros = np.zeros(len(speeds), int)
    ids = tuple(map(str, range(len(speeds))))
    return Coverage(num_stages, ids, zeros, zeros + 1, np.array(speeds), np.ones(len(speeds), bool))


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_for_every_assignment_and_one_is_found_near_the_best(seed: int) -> None:
    """Of few peers, all assignments are tried."""
    chance = random.Random(seed)
    num_stages, speeds = chance.randint(1, 3), [chance.lognormvariate(0, 0.5) for _ in range(chance.randint(3, 7))]
    best = max(
        min(sum(speed for speed, at in zip(speeds, stages, strict=True) if at == stage) for stage in range(num_stages))
        for stages in product(range(num_stages), repeat=len(speeds))
    )
    found = assigned(layout(num_stages, speeds))
    assert found <= best * (1 + 1e-9) and best <= most_of_all_assignments(layout(num_stages, speeds)) * (1 + 1e-9)
    assert found >= 0.8 * best


def test_the_optimum_does_not_depend_on_the_policy_and_rebalancing_comes_nearer() -> None:
    by_policy, found = simulate(SMALL, seed=1, num_checks=2)
    optima = [metrics.optimum for metrics in by_policy.values()]
    assert all(optimum == optima[0] for optimum in optima) and len(found) == 2
    for metrics in by_policy.values():
        assert all(a <= b * (1 + 1e-9) for a, b in zip(metrics.carried, metrics.optimum, strict=True))
    random_stage, staying, ours = by_policy.values()
    assert random_stage.of_optimum < staying.of_optimum < ours.of_optimum
    assert ours.moves and not ours.moves_at_rest and not staying.moves
    again, _ = simulate(SMALL, seed=1, num_checks=0)
    assert again["ours"].summary() == ours.summary()


def test_hours_and_what_is_lost_are_those_of_the_formulas() -> None:
    metrics = Metrics(times=[i * 1800.0 for i in range(5)], carried=[1, 2, 3, 4, 9], optimum=[4] * 5, num_measured=4)
    assert hours_of(metrics) == [3 / 8, 7 / 8]
    first, second = replace(peer_lives(SMALL, 1)[0], speed=2.0, born_s=0.0, gone_s=600.0, crashes=True), None
    second = replace(first, peer_id="b", speed=1.0, gone_s=float("inf"))
    assert lost_share(SMALL, [first, second]) == pytest.approx(2 * 30 / (2 * 600 + 1 * 7200))


def test_one_trainer_reaches_what_equal_peers_can_compute() -> None:
    """Four micro-batches under way for each two peers in turn: all are busy, but for latency and jitter."""
    crew = Crew(((1.0, 1.0),) * 2, num_trainers=1)
    assert crew.carried == 2.0
    for name, policy in ROUTERS.items():
        assert (0.85 if policy is not RandomRouter else 0.5) < Traffic(crew, policy, seed=1).run() < 1.02, name


def test_a_step_waits_for_its_last_micro_batch() -> None:
    """One micro-batch at a time: two passes, and four ways through the network; a second peer has nothing to do."""
    for peers, batch, expected in (((1.0,), 1, 1 / 1.08), ((1.0, 1.0), 1, 0.5 / 1.08)):
        reached = Traffic(Crew((peers,), num_trainers=1), Router, seed=1, batch=batch).run()
        assert reached == pytest.approx(expected, rel=0.03)


def test_random_routing_is_held_up_by_a_slow_peer_and_announced_speeds_are_not() -> None:
    crew = Crew(((1.0, 1.0, 1.0, 0.1),) * 2, num_trainers=2)
    for policy in (Router, WeightedRouter):
        assert Traffic(crew, RandomRouter, seed=1).run() < 0.5 < 0.7 < Traffic(crew, policy, seed=1).run()


@pytest.mark.parametrize("seed", range(5))
def test_in_a_weighted_round_robin_nobody_is_ever_a_micro_batch_away_from_its_share(seed: int) -> None:
    rng = random.Random(seed)
    speeds = {peer: rng.lognormvariate(0, 1) for peer in "abcdefg"[: rng.randint(1, 7)]}
    routing, work, total = WeightedRoundRobin(rng.random), dict.fromkeys(speeds, 0.0), sum(speeds.values())
    for _ in range(300):
        share = SHARES[rng.choice((FORWARD, BACKWARD))]
        peer = routing.choose(list(speeds), speeds, share)
        routing.asked(peer, speeds[peer], share)
        work[peer] += share
        for peer, speed in speeds.items():
            assert abs(work[peer] - sum(work.values()) * speed / total) <= 1 + speed / total * len(speeds)


def test_a_crew_is_balanced() -> None:
    crew = crew_of(SCENARIOS[100], 1, 8)
    sums = [sum(stage) for stage in crew.stages]
    assert len(sums) == 8 and max(sums) < 1.2 * min(sums)
