"""How much a peer carries for others: tunnels at a time, and bytes per second."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller, Shares

_BURST_S = 0.5  # of the budget that may pass at once after a silence


class Places:
    """So many at a time, and of one peer so many; all identities at one address together leave room for others."""

    def __init__(self, what: str, most: int, most_of_one: int) -> None:
        self._what, self._most, self._most_of_one = what, most, most_of_one
        self._shares = Shares(most, minimum=1)

    @property
    def num_taken(self) -> int:
        return self._shares.used

    def has_room(self, caller: Caller) -> bool:
        return self._shares.held(caller) < self._most_of_one and self._shares.fits(caller, 1)

    @contextmanager
    def taken(self, caller: Caller) -> Iterator[None]:
        """Raises PeerBusy if there is none left for the caller."""
        if self.num_taken >= self._most:
            raise PeerBusy(f"there are {self._most} {self._what} already")
        if self._shares.held(caller) >= self._most_of_one:
            raise PeerBusy(f"this peer has {self._most_of_one} {self._what} already")
        if not self._shares.fits(caller, 1):
            raise PeerBusy(f"this peer, or all at its address, have their share of {self._most} {self._what} already")
        self._shares.add(caller, 1)
        try:
            yield
        finally:
            self._shares.add(caller, -1)


class Budget:
    """Bytes per second for all who share it, in the order in which they ask."""

    def __init__(self, bytes_per_s: float = inf) -> None:
        self.bytes_per_s = bytes_per_s  # of what is taken from now on
        self._free_s = -inf  # when all that was taken has passed
        self.num_bytes = 0  # in all

    async def take(self, num_bytes: int) -> None:
        """Wait until these bytes may pass. A call that is cancelled gives them back."""
        now_s, takes_s = asyncio.get_running_loop().time(), num_bytes / self.bytes_per_s
        self.num_bytes += num_bytes
        self._free_s = max(self._free_s, now_s - _BURST_S) + takes_s
        if self._free_s > now_s:
            try:
                await asyncio.sleep(self._free_s - now_s)
            except asyncio.CancelledError:
                self.num_bytes -= num_bytes
                self._free_s -= takes_s
                raise
