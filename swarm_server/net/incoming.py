"""The messages of one stream, with a time limit for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import torch

from swarm_protocol.errors import RequestRejected, SessionLost
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.wire.codec import Assembler
from swarm_server.net.arrivals import Arrivals, ArrivingTensor, TransferDeadline

_LARGE_BYTES = 16 * 1024  # of a message that takes a while on a slow line, unlike a step of one token


class Incoming:
    """The reader of a client's stream. A request's messages count in ``arrivals``, and must not come too slowly."""

    def __init__(self, messages: AsyncIterator[Any], arrivals: Arrivals, reads_ahead: bool = False) -> None:
        """Create the reader. If ``reads_ahead``, it prefetches the message after a large one, and needs ``aclose``."""
        self._messages = messages
        self._arrivals = arrivals
        self._reads_ahead = reads_ahead
        self._ahead: asyncio.Future[Any] | None = None
        self._pace: TransferDeadline | None = None  # of the request that has begun to arrive

    async def begin(self, idle_timeout_s: float | None) -> Any:
        """Return the next request, before which the stream may be silent, or None at the end of the stream.

        Raise SessionLost after ``idle_timeout_s``; None means no limit.
        """
        self._pace = None
        if idle_timeout_s is None:
            return await self._message()
        try:
            async with asyncio.timeout(idle_timeout_s):
                return await self._message()
        except TimeoutError:
            raise SessionLost(f"the session was closed after {idle_timeout_s:g} s without a request") from None

    async def next(self) -> Any:
        """Return the next message of a request, or None at the end of the stream. Raise SessionLost if it is late."""
        clock = asyncio.get_running_loop().time
        start_s = clock()
        if self._pace is None:
            self._pace = self._arrivals.pace()
        try:
            async with asyncio.timeout(self._pace.left_s):
                message = await self._message()
        except TimeoutError:
            raise SessionLost(
                f"a request came too slowly: expected {self._arrivals.min_bytes_per_s:g} bytes per second, and no "
                f"pause beyond {self._arrivals.stall_timeout_s:g} s"
            ) from None
        if message is not None:
            self._pace.received(message.ByteSize(), clock() - start_s)
        return message

    async def _message(self) -> Any:
        """Return the next message, or None at the end of the stream."""
        ahead, self._ahead = self._ahead, None
        message = await (anext(self._messages, None) if ahead is None else ahead)
        if self._reads_ahead and message is not None and message.ByteSize() > _LARGE_BYTES:
            self._ahead = asyncio.ensure_future(anext(self._messages, None))
        return message

    async def aclose(self) -> None:
        """Cancel the prefetch, after which the messages may be closed; closing fails while a read is under way."""
        if self._ahead is not None:
            await end_tasks([self._ahead])

    async def first(self, *kinds: str) -> Any:
        """Return the next message. Raise RequestRejected if it is not of one of these kinds."""
        message = await self.next()
        if message is None or message.WhichOneof("kind") not in kinds:
            raise RequestRejected(f"expected a message of kind {' or '.join(map(repr, kinds))}")
        return message

    async def collect(self, assembler: Assembler, request: ExitStack) -> torch.Tensor:
        """Return the tensor that begins in ``assembler``, with all parts. It counts until ``request`` is closed.

        Raise PeerBusy if there is no room.
        """
        arriving = request.enter_context(ArrivingTensor(self._arrivals, assembler))
        while not arriving.complete:
            arriving.add((await self.first("more")).more)
        return arriving.tensor()
