"""A peer's node in the swarm's DHT: it joins, publishes its own record, and reads the records of others."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.dht import claims, shards
from swarm_protocol.dht import node as dht_node
from swarm_protocol.dht.addresses import CONNECT_TIMEOUT_S, tcp_target
from swarm_protocol.dht.bootstrap import bootstrap, start_joined
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.notices.accusations import AccusationRegistry
from swarm_protocol.dht.notices.group_candidates import CandidateRegistry
from swarm_protocol.dht.notices.revocations import Revocations
from swarm_protocol.dht.records import (
    LIFETIME_S,
    ROOT_SHARD,
    ServerRecord,
    ServerState,
    SwarmView,
    models_key,
    servers_key,
    short_id,
)
from swarm_protocol.dht.shards import USUAL_LIMITS, DhtLimits
from swarm_protocol.dht.stored_records import Expirations, limit_records, owner_of, read_items, subkey_of
from swarm_protocol.net.hivemind_parts import DAEMON_ERRORS, P2P, DHTNode, PeerID, get_dht_time
from swarm_protocol.net.identity import Identity
from swarm_protocol.span import Span
from swarm_protocol.wire.printable import printable

JOIN_TIMEOUT_S = 30.0  # for peers that exist, but are frozen or too busy to answer
_PUBLISH_TIMEOUT_S = 10.0
_MAX_NAMED = 3  # servers named in a message
_MAX_REMEMBERED = 8  # peers
_PARALLEL_READS = 8  # reads of shards: the data in flight must arrive within hivemind's 3 s for a reply
_RARELY = 5  # where the root shard is full, there are many servers, and each reads the list of models less often
_logger = logging.getLogger(__name__)


class Dht:
    """A DHT node inside this process; its libp2p daemon ends with the process.

    Attributes:
        num_strangers: servers in the list of models that were not members at the last read.
    """

    def __init__(
        self,
        node: DHTNode,
        swarm: str,
        identity: Identity,
        listening: Listening,
        access: AccessControl | None = None,
        limits: DhtLimits = USUAL_LIMITS,
    ) -> None:
        limit_records(node, access, limits)
        self._node = node
        self._swarm = swarm
        self._identity = identity
        self._listening = listening
        self._peers: list[str] = []  # addresses of some recently connected peers
        self._restarting = asyncio.Lock()
        self._subkey = subkey_of(identity)
        self._limits = limits
        self._access = access
        self.num_strangers = 0
        self._expirations = Expirations()
        self._places: dict[str, _Place] = {}  # by model
        self._publishing = asyncio.Lock()
        self._reading = asyncio.Semaphore(_PARALLEL_READS)

    @classmethod
    async def join(
        cls,
        swarm: str,
        initial_peers: Sequence[str],
        identity: Identity,
        listening: Listening | None = None,
        *,
        access: AccessControl | None = None,
        limits: DhtLimits = USUAL_LIMITS,
        are_alive: Callable[[], bool] = lambda: False,
        is_reachable: Callable[[P2P], Awaitable[bool]] | None = None,
    ) -> Dht:
        """Join through ``initial_peers``, or start a new DHT if there are none.

        A node that listens stores records for other nodes; without ``listening``, it only queries. A node with an
        ``announce_host`` needs a port. Silent initial peers are retried for ``JOIN_TIMEOUT_S`` while ``are_alive``
        returns true or libp2p is connected to one. ``access`` is given for a private swarm: only its members' records
        are stored and read. A node that listens but is not ``is_reachable`` stores nothing for other nodes either.

        Raises:
            NoSwarm: no initial peer answered; within 4 s if no peer listens. JoinRefused: a peer answered but refused.
            ValueError: an initial peer is no multiaddr with a peer id.
        """

        def say_that_it_waits(timeout_s: float) -> None:
            who = ", ".join(short_id(peer.rpartition("/p2p/")[2]) for peer in initial_peers[:_MAX_NAMED])
            message = "no answer yet from %s of swarm %s, though it seems to run; trying again for up to %.0f s"
            _logger.warning(message, who, swarm, timeout_s)

        listening = listening or Listening()
        node = await start_joined(
            identity,
            listening,
            initial_peers,
            JOIN_TIMEOUT_S,
            are_alive=are_alive,
            on_wait=say_that_it_waits,
            is_reachable=is_reachable,
        )
        return cls(node, swarm, identity, listening, access, limits)

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def p2p(self) -> P2P:
        """Return the running libp2p daemon; ``restart`` replaces it."""
        p2p: P2P = self._node.p2p
        return p2p

    @property
    def revocations(self) -> Revocations | None:
        """Return the revocations of a private swarm; None in a public swarm."""
        return None if self._access is None else Revocations(self._node, self._swarm, self._access)

    def accusations(self, model: str) -> AccusationRegistry:
        """Return the accusations against servers of a model."""
        return AccusationRegistry(lambda: self._node, self._swarm, model, self._identity, self._access)

    def candidates(self, group: str, secret: bytes, token: bytes) -> CandidateRegistry:
        """Return the candidates for a group of servers; ``token`` is the membership token in a private swarm."""
        return CandidateRegistry(lambda: self._node, self._swarm, self._identity, token, group, secret)

    async def addresses(self) -> list[str]:
        """Return the multiaddrs under which peers can join through this node."""
        return await dht_node.addresses(self._node)

    @property
    def is_alive(self) -> bool:
        """Return whether the libp2p daemon runs; without it, no peer is reachable."""
        return dht_node.is_alive(self._node)

    @property
    def serves_others(self) -> bool:
        return not self._node.protocol.client_mode

    def serve_others(self, serves: bool) -> None:
        """Set whether other nodes may query this node; a node that is not reachable should only query."""
        dht_node.set_serving(self._node, serves)

    def move(self, host: str) -> None:
        """End the libp2p daemon, so that ``restart`` starts it again on another address of this machine."""
        self._listening = dataclasses.replace(self._listening, host=host)
        with suppress(ProcessLookupError):
            self._node.p2p._child.terminate()

    async def daemon_ended(self) -> None:
        """Wait until the libp2p daemon has ended: it may be killed, or run out of memory."""
        await self._node.p2p._child.wait()

    async def restart(self) -> None:
        """Start the libp2p daemon again if it has ended, with the same identity and, if it is free, the same address.

        The node keeps what it stores for other nodes, and reconnects to its most recent peers.

        Raises:
            NoSwarm: the daemon does not start.
        """
        async with self._restarting:
            if not self.is_alive:
                self._node = await dht_node.start_again(self._node, self._identity, self._listening)
                await bootstrap(self._node, self._peers)

    async def remember_peers(self) -> None:
        """Save the addresses of some connected peers, because the daemon's end loses them."""
        self._peers = await self.peers() or self._peers  # all peers may be gone for a while

    async def peers(self) -> list[str]:
        """Return multiaddrs of some connected nodes of this DHT, through which other nodes can join."""
        with suppress(*DAEMON_ERRORS):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                peers = await self._node.p2p.list_peers()
            known = [peer for peer in peers if peer.peer_id in self._node.protocol.routing_table and peer.addrs]
            return [f"{peer.addrs[0]}/p2p/{peer.peer_id.to_base58()}" for peer in known[:_MAX_REMEMBERED]]
        return []

    @property
    def is_alone(self) -> bool:
        """Return whether this node knows no other node that answers, as far as it has noticed."""
        return not self._node.protocol.routing_table.uid_to_peer_id

    def knows(self, peer_id: str) -> bool:
        """Return whether the peer is in this node's routing table, where peers are that answered last time."""
        return PeerID.from_base58(peer_id) in self._node.protocol.routing_table.peer_id_to_uid

    async def connect_to(self, addresses: Sequence[str]) -> bool:
        """Connect this node and the peers at the addresses to each other; return whether one of the peers answered.

        This repairs partitions: between a client and servers that came after all its known peers had left, or between
        two halves of a swarm, through any member of the other half. The node's own address does no harm. Takes 20 s at
        most, usually much less.

        Raises:
            ValueError: an address is no multiaddr with a peer id.
        """
        for address in addresses:
            tcp_target(address)
        return await bootstrap(self._node, addresses)

    async def publish(self, record: ServerRecord, lifetime_s: float = LIFETIME_S) -> bool:
        """Store the record, signed with the node's identity; return whether a node accepted it."""
        assert record.peer_id == self.peer_id
        try:
            async with asyncio.timeout(_PUBLISH_TIMEOUT_S):
                stored = await self._publish(record, lifetime_s)
            return stored and self.is_alive  # without a daemon, only this node itself has stored it
        except TimeoutError:  # hivemind waits for ever for a daemon that is gone
            return False

    async def _publish(self, record: ServerRecord, lifetime_s: float) -> bool:
        async with self._publishing:
            place = self._places.setdefault(record.model, _Place())
            # The withdrawn record expires earlier, because readers that find both take the one that expires last.
            withdrawn = dataclasses.replace(
                record, state=ServerState.OFFLINE, expires_at=self._expirations.after(lifetime_s)
            )
            record = dataclasses.replace(record, expires_at=self._expirations.after(lifetime_s))
            if record.state is ServerState.OFFLINE:
                storing = self._overwrite(place, list(place.standing), record)
            else:
                storing = self._settle(place, record, withdrawn)
            looks = place.publications % (self._limits.climb_every * (_RARELY if place.depth else 1)) == 0
            stored, _ = await asyncio.gather(storing, self._list(place, record, looks))
        return stored

    async def _list(self, place: _Place, record: ServerRecord, looks: bool) -> None:
        """Store the server's entry in the list of models if it is needed; ``looks``: read the list to decide."""
        if record.state is not ServerState.OFFLINE and looks:
            entries = self._members(await self._read_list(claims.shards_of(record.model)))
            place.note_listing(claims.should_write(record, entries))
        if place.is_listed:
            entry = dataclasses.replace(record, next_hop_rtts_s={}, adapters=()).to_proto().SerializeToString()
            keys = [models_key(self._swarm, shard) for shard in claims.shards_of(record.model)]
            storing = (self._node.store(key, entry, record.expires_at, subkey=self._subkey) for key in keys)
            await asyncio.gather(*storing)

    async def view(self, model: str, num_blocks: int, part: Span | None = None) -> SwarmView:
        """Return the servers of a model, or those that hold some block of ``part``, without withdrawn servers.

        One DHT read is enough for few servers; otherwise each level of the tree of shards needs one more read in turn.
        """
        if (revocations := self.revocations) is not None:
            await revocations.read()
        records: list[ServerRecord] = []
        level: Sequence[str] = (ROOT_SHARD,)
        while level:
            found = await asyncio.gather(*(self._read_servers(model, num_blocks, shard) for shard in level))
            records += [record for valid, _ in found for record in valid]
            split = (shard for shard, (_, is_split) in zip(level, found, strict=True) if is_split)
            level = [child for shard in split for child in shards.children(shard, num_blocks, part)]
        there = (record for record in _latest(records) if record.state is not ServerState.OFFLINE)
        return SwarmView.of(record for record in there if part is None or part.overlaps(record.span))

    async def models(self) -> dict[str, int]:
        """Return the names of the models in this swarm, with the block count that most of their servers claim."""
        records = await self._read_list(range(claims.NUM_SHARDS))
        members = self._members(records)
        self.num_strangers = len({record.peer_id for record in records} - {record.peer_id for record in members})
        return claims.models_of(members)

    async def _read_list(self, parts: Sequence[int]) -> list[ServerRecord]:
        """Return all valid records in these parts of the list, whether their servers are members or not."""
        found = await asyncio.gather(*(self._items_of(models_key(self._swarm, part)) for part in parts))
        return [record for items in found for record in _valid(items)]

    async def shutdown(self) -> None:
        await dht_node.stop(self._node)

    async def _settle(self, place: _Place, record: ServerRecord, withdrawn: ServerRecord) -> bool:
        """Store the record in the first shard of its path with room, and ``withdrawn`` where it had other blocks."""
        path = shards.path(record.peer_id, record.span, record.num_blocks)
        for depth in place.start_publication(path, self._limits.climb_every):
            stored = await self._store(place, path[depth], record)
            if stored:
                break
            # Shards above the present depth are known to be full. In another one, the store may have failed for another
            # reason, and readers look below a shard only if it is at least half full.
            if depth >= place.depth:
                items = await self._read(record.model, path[depth])
                stored = self._subkey in items and items[self._subkey].expiration_time == record.expires_at
                if stored or not shards.is_split(len(items), self._limits.capacity):
                    break
        place.settle(depth, get_dht_time())
        left = [shard for shard, old in place.standing.items() if old.span != record.span]
        await self._overwrite(place, left, withdrawn)
        return stored

    async def _overwrite(self, place: _Place, left: Sequence[str], withdrawn: ServerRecord) -> bool:
        return any(await asyncio.gather(*(self._store(place, shard, withdrawn) for shard in left)))

    async def _store(self, place: _Place, shard: str, record: ServerRecord) -> bool:
        place.standing[shard] = record  # even if it is refused: the nodes that store the key may disagree
        stored: bool = await self._node.store(
            servers_key(self._swarm, record.model, shard),
            record.to_proto().SerializeToString(),
            record.expires_at,
            subkey=self._subkey,
        )
        return stored

    async def _read(self, model: str, shard: str) -> Mapping[Any, Any]:
        """Return everything in a shard, by subkey, with its expiration."""
        return await self._items_of(servers_key(self._swarm, model, shard))

    async def _items_of(self, key: str) -> Mapping[Any, Any]:
        async with self._reading:
            return await read_items(self._node, key)

    async def _read_servers(self, model: str, num_blocks: int, shard: str) -> tuple[list[ServerRecord], bool]:
        """Return the valid records in a shard, and whether there may be more below it."""
        items = await self._read(model, shard)
        records = [
            record
            for record in self._members(_valid(items))
            if (record.model, record.num_blocks) == (model, num_blocks)
        ]
        return records, shards.is_split(len(items), self._limits.capacity)

    def _members(self, records: list[ServerRecord]) -> list[ServerRecord]:
        """Return the records of members; all records, if the swarm is not known to be private."""
        if self._access is None:
            return records
        return [record for record in records if self._access.is_server(record.peer_id, record.token)]


@dataclass
class _Place:
    """The place of a server's record in the tree of shards."""

    path: tuple[str, ...] = ()
    depth: int = 0
    publications: int = 0
    is_listed: bool = False  # the server's entry is in the list of models
    standing: dict[str, ServerRecord] = field(default_factory=dict)  # by shard: records that readers may still find

    def start_publication(self, path: tuple[str, ...], climb_every: int) -> range:
        """Return the depths of ``path`` to try: from the present one on, or now and then from the root on, to climb."""
        if path != self.path:
            self.path, self.depth = path, 0
        climbs = self.publications % climb_every == 0
        self.publications += 1
        return range(0 if climbs else self.depth, len(path))

    def note_listing(self, is_listed: bool) -> None:
        """Set whether the server's entry belongs in the list of models."""
        self.is_listed = is_listed

    def settle(self, depth: int, now: float) -> None:
        """Stay at this depth, and drop the records that have expired by now."""
        self.depth = depth
        self.standing = {shard: old for shard, old in self.standing.items() if old.expires_at > now}


def _latest(records: Iterable[ServerRecord]) -> Collection[ServerRecord]:
    """Return for each server the record that expires last, or the first of several."""
    latest: dict[str, ServerRecord] = {}
    for record in records:
        if latest.setdefault(record.peer_id, record).expires_at < record.expires_at:
            latest[record.peer_id] = record
    return latest.values()


def _valid(items: Mapping[Any, Any]) -> list[ServerRecord]:
    """Return the well-formed records that describe their own owner.

    The node's validator has already checked signatures and expirations.
    """
    records = []
    for subkey, item in items.items():
        try:
            record = ServerRecord.parse(item.value)
            if owner_of(subkey) != record.peer_id:
                raise ValueError("the record describes another peer than its owner")
            records.append(dataclasses.replace(record, expires_at=item.expiration_time))
        except (ValueError, TypeError) as error:
            _logger.debug("ignored a record under %s: %s", printable(str(subkey)), printable(str(error)))
    return records
