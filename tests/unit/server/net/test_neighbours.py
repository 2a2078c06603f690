"""Servers connect to others by peer id, at the addresses of their records, which are read rarely; on a fake clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from swarm_protocol.dht.records import ServerRecord, SwarmView
from swarm_protocol.errors import PeerUnavailable
from swarm_server.net.neighbours import Neighbours
from swarm_server.net.push import ChannelPool
from tests.unit.support import server_record
from tests.worlds.virtual_time import run_virtually


class Swarm:
    """Its records, and who answers at which address."""

    def __init__(self, *records: ServerRecord) -> None:
        self.records = list(records)
        self.dead: set[str] = set()
        self.read_s: list[float] = []
        self.connected: list[str] = []
        self.breaks = False
        self.state = grpc.ChannelConnectivity.IDLE
        self.neighbours = Neighbours(ChannelPool(self.connect), self.read)

    async def read(self) -> SwarmView:
        self.read_s.append(asyncio.get_running_loop().time())
        view = SwarmView.of(self.records)
        await asyncio.sleep(0.1)
        if self.breaks:
            raise OSError("no daemon")
        return view

    async def connect(self, address: str, *_options: Any) -> Any:
        self.connected.append(address)
        if address in self.dead:
            raise PeerUnavailable("nobody answers")
        return self

    def stream_stream(self, *_args: Any, **_options: Any) -> None: ...

    async def close(self) -> None:
        await asyncio.sleep(1.0)

    def get_state(self) -> grpc.ChannelConnectivity:
        return self.state

    unary_unary = unary_stream = stream_unary = stream_stream


pytestmark = pytest.mark.run_by(function=run_virtually)


def server(name: str, address: str = "") -> ServerRecord:
    return replace(server_record(name, "0:2"), addresses=(address or f"{name}:1",))


async def test_a_server_is_reached_at_the_address_of_its_record() -> None:
    swarm = Swarm(server("a"), server("b"))
    for name in ("a", "b", "a"):
        await swarm.neighbours.stub(name)
    assert (swarm.connected, len(swarm.read_s)) == (["a:1", "b:1"], 1)


async def test_nobody_is_called_whom_the_swarm_does_not_know() -> None:
    swarm = Swarm(server("a"))
    with pytest.raises(PeerUnavailable, match="the swarm has no record of it"):
        await swarm.neighbours.stub("127.0.0.1:22")
    assert swarm.connected == []


async def test_one_that_has_just_joined_is_found() -> None:
    swarm = Swarm(server("a"))
    await swarm.neighbours.stub("a")
    swarm.records.append(server("new"))
    await swarm.neighbours.stub("new")
    assert swarm.connected == ["a:1", "new:1"]


async def test_many_unknown_names_have_the_swarm_read_once_in_two_seconds() -> None:
    swarm = Swarm(server("a"))
    for _ in range(3):
        asked = [swarm.neighbours.stub(f"nobody {number}") for number in range(100)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, PeerUnavailable) for error in errors)
    assert swarm.read_s == [0.0, 2.0, 4.0]


async def test_a_reading_that_had_begun_before_is_not_enough() -> None:
    swarm = Swarm(server("a"))
    first = asyncio.ensure_future(swarm.neighbours.stub("a"))
    await asyncio.sleep(0.05)
    swarm.records.append(server("new"))
    await swarm.neighbours.stub("new")
    await first
    assert swarm.read_s == [0.0, 2.0]


IDLE, CONNECTING = grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING
READY, TRANSIENT_FAILURE = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE


@pytest.mark.parametrize("lost", [IDLE, TRANSIENT_FAILURE])
async def test_one_that_was_started_again_is_reached_at_its_new_address(lost: grpc.ChannelConnectivity) -> None:
    swarm = Swarm(server("a"))
    await swarm.neighbours.stub("a")
    for state in (IDLE, CONNECTING, READY, READY):
        swarm.state = state
        await swarm.neighbours.stub("a")
    assert swarm.connected == ["a:1"]
    swarm.state = lost
    swarm.dead.add("a:1")
    with pytest.raises(PeerUnavailable):  # too early to read again, and nobody waits for it
        await swarm.neighbours.stub("a")
    await asyncio.sleep(2.0)
    swarm.records = [server("a", "a:2")]
    await swarm.neighbours.stub("a")
    assert swarm.connected == ["a:1", "a:1", "a:1", "a:2"]
    assert list(swarm.neighbours._channels._channels) == [("a:2", b"")]


async def test_a_swarm_that_cannot_be_read_is_no_more_than_an_unknown_server(caplog: pytest.LogCaptureFixture) -> None:
    swarm = Swarm(server("a"))
    swarm.breaks = True
    with pytest.raises(PeerUnavailable):
        await swarm.neighbours.stub("a")
    swarm.breaks = False
    await swarm.neighbours.stub("a")
    assert "cannot be read: no daemon" in caplog.text


async def test_who_waits_does_not_take_a_reading_that_was_cancelled_for_one_that_ended() -> None:
    swarm = Swarm()
    asking = []
    for _ in range(3):
        asking.append(asyncio.ensure_future(swarm.neighbours.stub("a")))
        await asyncio.sleep(0.01)
    swarm.records = [server("a")]
    while len(swarm.read_s) < 2:
        await asyncio.sleep(0.01)
    asking[1].cancel()  # its reading is the first that began after the last one asked
    assert await asking[2] is not None
    await asyncio.gather(*asking, return_exceptions=True)


async def test_no_stub_is_made_once_connections_are_closed() -> None:
    """gRPC ends the process of who makes one for a channel that is closed."""
    swarm = Swarm(server("a"))
    pool = ChannelPool(swarm.connect)
    await pool.stub(server("a"))
    closing = asyncio.ensure_future(pool.close())
    for name in "aba":
        await asyncio.sleep(0)
        with pytest.raises(PeerUnavailable, match="connections to other servers are closed"):
            await pool.stub(server(name))
    await closing
    assert swarm.connected == ["a:1"]
