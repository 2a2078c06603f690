"""Who keeps the replicas of an expert, and which of them one that takes its place loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from swarm_experts.core.cells import Cell, expert_name


def in_rank(name: str, cell: Cell, peer_ids: Iterable[str]) -> list[str]:
    """Peers in the order in which they are asked to keep a cell's replica: highest random weight first.

    Whoever comes or goes changes little for others (rendezvous hashing: Thaler and Ravishankar, 1998).
    """
    cell_name = expert_name(name, cell)
    return sorted(peer_ids, key=lambda peer_id: hashlib.sha256(f"{cell_name} {peer_id}".encode()).digest())


class Orphans:
    """Cells whose replicas are kept here and that no server announces any more, and since when."""

    def __init__(self) -> None:
        self._since: dict[Cell, float] = {}

    def due(self, now: float, announced: Mapping[Cell, bool], after_s: Mapping[Cell, float]) -> list[Cell]:
        """Those that have been missing for as long as ``after_s`` says, the longest missing first.

        ``announced``: for each cell of which there is a replica, whether some server has it at this moment.
        """
        missing = [cell for cell, is_there in announced.items() if not is_there]
        self._since = {cell: self._since.get(cell, now) for cell in missing}
        due = [cell for cell in missing if now - self._since[cell] >= after_s[cell]]
        return sorted(due, key=lambda cell: (self._since[cell], cell))
