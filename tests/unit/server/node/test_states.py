"""The states of a server: what its record says in each, and that nothing but a runtime brings measurements."""

from __future__ import annotations

import pytest

from swarm_protocol.dht.records import ServerState
from swarm_protocol.span import Span
from swarm_server.metrics.throughput import Speeds
from swarm_server.node.states import Draining, Loading, Serving, Unloaded, with_speeds
from tests.unit.server.node.test_moving import HERE, THERE, FakeRuntime
from tests.unit.support import server_record

LOADING = Loading(server_record(blocks="0:4", state=ServerState.JOINING))


SERVING = LOADING.serve(FakeRuntime(HERE))


def said(state) -> tuple[ServerState, Span, Span | None]:
    return state.record.state, state.record.span, state.record.next_span


def test_a_move_that_failed_half_way_may_be_planned_again() -> None:
    again = SERVING.drain(THERE).plan_move(HERE)
    assert isinstance(again, Draining) and said(again) == (ServerState.DRAINING, HERE, HERE)


@pytest.mark.parametrize("state", [SERVING.plan_move(THERE), SERVING.drain(THERE)])
def test_a_server_that_is_stopped_while_it_moves_drains_and_goes_nowhere(state: Serving | Draining) -> None:
    assert state.drain() == SERVING.drain()


def test_a_server_that_is_stopped_without_blocks_has_nothing_to_drain() -> None:
    assert LOADING.drain() == Unloaded(SERVING.drain().record)
    stopped = SERVING.drain(THERE).unload().drain()
    assert said(stopped) == (ServerState.DRAINING, HERE, None)


def test_what_was_measured_last_is_known_when_the_blocks_are_gone() -> None:
    record = SERVING.unload().record
    assert (record.tokens_per_s, record.forward_tokens_per_s, record.cache_tokens_left) == (20.0, 300.0, 0)
    assert with_speeds(record, None) == record
    assert with_speeds(record, Speeds(1.0, 2.0)).forward_tokens_per_s == 2.0
