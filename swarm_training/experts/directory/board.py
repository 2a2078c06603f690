"""The registry where experts are announced and found: a DHT key for each prefix, with one record of each server.

A server has one record under a key, even for several experts there. A key has room for 256 servers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.dht import node as dht_node
from swarm_protocol.dht.bootstrap import rejoin_if_alone, start_joined
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.notices.revocations import Revocations
from swarm_protocol.dht.stored_records import Expirations, items_of, limit_records, owner_of, subkey_of
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.net.hivemind_parts import DHTNode
from swarm_training.experts.core.cells import Prefix, check_grid, check_name, expert_name
from swarm_training.experts.directory.records import ExpertHolder, read_record, record_of

_TIMEOUT_S = 10.0
_JOIN_TIMEOUT_S = 30.0
Holders = dict[int, list[ExpertHolder]]  # by the coordinate that follows a prefix, sorted by peer id
_logger = logging.getLogger(__name__)


class DhtNodeOfExperts:
    """A DHT node of this process; its libp2p daemon ends with the process."""

    def __init__(self, node: DHTNode, access: SwarmAccess, initial_peers: Sequence[str] = ()) -> None:
        limit_records(node, access.control)
        self.node = node
        self._initial_peers = tuple(initial_peers)
        self.access = access

    @classmethod
    async def join(cls, initial_peers: Sequence[str], access: SwarmAccess, listening: Listening) -> DhtNodeOfExperts:
        """Join through ``initial_peers``, or start a new DHT if there are none. Raise NoSwarm if no initial peer
        answered, or ValueError if an initial peer is not a multiaddr with a peer id."""
        node = await start_joined(access.identity, listening, initial_peers, _JOIN_TIMEOUT_S)
        return cls(node, access, initial_peers)

    async def addresses(self) -> list[str]:
        """Return the multiaddrs under which others can join through this node."""
        return await dht_node.addresses(self.node)

    async def rejoin_if_alone(self) -> None:
        """Join again through the initial peers if the node knows no other node."""
        await rejoin_if_alone(self.node, self._initial_peers)

    @property
    def is_alive(self) -> bool:
        return dht_node.is_alive(self.node)

    async def close(self) -> None:
        await dht_node.stop(self.node)


class DhtExpertRegistry:
    """The registry of one mixture in the DHT."""

    def __init__(self, dht: DhtNodeOfExperts, name: str, grid: Sequence[int], hidden: int) -> None:
        """Open the registry. Raise ValueError if the name or the grid is not valid."""
        self._name = check_name(name)
        self._grid = check_grid(grid)
        self._hidden = hidden
        self._dht = dht
        self._expirations = Expirations()
        control = dht.access.control
        self.revocations = None if control is None else Revocations(dht.node, name, control)

    async def read(self, prefixes: Iterable[Prefix]) -> dict[Prefix, Holders]:
        """Return each prefix's servers, by the next coordinate. Raise PeerUnavailable if the DHT does not answer."""
        keys = {self._key(prefix): prefix for prefix in prefixes}
        read: dict[Prefix, Holders] = {}
        for key, records in (await self._read(list(keys))).items():
            holders = read.setdefault(keys[key], {})
            for holder, following in self._valid(records, self._grid[len(keys[key])]):
                for at in following:
                    holders.setdefault(at, []).append(holder)
            for each in holders.values():
                each.sort()
        return read

    async def keepers(self) -> list[ExpertHolder]:
        """Return servers that keep replicas, sorted by peer id. Raise PeerUnavailable if the DHT does not answer."""
        (records,) = (await self._read([self._keepers_key])).values()
        return sorted(holder for holder, _ in self._valid(records, size=0))

    async def publish(self, own: ExpertHolder, following: Mapping[Prefix, Iterable[int]], lifetime_s: float) -> bool:
        """Publish the records of a server; return whether all are stored."""
        return await self._publish(own, {self._key(prefix): after for prefix, after in following.items()}, lifetime_s)

    async def publish_keeper(self, own: ExpertHolder, lifetime_s: float) -> bool:
        """Publish a server that keeps replicas; return whether the record is stored."""
        return await self._publish(own, {self._keepers_key: ()}, lifetime_s)

    async def _publish(self, own: ExpertHolder, following: Mapping[str, Iterable[int]], lifetime_s: float) -> bool:
        """Publish under each key a record with the given coordinates."""
        expires_at = self._expirations.after(lifetime_s)
        keys = list(following)
        values = [record_of(own, self._hidden, after, self._dht.access.token) for after in following.values()]
        subkeys = [subkey_of(self._dht.access.identity)] * len(keys)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                stored = await self._dht.node.store_many(keys, values, expires_at, subkeys=subkeys)
        except TimeoutError:  # the records are published again soon
            return False
        return all(stored.values())

    async def _read(self, keys: list[str]) -> dict[str, list[tuple[object, object]]]:
        """Return the unchecked records under each key, with their subkeys."""
        await self._dht.rejoin_if_alone()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                if self.revocations is not None:
                    await self.revocations.read()
                found = await self._dht.node.get_many(keys, sufficient_expiration_time=math.inf)
        except TimeoutError:
            raise PeerUnavailable("the DHT has not answered in time with the addresses of experts") from None
        return {key: list(items_of(found.get(key)).items()) for key in keys}

    @property
    def _keepers_key(self) -> str:
        return f"swarm.experts.v1/{self._name}/keepers"

    def _key(self, prefix: Prefix) -> str:
        return f"swarm.experts.v1/{expert_name(self._name, prefix)}"

    def _valid(
        self, items: Iterable[tuple[object, object]], size: int
    ) -> Iterator[tuple[ExpertHolder, frozenset[int]]]:
        for subkey, item in items:
            try:
                yield read_record(owner_of(subkey), item.value, self._hidden, size, self._dht.access.control)  # type: ignore[attr-defined]
            except ValueError as error:  # a stranger may have written it
                _logger.debug("a record in the DHT is ignored: %s", error)
