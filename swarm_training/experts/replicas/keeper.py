"""The keeper of replicas of other servers' experts, in memory and within limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm_protocol.errors import PeerBusy, PeerMoved, RequestRejected
from swarm_protocol.wire.codec import parts_of
from swarm_protocol.wire.printable import printable
from swarm_training.experts.core.cells import Cell, expert_name
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.core.replica import Replica
from swarm_training.experts.directory.board import DhtExpertRegistry
from swarm_training.experts.net.replica_calls import most_seconds, received
from swarm_training.experts.pb import experts_pb2 as pb

MAX_REPLICAS = 4096  # so many that a list of them fits in a message
STALE_S = 3600.0  # senders renew their replicas twice in that time; a replica that nobody renews may be replaced
_FIRST_S = 10.0  # the time limit for the description of a replica
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    replica: Replica
    data: bytes
    sender: str
    at: float


@dataclass(eq=False, repr=False)
class Keeper:
    """The keeper of one server; used on one event loop only.

    It accepts a replica only from the server that the DHT names for its cell. One sender may use half of the memory,
    and sends one replica at a time. An older version does not replace a newer one. A replica that nobody has
    renewed for an hour makes room for others.
    """

    _config: ExpertServerConfig
    _board: DhtExpertRegistry
    _clock: Callable[[], float] = time.monotonic
    _kept: dict[Cell, _Kept] = field(default_factory=dict)
    _arriving: dict[str, int] = field(default_factory=dict)  # bytes, by sender

    @property
    def replicas(self) -> list[Replica]:
        return [kept.replica for kept in self._kept.values()]

    def data(self, cell: Cell) -> bytes | None:
        """Return the replica's bytes, or None if there is no replica of the cell."""
        kept = self._kept.get(cell)
        return None if kept is None else kept.data

    async def keep(self, caller: str, requests: AsyncIterator[pb.KeepReplicaRequest]) -> pb.KeepReplicaReply:
        """Keep a replica. Raise RequestRejected, PeerMoved, PeerBusy, PeerUnavailable; TimeoutError if it is slow."""
        async with asyncio.timeout(_FIRST_S):
            first = await anext(requests, None)
        if first is None or not first.HasField("replica"):
            raise RequestRejected("a replica begins with its description: expected a cell, steps, size and SHA-256")
        self._require_name(first.name)
        replica = Replica.from_proto(first.replica, self._config.grid)
        await self._require_owner(caller, replica.cell)
        with self._room(caller, replica):
            data = await received(replica, first, requests, most_seconds(replica.size_bytes))
            self._require_newer(replica)  # checked again, in case two replicas arrived at once
            self._kept[replica.cell] = _Kept(replica, data, caller, self._clock())
        return pb.KeepReplicaReply()

    async def listed(self, request: pb.ListReplicasRequest) -> pb.ListReplicasReply:
        """Return the descriptions of all replicas. Raise PeerMoved for another mixture."""
        self._require_name(request.name)
        return pb.ListReplicasReply(replicas=[replica.to_proto() for replica in self.replicas])

    async def fetch(self, request: pb.FetchReplicaRequest) -> AsyncIterator[pb.FetchReplicaReply]:
        """Yield a replica in parts. Raise PeerMoved for another mixture, or if there is no replica of the expert."""
        self._require_name(request.name)
        kept = self._kept.get(tuple(request.cell))
        if kept is None:
            raise PeerMoved("there is no replica of that expert here")
        yield pb.FetchReplicaReply(replica=kept.replica.to_proto())
        for part in parts_of(kept.data):
            yield pb.FetchReplicaReply(data=part)

    def _require_name(self, name: str) -> None:
        if name != self._config.name:
            raise PeerMoved(f"replicas here are of {self._config.name}, and not of {printable(name, 80)}")

    async def _require_owner(self, caller: str, cell: Cell) -> None:
        """Raise RequestRejected unless the caller owns the cell, or sent its replica and nobody owns it now."""
        holders = (await self._board.read({cell[:-1]}))[cell[:-1]].get(cell[-1], [])
        senders = [self._kept[cell].sender] if cell in self._kept else []
        if caller not in ([holders[0].peer_id] if holders else senders):
            raise RequestRejected(
                f"{expert_name(self._config.name, cell)} is not announced by this server, or another has it as well"
            )

    def _require_newer(self, replica: Replica) -> None:
        kept = self._kept.get(replica.cell)
        if kept is not None and replica.num_steps < kept.replica.num_steps and not self._is_stale(kept):
            raise RequestRejected(
                f"a newer replica is kept here: of {kept.replica.num_steps} steps, and not {replica.num_steps}"
            )

    @contextmanager
    def _room(self, caller: str, replica: Replica) -> Iterator[None]:
        """Reserve room for an arriving replica; the replica that it replaces stays until it is complete."""
        self._require_newer(replica)
        if caller in self._arriving:
            raise PeerBusy("another replica of this server is arriving: expected one at a time")
        # The replica that is replaced counts too, since its bytes are in memory until the new ones have come.
        own = sum(each.replica.size_bytes for each in self._kept.values() if each.sender == caller)
        most = self._config.replica_bytes
        if own + replica.size_bytes > most // 2:
            raise PeerBusy(f"no room for a replica of {replica.size_bytes} bytes: one server may use half of {most}")
        stale = [cell for cell, kept in self._kept.items() if self._is_stale(kept)]
        for cell in sorted(stale, key=lambda cell: self._kept[cell].at):
            if self._has_room(replica):
                break
            _logger.info("the replica of %s makes room for others", expert_name(self._config.name, cell))
            del self._kept[cell]
        if not self._has_room(replica):
            raise PeerBusy(
                f"no room for a replica of {replica.size_bytes} bytes: {self._used_bytes} of {most} are used"
            )
        self._arriving[caller] = replica.size_bytes
        try:
            yield
        finally:
            del self._arriving[caller]

    def _is_stale(self, kept: _Kept) -> bool:
        return self._clock() - kept.at > STALE_S

    @property
    def _used_bytes(self) -> int:
        return sum(each.replica.size_bytes for each in self._kept.values()) + sum(self._arriving.values())

    def _has_room(self, replica: Replica) -> bool:
        count = len(self._kept.keys() | {replica.cell}) + len(self._arriving)
        return self._used_bytes + replica.size_bytes <= self._config.replica_bytes and count <= MAX_REPLICAS
