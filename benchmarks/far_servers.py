"""Servers that seem far away: every link to them delays what it carries."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence

from local_servers import LocalServer, local_servers


class _Relay:
    """Forwards TCP connections to a port of this machine; every byte arrives ``delay_s`` later."""

    def __init__(self, target: int, delay_s: float) -> None:
        self._target, self._delay_s = target, delay_s
        self.port = 0

    async def start(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                loop.call_later(self._delay_s, lambda sent=data: writer.is_closing() or writer.write(sent))
        loop.call_later(self._delay_s, writer.close)


@contextlib.contextmanager
def far_servers(
    swarm: str, spans: Sequence[str], arguments: Sequence[str], delay_s: float
) -> Iterator[list[LocalServer]]:
    """One server process per span, each reached through a relay that delays by ``delay_s`` in each direction."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        with contextlib.ExitStack() as stack:
            running: list[LocalServer] = []
            for span in spans:
                port = _free_port()
                relay = _Relay(port, delay_s)
                asyncio.run_coroutine_threadsafe(relay.start(), loop).result()
                own = ["--port", str(port), "--announce-address", f"127.0.0.1:{relay.port}"]
                running += stack.enter_context(local_servers(swarm, [span], [*arguments, *own]))
            yield running
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
