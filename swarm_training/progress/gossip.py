"""The exchange of progress records: directly between peers, and over the DHT to find them.

Each peer calls a few others several times a second while there is something new, and once a second otherwise. A reply
has all records that have changed since the last call, signed by their owners. Records therefore also spread through
third peers, and from peers that cannot be called.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import logged_errors
from swarm_training.core.config import TrainingConfig
from swarm_training.core.network import Network
from swarm_training.core.record import Progress
from swarm_training.ledger.moderation import Moderation
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.progress.table import ProgressTable

_FANOUT = 8  # the most calls that one round of gossip begins
_PUBLISH_S = 15.0  # a quarter of ``LIFETIME_S``: the record stays on the DHT even if some calls fail
_READ_S, _READ_ALONE_S = 15.0, 2.0  # the second while no peer is known
_TIMEOUT_S = 3.0  # for one call
_logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Gossip:
    """One peer's exchange of progress records with the others."""

    _config: TrainingConfig
    _table: ProgressTable
    _network: Network
    _board: DhtPeerRegistry
    _renew: Callable[[], pb.SignedProgress]  # returns this peer's present record in a new version
    _orders: Moderation
    _rng: random.Random
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _urgent: asyncio.Event = field(default_factory=asyncio.Event)
    _outdated: asyncio.Event = field(default_factory=asyncio.Event)  # the record on the board
    _since: dict[str, int] = field(default_factory=dict)  # by peer, ``until`` of its last reply
    _calling: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _failing_since_s: dict[str, float] = field(default_factory=dict)  # by peer, since when it has answered no call

    def tell(self, *, urgent: bool = False) -> None:
        """Announce that there is something new; what is ``urgent`` is sent at once."""
        self._news.set()
        if urgent:
            self._urgent.set()

    def publish_soon(self) -> None:
        """Publish this peer's record on the DHT soon, because the published one is outdated."""
        self._outdated.set()

    def failing_s(self) -> dict[str, float]:
        """Return for how long, in seconds, each peer that fails to answer has done so."""
        now = asyncio.get_running_loop().time()
        return {peer_id: now - since_s for peer_id, since_s in self._failing_since_s.items()}

    async def run(self) -> None:
        await asyncio.gather(self._call_others(), self._publish(), self._read())

    async def _call_others(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat_s):
                    await self._news.wait()
            self._news.clear()
            self._urgent.clear()
            said_s = loop.time()
            self.call_some(self._renew())
            with suppress(TimeoutError):  # news that are not urgent wait for more
                async with asyncio.timeout_at(said_s + self._config.gossip_s):
                    await self._urgent.wait()

    def call_some(self, own: pb.SignedProgress) -> None:
        peers = [peer for peer in self._table.known() if peer.is_reachable and peer.peer_id not in self._calling]
        for peer in self._rng.sample(peers, min(len(peers), _FANOUT)):
            task = asyncio.ensure_future(self._call(peer, own))
            self._calling[peer.peer_id] = task
            task.add_done_callback(partial(self._forget_call, peer.peer_id))

    def _forget_call(self, peer_id: str, _: asyncio.Task[None]) -> None:
        self._calling.pop(peer_id, None)

    async def _call(self, peer: Progress, own: pb.SignedProgress) -> None:
        since = self._since.get(peer.peer_id, 0)
        request = pb.ExchangeRequest(own=own, since=since, orders_digest=self._orders.digest())
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reply = await self._network.exchange(peer, request)
        except (SwarmError, TimeoutError) as error:
            _logger.debug("%s does not report its progress: %s", peer.peer_id, error)
            self._failing_since_s.setdefault(peer.peer_id, asyncio.get_running_loop().time())
            # A peer whose process has ended need not be waited for until it counts as silent.
            if await self._network.is_gone(peer):
                self._table.note_gone(peer.peer_id)
            return
        self._failing_since_s.pop(peer.peer_id, None)
        self._since[peer.peer_id] = reply.until
        self._orders.take(reply.orders)
        self.note(reply.records)

    def note(self, records: Iterable[pb.SignedProgress]) -> None:
        """Add the valid ones among the records to the table."""
        num_known = len(self._table.known())
        for record in records:
            try:
                self._table.add(record, asyncio.get_running_loop().time())
            except ValueError as error:
                _logger.debug("ignored a record: %s", error)
        if len(self._table.known()) > num_known:  # a peer that was just found is called soon
            self.tell()

    async def _publish(self) -> None:
        while True:
            self._outdated.clear()
            with logged_errors(_logger, "this peer's record is not on the DHT yet", level=logging.WARNING):
                await self._board.publish(self._renew())
            with suppress(TimeoutError):
                async with asyncio.timeout(_PUBLISH_S):
                    await self._outdated.wait()

    async def _read(self) -> None:
        while True:
            with logged_errors(_logger, "the run's records on the DHT cannot be read", level=logging.WARNING):
                self.note(await self._board.read())
                if self._orders.digest():
                    self._orders.take(await self._board.read_orders())
            await asyncio.sleep(_READ_S if self._table.known() else _READ_ALONE_S)
