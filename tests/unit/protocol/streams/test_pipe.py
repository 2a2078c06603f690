"""Bytes between two connections, one of which is lost while the other one writes: both end, and nobody hears of it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import replace

import pytest
import uvloop

from swarm_protocol.streams.frames import framed, write
from swarm_protocol.streams.pipe import pipe, splice
from swarm_protocol.streams.streams import Stream
from tests.unit.support import TIMEOUT_S

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def connected() -> tuple[Stream, Stream]:
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    first, second = [Stream("peer", "", *await asyncio.open_connection(sock=end)) for end in (near, far)]
    return first, second


@pytest.mark.parametrize("data", [b"x" * 1000, b""], ids=["a run", "the end"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_pipe_whose_connection_is_lost_before_a_write_closes_its_stream(loop: str, data: bytes) -> None:
    """uvloop says of such a write that the handler is closed, which asyncio does not."""

    async def story() -> None:
        (stream, far), (end, _client) = await connected(), await connected()
        end.abort()
        with suppress(OSError):
            await end.writer.wait_closed()
        unread = asyncio.StreamReader()  # has not heard of it
        if not data:
            unread.feed_eof()
        await write(far.writer, framed(data))
        await asyncio.wait_for(pipe(unread, end.writer, stream), TIMEOUT_S)
        assert stream.writer.is_closing()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(story())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_splice_whose_side_is_lost_before_a_write_ends(loop: str) -> None:
    async def story() -> None:
        (one, caller), (other, _server) = await connected(), await connected()
        other.abort()
        with suppress(OSError):
            await other.writer.wait_closed()
        await write(caller.writer, b"x")
        deaf = replace(other, reader=asyncio.StreamReader())
        await asyncio.wait_for(splice(one, deaf, _take), TIMEOUT_S)
        assert one.writer.is_closing() and other.writer.is_closing()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(story())


async def _take(_num_bytes: int) -> None: ...


async def test_a_pipe_that_is_cancelled_closes_its_stream() -> None:
    (stream, _far), (end, _client) = await connected(), await connected()
    task = asyncio.ensure_future(pipe(end.reader, end.writer, stream))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and stream.writer.is_closing() and end.writer.is_closing()


async def test_streams_are_closed_whatever_a_splice_fails_with() -> None:
    (one, caller), (other, _server) = await connected(), await connected()

    async def take(_num_bytes: int) -> None:
        raise ZeroDivisionError

    await write(caller.writer, b"x")
    with pytest.raises(ZeroDivisionError):
        await splice(one, other, take)
    assert one.writer.is_closing() and other.writer.is_closing()


def test_what_is_no_loss_is_told() -> None:
    class Writer:
        def write(self, _data: bytes) -> None:
            raise RuntimeError("a mistake")

        def is_closing(self) -> bool:
            return False

    with pytest.raises(RuntimeError, match="a mistake"):
        asyncio.run(write(Writer(), b""))  # type: ignore[arg-type]
