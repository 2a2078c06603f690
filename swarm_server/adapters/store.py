"""The adapters a server has at present: those that clients gave it, in a byte budget, and those it loaded itself."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from swarm_protocol.errors import CacheMiss, PeerBusy, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MAX_ADAPTER_BYTES
from swarm_protocol.wire.printable import printable
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.net.shares import Caller, Shares

CAPACITY_BYTES = MAX_ADAPTER_BYTES * 4 // 3  # one client's share has room for the largest
UNUSED_S = 120.0  # after which an adapter that nobody uses is dropped


@dataclass(eq=False)
class _Entry:
    placed: PlacedAdapter
    size_bytes: int
    owner: Caller
    num_users: int = 0
    dropping: asyncio.TimerHandle | None = None  # while nobody uses it


class AdapterStore:
    """Adapters by key, or by name if the server loaded them. Used on one event loop.

    Those that nobody uses make room for others, least recently used first, and are dropped after ``UNUSED_S``. A client
    may have much of the room, never all, and what it puts beyond a fair part is at the cost of its own.
    """

    def __init__(
        self,
        capacity_bytes: int = CAPACITY_BYTES,
        named: Mapping[str, PlacedAdapter] | None = None,
        unused_s: float = UNUSED_S,
    ) -> None:
        """``named`` does not count against the budget, and stays."""
        self.capacity_bytes = capacity_bytes
        self._named = dict(named or {})
        self._unused_s = unused_s
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._shares = Shares(capacity_bytes)  # of entries, and of what is arriving

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return self._shares.used

    @property
    def max_bytes(self) -> int:
        """Of one adapter."""
        return min(MAX_ADAPTER_BYTES, self._shares.most())

    def take(self, size_bytes: int, client: Caller) -> None:
        """Counts so many bytes more of a client's.

        Raises:
            PeerBusy: there is no room for it, even without the adapters that nobody uses.
        """
        while not self._shares.fits(client, size_bytes):
            unused = self._unused(client, size_bytes)
            if unused is None:
                raise PeerBusy(
                    f"no room for {size_bytes} bytes more of adapters: {self.used_bytes} of {self.capacity_bytes} "
                    f"bytes are in use, {self._shares.held(client)} of them by this client"
                )
            self._drop(unused)
        self._shares.add(client, size_bytes)

    def give_back(self, size_bytes: int, client: Caller) -> None:
        self._shares.add(client, -size_bytes)

    def add(self, placed: PlacedAdapter, size_bytes: int, client: Caller) -> None:
        """Keeps an adapter for which so many bytes have been taken."""
        if placed.key in self._entries:
            self.give_back(size_bytes, client)
        else:
            self._entries[placed.key] = _Entry(placed, size_bytes, client)
        self._touch(placed.key)

    def _unused(self, client: Caller, size_bytes: int) -> bytes | None:
        """What goes next for a client that wants so much more: its own beyond a fair part, else of who has most."""
        unused = {key: entry.owner for key, entry in self._entries.items() if not entry.num_users}
        owners = {entry.owner.peer_id for entry in self._entries.values()} | {client.peer_id}
        if self._shares.held(client) + size_bytes > self.capacity_bytes / len(owners):
            unused = {key: owner for key, owner in unused.items() if owner.peer_id == client.peer_id}
        others = {key: owner for key, owner in unused.items() if owner.peer_id != client.peer_id}
        return max(others or unused, key=lambda key: self._shares.held(unused[key]), default=None)

    @contextmanager
    def using(self, name: pb.AdapterName) -> Iterator[PlacedAdapter]:
        """The adapter, which is kept meanwhile.

        Raises:
            CacheMiss: nobody has put an adapter with this key, or it was dropped.
            RequestRejected: the server has loaded none of this name.
        """
        if name.WhichOneof("kind") == "name":
            yield self._find_named(name.name)
            return
        if name.WhichOneof("kind") != "key":
            raise RequestRejected("the adapter has neither key nor name")
        if name.key not in self._entries:
            raise CacheMiss("this server does not have the adapter (any more)")
        entry = self._entries[name.key]
        entry.num_users += 1
        self._touch(name.key)
        try:
            yield entry.placed
        finally:
            entry.num_users -= 1
            self._touch(name.key)

    def close(self) -> None:
        """Drops everything."""
        for key in list(self._entries):
            self._drop(key)

    def _find_named(self, name: str) -> PlacedAdapter:
        if name not in self._named:
            known = ", ".join(sorted(self._named)) or "none"
            raise RequestRejected(
                f"this server has loaded no adapter {printable(name, 60)!r}: expected one of its own, {known}"
            )
        return self._named[name]

    def _touch(self, key: bytes) -> None:
        entry = self._entries.get(key)
        if entry is None:  # everything was dropped meanwhile
            return
        self._entries.move_to_end(key)
        if entry.dropping is not None:
            entry.dropping.cancel()
            entry.dropping = None
        if not entry.num_users:
            entry.dropping = asyncio.get_running_loop().call_later(self._unused_s, self._drop, key)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self.give_back(entry.size_bytes, entry.owner)
        if entry.dropping is not None:
            entry.dropping.cancel()


class Arriving:
    """A serialised adapter whose parts come one by one, each counted before it is kept."""

    def __init__(self, store: AdapterStore, client: Caller) -> None:
        self._store = store
        self._client = client
        self.data = bytearray()

    def add(self, part: bytes) -> None:
        """Raises RequestRejected if it becomes too large, PeerBusy if there is no room at present."""
        size_bytes, limit = len(self.data) + len(part), self._store.max_bytes
        if size_bytes > limit:
            raise RequestRejected(f"the adapter is larger than {limit} bytes, the most that this server takes")
        self._store.take(len(part), self._client)
        self.data += part

    def keep(self, placed: PlacedAdapter) -> None:
        """In place of the parts."""
        self._store.add(placed, len(self.data), self._client)
        self.data = bytearray()

    def __enter__(self) -> Arriving:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._store.give_back(len(self.data), self._client)
