"""Copying of bytes between two connections until both sides have ended, or one of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from swarm_protocol.errors import BadReply
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.rpc.shared import has_result
from swarm_protocol.streams.frames import MAX_RUN_BYTES, framed, losses_of, read_run, write
from swarm_protocol.streams.streams import Stream

_LOSSES = (OSError, asyncio.IncompleteReadError, BadReply)


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: Stream) -> None:
    """Copy a TCP connection through a tunnel. The end of one direction leaves the other open; a loss ends both.

    Memory holds only a few runs per direction: a slow reader slows the sender down.
    """

    async def up() -> None:
        while data := await reader.read(MAX_RUN_BYTES):
            await write(stream.writer, framed(data))
        await write(stream.writer, framed(b""))

    async def down() -> None:
        while data := await read_run(stream.reader):
            await write(writer, data)
        with losses_of(writer):
            writer.write_eof()

    whole = False
    try:
        whole = await _both(up(), down())
    finally:
        if whole:
            stream.close()
            writer.close()
        else:
            stream.abort()
            writer.transport.abort()


async def splice(one: Stream, other: Stream, take: Callable[[int], Awaitable[None]]) -> None:
    """Copy both directions between two streams without parsing; ``take`` waits until that many bytes may pass.

    Returns when one side is closed: the ends of directions are among the bytes.
    """

    async def copy(source: Stream, sink: Stream) -> None:
        while data := await source.reader.read(MAX_RUN_BYTES):
            await take(len(data))
            await write(sink.writer, data)

    tasks = [asyncio.ensure_future(copy(*ends)) for ends in ((one, other), (other, one))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        try:  # the streams are closed even if this is cancelled, or a copy has failed
            await _end(tasks)
        finally:
            one.close()
            other.close()


async def _both(*copying: Any) -> bool:
    """Run both copies; return whether both ended normally."""
    tasks = [asyncio.ensure_future(copy) for copy in copying]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        whole = all(map(has_result, tasks))
    finally:
        await _end(tasks)
    return whole


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel the copies; raise an error that is not the loss of a connection."""
    for outcome in await end_tasks(tasks):
        if isinstance(outcome, Exception) and not isinstance(outcome, _LOSSES):
            raise outcome
