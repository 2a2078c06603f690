"""A stream inside one process, between a leader and itself as a member."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from swarm_protocol.errors import PeerUnavailable

Out = TypeVar("Out")
In = TypeVar("In")


class LocalStream(Generic[Out, In]):
    """One side of a stream; see ``stream_pair``."""

    def __init__(
        self, outbox: asyncio.Queue[Out | None], inbox: asyncio.Queue[In | None], broken: asyncio.Event
    ) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self._broken = broken  # of both sides
        self._has_ended = False

    @property
    def is_broken(self) -> bool:
        return self._broken.is_set()

    async def send(self, message: Out) -> None:
        if self.is_broken:
            raise PeerUnavailable("the stream is broken")
        self._outbox.put_nowait(message)

    async def receive(self) -> In | None:
        if self._has_ended:
            return None
        message = await self._inbox.get()
        if self.is_broken:
            raise PeerUnavailable("the stream is broken")
        self._has_ended = message is None
        return message

    async def finish(self) -> None:
        self._outbox.put_nowait(None)

    def break_off(self) -> None:
        """Break the stream for both sides."""
        self._broken.set()
        self._outbox.put_nowait(None)
        self._inbox.put_nowait(None)


def stream_pair(out: type[Out], into: type[In]) -> tuple[LocalStream[Out, In], LocalStream[In, Out]]:
    """Return both sides of a new stream; the first side sends messages of the first type."""
    there: asyncio.Queue[Out | None] = asyncio.Queue()
    back: asyncio.Queue[In | None] = asyncio.Queue()
    broken = asyncio.Event()
    return LocalStream[Out, In](there, back, broken), LocalStream[In, Out](back, there, broken)
