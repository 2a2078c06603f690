"""The claim of free grid cells for a server's experts, and their announcement in the DHT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from itertools import islice

from swarm_protocol.errors import SwarmError
from swarm_training.experts.core.cells import Cell, expert_name
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.directory.board import DhtExpertRegistry
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.search.placing import by_prefix, candidates, clashes

_LOOKED_AT = 64  # cells looked up at once
_LIFETIMES_WAITED = 1.5  # times the lifetime of a record
_LOOK_S = 1.0
_logger = logging.getLogger(__name__)


class Announcer:
    """The announcer of one server's experts."""

    def __init__(self, board: DhtExpertRegistry, own: ExpertHolder, config: ExpertServerConfig) -> None:
        self._board = board
        self._own = own
        self._config = config
        self._published: set[Cell] = set()  # prefixes

    async def free_cells(self, count: int, wanted: Iterable[Cell] = (), taken: Collection[Cell] = ()) -> list[Cell]:
        """Return ``count`` cells that no other server has, the ``wanted`` ones first, none of them in ``taken``. Raise
        SwarmError if there are not enough free cells, or PeerUnavailable if the DHT does not answer."""
        grid = self._config.grid
        found = await self._without_others(list(dict.fromkeys(wanted)))
        left = candidates(grid, self._own.peer_id)
        while len(found) < count:
            some = list(islice(left, _LOOKED_AT))
            if not some:
                raise SwarmError(
                    f"the grid {grid} of {self._config.name} has no {count} free cells: start fewer experts, or "
                    "a mixture with a larger grid"
                )
            found += await self._without_others([cell for cell in some if cell not in taken and cell not in found])
        return found[:count]

    async def claimed(self, cells: Collection[Cell]) -> list[Cell]:
        """Wait until no other server has these cells, and return them: the records of a killed server last for a while.
        Raise SwarmError if another server has one of the cells, and continues to announce it; PeerUnavailable if the
        DHT does not answer."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + _LIFETIMES_WAITED * self._config.lifetime_s
        before: set[Cell] = set()
        while taken := await self.announced(cells):
            names = ", ".join(expert_name(self._config.name, cell) for cell in sorted(taken))
            if clock() >= deadline:
                raise SwarmError(f"another server has {names}: expected cells that are free, or soon will be")
            if taken != before:
                _logger.info("waiting until no other server announces %s", names)
            before = taken
            await asyncio.sleep(_LOOK_S)
        return list(cells)

    async def announced(self, cells: Collection[Cell]) -> set[Cell]:
        """Return the cells among these that another server has at present."""
        return {cell for cell, others in (await self._others(cells)).items() if others}

    async def given_up(self, cells: Collection[Cell]) -> set[Cell]:
        """Return the own cells among these that another server has taken as well, and keeps."""
        return clashes(cells, await self._others(cells), self._own.peer_id)

    async def moves(self, cells: Collection[Cell], staying: Collection[Cell] = ()) -> dict[Cell, Cell]:
        """Return own cells that another server has taken at the same time, each with a free cell to move to.

        ``staying`` are other own cells, which are not free.
        """
        given_up = await self.given_up(cells)
        if not given_up:
            return {}
        free = await self.free_cells(len(given_up), taken={*cells, *staying})
        for cell, to in zip(sorted(given_up), free, strict=True):
            names = expert_name(self._config.name, cell), expert_name(self._config.name, to)
            _logger.info("another server has %s too: this one's is now %s", *names)
        return dict(zip(sorted(given_up), free, strict=True))

    async def publish(self, cells: Iterable[Cell]) -> bool:
        """Announce experts, and withdraw earlier announcements of absent ones; return whether all is stored."""
        following = by_prefix(cells)
        # A record on the DHT cannot be removed: one without coordinates replaces it.
        gone: dict[Cell, set[int]] = {prefix: set() for prefix in self._published - following.keys()}
        is_stored = await self._board.publish(self._own, following | gone, self._config.lifetime_s)
        self._published = set(following) if is_stored else self._published | following.keys()
        return is_stored

    async def _without_others(self, cells: list[Cell]) -> list[Cell]:
        others = await self._others(cells)
        return [cell for cell in cells if not others[cell]]

    async def _others(self, cells: Collection[Cell]) -> dict[Cell, set[str]]:
        """Return for each cell the peer ids of other servers that have an expert there."""
        known = await self._board.read({cell[:-1] for cell in cells}) if cells else {}
        return {
            cell: {each.peer_id for each in known[cell[:-1]].get(cell[-1], ())} - {self._own.peer_id} for cell in cells
        }
