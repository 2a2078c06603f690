"""A keeper takes replicas of those who have the expert, within limits, over gRPC as it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from swarm_protocol.errors import BadReply, PeerBusy, PeerMoved, RequestRejected, SwarmError
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_protocol.process.routine import end_tasks
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.core.replica import Replica
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.net.replica_calls import ReplicaCalls
from swarm_training.experts.pb import experts_pb2 as pb
from swarm_training.experts.replicas import keeper as keeping
from swarm_training.experts.replicas.keeper import Keeper
from swarm_training.experts.server.host import ExpertHost
from swarm_training.experts.server.service import start_service
from tests.worlds.experts import MemoryBoard, holder
from tests.worlds.identities import identity

GRID = (4, 4)
ROOM = 3 << 20
CONFIG = ExpertServerConfig("demo", 8, GRID, replica_bytes=ROOM)
CELL, OTHER = (1, 2), (1, 3)


@dataclass
class Scene:
    """A keeper, and callers by number; 1 has the experts that the board names."""

    keeper: Keeper
    board: MemoryBoard
    address: ExpertHolder
    now: float = 0.0
    calls: dict[int, ReplicaCalls] = field(default_factory=dict)

    def caller(self, number: int, name: str = "demo") -> ReplicaCalls:
        return self.calls.setdefault(number, ReplicaCalls(ClientCredentials(identity(number)), name, GRID))

    async def send(self, number: int, replica: Replica, data: bytes) -> None:
        await self.caller(number).send(self.address, replica, data)

    def announce(self, number: int, *cells: tuple[int, int]) -> None:
        for x, y in cells:
            self.board.records.setdefault((x,), {}).setdefault(holder(identity(number).peer_id), set()).add(y)


@asynccontextmanager
async def played(config: ExpertServerConfig = CONFIG) -> AsyncIterator[Scene]:
    board, certificate = MemoryBoard(), Certificate.generate()
    scene = Scene(Keeper(config, board, lambda: scene.now), board, holder("nobody"))
    host = ExpertHost(config)
    server, port = await start_service(host, scene.keeper, certificate, "127.0.0.1", 0, None)
    scene.address = ExpertHolder(identity(0).peer_id, f"127.0.0.1:{port}", certificate.fingerprint)
    scene.announce(1, CELL, OTHER)
    try:
        yield scene
    finally:
        for calls in scene.calls.values():
            await calls.close()
        await server.stop(None)
        host.pool.close()


def some(num_steps: int, size: int = 1000, cell: tuple[int, ...] = CELL) -> tuple[Replica, bytes]:
    data = bytes((num_steps + at) % 251 for at in range(size))
    return Replica.of(cell, num_steps, data), data


async def test_what_is_sent_is_listed_and_fetched_in_parts() -> None:
    async with played() as scene:
        replica, data = some(7, (1 << 20) + 5)
        await scene.send(1, replica, data)
        assert await scene.caller(2).listed(scene.address) == [replica]
        assert await scene.caller(2).fetch(scene.address, CELL, ROOM) == (replica, data)
        with pytest.raises(BadReply, match="a larger one than expected"):
            await scene.caller(2).fetch(scene.address, CELL, len(data) - 1)
        with pytest.raises(PeerMoved, match="no replica of that expert"):
            await scene.caller(2).fetch(scene.address, OTHER, ROOM)
        with pytest.raises(PeerMoved, match="replicas here are of demo, and not of other"):
            await scene.caller(3, "other").listed(scene.address)


async def test_only_who_has_the_expert_may_replace_its_replica() -> None:
    async with played() as scene:
        with pytest.raises(RequestRejected, match=r"demo\.1\.2 is not announced by this server"):
            await scene.send(2, *some(7))
        await scene.send(1, *some(7))
        with pytest.raises(RequestRejected, match="not announced by this server"):
            await scene.send(2, *some(9))
        scene.board.records.clear()  # it is about to leave
        await scene.send(1, *some(8))
        scene.announce(2, CELL)  # it has taken its place
        with pytest.raises(RequestRejected, match="not announced by this server, or another has it"):
            await scene.send(1, *some(9))
        with pytest.raises(RequestRejected, match="a newer replica is kept here: of 8 steps, and not 7"):
            await scene.send(2, *some(7))
        await scene.send(2, *some(9))
        assert [replica.num_steps for replica in scene.keeper.replicas] == [9]


async def test_an_old_replica_gives_way_once_nobody_renews_it() -> None:
    async with played() as scene:
        await scene.send(1, *some(1000))
        scene.now = keeping.STALE_S + 1
        await scene.send(1, *some(3))
        assert [replica.num_steps for replica in scene.keeper.replicas] == [3]


async def test_one_sender_has_half_of_the_room_and_all_together_no_more_than_it() -> None:
    async with played() as scene:
        half = ROOM // 2
        await scene.send(1, *some(1, half))
        with pytest.raises(PeerBusy, match="one server may use half of 3145728"):
            await scene.send(1, *some(1, 1, OTHER))
        scene.announce(2, (2, 0), (2, 1))
        await scene.send(2, *some(1, half - 10, (2, 0)))
        scene.announce(3, (3, 0))
        with pytest.raises(PeerBusy, match="3145718 of 3145728 are used"):
            await scene.send(3, *some(1, 11, (3, 0)))
        await scene.send(3, *some(1, 10, (3, 0)))
        assert {replica.cell for replica in scene.keeper.replicas} == {CELL, (2, 0), (3, 0)}
        scene.now = keeping.STALE_S + 1  # the oldest makes room, and no more of them than it takes
        scene.announce(4, (0, 0))
        await scene.send(4, *some(1, 100, (0, 0)))
        assert {replica.cell for replica in scene.keeper.replicas} == {(0, 0), (2, 0), (3, 0)}


async def test_the_number_of_replicas_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MAX_REPLICAS", 1)
    async with played() as scene:
        await scene.send(1, *some(1))
        with pytest.raises(PeerBusy, match="no room"):
            await scene.send(1, *some(1, cell=OTHER))
        await scene.send(1, *some(2))


async def test_a_replica_that_is_arriving_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MAX_REPLICAS", 1)
    replica, _data = some(1)
    begun = asyncio.Event()

    async def unfinished() -> AsyncIterator[pb.KeepReplicaRequest]:
        yield pb.KeepReplicaRequest(name="demo", replica=replica.to_proto())
        begun.set()
        await asyncio.Event().wait()

    async with played() as scene:
        arriving = asyncio.create_task(scene.keeper.keep(identity(1).peer_id, unfinished()))
        await begun.wait()
        scene.announce(2, (2, 0))
        with pytest.raises(PeerBusy, match="no room"):
            await scene.send(2, *some(1, cell=(2, 0)))
        await end_tasks([arriving])
        await scene.send(2, *some(1, cell=(2, 0)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cell": (1, 4)}, "of no cell of the grid"),
        ({"cell": (1,)}, "of no cell of the grid"),
        ({"size_bytes": 0}, "no bytes"),
        ({"digest": b"short"}, "no SHA-256"),
        ({"num_steps": 1 << 63}, "nobody can have taken"),
        ({"size_bytes": 999}, "not the 999 bytes with its SHA-256"),
        ({"size_bytes": 1001}, "not the 1001 bytes with its SHA-256"),
        ({"digest": b"0" * 32}, "not the 1000 bytes with its SHA-256"),
    ],
)
async def test_replicas_that_are_not_what_they_say_are_refused(changed: dict[str, object], message: str) -> None:
    async with played() as scene:
        await scene.send(1, *some(5))
        replica, data = some(6)
        with pytest.raises(RequestRejected, match=message):
            await scene.send(1, replace(replica, **changed), data)
        assert [each.num_steps for each in scene.keeper.replicas] == [5]
        await scene.send(1, replica, data)  # nothing of it was left behind


async def test_a_sender_that_stops_is_given_up_and_its_room_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*messages: pb.KeepReplicaRequest) -> AsyncIterator[pb.KeepReplicaRequest]:
        for message in messages:
            yield message
        await asyncio.Event().wait()

    async def given_up(scene: Scene, replica: Replica, data: bytes) -> None:
        first = pb.KeepReplicaRequest(name="demo", replica=replica.to_proto(), data=data[:10])
        peer_id = identity(1).peer_id
        for messages in ([], [first]):
            with pytest.raises(TimeoutError):
                await scene.keeper.keep(peer_id, silent(*messages))
        keeping_on = asyncio.ensure_future(scene.keeper.keep(peer_id, silent(first)))
        await asyncio.sleep(0)
        with pytest.raises((PeerBusy, TimeoutError)) as raised:
            await scene.keeper.keep(peer_id, silent(first))
        assert isinstance(raised.value, SwarmError) and "one at a time" in str(raised.value)
        with pytest.raises(TimeoutError):
            await keeping_on

    async with played() as scene:
        replica, data = some(6, ROOM // 2)
        with monkeypatch.context() as patched:
            patched.setattr(keeping, "_FIRST_S", 0.05)
            patched.setattr(keeping, "most_seconds", lambda size: 0.05)
            await given_up(scene, replica, data)
        await scene.send(1, replica, data)


async def test_a_call_that_begins_with_data_is_refused() -> None:
    async def begins_wrongly() -> AsyncIterator[pb.KeepReplicaRequest]:
        yield pb.KeepReplicaRequest(data=b"1")

    async with played() as scene:
        with pytest.raises(RequestRejected, match="begins with its description"):
            await scene.keeper.keep(identity(1).peer_id, begins_wrongly())
