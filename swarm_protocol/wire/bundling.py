"""Bundling of entries that are ready at the same time into one message, even if they belong to many sessions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from swarm_protocol.wire.constants import MAX_BUNDLED, MAX_BUNDLED_BYTES, PART_BYTES

E = TypeVar("E", bound=Message)
_LENGTH = 2  # the wire type of nested messages
_MOST_SIZES = 1024


def may_be_bundled(entry: Message) -> bool:
    """Return whether the entry is small enough; a larger one would delay the others."""
    return entry.ByteSize() <= MAX_BUNDLED_BYTES


@dataclass
class _Bundle:
    """A message that waits to be sent, as the encoded pieces that make it up, of ``size_bytes`` together."""

    pieces: list[bytes]
    num_entries: int = 0
    size_bytes: int = 0


class Outbox(Generic[E]):
    """A queue of entries to send; entries that arrive before the next turn of the event loop share a message.

    Attributes:
        size_bytes: the size of the waiting entries.
    """

    def __init__(self, message_type: type[Message], field: str, send: Callable[[Any], Awaitable[object]]) -> None:
        """Create an empty queue; ``send`` writes one message of this type, whose repeated ``field`` has the entries."""
        self.size_bytes = 0
        self._message_type: Any = message_type
        self._field_number = message_type.DESCRIPTOR.fields_by_name[field].number
        self._send = send
        self._waiting: deque[_Bundle] = deque()
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, entry: E) -> None:
        self.put_encoded(entry.SerializeToString())

    def put_encoded(self, entry: bytes) -> None:
        """Put an entry that is serialised already."""
        size_bytes = len(entry)
        bundle = self._waiting[-1] if self._waiting else None
        if bundle is None or bundle.num_entries == MAX_BUNDLED or bundle.size_bytes + size_bytes > PART_BYTES:
            bundle = _Bundle([])
            self._waiting.append(bundle)
            self._filled.set()
        # In place: a method call for each entry is measurable where many sessions decode.
        bundle.pieces += _tag_and_length(self._field_number, size_bytes), entry
        bundle.num_entries += 1
        bundle.size_bytes += size_bytes
        self.size_bytes += size_bytes

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
                await self._send(self._message_type.FromString(b"".join(bundle.pieces)))


@lru_cache(_MOST_SIZES)  # the entries of a session are of few sizes
def _tag_and_length(field_number: int, size_bytes: int) -> bytes:
    """Return what precedes an entry in an encoded message (https://protobuf.dev/programming-guides/encoding/)."""
    encoded = bytearray([field_number << 3 | _LENGTH])
    while size_bytes > 127:
        encoded.append(size_bytes & 127 | 128)
        size_bytes >>= 7
    encoded.append(size_bytes)
    return bytes(encoded)
