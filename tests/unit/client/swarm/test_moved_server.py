"""A server that is reached at another address from now on: what goes on through the old one is not disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from swarm_client.core.config import ClientConfig
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport import transport
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import BadReply, PeerUnavailable
from tests.unit.client.swarm.test_swarm import FakeNet
from tests.unit.support import server_record
from tests.worlds.partial_service import serve_methods


class SlowServer:
    """Answers when it may."""

    def __init__(self, record: ServerRecord) -> None:
        self.record = record
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def Describe(self, _request: Any, _context: Any) -> Any:
        self.asked.set()
        await self.may_answer.wait()
        return self.record.to_proto()


@asynccontextmanager
async def swarm_of_one(count_addresses: int) -> AsyncIterator[tuple[Swarm, SlowServer, list[ServerRecord]]]:
    """The records are those of one server at so many addresses, one after the other."""
    grpc_server, swarm = grpc.aio.server(), None
    ports = [grpc_server.add_insecure_port("127.0.0.1:0") for _ in range(count_addresses)]
    records = [server_record(addresses=(f"127.0.0.1:{port}",)) for port in ports]
    server = SlowServer(records[0])
    serve_methods(server, grpc_server)
    await grpc_server.start()

    async def connect(record: ServerRecord, config: ClientConfig) -> ServerConnection:
        return ServerConnection(
            record, grpc.aio.insecure_channel(record.addresses[0]), config, record.addresses[0], lambda _: ""
        )

    swarm = Swarm(ClientConfig(), "model", "revision", 8, dht=FakeNet(records), connect=connect)
    try:
        yield swarm, server, records
    finally:
        await swarm.close()
        await grpc_server.stop(None)


async def is_closed(connection: ServerConnection) -> None:
    """Returns once it is."""
    while connection._channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
        await asyncio.sleep(0.01)
    with pytest.raises(PeerUnavailable, match="the connection to server …peer is closed") as caught:
        await connection.describe()
    assert caught.value.peer_id == connection.record.peer_id


async def test_what_is_under_way_goes_on_and_then_the_old_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_IDLE_S", 0.2)
    async with swarm_of_one(2) as (swarm, server, records):
        old = await swarm.server(records[0])
        asking = asyncio.ensure_future(old.describe())
        await server.asked.wait()
        new = await swarm.server(records[1])
        assert new is not old and await swarm.server(replace(records[1], tokens_per_s=7.0)) is new
        assert not asking.done()
        server.may_answer.set()
        assert (await asking).peer_id == old.record.peer_id
        await is_closed(old)
        assert (await new.describe()).peer_id == old.record.peer_id


async def test_one_that_was_idle_for_long_is_not_closed_under_those_who_have_just_got_it() -> None:
    async with swarm_of_one(2) as (swarm, server, records):
        server.may_answer.set()
        old = await swarm.server(records[0])
        old._stub.idle_since_s -= 1e6
        await swarm.server(records[1])
        for _ in range(10):
            await asyncio.sleep(0)
        assert (await old.describe()).peer_id == old.record.peer_id


async def test_who_is_another_server_than_expected_is_named() -> None:
    class Dialer:
        async def connect(self, *_: Any) -> Any:
            raise BadReply("another server answers")

        relay_of = None

    dialer: Any = Dialer()
    with pytest.raises(BadReply, match="server …peer is not where it should be: another server answers") as caught:
        await ServerConnection.connect(server_record(), ClientConfig(), dialer)
    assert caught.value.peer_id == "peer"


async def test_nor_is_one_left_open_that_was_replaced_just_before_the_swarm_was_closed() -> None:
    async with swarm_of_one(2) as (swarm, server, records):
        server.may_answer.set()
        old = await swarm.server(records[0])
        swarm.spawn(swarm.server(records[1]))
        while not swarm._replaced:
            await asyncio.sleep(0)
        await swarm.close()
        await is_closed(old)


async def test_an_old_connection_ends_with_the_swarm() -> None:
    async with swarm_of_one(2) as (swarm, server, records):
        server.may_answer.set()
        old = await swarm.server(records[0])
        await swarm.server(records[1])
        assert await old.describe()
        await swarm.close()
        await is_closed(old)
