"""Messages and runs of bytes on a stream, each with a length prefix; see ``protos/tunnel.proto``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from swarm_protocol.errors import BadReply

MAX_RUN_BYTES = 64 * 1024
_LENGTH_BYTES = 4
M = TypeVar("M", bound=Message)


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES) + data


async def read_run(reader: asyncio.StreamReader) -> bytes:
    """Read the next run; an empty one is the end of this direction.

    Raises:
        BadReply: the run is too long. IncompleteReadError: the stream ended without an empty run.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    if length > MAX_RUN_BYTES:
        raise BadReply(f"a run of {length} bytes came through a tunnel: expected at most {MAX_RUN_BYTES}")
    return await reader.readexactly(length)


async def read_message(reader: asyncio.StreamReader, kind: type[M], timeout_s: float) -> M:
    """Read a message; raise BadReply if it is of another kind, late, or cut off."""
    try:
        async with asyncio.timeout(timeout_s):
            return kind.FromString(await read_run(reader))
    except (TimeoutError, asyncio.IncompleteReadError, OSError, DecodeError) as error:
        raise BadReply(f"no {kind.DESCRIPTOR.name} came: {error!r}") from None


async def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write data; raise OSError if the stream is gone."""
    with losses_of(writer):
        writer.write(data)
        await writer.drain()


async def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Write a message; raise OSError if the stream is gone."""
    await write(writer, framed(message.SerializeToString()))


@contextmanager
def losses_of(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Raise OSError where uvloop, unlike asyncio, raises RuntimeError: the connection was lost before the write."""
    try:
        yield
    except RuntimeError as error:
        if not writer.is_closing():
            raise
        raise ConnectionResetError(str(error)) from None
