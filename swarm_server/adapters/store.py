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

UNUSED_S = 120.0  # after which an adapter that nobody uses is dropped


@dataclass(eq=False)
class _Entry:
    placed: PlacedAdapter
    size_bytes: int
    num_users: int = 0
    dropping: asyncio.TimerHandle | None = None  # while nobody uses it


class AdapterStore:
    """Adapters by key, or by name if the server loaded them. Used on one event loop.

    Those that nobody uses make room for others, least recently used first, and are dropped after ``UNUSED_S``.
    """

    def __init__(
        self,
        capacity_bytes: int = MAX_ADAPTER_BYTES,
        named: Mapping[str, PlacedAdapter] | None = None,
        unused_s: float = UNUSED_S,
    ) -> None:
        """``named`` does not count against the budget, and stays."""
        self.capacity_bytes = capacity_bytes
        self._named = dict(named or {})
        self._unused_s = unused_s
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._used_bytes = 0  # by entries, and by what is arriving

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, size_bytes: int) -> None:
        """Counts so many bytes more.

        Raises:
            PeerBusy: there is no room, even without the adapters that nobody uses.
        """
        while self._used_bytes + size_bytes > self.capacity_bytes:
            unused = next((key for key, entry in self._entries.items() if not entry.num_users), None)
            if unused is None:
                raise PeerBusy(
                    f"no room for {size_bytes} bytes more of adapters: {self._used_bytes} of {self.capacity_bytes} "
                    "bytes are in use"
                )
            self._drop(unused)
        self._used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._used_bytes -= size_bytes

    def add(self, placed: PlacedAdapter, size_bytes: int) -> None:
        """Keeps an adapter for which so many bytes have been taken."""
        if placed.key in self._entries:
            self.give_back(size_bytes)
        else:
            self._entries[placed.key] = _Entry(placed, size_bytes)
        self._touch(placed.key)

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
        self.give_back(entry.size_bytes)
        if entry.dropping is not None:
            entry.dropping.cancel()


class Arriving:
    """A serialised adapter whose parts come one by one, each counted before it is kept."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self.data = bytearray()

    def add(self, part: bytes) -> None:
        """Raises RequestRejected if it becomes too large, PeerBusy if there is no room at present."""
        size_bytes, limit = len(self.data) + len(part), min(MAX_ADAPTER_BYTES, self._store.capacity_bytes)
        if size_bytes > limit:
            raise RequestRejected(f"the adapter is larger than {limit} bytes, the most that this server takes")
        self._store.take(len(part))
        self.data += part

    def keep(self, placed: PlacedAdapter) -> None:
        """In place of the parts."""
        self._store.add(placed, len(self.data))
        self.data = bytearray()

    def __enter__(self) -> Arriving:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._store.give_back(len(self.data))
