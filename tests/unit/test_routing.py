"""Routing: the chain it takes is the best of all chains, and what it cannot use it names."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest

from swarm_client.routing import (
    ASSUMED_RTT_S,
    ASSUMED_TOKENS_PER_S,
    NO_ROOM_S,
    Chain,
    Hop,
    fastest_chain,
    no_route,
    usable,
)
from swarm_protocol.errors import NoRoute
from swarm_protocol.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_protocol.wire import WIRE_VERSION
from tests.unit.support import server_record

NEED = 100


def cost(chain: Chain, rtts_s: Mapping[str, float], need_tokens: int) -> float:
    """Seconds for one token: what `fastest_chain` says it minimises."""
    seconds = 0.0
    for hop in chain:
        server = hop.server
        seconds += rtts_s.get(server.peer_id, ASSUMED_RTT_S) + server.queue_delay_s
        seconds += len(hop.span) / len(server.span) / (server.tokens_per_s or ASSUMED_TOKENS_PER_S)
        seconds += NO_ROOM_S if server.cache_tokens_left < need_tokens else 0
    return seconds


def all_chains(servers: tuple[ServerRecord, ...], start: int, end: int) -> Iterator[Chain]:
    if start == end:
        yield ()
    for server in servers:
        if start in server.span:
            for stop in range(start + 1, min(server.span.end, end) + 1):
                for rest in all_chains(servers, stop, end):
                    yield (Hop(server, Span(start, stop)), *rest)


def random_swarm(seed: int) -> tuple[SwarmView, Span, dict[str, float]]:
    draw = random.Random(seed)
    num_blocks = draw.randint(1, 5)
    servers = []
    for index in range(draw.randint(1, 5)):
        start = draw.randrange(num_blocks)
        servers.append(
            server_record(
                f"peer{index}",
                f"{start}:{draw.randint(start + 1, num_blocks)}",
                num_blocks=num_blocks,
                tokens_per_s=draw.choice([0.0, 1.0, 20.0, draw.uniform(0.5, 200)]),
                queue_delay_s=draw.choice([0.0, draw.uniform(0, 0.5)]),
                cache_tokens_left=draw.choice([NEED - 1, NEED, 10 * NEED]),
            )
        )
    rtts_s = {
        server.peer_id: draw.choice([1e-4, draw.uniform(0.001, 0.3)]) for server in servers if draw.random() < 0.7
    }
    start = draw.randrange(num_blocks)
    return SwarmView.of(servers), Span(start, draw.randint(start + 1, num_blocks)), rtts_s


@pytest.mark.parametrize("first_seed", range(0, 600, 100))
def test_no_chain_is_faster(first_seed: int) -> None:
    found = 0
    for seed in range(first_seed, first_seed + 100):
        view, blocks, rtts_s = random_swarm(seed)
        best = min((cost(chain, rtts_s, NEED) for chain in all_chains(view.servers, *ends(blocks))), default=None)
        if best is None:
            with pytest.raises(NoRoute) as caught:
                fastest_chain(view, blocks, rtts_s=rtts_s, need_tokens=NEED)
            unserved = [block for block in blocks if not any(block in server.span for server in view.servers)]
            assert [block for span in caught.value.missing for block in span] == unserved != []
            continue
        chain = fastest_chain(view, blocks, rtts_s=rtts_s, need_tokens=NEED)
        assert [block for hop in chain for block in hop.span] == list(blocks)
        assert all(hop.server.span.covers(hop.span) for hop in chain)
        assert cost(chain, rtts_s, NEED) == pytest.approx(best)
        found += 1
    assert 20 < found < 100  # both cases occur


def ends(blocks: Span) -> tuple[int, int]:
    return blocks.start, blocks.end


def spans(chain: Chain) -> list[tuple[str, str]]:
    return [(hop.server.peer_id, str(hop.span)) for hop in chain]


def test_stays_with_one_server_rather_than_hop() -> None:
    view = SwarmView((server_record("all", "0:8"), server_record("half", "0:4", tokens_per_s=20.0)))
    assert spans(fastest_chain(view, Span(0, 8))) == [("all", "0:8")]


def test_leaves_a_slow_server_as_soon_as_it_can() -> None:
    slow = server_record("slow", "0:8", tokens_per_s=0.1)
    fast = server_record("fast", "3:8", tokens_per_s=100.0)
    assert spans(fastest_chain(SwarmView((slow, fast)), Span(0, 8))) == [("slow", "0:3"), ("fast", "3:8")]


def test_the_nearer_of_equals_is_taken() -> None:
    view = SwarmView((server_record("a", "0:8"), server_record("b", "0:8")))
    assert spans(fastest_chain(view, Span(0, 8), rtts_s={"a": 0.2, "b": 0.1})) == [("b", "0:8")]
    assert spans(fastest_chain(view, Span(0, 8), rtts_s={"a": 0.1, "b": 0.2})) == [("a", "0:8")]


def test_the_answer_does_not_depend_on_the_order_of_servers() -> None:
    servers = [server_record(peer, "0:8") for peer in "cab"]
    chains = [fastest_chain(SwarmView(tuple(servers[i:] + servers[:i])), Span(0, 8)) for i in range(3)]
    assert chains[0] == chains[1] == chains[2]


def test_a_full_server_is_taken_only_if_there_is_no_other() -> None:
    full = server_record("full", "0:8", tokens_per_s=1000.0, cache_tokens_left=NEED - 1)
    roomy = server_record("roomy", "0:8", tokens_per_s=1.0, cache_tokens_left=NEED)
    view = SwarmView((full, roomy))
    assert spans(fastest_chain(view, Span(0, 8), need_tokens=NEED)) == [("roomy", "0:8")]
    assert spans(fastest_chain(view, Span(0, 8), need_tokens=NEED - 1)) == [("full", "0:8")]
    assert spans(fastest_chain(SwarmView((full,)), Span(0, 8), need_tokens=NEED)) == [("full", "0:8")]


def test_a_queue_is_avoided() -> None:
    view = SwarmView((server_record("busy", "0:8", queue_delay_s=1.0), server_record("idle", "0:8", tokens_per_s=5.0)))
    assert spans(fastest_chain(view, Span(0, 8))) == [("idle", "0:8")]


def test_no_route_names_exactly_the_missing_blocks() -> None:
    view = SwarmView((server_record("a", "1:3"), server_record("b", "5:6")))
    with pytest.raises(NoRoute, match=r"^no server holds blocks 0:1, 3:5, 6:8$") as caught:
        fastest_chain(view, Span(0, 8))
    assert caught.value.missing == (Span(0, 1), Span(3, 5), Span(6, 8))
    with pytest.raises(NoRoute, match=r"^no server holds blocks 3:5$"):
        fastest_chain(view, Span(2, 6))
    with pytest.raises(NoRoute, match=r"^no server holds blocks 0:8$"):
        fastest_chain(SwarmView(), Span(0, 8))


def test_only_usable_servers_are_used_and_the_rest_is_accounted_for() -> None:
    good = server_record("good")
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
        )
    )
    kept, phrases = usable(view, "revision", 8, banned={"banned", "somebody else"})
    assert kept.servers == (good,)
    assert sorted(phrases) == sorted(
        [
            "1 server that failed a moment ago",
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


def test_nothing_is_left_out_of_a_healthy_swarm() -> None:
    view = SwarmView((server_record("a"), server_record("b")))
    assert usable(view, "revision", 8) == (view, [])
