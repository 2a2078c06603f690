"""More servers than one key of the DHT can hold: all are seen, between real nodes on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.net.hivemind_parts import MSGPackSerializer, get_dht_time
from swarm_protocol.span import Span
from tests.marks import SLOW
from tests.quick_keys import new_identity
from tests.worlds.crowd import LIMITS, Crowd

MODEL = "meta-llama/Llama-3.1-70B"
NUM_BLOCKS = 80
CAPACITY = 4
SMALL = dataclasses.replace(LIMITS, capacity=CAPACITY)
WHOLE = [Span(0, NUM_BLOCKS)]
SPREAD = [Span(start, start + 8) for start in range(NUM_BLOCKS - 7)]
Run = Callable[[Coroutine[Any, Any, Any]], Any]
_MESSAGE_BYTES = 4 << 20  # beyond which hivemind fails


class Reader(Dht):
    """Remembers which shards it has asked for."""

    asked: Sequence[str] = ()

    async def _read(self, model: str, shard: str) -> dict[Any, Any]:
        self.asked = (*self.asked, shard)
        return await super()._read(model, shard)

    async def servers(self, model: str, part: Span | None = None) -> list[ServerRecord]:
        self.asked = ()
        return list((await self.view(model, NUM_BLOCKS, part)).servers)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="module")
def nodes(run: Run) -> Iterator[tuple[Dht, Dht, Reader]]:
    """Two that store, and one that only asks."""

    async def start() -> tuple[Dht, Dht, Reader]:
        first = await Dht.join("size", [], new_identity(), Listening("127.0.0.1"), limits=SMALL)
        peers = await first.addresses()
        second = await Dht.join("size", peers, new_identity(), Listening("127.0.0.1"), limits=SMALL)
        return first, second, await Reader.join("size", peers, new_identity(), limits=SMALL)

    started = run(start())
    yield started
    for node in reversed(started):
        run(node.shutdown())


class Swarm:
    """Servers of one model on the nodes that store."""

    def __init__(self, nodes: tuple[Dht, Dht, Reader], model: str) -> None:
        self.stores, self.reader, self.model = nodes[:2], nodes[2], model
        self.members: list[Dht] = []
        self.records: dict[str, ServerRecord] = {}

    async def publish(self, count: int, spans: list[Span]) -> None:
        """All come at once, half of them on each node."""
        crowds = [Crowd(store, count // 2, dataclasses.replace(SMALL, climb_every=1)) for store in self.stores]
        coming = [crowd.records(self.model, NUM_BLOCKS, spans) for crowd in crowds]
        await asyncio.gather(*(crowd.publish(records) for crowd, records in zip(crowds, coming, strict=True)))
        self.members = [member for crowd in crowds for member in crowd.members]
        self.records = {record.peer_id: record for records in coming for record in records}

    async def change(self, member: Dht, **fields: Any) -> bool:
        self.records[member.peer_id] = dataclasses.replace(self.records[member.peer_id], **fields)
        return await member.publish(self.records[member.peer_id])

    def of(self, part: Span) -> list[ServerRecord]:
        return [r for r in self.all if r.span.start < part.end and r.span.end > part.start]

    @property
    def all(self) -> list[ServerRecord]:
        online = [record for record in self.records.values() if record.state is ServerState.ONLINE]
        return sorted(online, key=lambda record: (record.span, record.peer_id))

    def place(self, member: Dht) -> tuple[int, tuple[str, ...]]:
        """How deep in the tree it stands, and the shards on the way."""
        place = member._places[self.model]
        return place.depth, place.path

    def deepest(self) -> Dht:
        return max(self.members, key=lambda member: self.place(member)[0])

    async def servers(self, part: Span | None = None) -> list[ServerRecord]:
        return await self.reader.servers(self.model, part)

    async def stands(self, member: Dht, shard: str) -> ServerState:
        items = await self.reader._read(self.model, shard)
        return ServerRecord.parse(items[member._subkey].value).state

    def make_room(self, *capacities: int) -> None:
        """As if others had come or left."""
        for store, capacity in zip(self.stores, capacities, strict=True):
            store._node.protocol.storage.capacity = capacity


@pytest.fixture
def swarm(nodes: tuple[Dht, Dht, Reader], request: pytest.FixtureRequest) -> Iterator[Swarm]:
    swarm = Swarm(nodes, request.node.name)
    yield swarm
    swarm.make_room(CAPACITY, CAPACITY)


class TestTree:
    """With few servers, of which fewer go under one key."""

    def test_all_are_seen_who_come_at_once(self, run: Run, swarm: Swarm) -> None:
        async def look() -> None:
            await swarm.publish(60, [Span(0, 8), Span(30, 38), Span(72, 80), *WHOLE])
            assert await swarm.servers() == swarm.all and len(swarm.all) == 60
            for part in (Span(0, 1), Span(20, 40), Span(79, 80)):
                assert await swarm.servers(part) == swarm.of(part)
            # Nodes that hear of them in another order store others: at most 2 * CAPACITY in the root and in each group.
            assert 2 * CAPACITY * (1 + 4) < 60 and swarm.place(swarm.deepest())[0] > 1

        run(look())

    def test_readers_of_a_part_ask_for_its_keys_only_and_those_of_few_servers_for_one(
        self, run: Run, swarm: Swarm
    ) -> None:
        async def look() -> None:
            assert await swarm.servers() == [] and swarm.reader.asked == ("all",)
            await swarm.publish(60, SPREAD[::3])
            assert await swarm.servers(Span(40, 50)) == swarm.of(Span(40, 50)) != []
            asked = swarm.reader.asked
            assert {shard.partition(".")[0] for shard in asked} == {"all", "3", "4", "long"}
            assert await swarm.servers() == swarm.all
            assert {*asked} < {*swarm.reader.asked} and len({*swarm.reader.asked}) == len(swarm.reader.asked)

        run(look())

    def test_a_server_that_moves_is_seen_once_and_where_it_is(self, run: Run, swarm: Swarm) -> None:
        async def move() -> None:
            old, new = Span(0, 8), Span(60, 68)
            await swarm.publish(20, [old])
            movers = [member for member in swarm.members if swarm.place(member)[0] > 0]
            assert len(movers) > 4
            for mover in movers:
                assert await swarm.change(mover, span=new)
            for part in (None, old, new):
                assert await swarm.servers(part) == (swarm.of(part) if part else swarm.all)
            assert len(swarm.all) == 20 and len(swarm.of(old)) + len(movers) == 20

        run(move())

    def test_a_server_climbs_when_there_is_room_and_withdraws_wherever_it_stands(self, run: Run, swarm: Swarm) -> None:
        async def climb() -> None:
            await swarm.publish(20, WHOLE)
            climber = swarm.deepest()
            depth, route = swarm.place(climber)
            swarm.make_room(100, 100)
            assert await swarm.change(climber)
            assert depth > 1 and swarm.place(climber)[0] == 0
            assert await swarm.servers() == swarm.all
            assert [await swarm.stands(climber, route[n]) for n in (0, depth)] == [ServerState.ONLINE] * 2

            assert await swarm.change(climber, state=ServerState.OFFLINE)
            assert [await swarm.stands(climber, route[n]) for n in (0, depth)] == [ServerState.OFFLINE] * 2
            assert await swarm.servers() == swarm.all and len(swarm.all) == 19

        run(climb())

    def test_a_server_looks_for_room_once_in_some_publications(self, run: Run, swarm: Swarm) -> None:
        async def look() -> None:
            await swarm.publish(20, WHOLE)
            climber = swarm.deepest()
            climber._limits = SMALL  # the usual 3 publications
            before, depths = swarm.place(climber)[0], []
            swarm.make_room(100, 100)
            for _ in range(3):
                await swarm.change(climber)
                depths.append(swarm.place(climber)[0])
            assert depths == [before, before, 0]

        run(look())

    @pytest.mark.parametrize("capacities", [(100, 0), (0, 100)])
    def test_a_node_that_refuses_what_others_take_hides_nobody(
        self, capacities: tuple[int, int], run: Run, swarm: Swarm
    ) -> None:
        async def refuse() -> None:
            swarm.make_room(*capacities)
            await swarm.publish(2, WHOLE)  # of which it takes the first
            for member in swarm.members:
                assert await member.publish(swarm.records[member.peer_id])
            assert await swarm.servers() == swarm.all and swarm.place(swarm.deepest())[0] == 0

        run(refuse())

    def test_a_server_refused_without_reason_does_not_go_where_nobody_looks(self, run: Run, swarm: Swarm) -> None:
        async def refuse() -> None:
            await swarm.publish(2, WHOLE)
            crowd = Crowd(swarm.stores[0], 1)
            (late,), (record,) = crowd.members, crowd.records(swarm.model, NUM_BLOCKS, WHOLE)
            swarm.make_room(0, 0)
            assert not await late.publish(record)
            assert await swarm.servers() == swarm.all
            swarm.make_room(CAPACITY, CAPACITY)
            assert await late.publish(record)
            assert record in await swarm.servers() and await swarm.stands(late, "all") is ServerState.ONLINE

        run(refuse())

    def test_a_record_too_long_for_a_shard_is_refused_and_spoils_nothing(self, run: Run, swarm: Swarm) -> None:
        async def refuse() -> None:
            await swarm.publish(2, WHOLE)
            before = swarm.all
            assert not await swarm.change(swarm.members[0], adapters=("x" * 10_000,))
            assert await swarm.servers() == before

        run(refuse())

    def test_a_record_says_when_it_expires(self, run: Run, swarm: Swarm) -> None:
        async def look() -> None:
            await swarm.publish(2, WHOLE)
            member, start = swarm.members[0], get_dht_time()
            assert await member.publish(swarm.records[member.peer_id], 5000)
            expirations = {record.peer_id: record.expires_at for record in await swarm.servers()}
            assert start + 5000 <= expirations[member.peer_id] <= get_dht_time() + 5001
            assert expirations[swarm.members[1].peer_id] < start + 5000

        run(look())


async def _read_correctly(count: int, spans: list[Span], *, num_new: int = 0) -> None:
    """Real capacity and records of real size; one node stores all, as busy as nodes get, and another one reads.

    The last ``num_new`` look for their places at once, when all others are there.
    """
    storing = await Dht.join("size", [], new_identity(), Listening("127.0.0.1"), limits=LIMITS)
    reader = await Reader.join("size", await storing.addresses(), new_identity(), limits=LIMITS)
    try:
        crowd = Crowd(storing, count)
        records = crowd.records(MODEL, NUM_BLOCKS, spans)
        crowd.settle(records[: count - num_new])
        await crowd.publish(records[: count - num_new])
        await crowd.publish(records[count - num_new :], first=count - num_new)
        keys = [MSGPackSerializer.dumps(entry.value) for _, entry in storing._node.protocol.storage.items()]
        assert sum(map(len, keys)) > 1400 * count and max(map(len, keys)) < _MESSAGE_BYTES / 8
        records.sort(key=lambda record: (record.span, record.peer_id))
        assert await reader.servers(MODEL) == records
        part = Span(40, 48)
        assert await reader.servers(MODEL, part) == [r for r in records if r.span.start < 48 and r.span.end > 40]
    finally:
        await reader.shutdown()
        await storing.shutdown()


class TestSize:
    @pytest.mark.parametrize("count", [300, pytest.param(4000, marks=SLOW)])
    def test_many_that_host_the_whole_model(self, count: int, run: Run) -> None:
        run(_read_correctly(count, WHOLE))

    @pytest.mark.long
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize("spans", [WHOLE, SPREAD], ids=["whole", "spread"])
    def test_10_000_of_whom_2_000_join_at_once(self, spans: list[Span], run: Run) -> None:
        run(_read_correctly(10_000, spans, num_new=2000))
