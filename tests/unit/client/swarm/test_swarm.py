"""A client's view of its swarm: whom it speaks to before it trusts them, whom it leaves out, and what it reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Route
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.dht.records import ServerRecord, SwarmView
from swarm_protocol.errors import AccessDenied, NoRoute, PeerUnavailable
from swarm_protocol.span import Span
from tests.unit.support import run, server_record
from tests.worlds.virtual_time import run_virtually

NEED = 1


@dataclass
class FakeServer:
    record: ServerRecord
    net: FakeNet

    def leads_to(self, _record: ServerRecord) -> bool:
        return True

    def renew(self, record: ServerRecord) -> None:
        self.record = record

    async def ping(self) -> float:
        self.net.pinged.append(self.record.peer_id)
        if self.record.peer_id in self.net.denying:
            raise AccessDenied("takes only members")
        if self.record.peer_id in self.net.silent:
            await asyncio.Event().wait()
        return self.net.rtts_s.get(self.record.peer_id, 0.001)

    async def close(self) -> None:
        pass


@dataclass
class FakeNet:
    """Stands for the DHT and for the servers: all records, who is dead, who never answers, how far each is."""

    records: list[ServerRecord]
    dead: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    denying: set[str] = field(default_factory=set)
    rtts_s: dict[str, float] = field(default_factory=dict)
    pinged: list[str] = field(default_factory=list)
    parts: list[Span | None] = field(default_factory=list)  # of the model that were read
    is_alive: bool = True
    is_alone: bool = False

    async def view(self, _model: str, _num_blocks: int, part: Span | None = None) -> SwarmView:
        self.parts.append(part)
        return SwarmView.of(self.records)

    async def shutdown(self) -> None:
        pass

    async def connect(self, record: ServerRecord, _timeout_s: float) -> FakeServer:
        if record.peer_id in self.dead:
            raise PeerUnavailable("nobody answers", record.peer_id, record.span)
        return FakeServer(record, self)

    def publish_again(self) -> None:
        """All who live."""
        self.records = [
            record if record.peer_id in self.dead else replace(record, expires_at=record.expires_at + 20)
            for record in self.records
        ]


@asynccontextmanager
async def client_of(net: FakeNet, **options: Any) -> AsyncIterator[Swarm]:
    """A client of the network; ``options``: of its config."""
    config = ClientConfig(wait_timeout_s=0, **options)
    swarm = Swarm(config, "model", "revision", 8, dht=net, connect=net.connect)
    try:
        yield swarm
    finally:
        await swarm.close()


def servers(*spans: tuple[str, str], **fields: Any) -> list[ServerRecord]:
    lives_until = time.time() + 120
    return [
        server_record(name, blocks, cache_tokens_left=100, expires_at=lives_until, **fields) for name, blocks in spans
    ]


def names(chain: Route) -> list[str]:
    return [hop.server.peer_id for hop in chain]


@pytest.mark.run_by(function=run_virtually)
@pytest.mark.parametrize("fate", ["dead", "silent"])
async def test_a_ghost_is_never_in_a_chain(fate: str) -> None:
    """The DHT still has its record, and it would be the best by far."""
    net = FakeNet([*servers(("ghost", "0:8"), tokens_per_s=1e6), *servers(("slow", "0:8"))])
    getattr(net, fate).add("ghost")
    async with client_of(net) as swarm:
        for _ in range(3):
            assert names(await swarm.chain(Span(0, 8), NEED)) == ["slow"]


async def test_a_server_that_died_is_out_at_once_and_back_when_it_is_heard_of() -> None:
    net = FakeNet(servers(("a", "0:8"), ("b", "0:8")), rtts_s={"a": 0.01, "b": 0.2})
    async with client_of(net) as swarm:
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["a"]
        net.dead.add("a")
        swarm.failed(PeerUnavailable("it broke", "a", Span(0, 8)))
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["b"]
        swarm._backoff._failures["a"] = replace(swarm._backoff._failures["a"], since_s=-1000.0)  # long ago
        net.publish_again()
        await swarm.view(0)
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["b"]
        net.dead.clear()
        net.publish_again()
        await swarm.view(0)
        swarm._last_chains.clear()
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["a"]


async def test_a_client_that_no_server_accepts_hears_it_at_once_and_asks_nobody_twice() -> None:
    net = FakeNet(servers(("a", "0:8"), ("b", "0:8")), denying={"a", "b"})
    async with client_of(net) as swarm:
        for _ in range(3):
            with pytest.raises(AccessDenied, match="takes only members"):
                await swarm.chain(Span(0, 8), NEED, timeout_s=1000)
    assert sorted(net.pinged) == ["a", "b"]


async def test_servers_that_do_not_accept_a_client_are_passed_over() -> None:
    net = FakeNet(servers(("a", "0:8"), ("b", "0:8"), tokens_per_s=10.0), denying={"a"})
    async with client_of(net) as swarm:
        for _ in range(3):
            assert names(await swarm.chain(Span(0, 8), NEED)) == ["b"]
    assert net.pinged.count("a") == 1


@pytest.mark.run_by(function=run_virtually)
async def test_a_server_that_refuses_does_not_end_the_wait_for_another_that_failed() -> None:
    net = FakeNet(servers(("a", "0:8"), ("b", "0:8")), denying={"b"})
    async with client_of(net) as swarm:
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["a"]
        assert swarm.denial("b")
        swarm.failed(PeerUnavailable("it broke", "a", Span(0, 8)))
        with pytest.raises(NoRoute, match="no server holds blocks 0:8"):
            await swarm.chain(Span(0, 8), NEED)
        await asyncio.sleep(2.0)
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["a"]
        with pytest.raises(NoRoute):
            await swarm.chain(Span(0, 8), NEED, avoid=["a"])
        swarm.ban("a")
        with pytest.raises(AccessDenied):
            await swarm.chain(Span(0, 8), NEED)


async def test_an_expired_record_is_no_server() -> None:
    old = [replace(record, expires_at=time.time() - 1) for record in servers(("a", "0:8"))]
    async with client_of(FakeNet(old)) as swarm:
        with pytest.raises(NoRoute, match=r"no server holds blocks 0:8 \(left out: 1 server not heard from recently\)"):
            await swarm.chain(Span(0, 8), NEED)


async def test_only_the_part_in_use_is_read() -> None:
    net = FakeNet(servers(("a", "0:8")))
    async with client_of(net) as swarm:
        await swarm.chain(Span(2, 4), NEED)
        await swarm.chain(Span(3, 4), NEED)
        assert net.parts == [Span(2, 4)]
        await swarm.chains(Span(3, 6), [10])
        assert net.parts == [Span(2, 4), Span(2, 6)]


async def test_a_chain_is_kept_for_the_next_session() -> None:
    net = FakeNet(servers(("a", "0:8"), ("b", "0:8")), rtts_s={"a": 0.010, "b": 0.011})
    async with client_of(net) as swarm:
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["a"]
        net.records = [*servers(("b", "0:8"), tokens_per_s=10.5), *servers(("a", "0:8"))]
        await swarm.view(0)
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["a"]
        assert [names(chain) for chain in await swarm.chains(Span(0, 8), [64])] == [["b"]]
        net.records = [*servers(("b", "0:8"), tokens_per_s=20.0), *servers(("a", "0:8"))]
        await swarm.view(0)
        assert names(await swarm.chain(Span(0, 8), NEED)) == ["b"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"allowed_servers": ("…slow",)}, "peerslow"), ({"blocked_servers": ("peerfast",)}, "peerslow"), ({}, "peerfast")],
)
async def test_lists_of_servers_are_obeyed(options: dict[str, Any], expected: str) -> None:
    net = FakeNet([*servers(("peerfast", "0:8"), tokens_per_s=100.0), *servers(("peerslow", "0:8"))])
    async with client_of(net, **options) as swarm:
        assert names(await swarm.chain(Span(0, 8), NEED)) == [expected]
        assert expected in net.pinged and (len(net.pinged) == 1) is bool(options)  # who is not to be used is not asked


async def test_a_large_swarm_is_not_asked_as_a_whole() -> None:
    """The best of a thousand unknown servers cannot be found at once; a good one can."""
    many = servers(*((f"s{number:04}", "0:8") for number in range(1000)))
    net = FakeNet(many, rtts_s={f"s{number:04}": 0.001 * (1 + number) for number in range(1000)})
    async with client_of(net) as swarm:
        (chosen,) = names(await swarm.chain(Span(0, 8), NEED))
        assert len(set(net.pinged)) < 150
        assert net.rtts_s[chosen] == min(net.rtts_s[name] for name in set(net.pinged))


def joins(net: FakeNet, **options: Any) -> None:
    async def connect() -> None:
        async with client_of(net, **options) as swarm:
            await swarm.connect()

    run(connect())


def test_what_was_asked_for_by_name_is_missed_at_once() -> None:
    some = [
        *servers(("peerone", "0:4"), adapters=("polite", "rude")),
        *servers(("peertwo", "4:8"), adapters=("polite",)),
    ]
    with pytest.raises(NoRoute, match="no server has adapter 'kind': they have polite, rude"):
        joins(FakeNet(some), adapter="kind")
    with pytest.raises(NoRoute, match="no server has adapter 'rude': they have polite"):
        joins(FakeNet(some), adapter="rude", blocked_servers=("one",))
    with pytest.raises(NoRoute, match=r"here is six or ten: there are …eerone \(blocks 0:4\), …eertwo \(blocks 4:8\)"):
        joins(FakeNet(some), allowed_servers=("six", "ten"))
    with pytest.raises(NoRoute, match="all servers here are blocked: there are …eerone"):
        joins(FakeNet(some), blocked_servers=("one", "two"))


def test_some_of_those_asked_for_may_be_absent(caplog: pytest.LogCaptureFixture) -> None:
    some = servers(("peerone", "0:4"), ("peertwo", "4:8"), adapters=("polite",))
    joins(FakeNet(some), allowed_servers=("one", "two", "six"), blocked_servers=("ten",), adapter="polite")
    there = "there are …eerone (blocks 0:4), …eertwo (blocks 4:8)"
    assert caplog.messages == [f"no server here is six: {there}", f"no server here is ten: {there}"]


def test_where_nobody_is_yet_somebody_may_come() -> None:
    joins(FakeNet([]), adapter="kind", allowed_servers=("six",))


class SlowNet(FakeNet):
    """Counts what it is asked, and takes its time."""

    num_reads = num_connects = 0

    async def view(self, model: str, num_blocks: int, part: Span | None = None) -> SwarmView:
        self.num_reads += 1
        await asyncio.sleep(0.01)
        return await super().view(model, num_blocks, part)

    async def connect(self, record: ServerRecord, timeout_s: float) -> FakeServer:
        self.num_connects += 1
        await asyncio.sleep(0.01)
        return await super().connect(record, timeout_s)


async def test_those_who_wait_for_a_reading_share_the_next_one() -> None:
    net = SlowNet(servers(("a", "0:8")))
    async with client_of(net) as swarm:
        first = asyncio.ensure_future(swarm.view(0.0))
        while not net.num_reads:
            await asyncio.sleep(0)
        net.records += servers(("b", "0:8"))  # after the first one has begun, for all they know
        views = await asyncio.gather(*(swarm.view(0.0) for _ in range(20)))
        await first
        assert net.num_reads == 2 and all(len(view.servers) == 2 for view in views)


@pytest.mark.parametrize("is_dead", [False, True])
async def test_those_who_need_a_connection_at_once_share_it_or_its_failure(is_dead: bool) -> None:
    net = SlowNet(servers(("a", "0:8")), dead={"a"} if is_dead else set())
    async with client_of(net) as swarm:
        found = await asyncio.gather(*(swarm.server(net.records[0]) for _ in range(20)), return_exceptions=True)
        assert net.num_connects == 1
        if is_dead:
            assert all(isinstance(each, PeerUnavailable) and each.peer_id == "a" for each in found)
            net.dead.clear()
            assert (await swarm.server(net.records[0])).record.peer_id == "a"  # tried anew
        else:
            assert all(each is found[0] for each in found)


async def test_who_waits_for_a_connection_when_all_are_closed_hears_of_it() -> None:
    net = SlowNet(servers(("a", "0:8")))
    async with client_of(net) as swarm:
        waiting = asyncio.ensure_future(swarm.server(net.records[0]))
        while not net.num_connects:
            await asyncio.sleep(0)
        await swarm.close()
        with pytest.raises(PeerUnavailable, match="the connection was closed"):
            await waiting


async def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    blocks = Span(0, 8)
    net = FakeNet(servers(("a", "0:8"), ("b", "0:8")), rtts_s={"a": 0.001, "b": 0.05})
    async with client_of(net) as swarm:

        async def chosen(*pages: bytes) -> list[str]:
            return [hop.server.peer_id for hop in await swarm.chain(blocks, 8, prompt_pages=pages)]

        swarm.prompts.add([("b", blocks)], [b"one", b"two"], now_s())
        assert await chosen(b"other") == ["a"]
        assert await chosen(b"one", b"end") == ["b"]
        swarm.failed(PeerUnavailable("it is gone", "b", blocks))
        assert await chosen(b"one", b"end") == ["a"]
