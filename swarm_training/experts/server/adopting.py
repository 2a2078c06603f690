"""Adoption of experts whose server has been gone for some time, if their replicas are kept here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from swarm_training.experts.core.cells import Cell, expert_name
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.directory.board import DhtExpertRegistry
from swarm_training.experts.replicas.keeper import Keeper
from swarm_training.experts.replicas.replication import Replication
from swarm_training.experts.search.keeping import Orphans, in_rank
from swarm_training.experts.server.announcing import Announcer

_logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Adopter:
    """The adopter of one server; used on one event loop only.

    Keepers take turns: the first in rank waits for ``adopt_after_s``. Each further one waits longer by the lifetime of
    a record, and then sees whether the expert is announced again.
    """

    _config: ExpertServerConfig
    _peer_id: str
    _board: DhtExpertRegistry
    _announcer: Announcer
    _keeper: Keeper
    _replication: Replication
    _orphans: Orphans = field(default_factory=Orphans)
    adopted: set[Cell] = field(default_factory=set)  # the cells that this server has adopted

    async def given_up(self) -> set[Cell]:
        """Remove and return the adopted cells that another server has as well, and keeps."""
        gone = await self._announcer.given_up(self.adopted)
        self.adopted -= gone
        return gone

    async def adopt(self, own: Collection[Cell], build: Callable[[], Expert]) -> dict[Cell, Expert]:
        """Return experts to adopt, each with its newest replica. Raise PeerUnavailable if the DHT does not answer."""
        left = self._config.adopt - len(self.adopted)
        cells = [replica.cell for replica in self._keeper.replicas if replica.cell not in own]
        if left <= 0 or not cells:
            return {}
        announced = await self._announcer.announced(cells)
        # This server's own record may have expired, if the DHT has not taken the last one.
        keepers = {each.peer_id for each in await self._board.keepers()} | {self._peer_id}
        ranks = {cell: in_rank(self._config.name, cell, keepers).index(self._peer_id) for cell in cells}
        due = self._orphans.due(
            asyncio.get_running_loop().time(),
            {cell: cell in announced for cell in cells},
            {cell: self._config.adopt_after_s + rank * self._config.lifetime_s for cell, rank in ranks.items()},
        )
        if not due:
            return {}
        found, adopted = await self._replication.find(), {}
        for cell in due[:left]:
            expert = build()
            if await self._replication.load(cell, expert, found.get(cell, ()), above=-1):
                adopted[cell] = expert
                _logger.info("%s is here now: its server is gone", expert_name(self._config.name, cell))
        self.adopted |= adopted.keys()
        return adopted
