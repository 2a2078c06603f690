"""Placement: a server goes where it helps most, moves only for a gain, and a swarm comes to rest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_server.placement.capacity import Coverage
from swarm_server.placement.placement import PlannedMove, choose_span, may_leave, others_first, own_move, plan_moves
from tests.unit.server.placement.test_capacity import NUM_BLOCKS, most_tokens_per_s, views
from tests.unit.support import server_record


def swarm(*servers: tuple[str, float]) -> SwarmView:
    return SwarmView(
        tuple(
            server_record(f"peer{index:02}", blocks, tokens_per_s=speed)
            for index, (blocks, speed) in enumerate(servers)
        )
    )


def windows(length: int) -> list[Span]:
    return [Span(start, start + length) for start in range(NUM_BLOCKS - length + 1)]


@pytest.mark.parametrize(
    ("servers", "num_hosted", "expected"),
    [
        ([], 3, "0:3"),  # the first of equals
        ([], 100, "0:8"),  # never more than the model has
        ([("0:3", 10), ("5:8", 10)], 4, "2:6"),  # the gap, and help on either side
        ([("0:4", 1), ("4:8", 2)], 4, "1:5"),  # helps the slower half, and a little the other
        ([("0:4", 10), ("0:4", 10), ("4:8", 15)], 1, "4:5"),  # two slow servers are faster than one
        ([("0:8", 5)], 8, "0:8"),
    ],
)
def test_by_example(servers: list[tuple[str, float]], num_hosted: int, expected: str) -> None:
    assert choose_span(swarm(*servers), NUM_BLOCKS, num_hosted) == Span.parse(expected)


@settings(deadline=None, max_examples=30)
@given(views(5), st.integers(1, NUM_BLOCKS), st.sampled_from([0.5, 3.0, 50.0]))
def test_nowhere_does_it_help_more(view: SwarmView, num_hosted: int, speed: float) -> None:
    chosen = choose_span(view, NUM_BLOCKS, num_hosted, speed)

    def after(window: Span) -> tuple[float, int]:
        servers = (*view.servers, server_record("new", str(window), tokens_per_s=speed))
        held = {block for server in servers for block in server.span}
        return most_tokens_per_s(servers), len(held)

    best = max(after(window)[0] for window in windows(num_hosted))
    tokens_per_s, num_held = after(chosen)
    assert tokens_per_s == pytest.approx(best, rel=1e-5, abs=1e-9)
    if best < 1e-9:  # some blocks will be missing anyhow: as few as possible
        assert num_held == max(after(window)[1] for window in windows(num_hosted))


@pytest.mark.parametrize("num_servers", [2, 4, 7])
def test_servers_that_join_at_once_do_not_pile_up(num_servers: int) -> None:
    """All have chosen the same blocks, each before it heard of the others; then each reads what the others say."""
    names = [f"peer{number}" for number in range(num_servers)]
    spans = dict.fromkeys(names, choose_span(SwarmView(), NUM_BLOCKS, 2))
    for _ in range(num_servers):
        view = SwarmView(
            tuple(server_record(name, str(span), state=ServerState.JOINING) for name, span in spans.items())
        )
        spans = {name: choose_span(others_first(view, name), NUM_BLOCKS, 2, 10.0) for name in names}
    one_by_one: list = []
    for _ in names:
        one_by_one.append((str(choose_span(swarm(*one_by_one), NUM_BLOCKS, 2, 10.0)), 10.0))
    assert sorted(map(str, spans.values())) == sorted(blocks for blocks, _ in one_by_one)


def applied(view: SwarmView, moves: tuple[PlannedMove, ...]) -> SwarmView:
    """Where all servers are in the end; one may have moved twice."""
    destinations = {move.peer_id: move.to for move in moves}
    return SwarmView(
        tuple(replace(server, span=destinations.get(server.peer_id, server.span)) for server in view.servers)
    )


def all_placements(view: SwarmView) -> Iterator[SwarmView]:
    for spans in product(*(windows(len(server.span)) for server in view.servers)):
        yield SwarmView(tuple(replace(server, span=span) for server, span in zip(view.servers, spans, strict=True)))


@settings(deadline=None, max_examples=40)
@given(views())
def test_plans_gain_what_they_promise_and_then_there_is_rest(view: SwarmView) -> None:
    before = most_tokens_per_s(view.servers)
    moves = plan_moves(view, NUM_BLOCKS, margin=0.1)
    after = most_tokens_per_s(applied(view, moves).servers)
    missing = Coverage.of(view, NUM_BLOCKS).balance().num_missing
    if moves:
        now_missing = Coverage.of(applied(view, moves), NUM_BLOCKS).balance().num_missing
        assert after > before * 1.1 * (1 - 1e-6) or now_missing < missing
    rounds = 0
    while moves:
        rounds += 1
        assert rounds < 20, "the swarm does not come to rest"
        view = applied(view, moves)
        moves = plan_moves(view, NUM_BLOCKS, margin=0.1)


@pytest.mark.slow
def test_plans_come_near_the_best_placement() -> None:
    shares = []
    for seed in range(30):
        draw = random.Random(seed)
        servers = []
        for _ in range(3):
            length = draw.randint(2, 5)
            start = draw.randint(0, NUM_BLOCKS - length)
            servers.append((f"{start}:{start + length}", draw.choice([1.0, 2.0, 5.0])))
        view = swarm(*servers)
        best = max(most_tokens_per_s(placement.servers) for placement in all_placements(view))
        if best > 1e-9:
            shares.append(most_tokens_per_s(applied(view, plan_moves(view, NUM_BLOCKS, 0.01)).servers) / best)
    assert len(shares) > 15
    assert sum(shares) / len(shares) > 0.97
    assert min(shares) > 0.6


def test_a_gap_is_filled_by_those_who_can_go() -> None:
    view = swarm(("0:4", 10), ("0:4", 10), ("0:4", 10))
    after = applied(view, plan_moves(view, NUM_BLOCKS))
    assert sorted(str(server.span) for server in after.servers) == ["0:4", "2:6", "4:8"]  # 15 tokens/s
    assert plan_moves(swarm(("0:4", 10), ("2:6", 10)), NUM_BLOCKS) == (PlannedMove("peer01", Span(4, 8)),)


def test_nobody_moves_for_little() -> None:
    view = swarm(("0:4", 10), ("4:8", 10), ("0:4", 1))  # best in the middle: 10.5 tokens/s
    assert plan_moves(view, NUM_BLOCKS, margin=0.06) == ()
    (move,) = plan_moves(view, NUM_BLOCKS, margin=0.04)
    assert move.peer_id == "peer02" and 1 <= move.to.start <= 3


def test_pinned_servers_and_those_on_the_move_stay() -> None:
    view = swarm(("0:4", 10), ("0:4", 10))
    (move,) = plan_moves(view, NUM_BLOCKS)
    stays, goes = view.servers
    assert move == PlannedMove(stays.peer_id, Span(4, 8))
    assert plan_moves(SwarmView((replace(stays, pinned=True), goes)), NUM_BLOCKS) == (
        PlannedMove(goes.peer_id, Span(4, 8)),
    )
    pinned = SwarmView(tuple(replace(server, pinned=True) for server in view.servers))
    assert plan_moves(pinned, NUM_BLOCKS) == ()
    for state in (ServerState.ONLINE, ServerState.DRAINING):
        on_its_way = replace(goes, state=state, next_span=Span(4, 8))
        assert plan_moves(SwarmView((stays, on_its_way)), NUM_BLOCKS) == ()
    joining = replace(goes, state=ServerState.JOINING, span=Span(4, 8))
    assert plan_moves(SwarmView((stays, joining)), NUM_BLOCKS) == ()


def test_everybody_finds_the_same_plan_and_only_some_are_in_it() -> None:
    view = swarm(*[("0:4", 10.0)] * 6)
    plan = plan_moves(view, NUM_BLOCKS)
    assert len(plan) == 3
    shuffled = SwarmView(tuple(reversed(view.servers)))
    assert plan_moves(shuffled, NUM_BLOCKS) == plan
    own = {server.peer_id: own_move(view, server.peer_id, NUM_BLOCKS) for server in view.servers}
    assert {peer_id: to for peer_id, to in own.items() if to} == {move.peer_id: move.to for move in plan}


def test_nobody_leaves_blocks_that_others_must_come_to_first() -> None:
    """By the plan two exchange their places, but each is the only one at its blocks."""
    view = swarm(("0:2", 1), ("0:4", 1), ("4:8", 1), ("4:6", 100), ("6:8", 100), ("2:4", 0.1))
    for server in view.servers:
        to = own_move(view, server.peer_id, NUM_BLOCKS)
        others = SwarmView(tuple(other for other in view.servers if other is not server))
        assert to is None or all(others.replicas(NUM_BLOCKS)[block] for block in server.span)


def test_where_nothing_passes_anyhow_all_may_move_to_close_the_gap() -> None:
    view = swarm(("1:4", 10), ("3:6", 10), ("5:7", 10))
    assert not all(view.replicas(NUM_BLOCKS))
    moves = plan_moves(view, NUM_BLOCKS)
    assert all(applied(view, moves).replicas(NUM_BLOCKS))
    assert {own_move(view, move.peer_id, NUM_BLOCKS) for move in moves} == {move.to for move in moves}
    on_their_way = {move.peer_id: move.to for move in moves}
    about_to_leave = SwarmView(
        tuple(
            replace(server, next_span=on_their_way[server.peer_id]) if server.peer_id in on_their_way else server
            for server in view.servers
        )
    )
    assert all(may_leave(about_to_leave, peer_id, NUM_BLOCKS) for peer_id in on_their_way)


def test_a_gap_that_cannot_be_closed_is_no_reason_to_open_others() -> None:
    view = swarm(("0:2", 10), ("2:4", 10))
    assert [own_move(view, server.peer_id, NUM_BLOCKS) for server in view.servers] == [None, None]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([server_record("z", "0:8")], True),
        ([server_record("z", "0:2"), server_record("y", "2:8")], True),
        ([server_record("z", "0:3"), server_record("y", "4:8")], False),
        ([server_record("y", "4:8")], False),
        ([server_record("z", "0:8", state=ServerState.JOINING), server_record("y", "4:8")], False),
        ([server_record("z", "0:8", state=ServerState.DRAINING)], False),
        # Both want to leave, and neither knows whether the other has left already.
        ([server_record("z", "0:8", next_span=Span(4, 8))], False),
        ([server_record("a", "0:8", next_span=Span(4, 8))], False),
        ([server_record("z", "0:8", state=ServerState.DRAINING, next_span=Span(4, 8))], False),
    ],
)
def test_never_is_a_gap_opened(others: list[ServerRecord], expected: bool) -> None:
    me = server_record("me", "0:4", next_span=Span(4, 8))
    assert may_leave(SwarmView((me, *others)), "me", NUM_BLOCKS) is expected
