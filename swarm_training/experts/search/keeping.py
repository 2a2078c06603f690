"""The choice of the keepers of an expert's replicas, and of the orphaned experts to adopt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from swarm_training.experts.core.cells import Cell, expert_name


def in_rank(name: str, cell: Cell, peer_ids: Iterable[str]) -> list[str]:
    """Return peers in the order in which they are asked to keep a cell's replica: lowest hash first.

    A peer that comes or goes changes little for others (rendezvous hashing: Thaler and Ravishankar, 1998).
    """
    cell_name = expert_name(name, cell)
    return sorted(peer_ids, key=lambda peer_id: hashlib.sha256(f"{cell_name} {peer_id}".encode()).digest())


class Orphans:
    """The cells with replicas here that no server announces any more, with the time since when."""

    def __init__(self) -> None:
        self._since: dict[Cell, float] = {}

    def due(self, now: float, announced: Mapping[Cell, bool], after_s: Mapping[Cell, float]) -> list[Cell]:
        """Return the cells that have been missing for at least ``after_s``, the longest missing first.

        ``announced`` has, for each cell with a replica, whether some server has the expert at this moment.
        """
        missing = [cell for cell, is_there in announced.items() if not is_there]
        self._since = {cell: self._since.get(cell, now) for cell in missing}
        due = [cell for cell in missing if now - self._since[cell] >= after_s[cell]]
        return sorted(due, key=lambda cell: (self._since[cell], cell))
