"""The states of a server: what its record says in each, and that nothing but a runtime brings measurements."""

from __future__ import annotations

import pytest

from swarm_protocol.dht.records import ServerState
from swarm_protocol.span import Span
from swarm_server.metrics.throughput import Speeds
from swarm_server.node.states import Draining, Loading, Serving, Unloaded, end, with_speeds
from tests.unit.support import server_record

HERE, THERE = Span(0, 4), Span(4, 8)
LOADING = Loading(server_record(blocks="0:4", state=ServerState.JOINING))


class FakeRuntime:
    speeds, cache_tokens, cache_tokens_left, queue_delay_s = Speeds(20.0, 300.0), 9, 7, 0.5

    def __init__(self, span: Span = HERE) -> None:
        self.span = span


SERVING = LOADING.serve(FakeRuntime())


def said(state) -> tuple[ServerState, Span, Span | None]:
    return state.record.state, state.record.span, state.record.next_span


def test_a_life_without_a_move() -> None:
    assert said(LOADING) == (ServerState.JOINING, HERE, None)
    assert said(SERVING) == (ServerState.ONLINE, HERE, None)
    draining = SERVING.drain()
    assert said(draining) == (ServerState.DRAINING, HERE, None)
    unloaded = draining.unload()
    assert said(unloaded) == (ServerState.DRAINING, HERE, None)
    assert said(end(unloaded)) == (ServerState.OFFLINE, HERE, None)


def test_a_move_is_announced_until_the_other_blocks_load() -> None:
    planning = SERVING.plan_move(THERE)
    assert isinstance(planning, Serving) and said(planning) == (ServerState.ONLINE, HERE, THERE)
    draining = planning.drain(THERE)
    assert said(draining) == (ServerState.DRAINING, HERE, THERE)
    unloaded = draining.unload()
    assert said(unloaded) == (ServerState.DRAINING, HERE, THERE)
    loading = unloaded.load(THERE)
    assert said(loading) == (ServerState.JOINING, THERE, None)
    assert said(loading.serve(FakeRuntime(THERE))) == (ServerState.ONLINE, THERE, None)


def test_a_server_that_stays_takes_its_plan_back() -> None:
    assert SERVING.plan_move(THERE).stay() == SERVING


def test_a_move_that_failed_half_way_may_be_planned_again() -> None:
    again = SERVING.drain(THERE).plan_move(HERE)
    assert isinstance(again, Draining) and said(again) == (ServerState.DRAINING, HERE, HERE)


def test_blocks_that_cannot_be_loaded_pin_the_server_to_others() -> None:
    loading = LOADING.choose(THERE).stay_with(HERE)
    assert said(loading) == said(LOADING) and loading.record.pinned and not LOADING.record.pinned


@pytest.mark.parametrize("state", [SERVING.plan_move(THERE), SERVING.drain(THERE)])
def test_a_server_that_is_stopped_while_it_moves_drains_and_goes_nowhere(state: Serving | Draining) -> None:
    assert state.drain() == SERVING.drain()


def test_a_server_that_is_stopped_without_blocks_has_nothing_to_drain() -> None:
    assert LOADING.drain() == Unloaded(SERVING.drain().record)
    stopped = SERVING.drain(THERE).unload().drain()
    assert said(stopped) == (ServerState.DRAINING, HERE, None)


def test_a_hosting_server_says_what_is_measured() -> None:
    for state in (SERVING, SERVING.drain()):
        record = state.measured({"near": 0.01}, 5.0)
        assert (record.tokens_per_s, record.forward_tokens_per_s) == (20.0, 300.0)
        assert (record.cache_tokens, record.cache_tokens_left, record.queue_delay_s) == (9, 7, 0.5)
        assert (record.next_hop_rtts_s, record.network_tokens_per_s) == ({"near": 0.01}, 5.0)
        assert (record.state, record.span) == said(state)[:2]


def test_what_was_measured_last_is_known_when_the_blocks_are_gone() -> None:
    record = SERVING.unload().record
    assert (record.tokens_per_s, record.forward_tokens_per_s, record.cache_tokens_left) == (20.0, 300.0, 0)
    assert with_speeds(record, None) == record
    assert with_speeds(record, Speeds(1.0, 2.0)).forward_tokens_per_s == 2.0
