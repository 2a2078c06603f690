"""What a relay costs: round trips and transfers through one beside direct ones, and how soon a server has a relay.

    python benchmarks/network_reach.py

Everything is on loopback, and the server's libp2p daemon listens nowhere, so that only processors are measured: on real
links a relay adds the way to it. Section ``reach`` of ``network.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.net.identity import Identity
from swarm_protocol.streams.pipe import pipe
from swarm_protocol.streams.streams import DaemonStreams
from swarm_protocol.tunnel.accepting import Acceptor
from swarm_protocol.tunnel.circuit import Circuit
from swarm_protocol.tunnel.dialing import open_tunnel
from swarm_protocol.tunnel.members import RelayCredentials
from swarm_protocol.tunnel.relaying import Relay, RelayLimits
from swarm_protocol.tunnel.reserving import reserve

HOST = "127.0.0.1"
SIZES = {"4 KiB": (4 << 10, 200), "1 MiB": (1 << 20, 20)}
ROUNDS = 3  # of direct, relayed, direct, relayed, …
TARGET_S = 5.0  # until one relay is found
NOBODY = RelayCredentials()


@dataclass
class Ways:
    """Ports that lead to the same echo."""

    direct: int
    relayed: int
    found_s: float


def measure(_args: argparse.Namespace, _links: dict[str, Any], console: Console) -> list[dict[str, Any]]:
    return asyncio.run(_measure(console))


async def _measure(console: Console) -> list[dict[str, Any]]:
    async with ways() as net:
        rows = [row("from the start of the DHT node to a relay, one relay, s", net.found_s, None, TARGET_S)]
        for name, (size, count) in SIZES.items():
            pairs = [
                (await echo_s(net.direct, size, count), await echo_s(net.relayed, size, count)) for _ in range(ROUNDS)
            ]
            direct, relayed = (statistics.median(times) for times in zip(*pairs, strict=True))
            rows.append(row(f"{name} there and back through a relay, beside direct, ms", relayed * 1e3, direct * 1e3))
    for each in rows:
        beside = "" if each["beside"] is None else f", {each['beside']:.3g} directly"
        console.print(f"{each['name']}: {each['measured']:.3g}{beside}")
    return rows


def row(name: str, measured: float, beside: float | None, target: float | None = None) -> dict[str, Any]:
    met = None if target is None else "yes" if measured <= target else "no"
    ratio = None if beside is None else measured / beside
    return {"name": name, "measured": measured, "beside": beside, "ratio": ratio, "target": target, "met": met}


async def echo_s(port: int, size: int, count: int) -> float:
    """Median seconds of so many round trips on one connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    data, times = bytes(size), []
    for _ in range(count + 1):
        start_s = time.perf_counter()
        writer.write(data)
        await reader.readexactly(size)
        times.append(time.perf_counter() - start_s)
    writer.close()
    return statistics.median(times[1:])  # the first one has opened the tunnel


@asynccontextmanager
async def ways() -> AsyncIterator[Ways]:
    async with AsyncExitStack() as stack:

        async def node(peers: list[str], host: str | None = None) -> tuple[Dht, DaemonStreams]:
            dht = await Dht.join("reach", peers, Identity.generate(), Listening(host))
            stack.push_async_callback(dht.shutdown)
            return dht, DaemonStreams(lambda: dht.p2p)

        async def listen(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> int:
            server = await asyncio.start_server(serve, HOST, 0)
            stack.callback(server.close)
            port: int = server.sockets[0].getsockname()[1]
            return port

        relay, relay_streams = await node([], HOST)
        peers = await relay.addresses()
        await Relay(relay_streams, RelayLimits()).start()
        direct = await listen(echo)
        start_s = time.perf_counter()
        server, server_streams = await node(peers)
        await Acceptor(server_streams, HOST, direct, {relay.peer_id: ""}.get, {}).start()
        reservation = await reserve(server_streams, peers[0], NOBODY, 20.0)
        found_s = time.perf_counter() - start_s
        stack.callback(reservation.close)
        _, client_streams = await node(peers)

        async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await pipe(reader, writer, await open_tunnel(client_streams, Circuit(peers[0], server.peer_id), NOBODY))

        yield Ways(direct, await listen(through), found_s)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


if __name__ == "__main__":
    measure(argparse.Namespace(), {}, Console(width=150, highlight=False))
