"""The simulation that placement is measured with: the same events for all, gaps seen, rest when nothing happens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

from churn import Scenario, first_spans, lives
from petals_policy import Placed, best_window, block_sums, settled, wants_to_move
from policies import NoRebalancing, Petals, Swarm, shared_plans
from virtual_swarm import Policy, VirtualSwarm

from swarm_protocol.span import Span

SMALL = Scenario(10, 16, 3, 6, hours=1, lifetime_h=1, zones=2, burst_every_h=0.3)


def run(policy: Policy, seed: int = 1) -> VirtualSwarm:
    everybody = lives(SMALL, seed)
    swarm = VirtualSwarm(SMALL, everybody, first_spans(SMALL, everybody), policy, seed)
    with shared_plans():
        swarm.run()
    return swarm


def test_the_optimum_does_not_depend_on_the_policy_and_is_not_exceeded() -> None:
    runs = [run(policy).metrics for policy in (NoRebalancing(), Swarm(), Petals(10))]
    for metrics in runs:
        assert metrics.optimum == runs[0].optimum
        assert all(
            carried <= optimum * (1 + 1e-5) for carried, optimum in zip(metrics.carried, metrics.optimum, strict=True)
        )
        assert not metrics.moves_at_rest


def test_a_run_can_be_repeated() -> None:
    assert run(Swarm()).metrics.summary() == run(Swarm()).metrics.summary()


@pytest.mark.parametrize(
    ("sums", "length", "window"),
    [([3, 1, 2, 1], 1, "1:2"), ([3, 1, 2, 1], 2, "1:3"), ([1, 3, 1, 2], 2, "2:4"), ([0, 0, 0], 3, "0:3")],
)
def test_petals_takes_the_lowest_window(sums: list[float], length: int, window: str) -> None:
    import numpy as np

    assert best_window(np.array(sums, float), length) == Span.parse(window)


def test_petals_settles_where_all_blocks_are_held() -> None:
    import random

    servers = {str(i): Placed(Span(0, 2), 1.0) for i in range(4)}
    assert not wants_to_move({"0": servers["0"]}, "0", block_sums({"0": servers["0"]}, 2))
    assert wants_to_move(servers, "0", block_sums(servers, 8))
    assert settled(servers, "0", 8, random.Random(0)) == pytest.approx(1.0, rel=0.01)
