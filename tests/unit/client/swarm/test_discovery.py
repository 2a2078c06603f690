"""A client's way into the DHT, and into it again when all whom it knew are gone or its libp2p daemon is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarm_client.core.config import ClientConfig, Timeouts
from swarm_client.swarm.discovery import Discovery
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.errors import NoSwarm
from tests.unit.support import server_record, until


@dataclass
class FakeDht:
    """A node that sees one server, named as it is."""

    name: str
    is_alive: bool = True
    is_alone: bool = False
    closed: bool = False

    async def view(self, *_what: object) -> SwarmView:
        return SwarmView.of([server_record(self.name)])

    async def shutdown(self) -> None:
        self.closed = True


@dataclass
class Ways:
    """What joining leads to, the next time and after that; an exception is raised, an event waited for."""

    come: list[FakeDht | Exception | asyncio.Event] = field(default_factory=list)

    async def join(self, _config: ClientConfig) -> FakeDht:
        outcome = self.come.pop(0)
        if isinstance(outcome, asyncio.Event):
            await outcome.wait()
            outcome = self.come.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def seen(client: Discovery) -> str | None:
    view = await client.view("model", 8, None)
    return None if view is None else view.servers[0].peer_id


@asynccontextmanager
async def discovery(**timeouts: float) -> AsyncIterator[tuple[Discovery, FakeDht, Ways]]:
    first, ways = FakeDht("first"), Ways()
    client = Discovery(ClientConfig(timeouts=Timeouts(rejoin_after_s=0, **timeouts)), ways.join, first)
    yield client, first, ways
    await client.close()


async def test_who_is_alone_joins_again() -> None:
    async with discovery() as (client, first, ways):
        first.is_alone = True
        ways.come = [NoSwarm("nobody is there"), FakeDht("second")]
        assert await seen(client) == "first"  # as far as is known
        assert await seen(client) == "second"
        await until(lambda: first.closed)
        assert await seen(client) == "second"


async def test_a_daemon_that_has_ended_is_replaced_with_a_warning(caplog) -> None:
    async with discovery() as (client, first, ways):
        first.is_alive = False
        ways.come = [FakeDht("second")]
        with caplog.at_level(logging.WARNING):
            assert [await seen(client) for _ in range(2)] == ["second"] * 2
        assert [record.message for record in caplog.records] == [
            "the libp2p daemon of this client has ended; joining the swarm again"
        ]


async def test_a_dht_that_cannot_be_read_is_left() -> None:
    async with discovery() as (client, first, ways):

        async def fail(*_what: object) -> SwarmView:
            raise ConnectionResetError

        first.view = fail
        ways.come = [NoSwarm("nobody is there"), FakeDht("second")]
        assert await seen(client) is None
        assert await seen(client) == "second"


async def test_nobody_waits_long_for_those_who_do_not_answer() -> None:
    async with discovery(rejoin_s=0.01) as (client, first, ways):
        first.is_alone, answer = True, asyncio.Event()
        ways.come = [answer, FakeDht("second")]
        assert [await seen(client) for _ in range(3)] == ["first"] * 3  # one attempt at a time
        answer.set()

        async def arrived() -> bool:
            return await seen(client) == "second"

        await until(arrived)
