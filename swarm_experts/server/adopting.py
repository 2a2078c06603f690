"""Takes experts whose server has been gone for some time, of those whose replicas are kept here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from swarm_experts.core.cells import Cell, expert_name
from swarm_experts.core.config import ServerConfig
from swarm_experts.replicas.keeper import Keeper
from swarm_experts.replicas.replication import KeeperBoard, Replication
from swarm_experts.search.keeping import Orphans, in_rank
from swarm_experts.server.announcing import Announcer
from swarm_experts.server.expert import Expert

_logger = logging.getLogger(__name__)


class Adopter:
    """Of one server; used on one event loop.

    Keepers wait for each other: the first in rank for ``adopt_after_s``, each of the others for the lifetime of a
    record longer, by when it sees that the expert is there again.

    Attributes:
        adopted: cells that this server has taken.
    """

    def __init__(
        self,
        config: ServerConfig,
        peer_id: str,
        board: KeeperBoard,
        announcer: Announcer,
        keeper: Keeper,
        replication: Replication,
    ) -> None:
        self._config = config
        self._peer_id = peer_id
        self._board = board
        self._announcer = announcer
        self._keeper = keeper
        self._replication = replication
        self._orphans = Orphans()
        self.adopted: set[Cell] = set()

    async def given_up(self) -> set[Cell]:
        """Adopted cells that another server has as well, and keeps; they are adopted no more."""
        gone = await self._announcer.given_up(self.adopted)
        self.adopted -= gone
        return gone

    async def adopt(self, own: Collection[Cell], build: Callable[[], Expert]) -> dict[Cell, Expert]:
        """Experts that are due, each with its newest replica. Raises PeerUnavailable if the DHT does not say."""
        left = self._config.adopt - len(self.adopted)
        cells = [replica.cell for replica in self._keeper.replicas if replica.cell not in own]
        if left <= 0 or not cells:
            return {}
        announced = await self._announcer.announced(cells)
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
