"""How much a peer carries for others: tunnels at a time, and bytes per second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from swarm_protocol.errors import PeerBusy

_BURST_S = 0.5  # of the budget that may pass at once after a silence


class Places:
    """So many at a time, and of one peer so many."""

    def __init__(self, what: str, most: int, most_of_one: int) -> None:
        self._what, self._most, self._most_of_one = what, most, most_of_one
        self._taken: Counter[str] = Counter()

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    def has_room(self, peer_id: str) -> bool:
        return self.num_taken < self._most and self._taken[peer_id] < self._most_of_one

    @contextmanager
    def taken(self, peer_id: str) -> Iterator[None]:
        """Raises PeerBusy if there is none left."""
        if self.num_taken >= self._most:
            raise PeerBusy(f"there are {self._most} {self._what} already")
        if self._taken[peer_id] >= self._most_of_one:
            raise PeerBusy(f"this peer has {self._most_of_one} {self._what} already")
        self._taken[peer_id] += 1
        try:
            yield
        finally:
            self._taken[peer_id] -= 1
            if not self._taken[peer_id]:
                del self._taken[peer_id]


class Budget:
    """Bytes per second for all who share it, in the order in which they ask."""

    def __init__(self, bytes_per_s: float = inf) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = -inf  # when all that was taken has passed
        self.num_bytes = 0  # in all

    async def take(self, num_bytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        self.num_bytes += num_bytes
        self._free_s = max(self._free_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)
