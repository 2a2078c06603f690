"""A port that leads to another one, later: what a server far away looks like."""

from __future__ import annotations

import asyncio
import contextlib

from swarm_client.core import background


class DelayedPort:
    """Forwards TCP connections to a port of this machine; every byte arrives ``delay_s`` later. A context manager.

    Attributes:
        port: the one to connect to.
    """

    def __init__(self, target: int, delay_s: float) -> None:
        self._target = target
        self._delay_s = delay_s
        self.port = 0

    def __enter__(self) -> DelayedPort:
        background.run(self._start())
        return self

    def __exit__(self, *_exception: object) -> None:
        background.run(self._stop())

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))
        writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                loop.call_later(self._delay_s, _write, writer, data)
        loop.call_later(self._delay_s, writer.close)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)
