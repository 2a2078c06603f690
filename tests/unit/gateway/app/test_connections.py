"""Connections that send no whole request: they do not keep others out, and do not stay."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from swarm_gateway.app.connections import IncomingRequests, protocol_of
from swarm_gateway.app.serving import listen
from swarm_gateway.grammars.schema_check import limit_resources

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_BODY = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def test_there_is_a_limit_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= IncomingRequests.of_this_process()._most <= 1024
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert IncomingRequests.of_this_process()._most == 1024
    limit_resources()  # which limits nothing there


async def app(_scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Caller:
    """Opens connections to a server whose requests are bounded."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: list[Stream] = []

    async def send(self, data: bytes, stream: Stream | None = None) -> Stream:
        if stream is None:
            stream = await asyncio.open_connection("127.0.0.1", self._port)
            self._streams.append(stream)
        stream[1].write(data)
        await stream[1].drain()
        return stream

    def close(self) -> None:
        for _, writer in self._streams:
            writer.close()


@asynccontextmanager
async def serving(most: int, timeout_s: float = 600.0) -> AsyncIterator[Caller]:
    with listen("127.0.0.1", 0) as listener:
        protocol = protocol_of(IncomingRequests(most, timeout_s))
        options = uvicorn.Config(app, http=protocol, log_config=None, lifespan="off", ws="none")
        options.timeout_keep_alive = 600
        server = uvicorn.Server(options)
        running = asyncio.ensure_future(server._serve([listener]))
        caller = Caller(listener.getsockname()[1])
        try:
            yield caller
        finally:
            caller.close()
            server.should_exit = True
            await running


async def answer(stream: Stream) -> bytes:
    head = await stream[0].readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    return await stream[0].readexactly(2)


@pytest.mark.parametrize("part", [b"", HALF, HALF_BODY])
async def test_many_that_send_no_whole_request_keep_nobody_out(part: bytes) -> None:
    async with serving(most=3) as caller:
        slow = [await caller.send(part) for _ in range(20)]
        assert await answer(await caller.send(WHOLE)) == b"ok"
        for reader, _ in slow[:17]:
            assert await reader.read() == b""


async def test_many_that_stay_after_an_answer_keep_nobody_out() -> None:
    async with serving(most=3) as caller:
        answered = []
        for _ in range(10):
            answered.append(await caller.send(WHOLE))
            assert await answer(answered[-1]) == b"ok"
        for reader, _ in answered[:6]:
            assert await reader.read() == b""


async def test_requests_that_come_together_are_all_answered() -> None:
    async with serving(most=1) as caller:
        stream = await caller.send(3 * WHOLE)
        assert [await answer(stream) for _ in range(3)] == [b"ok"] * 3


@pytest.mark.parametrize("part", [b"", HALF, HALF_BODY])
async def test_a_request_that_takes_too_long_to_come_is_given_up(part: bytes) -> None:
    async with serving(most=3, timeout_s=0.05) as caller:
        reader, _ = await caller.send(part)
        assert await reader.read() == b""


async def test_a_connection_may_have_many_requests_of_which_each_is_bounded() -> None:
    async with serving(most=1) as caller:
        stream = await caller.send(HALF)
        assert await answer(await caller.send(b"no\r\n\r\n", stream)) == b"ok"
        assert await answer(await caller.send(WHOLE, stream)) == b"ok"
        await caller.send(HALF, stream)
        assert await answer(await caller.send(b"no\r\n\r\n", stream)) == b"ok"
        await caller.send(HALF, stream)
        assert await answer(await caller.send(WHOLE)) == b"ok"
        assert await stream[0].read() == b""
