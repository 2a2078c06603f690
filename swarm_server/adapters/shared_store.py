"""A store of what a server keeps for clients for a while, by key, in a byte budget that the clients share."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller, Shares

UNUSED_S = 120.0  # after this time, an unused entry is dropped


@dataclass(eq=False)
class Entry:
    """A value in the store, and the client whose share it counts in.

    Attributes:
        num_users: how many contexts use the value now; the store drops only unused entries.
        dropping: the timer that drops an unused entry.
    """

    value: object
    size_bytes: int
    owner: Caller
    num_users: int = 0
    dropping: asyncio.TimerHandle | None = None

    def resize(self, more_bytes: int) -> None:
        self.size_bytes += more_bytes

    def count_users(self, more: int) -> None:
        self.num_users += more

    def drop_later(self, unused_s: float, drop: Callable[[], object]) -> None:
        """Start the timer again if nobody uses the entry."""
        self.stop_dropping()
        if not self.num_users:
            self.dropping = asyncio.get_running_loop().call_later(unused_s, drop)

    def stop_dropping(self) -> None:
        if self.dropping is not None:
            self.dropping.cancel()
            self.dropping = None


class SharedStore:
    """A store of entries by key, used on one event loop.

    Unused entries make room for others, least recently used first, and are dropped after ``UNUSED_S``. A client may
    have much of the room, but never all. Beyond a fair part, a client's new entries replace only its own entries.
    """

    def __init__(self, capacity_bytes: int, unused_s: float = UNUSED_S) -> None:
        self.capacity_bytes = capacity_bytes
        self._unused_s = unused_s
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._shares = Shares(capacity_bytes)  # bytes of entries, and of data that is arriving

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return self._shares.used

    @property
    def share_bytes(self) -> int:
        """Return the most bytes that one client may have."""
        return self._shares.most()

    def take(self, size_bytes: int, client: Caller) -> None:
        """Count ``size_bytes`` more for a client; drop unused entries if they are in the way.

        Raises:
            PeerBusy: there is no room, even without the unused entries.
        """
        while not self._shares.fits(client, size_bytes):
            unused = self._unused(client, size_bytes)
            if unused is None:
                raise PeerBusy(
                    f"no room for {size_bytes} bytes more of adapters: {self.used_bytes} of {self.capacity_bytes} "
                    f"bytes are in use, {self._shares.held(client)} of them by this client"
                )
            self.drop(unused)
        self._shares.add(client, size_bytes)

    def give_back(self, size_bytes: int, client: Caller) -> None:
        self._shares.add(client, -size_bytes)

    def put(self, key: bytes, value: object, size_bytes: int, client: Caller) -> None:
        """Keep a value for which ``size_bytes`` have been taken, unless there is an entry with this key."""
        if key in self._entries:
            self.give_back(size_bytes, client)
        else:
            self._entries[key] = Entry(value, size_bytes, client)
        self._touch(key)

    def resize(self, key: bytes, more_bytes: int) -> None:
        """Count an entry as larger, or smaller. The caller has made sure that there is room."""
        entry = self._entries[key]
        entry.resize(more_bytes)
        self._shares.add(entry.owner, more_bytes)
        self._touch(key)

    def find(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    @contextmanager
    def in_use(self, key: bytes) -> Iterator[None]:
        """Prevent the entry, which must exist, from being dropped while the context is active."""
        entry = self._entries[key]
        entry.count_users(1)
        self._touch(key)
        try:
            yield
        finally:
            entry.count_users(-1)
            self._touch(key)

    def drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self.give_back(entry.size_bytes, entry.owner)
        entry.stop_dropping()

    def close(self) -> None:
        """Drop everything."""
        for key in list(self._entries):
            self.drop(key)

    def _unused(self, client: Caller, size_bytes: int) -> bytes | None:
        """Return the unused entry to drop: the client's own if it exceeds a fair part, else the largest holder's."""
        unused = {key: entry.owner for key, entry in self._entries.items() if not entry.num_users}
        # A fair part is an equal part for each client that has entries, and for this one.
        owners = {entry.owner.peer_id for entry in self._entries.values()} | {client.peer_id}
        if self._shares.held(client) + size_bytes > self.capacity_bytes / len(owners):
            unused = {key: owner for key, owner in unused.items() if owner.peer_id == client.peer_id}
        others = {key: owner for key, owner in unused.items() if owner.peer_id != client.peer_id}
        return max(others or unused, key=lambda key: self._shares.held(unused[key]), default=None)

    def _touch(self, key: bytes) -> None:
        entry = self._entries.get(key)
        if entry is None:  # the store was emptied meanwhile
            return
        self._entries.move_to_end(key)
        entry.drop_later(self._unused_s, partial(self.drop, key))
