"""Routing: the chain it takes is the best of all chains, and what it cannot use it names."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from swarm_client.routing.routing import (
    ASSUMED_TOKENS_PER_S,
    KEEP_MARGIN,
    NO_ROOM_S,
    Costs,
    Hop,
    Route,
    Wanted,
    best_replica,
    fastest_chain,
    no_route,
    seconds,
    spread,
    usable,
)
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import NoRoute
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import WIRE_VERSION
from tests.unit.support import server_record

NEED = 100
NEAR = Costs({}, need_tokens=NEED)  # every server is at the client's side


def cost(chain: Route, costs: Costs) -> float:
    """Seconds for one token: what `fastest_chain` says it minimises, told differently."""
    to_client = {hop.server.peer_id: costs.rtts_s.get(hop.server.peer_id, costs.unknown_rtt_s) / 2 for hop in chain}
    total = to_client[chain[0].server.peer_id] + to_client[chain[-1].server.peer_id]
    for hop in chain:
        server = hop.server
        total += server.queue_delay_s
        total += len(hop.span) / len(server.span) / (server.tokens_per_s or ASSUMED_TOKENS_PER_S)
        total += NO_ROOM_S if server.cache_tokens_left < costs.need_tokens else 0
    for one, other in pairwise(chain):
        ways = [to_client[one.server.peer_id] + to_client[other.server.peer_id]]
        for server, peer in ((one.server, other.server.peer_id), (other.server, one.server.peer_id)):
            if costs.pushes and peer in server.next_hop_rtts_s:
                ways.append(server.next_hop_rtts_s[peer] / 2)
        total += min(ways)
    return total


def all_chains(servers: tuple[ServerRecord, ...], start: int, end: int) -> Iterator[Route]:
    if start == end:
        yield ()
    for server in servers:
        if start in server.span:
            for stop in range(start + 1, min(server.span.end, end) + 1):
                for rest in all_chains(servers, stop, end):
                    yield (Hop(server, Span(start, stop)), *rest)


def random_swarm(seed: int) -> tuple[SwarmView, Span, Costs]:
    draw = random.Random(seed)
    num_blocks, num_servers = draw.randint(1, 5), draw.randint(1, 5)
    servers = []
    for index in range(num_servers):
        start = draw.randrange(num_blocks)
        others = [f"peer{other}" for other in range(num_servers + 1) if other != index and draw.random() < 0.4]
        servers.append(
            server_record(
                f"peer{index}",
                f"{start}:{draw.randint(start + 1, num_blocks)}",
                num_blocks=num_blocks,
                tokens_per_s=draw.choice([0.0, 1.0, 20.0, draw.uniform(0.5, 200)]),
                queue_delay_s=draw.choice([0.0, draw.uniform(0, 0.5)]),
                cache_tokens_left=draw.choice([NEED - 1, NEED, 10 * NEED]),
                next_hop_rtts_s={other: draw.choice([0.0, draw.uniform(0, 0.6)]) for other in others},
            )
        )
    rtts_s = {
        server.peer_id: draw.choice([1e-4, draw.uniform(0.001, 0.3)]) for server in servers if draw.random() < 0.7
    }
    start = draw.randrange(num_blocks)
    costs = Costs(rtts_s, draw.choice([0.0, 0.05]), NEED, pushes=draw.random() < 0.7)
    return SwarmView.of(servers), Span(start, draw.randint(start + 1, num_blocks)), costs


@pytest.mark.parametrize("first_seed", range(0, 600, 100))
def test_no_chain_is_faster(first_seed: int) -> None:
    found = 0
    for seed in range(first_seed, first_seed + 100):
        view, blocks, costs = random_swarm(seed)
        best = min((cost(chain, costs) for chain in all_chains(view.servers, *ends(blocks))), default=None)
        if best is None:
            with pytest.raises(NoRoute) as caught:
                fastest_chain(view, blocks, costs)
            unserved = [block for block in blocks if not any(block in server.span for server in view.servers)]
            assert [block for span in caught.value.missing for block in span] == unserved != []
            continue
        chain = fastest_chain(view, blocks, costs)
        assert [block for hop in chain for block in hop.span] == list(blocks)
        assert all(hop.server.span.covers(hop.span) for hop in chain)
        assert cost(chain, costs) == pytest.approx(best)
        assert seconds(chain, costs) == pytest.approx(best)
        found += 1
    assert 20 < found < 100  # both cases occur


def ends(blocks: Span) -> tuple[int, int]:
    return blocks.start, blocks.end


def spans(chain: Route) -> list[tuple[str, str]]:
    return [(hop.server.peer_id, str(hop.span)) for hop in chain]


def test_the_answer_does_not_depend_on_the_order_of_servers() -> None:
    servers = [server_record(peer, "0:8") for peer in "cab"]
    chains = [fastest_chain(SwarmView(tuple(servers[i:] + servers[:i])), Span(0, 8), NEAR) for i in range(3)]
    assert chains[0] == chains[1] == chains[2]


def test_a_prompt_counts_by_another_speed_than_a_token() -> None:
    decoder = server_record("decoder", "0:8", tokens_per_s=100.0, forward_tokens_per_s=200.0)
    reader = server_record("reader", "0:8", tokens_per_s=50.0, forward_tokens_per_s=2000.0)
    view = SwarmView((decoder, reader))
    assert spans(fastest_chain(view, Span(0, 8), Costs({}))) == [("decoder", "0:8")]
    assert spans(fastest_chain(view, Span(0, 8), Costs({}, num_tokens=64))) == [("reader", "0:8")]


# ------------------------------------------------------------ staying with a chain


def pair(new_tokens_per_s: float, **old: object) -> SwarmView:
    fast = server_record("new", "0:8", tokens_per_s=new_tokens_per_s)
    return SwarmView((server_record("old", **{"blocks": "0:8", "tokens_per_s": 100.0, **old}), fast))


OLD = (Hop(server_record("old", "0:8", tokens_per_s=1.0), Span(0, 8)),)


def test_a_chain_is_kept_unless_another_is_faster_by_a_margin() -> None:
    assert spans(fastest_chain(pair(100 * (1 + KEEP_MARGIN / 2)), Span(0, 8), Costs({}), OLD)) == [("old", "0:8")]
    assert spans(fastest_chain(pair(100 * (1 + KEEP_MARGIN / 2)), Span(0, 8), Costs({}))) == [("new", "0:8")]
    assert spans(fastest_chain(pair(100 * (1 + 2 * KEEP_MARGIN)), Span(0, 8), Costs({}), OLD)) == [("new", "0:8")]


def test_a_kept_chain_is_of_the_servers_as_they_are_now() -> None:
    (hop,) = fastest_chain(pair(100.0, cache_tokens_left=7), Span(0, 8), Costs({}), OLD)
    assert hop.server.cache_tokens_left == 7


def test_a_chain_that_is_gone_is_not_kept() -> None:
    assert spans(fastest_chain(SwarmView(pair(1.0).servers[1:]), Span(0, 8), Costs({}), OLD)) == [("new", "0:8")]
    assert spans(fastest_chain(pair(1.0, blocks="0:4"), Span(4, 8), Costs({}), OLD)) == [("new", "4:8")]


# ------------------------------------------------------------ several at once


def shares(chains: list[Route], block: int) -> Counter[str]:
    """How many chains compute a block on each server."""
    return Counter(hop.server.peer_id for chain in chains for hop in chain if block in hop.span)


def test_micro_batches_are_spread_in_proportion_to_speed() -> None:
    """Each half of the model has servers of its own; far ones get their share as well."""
    speeds = {"a": ("0:4", 300.0), "b": ("0:4", 100.0), "c": ("4:8", 100.0), "d": ("4:8", 200.0), "e": ("4:8", 500.0)}
    view = SwarmView(
        tuple(
            server_record(peer, blocks, tokens_per_s=1.0, forward_tokens_per_s=speed)
            for peer, (blocks, speed) in speeds.items()
        )
    )
    chains = spread(view, Span(0, 8), [64] * 80, Costs({"b": 0.01}, pushes=False))
    assert len(chains) == 80
    for block, expected in {0: {"a": 60, "b": 20}, 7: {"c": 10, "d": 20, "e": 50}}.items():
        found = shares(chains, block)
        assert all(abs(found[peer] - count) <= 4 for peer, count in expected.items()), found


def test_a_server_in_both_halves_helps_where_it_is_needed() -> None:
    """The optimum, by hand: 300 tokens/s through four blocks are needed on either side of 200 + 400."""
    view = SwarmView(
        (
            server_record("left", "0:4", forward_tokens_per_s=300.0),
            server_record("right", "4:8", forward_tokens_per_s=100.0),
            server_record("both", "0:8", forward_tokens_per_s=100.0),
        )
    )
    chains = spread(view, Span(0, 8), [64] * 120, Costs({}, pushes=False))
    busy_s = Counter()
    for chain in chains:
        for hop in chain:
            busy_s[hop.server.peer_id] += 64 * len(hop.span) / len(hop.server.span) / hop.server.forward_tokens_per_s
    # Of what the right half needs, "both" can do 200 tokens/s if it does nothing else: 300 tokens/s pass in all.
    assert 120 * 64 / max(busy_s.values()) > 0.95 * 300


def test_large_micro_batches_weigh_more() -> None:
    view = SwarmView(tuple(server_record(peer, "0:8", forward_tokens_per_s=100.0) for peer in "ab"))
    chains = spread(view, Span(0, 8), [300, 100, 100, 100], Costs({}, pushes=False))
    assert [chain[0].server.peer_id for chain in chains] == ["a", "b", "b", "b"]


def test_a_slow_server_gets_nothing_of_a_few() -> None:
    slow, fast = (
        server_record(name, "0:8", forward_tokens_per_s=each) for name, each in (("slow", 10.0), ("fast", 100.0))
    )
    chains = spread(SwarmView((slow, fast)), Span(0, 8), [64] * 4, Costs({}, pushes=False))
    assert {chain[0].server.peer_id for chain in chains} == {"fast"}


def test_nothing_is_spread_where_nobody_is() -> None:
    with pytest.raises(NoRoute, match=r"^no server holds blocks 4:8$"):
        spread(SwarmView((server_record("a", "0:4"),)), Span(0, 8), [64], Costs({}))


# ------------------------------------------------------------ who can be used


def test_no_route_names_exactly_the_missing_blocks() -> None:
    view = SwarmView((server_record("a", "1:3"), server_record("b", "5:6")))
    with pytest.raises(NoRoute, match=r"^no server holds blocks 0:1, 3:5, 6:8$") as caught:
        fastest_chain(view, Span(0, 8), NEAR)
    assert caught.value.missing == (Span(0, 1), Span(3, 5), Span(6, 8))


def test_only_usable_servers_are_used_and_the_rest_is_accounted_for() -> None:
    good = server_record("good", expires_at=10.0)
    view = SwarmView(
        (
            good,
            server_record("banned"),
            server_record("retrained", revision="other"),
            server_record("longer", num_blocks=9),
            server_record("newer", wire_version=WIRE_VERSION + 1),
            server_record("leaving", state=ServerState.DRAINING),
            server_record("coming1", state=ServerState.JOINING),
            server_record("coming2", state=ServerState.JOINING),
            server_record("old", expires_at=9.9),
            server_record("unwanted"),
        )
    )
    wanted = Wanted("revision", 8, blocked=("wanted",))
    banned = {"banned": "that failed a moment ago", "somebody else": "that did not answer"}
    kept, phrases = usable(view, wanted, banned, time_s=10.0)
    assert kept.servers == (good,)
    assert sorted(phrases) == sorted(
        [
            "1 server not heard from recently",
            "1 server that failed a moment ago",
            "1 server that this client is configured not to use",
            "1 server with model revision other where this client has revision",
            "1 server with model revision revision where this client has revision",
            f"1 server of wire version {WIRE_VERSION + 1} where this client speaks {WIRE_VERSION}",
            "1 server still draining",
            "2 servers still joining",
        ]
    )
    error = no_route(kept, Span(0, 8), ["2 servers still joining", "1 server that failed a moment ago"])
    assert str(error) == (
        "no server holds blocks 4:8 (left out: 2 servers still joining; 1 server that failed a moment ago)"
    )
    assert error.missing == (Span(4, 8),)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, "abc"),
        ({"allowed": ("a", "b")}, "ab"),
        ({"blocked": ("a",)}, "bc"),
        ({"allowed": ("a", "b"), "blocked": ("r-b",)}, "a"),
    ],
)
def test_lists_of_servers(lists: dict[str, tuple[str, ...]], expected: str) -> None:
    view = SwarmView(tuple(server_record(f"peer-{name}") for name in "abc"))
    kept, _ = usable(view, Wanted("revision", 8, **lists))
    assert "".join(server.peer_id[-1] for server in kept.servers) == expected


def test_servers_that_would_ignore_what_sees_later_positions() -> None:
    new, old = server_record("new", joins=True), server_record("old")
    view = SwarmView((new, old))
    assert usable(view, Wanted("revision", 8)) == (view, [])
    kept, (phrase,) = usable(view, Wanted("revision", 8, joins=True))
    assert kept.servers == (new,)
    assert phrase == "1 server of an older version, which computes causal attention to this model's pictures"


def test_the_best_replica_holds_all_of_the_span() -> None:
    view = SwarmView(
        (
            server_record("part", "0:3", tokens_per_s=1000.0),
            server_record("far", "0:8", tokens_per_s=100.0),
            server_record("near", "0:4", tokens_per_s=20.0),
        )
    )
    assert best_replica(view, Span(0, 4), Costs({"far": 0.5, "near": 0.01})).peer_id == "near"
    assert best_replica(view, Span(0, 4), Costs({"far": 0.01, "near": 0.5})).peer_id == "far"
    assert best_replica(view, Span(4, 8), Costs({})).peer_id == "far"
    assert best_replica(SwarmView(view.servers[:1]), Span(0, 4), Costs({})) is None
