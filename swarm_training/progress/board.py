"""The DHT keys where the peers of a run find each other's signed records. The DHT is slow, hence also ``gossip``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from swarm_protocol.dht import node as dht_node
from swarm_protocol.dht.bootstrap import rejoin_if_alone, start_joined
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.stored_records import Expirations, limit_records, read_items, store_item, subkey_of
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.net.hivemind_parts import DHTNode, get_dht_time
from swarm_protocol.net.identity import Identity
from swarm_training.pb import training_pb2 as pb

LIFETIME_S = 60.0  # of an entry
_TIMEOUT_S = 10.0  # for reading one key
M = TypeVar("M", bound=Message)


class DhtPeerRegistry:
    """A DHT node inside this process, and the keys of one run on the DHT. ``node``: the DHT node, for keys of other
    kinds."""

    def __init__(
        self,
        node: DHTNode,
        run: str,
        identity: Identity,
        moderated_as: str | None = None,
        initial_peers: Sequence[str] = (),
    ) -> None:
        """Use ``node`` for the keys of a run.

        ``moderated_as``: the run's name in moderators' orders, if it differs. ``initial_peers``: multiaddrs through
        which the node has joined, and joins again if it knows no other node.
        """
        self.node = node
        self._initial_peers = tuple(initial_peers)
        self._identity = identity
        self._key = f"swarm.training.v1/{run}/progress"
        self._orders_key = f"swarm.training.v1/{run if moderated_as is None else moderated_as}/orders"
        self._subkey = subkey_of(identity)
        self._expirations = Expirations()

    @classmethod
    async def join(
        cls, run: str, initial_peers: Sequence[str], identity: Identity, listening: Listening, timeout_s: float
    ) -> DhtPeerRegistry:
        """Join the DHT through ``initial_peers``, or start a new DHT if there are none. Raise NoSwarm if no initial
        peer answered, or ValueError if an initial peer is not a multiaddr with a peer id."""
        node = await start_joined(identity, listening, initial_peers, timeout_s)
        limit_records(node)  # without ``access``, which would admit records of servers only
        return cls(node, run, identity, initial_peers=initial_peers)

    def beside(self, run: str, moderated_as: str | None = None) -> DhtPeerRegistry:
        """Return the registry of another run on the same node. Closing either of them stops the node of both."""
        return DhtPeerRegistry(self.node, run, self._identity, moderated_as, self._initial_peers)

    async def addresses(self) -> list[str]:
        """Return multiaddrs with which other peers can join through this node."""
        return await dht_node.addresses(self.node)

    async def publish(self, record: pb.SignedProgress) -> None:
        data, expires_at = record.SerializeToString(), self._expirations.after(LIFETIME_S)
        await store_item(self.node, self._key, self._subkey, data, expires_at)  # if it fails, the next call repairs it

    async def read(self) -> list[pb.SignedProgress]:
        """Return the records of all peers, not yet verified."""
        return [record async for record in self._values(self._key, pb.SignedProgress)]

    async def read_orders(self) -> list[bytes]:
        """Return the orders of moderators, not yet verified."""
        return [order async for each in self._values(self._orders_key, pb.PublishedOrders) for order in each.orders]

    async def publish_order(self, order: bytes) -> None:
        """Publish an order beside this peer's earlier ones. Members relay them, because entries of the DHT expire.
        Raise PeerUnavailable if no peer has stored the orders."""
        orders, expires_at = [order], get_dht_time() + LIFETIME_S
        if (item := (await read_items(self.node, self._orders_key)).get(self._subkey)) is not None:
            orders = [*pb.PublishedOrders.FromString(item.value).orders, order]
            expires_at = max(expires_at, item.expiration_time + 0.001)  # only the later entry stays
        data = pb.PublishedOrders(orders=orders).SerializeToString()
        if not await store_item(self.node, self._orders_key, self._subkey, data, expires_at):
            raise PeerUnavailable("no member of the run has stored the order: try again")

    async def _values(self, key: str, kind: type[M]) -> AsyncIterator[M]:
        await rejoin_if_alone(self.node, self._initial_peers)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                items = await read_items(self.node, key)
        except TimeoutError:
            return
        for item in items.values():
            with suppress(DecodeError, TypeError):  # a stranger's entry
                yield kind.FromString(item.value)

    async def close(self) -> None:
        await dht_node.stop(self.node)
