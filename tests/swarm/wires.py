"""Wires between servers that can be cut: whatever a server sends to another one goes through a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from swarm_client.core import background
from swarm_protocol.tunnel.dialing import Dialer
from swarm_server.node import server


class Wires:
    """All connections that servers have made to others."""

    def __init__(self) -> None:
        self._proxies: dict[str, Proxy] = {}  # by address

    def cut(self) -> None:
        """As if somebody had pulled the plug for a moment."""
        background.run(self._cut())

    async def _cut(self) -> None:
        assert any(proxy.ends for proxy in self._proxies.values()), "nothing is connected"
        for proxy in self._proxies.values():
            proxy.cut()

    async def proxy(self, address: str) -> str:
        if address not in self._proxies:
            self._proxies[address] = proxy = Proxy(address)
            await proxy.start()
        return self._proxies[address].address

    async def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.cut()
            proxy.server.close()


class Proxy:
    """Passes bytes on to an address."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.ends: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for end in self.ends:
            end.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self.ends |= ends
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
        self.ends -= ends


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()


@contextmanager
def wires_between_servers() -> Iterator[Wires]:
    """Servers that start meanwhile reach each other through wires that can be cut."""
    wires = Wires()

    class Wired(Dialer):
        async def connect(self, address: str, *args) -> grpc.aio.Channel:
            return await super().connect(await wires.proxy(address), *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "Dialer", Wired)
        try:
            yield wires
        finally:
            background.run(wires.close())
