"""What a monitor makes of servers that come, go, hang and change, and of a DHT that cannot be read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

import pytest

from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import Monitor, SwarmSnapshot
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import AccessDenied, NoSwarm, PeerUnavailable
from swarm_protocol.span import Span
from tests.unit.support import server_record
from tests.worlds.virtual_time import run_virtually

NUM_BLOCKS = 8
FOREVER = 1e9


class Net:
    """A swarm that is what the test says: the DHT, and the servers that can be connected to."""

    def __init__(self, *records: ServerRecord) -> None:
        self.records = {record.peer_id: record for record in records}  # in the DHT
        self.alive = dict(self.records)  # what the servers themselves say
        self.delays_s: dict[str, float] = {}
        self.closed: set[str] = set()  # servers that let in members only
        self.num_strangers = 0
        self.is_alone = False  # no other node is known: all have answered too late
        self.under_way = self.most_under_way = self.connections = 0

    def publish(self, record: ServerRecord) -> None:
        self.records[record.peer_id] = self.alive[record.peer_id] = record

    async def models(self) -> dict[str, int]:
        return {record.model: NUM_BLOCKS for record in self.records.values()}

    async def view(self, model: str, _num_blocks: int) -> SwarmView:
        return SwarmView.of(record for record in self.records.values() if record.model == model)

    async def shutdown(self) -> None:
        pass

    async def connect(self, record: ServerRecord, _config: ClientConfig) -> FakeServer:
        self.connections += 1
        return FakeServer(self, record)

    async def answer(self, peer_id: str) -> ServerRecord:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(self.delays_s.get(peer_id, 0.01))
        self.under_way -= 1
        if peer_id not in self.alive:
            raise PeerUnavailable("it is gone", peer_id)
        if peer_id in self.closed:
            raise AccessDenied("members only")
        return self.alive[peer_id]


class FakeServer:
    relay_id = ""  # it is reached directly

    def __init__(self, net: Net, record: ServerRecord) -> None:
        self.record = record
        self._net = net

    def leads_to(self, record: ServerRecord) -> bool:
        return record.tls_fingerprint == self.record.tls_fingerprint

    def renew(self, record: ServerRecord) -> None:
        self.record = record

    async def ping(self) -> float:
        await self._net.answer(self.record.peer_id)
        return self._net.delays_s.get(self.record.peer_id, 0.01)

    async def describe(self) -> ServerRecord:
        return await self._net.answer(self.record.peer_id)

    async def close(self) -> None:
        pass


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    run_virtually(coroutine, limit_s=1000)


pytestmark = pytest.mark.run_by(function=run)


def monitor(net: Net, model: str | None = None, *others: Net) -> Monitor:
    """``others``: whom it finds when it joins again."""
    nets = iter([net, *others])

    async def join(_config: ClientConfig) -> Net:
        found = next(nets, None)
        if found is None:
            raise NoSwarm("nobody answers")
        return found

    async def connect(record: ServerRecord, config: ClientConfig) -> FakeServer:
        owner = next(net for net in (net, *others) if record.peer_id in net.records)
        return await owner.connect(record, config)

    return Monitor(ClientConfig(), model, join=join, connect=connect)


def only(snapshot: SwarmSnapshot) -> ModelStatus:
    (model,) = snapshot.models
    return model


def find(snapshot: SwarmSnapshot, peer_id: str) -> ServerStatus:
    (server,) = [server for server in only(snapshot).servers if server.record.peer_id == peer_id]
    return server


def chain(snapshot: SwarmSnapshot) -> list[str]:
    return [f"{hop.server.peer_id} {hop.span}" for hop in only(snapshot).chain]


async def until(watcher: Monitor, condition: Any) -> SwarmSnapshot:
    """Looks again until the condition of what is seen holds."""
    while not condition(snapshot := await watcher.look_again(2.0)):
        await asyncio.sleep(2.0)
    return snapshot


TWO_WAYS = [server_record("a", "0:4"), server_record("b", "4:8", tokens_per_s=20), server_record("c", "4:8")]


async def test_one_look():
    net = Net(*TWO_WAYS)
    net.delays_s["c"] = 0.3
    snapshot = await monitor(net).look()
    assert chain(snapshot) == ["a 0:4", "b 4:8"]
    assert [server.rtt_s for server in only(snapshot).servers] == [0.01, 0.01, 0.3]
    assert only(snapshot).tokens_per_s == pytest.approx(1 / (1 / 10 + 1 / 20 + 0.01 + 0.01))
    assert only(snapshot).missing == () and snapshot.stale_s is None


@pytest.mark.parametrize("hangs", [False, True])
async def test_who_is_dead_or_hangs_does_not_answer_and_is_not_on_the_chain(hangs):
    net = Net(*TWO_WAYS)
    if hangs:
        net.delays_s["b"] = FOREVER
    else:
        del net.alive["b"]
    snapshot = await monitor(net).look()
    assert not find(snapshot, "b").answers and find(snapshot, "b").rtt_s is None
    assert chain(snapshot) == ["a 0:4", "c 4:8"]
    assert only(snapshot).replicas == [1] * 8


async def test_load_and_room_are_those_of_now():
    net = Net(server_record("a", "0:8", cache_tokens_left=1000))
    watcher = monitor(net)
    await watcher.look()
    net.alive["a"] = dataclasses.replace(net.records["a"], cache_tokens_left=10, queue_delay_s=0.5)
    snapshot = await until(watcher, lambda snapshot: find(snapshot, "a").record.cache_tokens_left == 10)
    assert find(snapshot, "a").record.queue_delay_s == 0.5
    net.records["a"] = dataclasses.replace(net.records["a"], cache_tokens_left=20, expires_at=FOREVER)  # newer
    net.delays_s["a"] = FOREVER
    await until(
        watcher, lambda snapshot: find(snapshot, "a").answers and find(snapshot, "a").record.cache_tokens_left == 20
    )


async def test_servers_come_die_and_come_back():
    net = Net(*TWO_WAYS)
    watcher = monitor(net)
    await watcher.look()
    net.publish(server_record("d", "0:8", tokens_per_s=100))
    await until(watcher, lambda snapshot: chain(snapshot) == ["d 0:8"])
    del net.alive["d"]
    snapshot = await until(watcher, lambda snapshot: not find(snapshot, "d").answers)
    assert "d 0:8" not in chain(snapshot)
    assert chain(await until(watcher, chain)) == ["a 0:4", "b 4:8"]
    net.alive["d"] = net.records["d"]
    await until(watcher, lambda snapshot: find(snapshot, "d").answers)
    del net.records["c"]
    await until(watcher, lambda snapshot: len(only(snapshot).servers) == 3)


async def test_who_was_started_again_is_taken_for_there():
    net = Net(*TWO_WAYS)
    del net.alive["b"]
    watcher = monitor(net)
    assert not find(await watcher.look(), "b").answers
    net.publish(dataclasses.replace(net.records["b"], tls_fingerprint=b"new", state=ServerState.JOINING))
    net.delays_s["b"] = FOREVER  # it does not listen yet
    snapshot = await until(watcher, lambda snapshot: find(snapshot, "b").answers)
    assert find(snapshot, "b").record.state is ServerState.JOINING


async def test_of_several_revisions_the_one_with_most_servers_is_used():
    old = [server_record(name, "0:8", revision="old") for name in "ab"]
    new = [server_record(name, "0:8", revision="new", tokens_per_s=100) for name in "cde"]
    net = Net(*old, *new)
    watcher = monitor(net)
    snapshot = await watcher.look()
    assert only(snapshot).revision == "new" and only(snapshot).replicas == [3] * 8
    del net.alive["c"], net.alive["d"]
    await until(
        watcher, lambda snapshot: only(snapshot).revision == "old" and chain(snapshot) in (["a 0:8"], ["b 0:8"])
    )


async def test_a_dht_that_cannot_be_read_leaves_the_last_picture():
    net = Net(*TWO_WAYS)
    watcher = monitor(net)
    await watcher.look()
    records, net.records = net.records, {}
    snapshot = await until(watcher, lambda snapshot: snapshot.stale_s is not None)
    assert len(only(snapshot).servers) == 3
    net.alive.clear()
    await until(watcher, lambda snapshot: not any(server.answers for server in only(snapshot).servers))
    net.records = net.alive = records
    await until(watcher, lambda snapshot: snapshot.stale_s is None and chain(snapshot))


async def test_others_are_found_when_all_are_gone():
    net, later = Net(*TWO_WAYS), Net(server_record("z", "0:8"))
    watcher = monitor(net, None, later)
    await watcher.look()
    net.alive.clear()  # but the DHT's node remembers them
    await until(watcher, lambda snapshot: chain(snapshot) == ["z 0:8"])
    assert [server.record.peer_id for server in only(await watcher.look_again(2.0)).servers] == ["z"]


async def test_servers_that_let_in_members_only():
    """They are no servers that are gone: they say who they are for."""
    net = Net(server_record("ada", "0:4"), server_record("bob", "2:8"), server_record("eve", "4:6"))
    net.closed = {"ada", "bob"}
    seen = monitor(net)
    status = only(await seen.look())
    assert [(s.record.peer_id, s.answers, s.denial) for s in status.servers] == [
        ("ada", True, "members only"),
        ("bob", True, "members only"),
        ("eve", True, ""),
    ]
    assert status.denied == (Span(0, 4), Span(6, 8)) and not status.missing and not status.chain
    net.closed.clear()  # whoever can be used now is seen to be so
    status = only(await seen.look_again(1.0))
    assert not status.denied and status.replicas == [1, 1, 2, 2, 2, 2, 1, 1]
    await seen.close()


async def test_a_view_without_servers_is_believed_when_nobody_answers():
    net = Net(*TWO_WAYS, server_record("z", "0:8", model="other"))
    watcher = monitor(net, "model")
    await watcher.look()
    for name in "abc":
        del net.alive[name]
        net.records[name] = dataclasses.replace(net.records[name], model="other")
    net.records["none"] = server_record("none", model="model")
    net.view = lambda model, num_blocks: asyncio.sleep(0, SwarmView())
    await until(watcher, lambda snapshot: not snapshot.models)


async def test_a_crowd_is_asked_bit_by_bit():
    net = Net(*(server_record(f"s{number:04}", "0:8") for number in range(1000)))
    watcher = monitor(net)
    snapshot = await watcher.look()
    known = [server for server in only(snapshot).servers if server.rtt_s is not None]
    assert 150 <= len(known) <= 250 and len(chain(snapshot)) == 1
    for _ in range(20):
        await watcher.look_again(2.0)
    assert net.most_under_way <= 64 and net.connections <= 300  # choosing a chain, the client measures some more


async def test_a_model_that_nobody_hosts():
    with pytest.raises(NoSwarm, match=r"hosts model 'nope'; its models: model$"):
        await monitor(Net(*TWO_WAYS), "nope").look()


async def test_a_node_that_has_lost_all_others_joins_again_before_it_says_that_there_are_none():
    net, later = Net(), Net(*TWO_WAYS)
    net.is_alone = True
    watcher = monitor(net, None, later)
    assert chain(await watcher.look()) == ["a 0:4", "b 4:8"]


async def test_a_node_that_stays_alone_sees_no_servers():
    net = Net()
    net.is_alone = True
    assert (await monitor(net).look()).models == ()  # whoever joins finds nobody
