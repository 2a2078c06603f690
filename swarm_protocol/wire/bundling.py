"""What is ready at the same time travels in one message, though it is of many sessions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from swarm_protocol.wire.constants import MAX_BUNDLED, MAX_BUNDLED_BYTES, PART_BYTES

E = TypeVar("E", bound=Message)


def may_be_bundled(entry: Message) -> bool:
    """Whether it is small enough; a larger one would keep the others waiting."""
    return entry.ByteSize() <= MAX_BUNDLED_BYTES


class Outbox(Generic[E]):
    """Entries that wait to be sent, which those that come before the next turn of the event loop join.

    Attributes:
        size_bytes: of those that wait.
    """

    def __init__(self, send: Callable[[list[E]], Awaitable[object]]) -> None:
        """``send`` writes one message."""
        self.size_bytes = 0
        self._send = send
        self._waiting: deque[tuple[E, int]] = deque()
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, entry: E) -> None:
        size_bytes = entry.ByteSize()
        self.size_bytes += size_bytes
        self._waiting.append((entry, size_bytes))
        self._filled.set()

    def close(self) -> None:
        """No more will come: ``send_all`` returns once everything is sent."""
        self._closed = True
        self._filled.set()

    async def send_all(self) -> None:
        """Until it is closed, or cancelled; raises what sending raises."""
        while not self._closed:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                await self._send(self._next())

    def _next(self) -> list[E]:
        """As many as one message may have."""
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
