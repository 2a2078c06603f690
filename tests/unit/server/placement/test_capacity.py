"""How much a swarm can carry: the closed form agrees with a linear program that knows nothing of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_server.placement.capacity import Coverage, SpanChange, speed_of
from tests.unit.support import server_record

NUM_BLOCKS = 8


@st.composite
def views(draw: st.DrawFn, max_size: int = 7) -> SwarmView:
    servers = []
    for index in range(draw(st.integers(1, max_size))):
        start = draw(st.integers(0, NUM_BLOCKS - 1))
        span = Span(start, draw(st.integers(start + 1, NUM_BLOCKS)))
        speed = draw(st.sampled_from([0.5, 1.0, 2.0, 3.5, 100.0]))
        servers.append(server_record(f"peer{index}", str(span), tokens_per_s=speed))
    return SwarmView(tuple(servers))


def most_tokens_per_s(servers: tuple[ServerRecord, ...]) -> float:
    """By linear programming: how much time each server gives to each of its blocks, so that most passes all of them."""
    if not set(range(NUM_BLOCKS)) <= {block for server in servers for block in server.span}:
        return 0.0
    pairs = [(index, block) for index, server in enumerate(servers) for block in server.span]
    upper = np.zeros((NUM_BLOCKS + len(servers), len(pairs) + 1))
    for column, (index, block) in enumerate(pairs):
        upper[block, column] = -len(servers[index].span) * servers[index].tokens_per_s  # of one block, in all its time
        upper[NUM_BLOCKS + index, column] = 1
    upper[:NUM_BLOCKS, -1] = 1
    limits = np.r_[np.zeros(NUM_BLOCKS), np.ones(len(servers))]
    result = linprog(np.r_[np.zeros(len(pairs)), -1.0], A_ub=upper, b_ub=limits)
    return -result.fun


@settings(deadline=None, max_examples=40)
@given(views())
def test_it_is_what_linear_programming_finds(view: SwarmView) -> None:
    balance = Coverage.of(view, NUM_BLOCKS).balance()
    assert balance.tokens_per_s == pytest.approx(most_tokens_per_s(view.servers), rel=1e-6, abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(views())
def test_the_bottleneck_is_all_that_limits(view: SwarmView) -> None:
    """To be faster at its blocks makes the swarm faster; to be faster elsewhere, or at a part of it, need not."""
    balance = Coverage.of(view, NUM_BLOCKS).balance()
    blocks = np.flatnonzero(balance.bottleneck).tolist()
    assert blocks
    helpers = tuple(server_record(f"helper{block}", f"{block}:{block + 1}", tokens_per_s=1.0) for block in blocks)
    assert most_tokens_per_s((*view.servers, *helpers)) > balance.tokens_per_s + 1e-6
    elsewhere = tuple(
        server_record(f"helper{block}", f"{block}:{block + 1}", tokens_per_s=1000.0)
        for block in range(NUM_BLOCKS)
        if block not in blocks
    )
    assert most_tokens_per_s((*view.servers, *elsewhere)) == pytest.approx(balance.tokens_per_s, rel=1e-6, abs=1e-9)
    for server in helpers if len(blocks) > 1 else ():  # all but one: that one still limits, or another part does
        rest = tuple(helper for helper in helpers if helper is not server)
        assert most_tokens_per_s((*view.servers, *rest)) <= most_tokens_per_s((*view.servers, *helpers)) + 1e-9


@settings(deadline=None, max_examples=30)
@given(views(), st.integers(0, 6), st.integers(0, NUM_BLOCKS - 1))
def test_alternatives_are_compared_as_if_they_were_there(view: SwarmView, index: int, start: int) -> None:
    layout = Coverage.of(view, NUM_BLOCKS)
    index %= len(view.servers)
    server = view.servers[index]
    start = min(start, NUM_BLOCKS - len(server.span))
    to = Span(start, start + len(server.span))
    throughputs, bottlenecks = layout.balances_with([[SpanChange(speed_of(server), server.span, to)], []])
    servers = list(view.servers)
    servers[index] = replace(server, span=to)
    assert throughputs.tolist() == pytest.approx(
        [most_tokens_per_s(tuple(servers)), most_tokens_per_s(view.servers)], rel=1e-6, abs=1e-9
    )
    moved = layout.moved([(index, to)]).balance()
    assert bottlenecks[0].tolist() == moved.bottleneck.tolist()


@settings(deadline=None, max_examples=50)
@given(views(), st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=7, max_size=7))
def test_no_placement_exceeds_the_upper_bound(view: SwarmView, starts: list[int]) -> None:
    bound = Coverage.of(view, NUM_BLOCKS).upper_bound()
    placed = []
    for server, start in zip(view.servers, starts, strict=False):
        start = min(start, NUM_BLOCKS - len(server.span))
        placed.append(replace(server, span=Span(start, start + len(server.span))))
    assert most_tokens_per_s(tuple(placed)) <= bound * (1 + 1e-5)


def test_missing_blocks_are_counted() -> None:
    view = SwarmView((server_record("a", "1:3"), server_record("b", "4:8")))
    balance = Coverage.of(view, NUM_BLOCKS).balance()
    assert (balance.tokens_per_s, balance.num_missing) == (0.0, 2)
    assert np.flatnonzero(balance.bottleneck).tolist() == [0, 3]
    assert Coverage.of(SwarmView(), NUM_BLOCKS).balance().num_missing == NUM_BLOCKS


def test_what_a_record_says_counts() -> None:
    assert speed_of(server_record(tokens_per_s=5.0)) == 20.0  # of four blocks
    assert speed_of(server_record(tokens_per_s=5.0, forward_tokens_per_s=50.0)) == 200.0
    assert speed_of(server_record(forward_tokens_per_s=50.0, network_tokens_per_s=30.0)) == 120.0
    assert speed_of(server_record(tokens_per_s=0.0)) == 0.0


def test_who_is_counted_and_where() -> None:
    going = server_record("going", "0:4", state=ServerState.DRAINING, next_span=Span(4, 8))
    view = SwarmView(
        (
            server_record("b", "0:4", tokens_per_s=4.0),
            server_record("a", "0:4", state=ServerState.JOINING, tokens_per_s=0.0),
            server_record("leaving", "0:8", state=ServerState.DRAINING),
            going,
            server_record("pinned", "2:6", pinned=True),
        )
    )
    layout = Coverage.of(view, NUM_BLOCKS)
    assert layout.peer_ids == ("a", "b", "going", "pinned")
    assert [str(layout.span(index)) for index in range(4)] == ["0:4", "0:4", "4:8", "2:6"]
    assert layout.speeds.tolist() == [40.0, 16.0, 40.0, 40.0]  # one that is unknown is as the median
    assert layout.movable.tolist() == [False, True, False, False]
