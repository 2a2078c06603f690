"""Replication of own experts to keepers, and the search for the newest replica of an expert."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from safetensors import SafetensorError

from swarm_models.checkpoints import safetensors_bytes
from swarm_protocol.errors import SwarmError
from swarm_training.experts.core.cells import Cell, expert_name
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.core.replica import Replica
from swarm_training.experts.directory.board import DhtExpertRegistry
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.net.replica_calls import ReplicaCalls
from swarm_training.experts.replicas.keeper import STALE_S, Keeper
from swarm_training.experts.search.keeping import in_rank

_RENEW_S = STALE_S / 2
_TRIED = 3  # keepers to try for each replica that is wanted
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Sent:
    num_steps: int
    at: float


@dataclass(frozen=True)
class FoundReplica:
    """A replica at a keeper; ``keeper`` is None for this server itself."""

    replica: Replica
    keeper: ExpertHolder | None


@dataclass(eq=False, repr=False)
class Replication:
    """The replication of one server's experts; used on one event loop only."""

    _config: ExpertServerConfig
    _own: ExpertHolder
    _board: DhtExpertRegistry
    _calls: ReplicaCalls
    _keeper: Keeper
    _in_thread: InThread  # runs a function while no expert computes
    _sent: dict[Cell, dict[ExpertHolder, _Sent]] = field(default_factory=dict)

    async def send(self, experts: Mapping[Cell, Expert]) -> None:
        """Send experts that have changed to as many keepers as are configured. Raise PeerUnavailable if the DHT does
        not name the keepers."""
        if not self._config.replicas:
            return
        keepers = {each.peer_id: each for each in await self._board.keepers() if each.peer_id != self._own.peer_id}
        self._sent = {cell: sent for cell, sent in self._sent.items() if cell in experts}
        for cell, expert in list(experts.items()):  # experts may be added or removed during the loop
            ranked = [keepers[peer_id] for peer_id in in_rank(self._config.name, cell, keepers)]
            await self._send(cell, expert, ranked[: self._config.replicas * _TRIED])

    async def _send(self, cell: Cell, expert: Expert, keepers: Sequence[ExpertHolder]) -> None:
        known = self._sent.setdefault(cell, {})
        encoded: tuple[Replica, bytes] | None = None
        count = 0
        for keeper in keepers:
            if count == self._config.replicas:
                break
            sent = known.get(keeper)
            if sent is None or sent.num_steps != expert.num_steps or time.monotonic() - sent.at >= _RENEW_S:
                if encoded is None:
                    num_steps, state = await self._in_thread(expert.versioned_state)
                    data = await asyncio.to_thread(safetensors_bytes.to_bytes, state)
                    encoded = Replica.of(cell, num_steps, data), data
                try:
                    await self._calls.send(keeper, *encoded)
                except SwarmError as error:
                    name = expert_name(self._config.name, cell)
                    _logger.debug("%s does not keep a replica of %s: %s", keeper.peer_id, name, error)
                    known.pop(keeper, None)
                    continue
                known[keeper] = _Sent(encoded[0].num_steps, time.monotonic())
            count += 1

    async def find(self) -> dict[Cell, list[FoundReplica]]:
        """Return the replicas of each cell, the newest first. A keeper that does not answer is left out."""
        try:
            keepers = [each for each in await self._board.keepers() if each.peer_id != self._own.peer_id]
        except SwarmError as error:
            _logger.warning("replicas of experts are not known: %s", error)
            keepers = []
        lists = await asyncio.gather(*map(self._list, keepers))
        found: dict[Cell, list[FoundReplica]] = {}
        for each in chain((FoundReplica(replica, None) for replica in self._keeper.replicas), *lists):
            found.setdefault(each.replica.cell, []).append(each)
        for some in found.values():
            some.sort(key=lambda each: each.replica.num_steps, reverse=True)
        return found

    async def load(self, cell: Cell, expert: Expert, found: Sequence[FoundReplica], above: int) -> bool:
        """Load the newest available replica into an expert that is not in use; return whether there was one.

        Replicas with ``above`` steps or fewer are ignored.
        """
        name = expert_name(self._config.name, cell)
        for each in found:
            if each.replica.num_steps <= above:
                break
            try:
                replica, data = await self._fetch(each, expert.most_bytes)
                await asyncio.to_thread(_load, expert, replica, data)
            except (SwarmError, ValueError) as error:
                _logger.warning("a replica of %s cannot be used: %s", name, error)
                continue
            _logger.info("%s goes on from its replica, after %d steps", name, replica.num_steps)
            return True
        return False

    async def _list(self, keeper: ExpertHolder) -> list[FoundReplica]:
        try:
            return [FoundReplica(replica, keeper) for replica in await self._calls.listed(keeper)]
        except SwarmError as error:
            _logger.debug("%s does not say which replicas it has: %s", keeper.peer_id, error)
            return []

    async def _fetch(self, found: FoundReplica, most_bytes: int) -> tuple[Replica, bytes]:
        if found.keeper is not None:
            return await self._calls.fetch(found.keeper, found.replica.cell, most_bytes)
        data = self._keeper.data(found.replica.cell)
        if data is None:
            raise ValueError("it is not kept any more")
        return found.replica, data


def _load(expert: Expert, replica: Replica, data: bytes) -> None:
    """Load the bytes. Raise ValueError if they are not the state of such an expert after so many steps."""
    try:
        tensors, _ = safetensors_bytes.from_bytes(data)
    except SafetensorError as error:
        raise ValueError(f"it is no file of tensors: {error}") from None
    try:
        expert.load(tensors, replica.num_steps)
    except RuntimeError as error:  # from torch, for unsupported types
        raise ValueError(f"it is no state of an expert: {error}") from None
