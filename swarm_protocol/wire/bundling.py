"""Bundling of entries that are ready at the same time into one message, even if they belong to many sessions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from swarm_protocol.wire.constants import MAX_BUNDLED, MAX_BUNDLED_BYTES, PART_BYTES

E = TypeVar("E", bound=Message)


def may_be_bundled(entry: Message) -> bool:
    """Return whether the entry is small enough; a larger one would delay the others."""
    return entry.ByteSize() <= MAX_BUNDLED_BYTES


@dataclass
class _Bundle:
    """A message that waits to be sent. ``entries``: its repeated field; ``size_bytes``: their size."""

    message: Any
    entries: Any
    size_bytes: int = 0


class Outbox(Generic[E]):
    """A queue of entries to send; entries that arrive before the next turn of the event loop share a message.

    Attributes:
        size_bytes: the size of the waiting entries.
    """

    def __init__(self, message_type: type[Message], field: str, send: Callable[[Any], Awaitable[object]]) -> None:
        """Create an empty queue; ``send`` writes one message of this type, whose repeated ``field`` has the entries."""
        self.size_bytes = 0
        self._message_type, self._field = message_type, field
        self._send = send
        self._waiting: deque[_Bundle] = deque()
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, entry: E) -> None:
        size_bytes = entry.ByteSize()
        bundle = self._bundle_with_room(size_bytes)
        bundle.entries.append(entry)
        self._count(bundle, size_bytes)

    def put_filled(self, fill: Callable[[E], object]) -> bool:
        """Call ``fill`` on a new entry of the waiting message, which takes half as long as ``put``.

        Return False, and remove the entry, if ``fill`` returns parts that do not fit into it, or if the entry is larger
        than ``MAX_BUNDLED_BYTES``.
        """
        bundle = self._bundle_with_room(MAX_BUNDLED_BYTES)
        entry, is_added = bundle.entries.add(), False
        try:
            if not fill(entry) and (size_bytes := entry.ByteSize()) <= MAX_BUNDLED_BYTES:
                self._count(bundle, size_bytes)
                is_added = True
        finally:
            if not is_added:
                self._waiting.pop()
                bundle.entries.pop()
                if bundle.entries:  # a message keeps the memory of what it has lost, so go on with a copy
                    copy = self._message_type()
                    copy.CopyFrom(bundle.message)
                    self._waiting.append(_Bundle(copy, getattr(copy, self._field), bundle.size_bytes))
        return is_added

    def _bundle_with_room(self, size_bytes: int) -> _Bundle:
        """Return the last message, or a new one if the last has no room for an entry of this size."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or len(last.entries) == MAX_BUNDLED or last.size_bytes + size_bytes > PART_BYTES:
            message = self._message_type()
            last = _Bundle(message, getattr(message, self._field))
            self._waiting.append(last)
        return last

    def _count(self, bundle: _Bundle, size_bytes: int) -> None:
        bundle.size_bytes += size_bytes
        self.size_bytes += size_bytes
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
                bundle = self._waiting.popleft()
                self.size_bytes -= bundle.size_bytes
                await self._send(bundle.message)
