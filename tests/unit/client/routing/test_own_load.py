"""What a client's sessions have servers do counts when the next one chooses, at once and by how much it is."""

from __future__ import annotations

from collections import Counter

import pytest

from swarm_client.routing.own_load import SessionLoad, with_own_load
from swarm_client.routing.routing import Costs, Hop, fastest_chain
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.span import Span
from tests.unit.support import server_record

ALL = Span(0, 8)
COSTS = Costs({"a": 0.001, "b": 0.001, "c": 0.001})


def server(name: str, tokens_per_s: float = 10.0):
    return server_record(name, "0:8", tokens_per_s=tokens_per_s, forward_tokens_per_s=10 * tokens_per_s)


def opened(view: SwarmView, num: int, costs: Costs = COSTS, num_waiting: int = 0) -> Counter[str]:
    """How many of so many sessions that come one after the other each server gets."""
    loads: list[SessionLoad] = []
    for _ in range(num):
        keep = loads[-1].route if loads else ()
        loads.append(SessionLoad(fastest_chain(view, ALL, with_own_load(costs, view, loads), keep), num_waiting))
    return Counter(hop.server.peer_id for load in loads for hop in load.route)


@pytest.mark.parametrize("num_waiting", [0, 100])
def test_equal_servers_get_equally_many_sessions(num_waiting: int) -> None:
    found = opened(SwarmView([server("a"), server("b")]), 32, num_waiting=num_waiting)
    assert found.total() == 32 and max(found.values()) <= 17


def test_a_fast_server_gets_more_of_them() -> None:
    found = opened(SwarmView([server("a", 30.0), server("b", 10.0)]), 40)
    assert 1.5 * found["b"] < found["a"] < 5 * found["b"]


def test_a_server_that_is_far_is_taken_once_the_near_one_is_loaded() -> None:
    """A session makes a step of 0.1 s longer by 0.02 s; the way there and back takes 0.15 s."""
    costs = Costs({"a": 0.0, "b": 0.15})
    view = SwarmView([server("a"), server("b")])
    assert opened(view, 6, costs) == {"a": 6}
    assert opened(view, 30, costs)["b"] > 6


def test_prompts_that_are_not_computed_yet_are_a_queue() -> None:
    view = SwarmView([server("a"), server("b")])
    costs = with_own_load(COSTS, view, [SessionLoad((Hop(view.servers[0], ALL),), 300)])
    assert costs.visit_s(view.servers[0]) == pytest.approx(3.0) and costs.visit_s(view.servers[1]) == 0.0
