"""What rebalancing stages is worth, in virtual time: ``simulate_swarm.py --training``.

Machines that may be preempted train a model in stages for 32 hours; the same ones come and go (``churn.py``) under
three policies (``training_policies.py``): a random stage, the slowest stage, and the slowest stage with moves later,
which is what peers do (``swarm_training/stages/placement/stage_choice.py``). Throughput is that of the slowest stage,
by the peers that work there, in proportion to what no assignment of the peers that are there exceeds. Then
micro-batches are routed through the stages of such a run (``training_routes.py``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from churn import Scenario, lives
from common import json_row
from metrics import Metrics
from rich.console import Console
from rich.table import Table
from routing_policies import ROUTERS
from training_policies import (
    PeerLife,
    RandomStage,
    Rebalanced,
    SlowestStage,
    StagePolicy,
    assigned,
    most_of_all_assignments,
)
from training_routes import PER_PEER, Crew, reached
from virtual_swarm import VirtualSwarm

from swarm_protocol.span import Span
from swarm_training.stages.placement.stage_choice import PlacedPeer, PlacementView, choose_stage

_FLEETS = Scenario(
    *(100, 8, 1, 1),
    hours=32,
    lifetime_h=6,
    preemptible=0.8,
    zones=8,
    burst_every_h=0.5,
    burst_size=(0.2, 1.0),
    back_after_s=(600, 3600),
)
SCENARIOS = {100: _FLEETS, 1000: replace(_FLEETS, num_servers=1000, num_blocks=16)}
QUICK = {100: 4.0}  # hours
# What Ryabinin et al. (2023) report of SWARM on preemptible machines, with rebalancing and without.
TARGET, SWARM_WITHOUT = 0.958, 0.827
STEP_S = 60.0  # for the note on what is lost with a peer
TRAINERS, TRAINERS_IN_STEPS, PER_STEP = (1, 8, 32), (1, 8), 4  # micro-batches of a step for each peer


def simulate(scenario: Scenario, seed: int, num_checks: int) -> tuple[dict[str, Metrics], list[float]]:
    """By policy; and at sampled instants, what an assignment that was found carries, of the bound."""
    everybody, found = peer_lives(scenario, seed), []
    by_policy = {}
    policies: Sequence[StagePolicy] = (RandomStage(), SlowestStage(), Rebalanced())
    large = scenario.num_servers >= 1000
    for policy in policies:
        swarm = VirtualSwarm(
            scenario,
            everybody,
            first_stages(scenario, everybody),
            policy,
            seed,
            view_s=5.0 if large else 0.0,
            sample_s=10.0,
            optimum=most_of_all_assignments,
        )
        if isinstance(policy, RandomStage):  # who is there is the same under each policy
            for number in range(num_checks):

                def look(swarm: VirtualSwarm = swarm) -> None:
                    found.append(assigned(swarm.there()) / most_of_all_assignments(swarm.there()))

                swarm.at((number + 0.5) * scenario.churn_s / num_checks, look)
        by_policy[policy.name] = swarm.run()
    return by_policy, found


def peer_lives(scenario: Scenario, seed: int) -> list[PeerLife]:
    return [PeerLife(**vars(life)) for life in lives(scenario, seed)]


def first_stages(scenario: Scenario, everybody: Sequence[PeerLife]) -> dict[str, Span]:
    """Where those are that are there from the start: each took the slowest stage."""
    view = PlacementView((1.0,) * scenario.num_blocks, ())
    for life in everybody:
        if life.born_s == 0.0:
            peer = PlacedPeer(life.peer_id, choose_stage(view, life.peer_id), life.speed)
            view = replace(view, peers=(*view.peers, peer))
    return {peer.peer_id: Span(peer.stage, peer.stage + 1) for peer in view.peers}


def crew_of(scenario: Scenario, seed: int, num_trainers: int) -> Crew:
    """Those who are there at the start, the usual one with a micro-batch per second."""
    everybody = peer_lives(scenario, seed)
    speeds = {life.peer_id: life.speed for life in everybody}
    usual = median(speed for life in everybody for speed in [life.speed] if life.born_s == 0.0)
    stages: list[list[float]] = [[] for _ in range(scenario.num_blocks)]
    for peer_id, span in first_stages(scenario, everybody).items():
        stages[span.start].append(speeds[peer_id] / usual)
    return Crew(tuple(map(tuple, stages)), num_trainers)


def lost_share(scenario: Scenario, everybody: Sequence[PeerLife]) -> float:
    """Of all work, what those who vanish have counted in the step of that moment: half a step in the mean."""
    stays_s = {life: min(life.gone_s, scenario.churn_s) - life.born_s for life in everybody}
    work = sum(life.speed * stay_s for life, stay_s in stays_s.items())
    vanished = [life for life in everybody if life.crashes and life.gone_s < scenario.churn_s]
    return sum(life.speed * min(STEP_S / 2, stays_s[life]) for life in vanished) / work


def of_optimum(metrics: Metrics, first: int, last: int) -> float:
    return sum(metrics.carried[first:last]) / sum(metrics.optimum[first:last])


def hours_of(metrics: Metrics) -> list[float]:
    """The share of the optimum in each whole hour with churn."""
    per_hour = round(3600 / (metrics.times[1] - metrics.times[0]))
    return [
        of_optimum(metrics, first, first + per_hour)
        for first in range(0, metrics.num_measured - per_hour + 1, per_hour)
    ]


# ---------------------------------------------------------------- results


def print_churn(console: Console, scenario: Scenario, by_policy: dict[str, Metrics], notes: str) -> None:
    low, high = scenario.burst_size
    title = (
        f"{scenario.num_servers} peers, {scenario.num_blocks} stages, {scenario.hours:g} h: {scenario.preemptible:.0%} "
        f"preemptible in {scenario.zones} zones, {low:.0%} to {high:.0%} of one of them vanish every "
        f"{60 * scenario.burst_every_h:.0f} min; the others stay {scenario.lifetime_h:g} h in the mean"
    )
    table = Table(box=None, title=title, title_justify="left")
    for column in ("", "of the optimum", "first hour", "last hour", "worst hour", "stage empty", "moves/h", "at rest"):
        table.add_column(column, justify="left" if not column else "right")
    for name, metrics in by_policy.items():
        hours = hours_of(metrics)
        table.add_row(
            name,
            f"{metrics.of_optimum:.1%}",
            *(f"{value:.1%}" for value in (hours[0], hours[-1], min(hours))),
            str(len(metrics.gaps)),
            f"{metrics.moves_per_hour:.2f}",
            str(metrics.moves_at_rest),
        )
    table.add_row("target of ours", f"≥ {TARGET:.1%}", *[""] * 5, "0", style="dim")
    table.add_row("SWARM, reported without rebalancing", f"{SWARM_WITHOUT:.1%}", style="dim")
    console.print(table)
    console.print(f"{notes}\n")


def routes(size: int, seed: int, is_quick: bool) -> dict[str, dict[str, float]]:
    """By how many trainers there are, and whether they wait for the end of steps: the share of each policy."""
    scenario, found = SCENARIOS[size], {}
    for number in TRAINERS[:1] if is_quick else TRAINERS:
        found[f"{number} trainers"] = reached(crew_of(scenario, seed, number), seed)
    for number in () if is_quick else TRAINERS_IN_STEPS:
        name = f"{number} trainers, in steps"
        found[name] = reached(crew_of(scenario, seed, number), seed, PER_STEP * scenario.num_servers)
    return found


def print_routing(console: Console, shares: dict[str, dict[str, float]]) -> None:
    table = Table(
        box=None,
        title=f"Micro-batches, of what the slowest stage can compute; {PER_PEER:g} under way per peer; in steps, "
        f"the next {PER_STEP} per peer begin when the last are computed",
        title_justify="left",
    )
    for column in ("", *ROUTERS):
        table.add_column(column, justify="right")
    for name, by_policy in shares.items():
        table.add_row(name, *(f"{by_policy[policy]:.1%}" for policy in ROUTERS))
    console.print(table)
    console.print()


def json_rows(size: int, by_policy: dict[str, Metrics]) -> list[dict[str, Any]]:
    ours = by_policy[Rebalanced.name]
    shares = [
        json_row(
            f"{size} training peers, {name}: share of the optimum",
            metrics.of_optimum,
            TARGET if metrics is ours else None,
            beside=1.0,
            worst_hour=min(hours_of(metrics)),
        )
        for name, metrics in by_policy.items()
    ]
    rest = json_row(f"{size} training peers, moves at rest", float(ours.moves_at_rest), 0.0, at_most=True)
    return [*shares, rest]


def routing_rows(size: int, shares: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [
        json_row(f"{size} peers, {name}, {policy}: share of the slowest stage", share)
        for name, by_policy in shares.items()
        for policy, share in by_policy.items()
    ]


def simulate_training(
    console: Console, sizes: Sequence[int], hours: float | None, seed: int, is_quick: bool
) -> tuple[dict[int, dict[str, Metrics]], list[dict[str, Any]]]:
    """Returns what was measured of each size, and the rows to be written."""
    results, rows = {}, []
    for size in sizes:
        scenario = SCENARIOS[size]
        if churn_h := hours or (QUICK[size] if is_quick else None):
            scenario = replace(scenario, hours=churn_h)
        start = time.perf_counter()
        by_policy, found = simulate(scenario, seed, num_checks=2 if is_quick else 24)
        lost = lost_share(scenario, peer_lives(scenario, seed))
        notes = (
            f"at {len(found)} instants an assignment was found that carries {min(found):.2%} of the optimum or more; "
            f"what vanishes with peers is {lost:.2%} of all work with steps of {STEP_S:g} s, which is not deducted; "
            f"{time.perf_counter() - start:.0f} s"
        )
        print_churn(console, scenario, by_policy, notes)
        results[size] = by_policy
        rows += json_rows(size, by_policy)
    size = min(sizes)
    shares = routes(size, seed, is_quick)
    print_routing(console, shares)
    return results, rows + routing_rows(size, shares)
