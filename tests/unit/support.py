"""What unit tests share: coroutines run to their end, conditions waited for, records of servers that do not exist."""

from __future__ import annotations

import asyncio
import ctypes
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from random import SystemRandom
from threading import Thread
from typing import Any, TypeVar

import pytest

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.span import Span

T = TypeVar("T")
TIMEOUT_S = 240.0  # after which a test that still waits has failed


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(coroutine, TIMEOUT_S)

    return asyncio.run(limited())


async def until(condition: Callable[[], Any]) -> None:
    """Waits for a condition, plain or async, to hold."""

    async def poll() -> None:
        while True:
            holds = condition()
            if await holds if asyncio.iscoroutine(holds) else holds:
                return
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), TIMEOUT_S)


def server_record(peer_id: str = "peer", blocks: str = "0:4", **fields: Any) -> ServerRecord:
    """An online server of a model with 8 blocks."""
    known = dict(addresses=("127.0.0.1:1",), model="model", revision="revision", num_blocks=8, tokens_per_s=10.0)
    return ServerRecord(peer_id=peer_id, span=Span.parse(blocks), **(known | fields))


@contextmanager
def http_server(answer: Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]) -> Iterator[str]:
    """The URL of a server on this machine, which answers each GET with this status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def refusal(capsys: pytest.CaptureFixture[str], run: Callable[[], object], code: int = 2) -> str:
    """Return the error with which a command ends: one sentence, and this exit code."""
    with pytest.raises(SystemExit) as end:
        run()
    said = capsys.readouterr().err
    assert end.value.code == code and said.startswith("error: ") and said.count("\n") == 1
    return said


def quiet_port() -> int:
    """A free port that no outgoing connection gets meanwhile: below those that systems give them."""
    for port in SystemRandom().sample(range(20_000, 30_000), 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def resident_bytes() -> int:
    """What is in use: freed memory that the C library still keeps is given back first."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096
