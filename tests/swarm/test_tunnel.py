"""Tunnels and relays between real libp2p daemons on loopback; the server's daemon listens nowhere."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.streams.frames import read_run
from swarm_protocol.streams.streams import DaemonStreams
from swarm_protocol.tunnel.accepting import Acceptor
from swarm_protocol.tunnel.circuit import Circuit
from swarm_protocol.tunnel.dialing import _TunnelPort, open_tunnel
from swarm_protocol.tunnel.members import RelayCredentials
from swarm_protocol.tunnel.relaying import Relay, RelayLimits
from swarm_protocol.tunnel.reserving import reserve
from tests.quick_keys import new_identity
from tests.swarm.waiting import DEADLINE_S
from tests.unit.support import until

NOBODY = RelayCredentials()
KEEPALIVE_S = 0.2


@dataclass
class Three:
    """A relay, a server that nobody can dial, and a client. ``origins``: of connections that the server has now."""

    relay: Relay
    relay_address: str
    dhts: dict[str, Dht]
    streams: dict[str, DaemonStreams]
    origins: dict[tuple[str, int], str]

    @property
    def circuit(self) -> Circuit:
        return Circuit(self.relay_address, self.dhts["server"].peer_id)


async def answer_digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says at once that it is there; all else only when the other direction has ended."""
    writer.write(b"hello")
    writer.write(hashlib.sha256(await reader.read()).digest())
    writer.write_eof()
    await writer.drain()
    writer.close()


@asynccontextmanager
async def three(service=answer_digest) -> AsyncIterator[Three]:
    async with AsyncExitStack() as stack:
        dhts, peers = {}, []
        for name in ("relay", "server", "client"):
            host = "127.0.0.1" if name == "relay" else None
            dhts[name] = await Dht.join("tunnels", peers, new_identity(), Listening(host))
            stack.push_async_callback(dhts[name].shutdown)
            peers = peers or [(await dhts[name].addresses())[0]]
        streams = {name: DaemonStreams(lambda dht=dht: dht.p2p) for name, dht in dhts.items()}
        relay = Relay(streams["relay"], RelayLimits())
        await relay.start()
        listening = await asyncio.start_server(service, "127.0.0.1", 0)
        stack.callback(listening.close)
        origins: dict[tuple[str, int], str] = {}
        port = listening.sockets[0].getsockname()[1]
        acceptor = Acceptor(streams["server"], "127.0.0.1", port, {dhts["relay"].peer_id: ""}.get, origins)
        await acceptor.start()
        yield Three(relay, peers[0], dhts, streams, origins)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE_S))


pytestmark = pytest.mark.run_by(function=run)


async def test_bytes_go_both_ways_and_one_direction_may_end_before_the_other():
    async with three() as net:
        reservation = await reserve(net.streams["server"], net.relay_address, NOBODY, KEEPALIVE_S)
        port = await _TunnelPort(net.circuit, net.streams["client"], NOBODY, {}).open()
        data = os.urandom(3_000_000)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
        assert await reader.readexactly(5) == b"hello"
        assert list(net.origins.values()) == ["127.0.0.1"]
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == hashlib.sha256(data).digest()
        writer.close()
        await until(lambda: not net.origins)
        assert net.relay.budget.num_bytes > len(data)
        await until(lambda: net.relay._places.num_taken == 0)
        port.close()
        reservation.close()


async def test_who_does_not_read_is_not_sent_more():
    sent = 0

    async def talk_for_ever(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while True:
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    async with three(service=talk_for_ever) as net:
        await reserve(net.streams["server"], net.relay_address, NOBODY, KEEPALIVE_S)
        stream = await open_tunnel(net.streams["client"], net.circuit, NOBODY)
        seen = -1
        while sent != seen:  # until it stands still
            seen = sent
            await asyncio.sleep(0.5)
        assert 0 < sent < 64 << 20
        for _ in range(1000):  # it goes on once somebody reads
            await stream.reader.read(1 << 16)
        await until(lambda: sent > seen)
        stream.abort()
        await until(lambda: not net.origins)


async def test_a_relay_itself_reaches_the_servers_for_which_it_relays():
    async with three() as net:
        await reserve(net.streams["server"], net.relay_address, NOBODY, KEEPALIVE_S)
        stream = await open_tunnel(net.streams["relay"], net.circuit, NOBODY)
        assert await read_run(stream.reader) == b"hello"
        stream.close()
