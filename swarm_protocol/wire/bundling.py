"""Bundling of entries that are ready at the same time into one message, even if they belong to many sessions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from swarm_protocol.wire.constants import MAX_BUNDLED, MAX_BUNDLED_BYTES, PART_BYTES

E = TypeVar("E", bound=Message)


def may_be_bundled(entry: Message) -> bool:
    """Return whether the entry is small enough; a larger one would delay the others."""
    return entry.ByteSize() <= MAX_BUNDLED_BYTES


class Outbox(Generic[E]):
    """A queue of entries to send; entries that arrive before the next turn of the event loop share a message.

    Attributes:
        size_bytes: the size of the waiting entries.
    """

    def __init__(self, send: Callable[[list[E]], Awaitable[object]]) -> None:
        """Create an empty queue; ``send`` writes one message."""
        self.size_bytes = 0
        self._send = send
        self._waiting: deque[tuple[E, int]] = deque()
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, entry: E) -> None:
        self._put(entry, entry.ByteSize())

    def put_small(self, entry: E) -> bool:
        """Add the entry if it is small enough, see ``may_be_bundled``; return whether it is."""
        size_bytes = entry.ByteSize()
        if size_bytes > MAX_BUNDLED_BYTES:
            return False
        self._put(entry, size_bytes)
        return True

    def _put(self, entry: E, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._waiting.append((entry, size_bytes))
        self._filled.set()

    def close(self) -> None:
        """Stop accepting entries, so that ``send_all`` returns once everything is sent."""
        self._closed = True
        self._filled.set()

    async def send_all(self) -> None:
        """Send entries until the queue is closed, or the task cancelled; raise what ``send`` raises."""
        while not self._closed:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                await self._send(self._next())

    def _next(self) -> list[E]:
        """Return as many entries as fit into one message."""
        entries: list[E] = []
        left_bytes = PART_BYTES
        while self._waiting and len(entries) < MAX_BUNDLED:
            entry, size_bytes = self._waiting[0]
            left_bytes -= size_bytes
            if entries and left_bytes < 0:
                break
            self._waiting.popleft()
            self.size_bytes -= size_bytes
            entries.append(entry)
        return entries
