"""The adapters of a server: adapters from clients, in a byte budget, and adapters that the server loaded itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from swarm_protocol.errors import CacheMiss, RequestRejected
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MAX_ADAPTER_BYTES
from swarm_protocol.wire.printable import printable
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.adapters.shared_store import UNUSED_S, SharedStore

CAPACITY_BYTES = MAX_ADAPTER_BYTES * 4 // 3  # one client's share has room for the largest adapter


class AdapterStore(SharedStore):
    """A store of adapters by key, or by name if the server loaded them, and of the sums of their gradients.

    See ``swarm_server/training/gradient_sums.py`` for these sums.
    """

    def __init__(
        self,
        capacity_bytes: int = CAPACITY_BYTES,
        named: Mapping[str, PlacedAdapter] | None = None,
        unused_s: float = UNUSED_S,
    ) -> None:
        """Open the store. ``named`` adapters stay, and do not count against the budget."""
        super().__init__(capacity_bytes, unused_s)
        self._named = dict(named or {})

    @property
    def max_bytes(self) -> int:
        """Return the most bytes that one adapter may have."""
        return min(MAX_ADAPTER_BYTES, self.share_bytes)

    @contextmanager
    def using(self, name: pb.AdapterName) -> Iterator[PlacedAdapter]:
        """Yield the adapter, and keep it while the context is active.

        Raises:
            CacheMiss: no client has put an adapter with this key, or the adapter was dropped.
            RequestRejected: the server has not loaded an adapter of this name.
        """
        if name.WhichOneof("kind") == "name":
            yield self._find_named(name.name)
            return
        if name.WhichOneof("kind") != "key":
            raise RequestRejected("the adapter has neither key nor name")
        entry = self.find(name.key)
        if entry is None or not isinstance(entry.value, PlacedAdapter):
            raise CacheMiss("this server does not have the adapter (any more)")
        with self.in_use(name.key):
            yield entry.value

    def _find_named(self, name: str) -> PlacedAdapter:
        if name not in self._named:
            known = ", ".join(sorted(self._named)) or "none"
            raise RequestRejected(
                f"this server has loaded no adapter {printable(name, 60)!r}: expected one of its own, {known}"
            )
        return self._named[name]


class IncomingAdapter:
    """A serialised adapter whose parts come one by one. Each part is counted before it is stored."""

    def __init__(self, store: AdapterStore, client: Caller) -> None:
        self._store = store
        self._client = client
        self.data = bytearray()

    def add(self, part: bytes) -> None:
        """Add a part; raise RequestRejected if the adapter is too large, PeerBusy if there is no room at present."""
        size_bytes, limit = len(self.data) + len(part), self._store.max_bytes
        if size_bytes > limit:
            raise RequestRejected(f"the adapter is larger than {limit} bytes, the most that this server takes")
        self._store.take(len(part), self._client)
        self.data += part

    def keep(self, placed: PlacedAdapter) -> None:
        """Keep the finished adapter in place of its parts."""
        self._store.put(placed.key, placed, len(self.data), self._client)
        self.data = bytearray()

    def __enter__(self) -> IncomingAdapter:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._store.give_back(len(self.data), self._client)
