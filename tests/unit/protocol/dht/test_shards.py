"""The tree of keys under which servers stand: whoever reads a part of the model finds all servers of that part."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_protocol.dht.records import LIFETIME_S, REFRESH_S, ROOT_SHARD
from swarm_protocol.dht.shards import CAPACITY, CLIMB_EVERY, LONG, children, has_room, is_split, path
from swarm_protocol.span import Span

CROWDED = 4  # the capacity of shards in simulations
TICK_S = 5.0
depths = st.integers(1, 300)


@st.composite
def models_and_spans(draw: st.DrawFn, num_spans: int) -> tuple[int, ...]:
    num_blocks = draw(depths)
    starts = [draw(st.integers(0, num_blocks - 1)) for _ in range(num_spans)]
    return num_blocks, *(Span(start, draw(st.integers(start + 1, num_blocks))) for start in starts)


def overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end


class TestTree:
    @given(models_and_spans(2), st.text(max_size=60))
    def test_a_reader_of_a_part_can_reach_every_shard_of_its_servers(self, model, peer_id: str) -> None:
        num_blocks, span, part = model
        shards = path(peer_id, span, num_blocks)
        assert shards[0] == ROOT_SHARD and len({*shards}) == len(shards)
        for wanted in [None, part] if overlap(span, part) else [None]:
            reached = (ROOT_SHARD,)
            for shard in shards:
                assert shard in reached
                reached = children(shard, num_blocks, wanted)
        assert children(shards[-1], num_blocks) == ()

    @given(models_and_spans(1))
    def test_a_part_has_few_groups(self, model) -> None:
        num_blocks, part = model
        groups = children(ROOT_SHARD, num_blocks, part)
        assert {*groups} <= {*children(ROOT_SHARD, num_blocks)} and len({*groups}) == len(groups) <= 9
        width = max(8, -(-num_blocks // 8))
        assert len(groups) <= (len(part) - 1) // width + 4  # those it touches, the one before, and the long ones

    def test_groups_by_example(self) -> None:
        assert children("all", 80) == ("0", "1", "2", "3", "4", "5", "6", "7", "long")
        assert children("all", 80, Span(40, 50)) == ("3", "4", "long")
        assert children("all", 80, Span(0, 11)) == ("0", "1", "long")
        assert children("all", 16) == children("all", 16, Span(15, 16)) == ("0", "1")
        assert children("all", 20, Span(16, 20)) == ("1", "2", "long")
        assert [path("p", Span(*ends), 80)[1] for ends in ((0, 1), (9, 11), (0, 20), (0, 21))] == ["0", "0", "0", LONG]
        assert children("3", 80) == ("3.0", "3.1") and children("long.01", 80) == ("long.010", "long.011")

    def test_a_model_of_unknown_depth_has_nothing_below_the_root(self) -> None:
        assert children(ROOT_SHARD, 0) == ()

    def test_a_hash_divides_servers_evenly(self) -> None:
        counts = Counter(path(f"peer {number}", Span(0, 80), 80)[4] for number in range(8000))
        assert len(counts) == 8 and all(850 < count < 1150 for count in counts.values())

    def test_what_a_reader_goes_below_has_been_half_full(self) -> None:
        assert [is_split(count, 8) for count in (0, 3, 4, 30)] == [False, False, True, True]
        assert not is_split(CAPACITY // 2 - 1) and is_split(CAPACITY // 2)

    def test_room_is_judged_by_records_that_last(self) -> None:
        lasting, fleeting = LIFETIME_S - REFRESH_S, LIFETIME_S / 2
        assert has_room([lasting] * 7 + [fleeting] * 7, 8)
        assert not has_room([lasting] * 8, 8)
        assert not has_room([fleeting] * 24, 8)
        assert REFRESH_S * CLIMB_EVERY < 80 - REFRESH_S / 2  # time to come up, as the module says


@dataclass
class Server:
    name: str
    span: Span
    phase: int
    depth: int = 0
    path: tuple[str, ...] = ()
    publications: int = 0
    standing: dict[str, Span] = field(default_factory=dict)


@dataclass
class Shards:
    """A DHT of one node with servers that keep to the rules, and a clock."""

    num_blocks: int
    climb_every: int = CLIMB_EVERY
    now: float = 0.0
    stored: dict[str, dict[str, tuple[float, Span | None]]] = field(default_factory=dict)  # None: withdrawn
    servers: list[Server] = field(default_factory=list)

    def shard(self, name: str) -> dict[str, tuple[float, Span | None]]:
        kept = {key: item for key, item in self.stored.get(name, {}).items() if item[0] > self.now}
        self.stored[name] = kept
        return kept

    def store(self, name: str, server: Server, span: Span | None, earlier: float = 0.0) -> bool:
        shard = self.shard(name)
        if server.name not in shard and not has_room([expires - self.now for expires, _ in shard.values()], CROWDED):
            return False
        shard[server.name] = self.now + LIFETIME_S - earlier, span
        return True

    def publish(self, server: Server) -> None:
        route = path(server.name, server.span, self.num_blocks)
        if route != server.path:
            server.path, server.depth = route, 0
        climbs = server.publications % self.climb_every == 0
        server.publications += 1
        start = 0 if climbs else server.depth
        server.depth = next(
            depth for depth in range(start, len(route)) if self.store(route[depth], server, server.span)
        )
        server.standing[route[server.depth]] = server.span
        for name in [name for name, span in server.standing.items() if span != server.span]:
            self.store(name, server, None, earlier=0.5)
            del server.standing[name]

    def withdraw(self, server: Server) -> None:
        self.servers.remove(server)
        for name in server.standing:
            self.store(name, server, None)

    def tick(self) -> None:
        self.now += TICK_S
        for server in self.servers:
            if int(self.now / TICK_S) % 4 == server.phase:
                self.publish(server)

    def read(self, part: Span | None) -> dict[str, Span]:
        latest: dict[str, tuple[float, Span | None]] = {}
        level: tuple[str, ...] = (ROOT_SHARD,)
        while level:
            for name in level:
                for server, item in self.shard(name).items():
                    latest[server] = max(item, latest.get(server, item), key=lambda item: item[0])
            split = [name for name in level if is_split(len(self.shard(name)), CROWDED)]
            level = tuple(child for name in split for child in children(name, self.num_blocks, part))
        return {
            server: span
            for server, (_, span) in latest.items()
            if span is not None and (part is None or overlap(span, part))
        }


def live(chance: random.Random, shards: Shards, ticks: int) -> None:
    """Servers come, move, withdraw and die, alone and in crowds; at every moment, readers see all that live."""

    def span() -> Span:
        start = chance.randrange(shards.num_blocks)
        return Span(start, chance.choice([shards.num_blocks, min(start + 5, shards.num_blocks)]))

    for tick in range(ticks):
        event, crowd = chance.random(), chance.choice([1, 1, 1, 10, 40])
        those = chance.sample(shards.servers, min(crowd, len(shards.servers)))
        if event < 0.15 and len(shards.servers) < 100:
            for number in range(crowd):
                shards.servers.append(Server(f"{tick}-{number}", span(), int(shards.now / TICK_S) % 4))
                shards.publish(shards.servers[-1])
        elif event < 0.2:
            for server in those:
                server.span = span()
                shards.publish(server)
        elif event < 0.25:
            for server in those:
                shards.withdraw(server)
                for part in (None, server.span):
                    assert server.name not in shards.read(part)
        elif event < 0.3:
            for server in those:
                shards.servers.remove(server)
        shards.tick()
        for part in (None, span()):
            seen = shards.read(part)
            expected = {server.name: server.span for server in shards.servers if not part or overlap(server.span, part)}
            assert {name: seen.get(name) for name in expected} == expected
            for server in shards.servers:
                assert server.name in expected or server.name not in seen


class TestLife:
    @settings(max_examples=25)
    @given(st.integers(0, 2**32), st.sampled_from([4, 20, 80]))
    def test_readers_see_all_that_live(self, seed: int, num_blocks: int) -> None:
        live(random.Random(seed), Shards(num_blocks), 150)

    def test_servers_that_rarely_look_up_would_be_overlooked(self) -> None:
        with pytest.raises(AssertionError):
            for seed in range(40):
                live(random.Random(seed), Shards(20, climb_every=1000), 150)

    def test_in_peace_every_server_stands_in_one_place(self) -> None:
        shards = Shards(20)
        for number in range(60):
            shards.servers.append(Server(f"{number}", Span(number % 16, number % 16 + 4), number % 4))
            shards.publish(shards.servers[-1])
        for _ in range(int(2 * LIFETIME_S / TICK_S)):
            shards.tick()
        counts = Counter(server for name in shards.stored for server in shards.shard(name))
        assert len(counts) == 60 and {*counts.values()} == {1}
        assert max(len(shard) for shard in shards.stored.values()) == CROWDED

    def test_those_that_are_left_climb_up_again(self) -> None:
        shards = Shards(80)
        for number in range(60):
            shards.servers.append(Server(f"{number}", Span(0, 80), number % 4))
            shards.publish(shards.servers[-1])
        shards.servers = shards.servers[-3:]
        assert all(server.depth > 2 for server in shards.servers)
        for _ in range(int(LIFETIME_S / TICK_S)):
            shards.tick()
        assert [server.depth for server in shards.servers] == [0, 0, 0]
