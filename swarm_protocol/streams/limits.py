"""Limits on what a peer carries for other peers: concurrent tunnels, and bytes per second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller, Shares

_BURST_S = 0.5


class Places:
    """A limit on concurrent uses, in total and per peer. The identities at one address leave room for others."""

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
        """Occupy one place during the context; raise PeerBusy if the caller can have none."""
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


class BandwidthBudget:
    """A budget of bytes per second for all its users, in the order of their requests."""

    def __init__(self, bytes_per_s: Callable[[], float] = lambda: inf, burst_s: float = _BURST_S) -> None:
        """Create the budget.

        Args:
            bytes_per_s: returns the present rate, which counts for bytes that are taken now.
            burst_s: the seconds of the rate that may pass at once after a silence.
        """
        self._bytes_per_s, self._burst_s = bytes_per_s, burst_s
        self._free_s = -inf  # the time when all bytes taken so far have passed
        self.num_bytes = 0  # total

    async def take(self, num_bytes: int) -> None:
        """Wait until these bytes may pass. A cancelled call returns them to the budget."""
        now_s, takes_s = asyncio.get_running_loop().time(), num_bytes / self._bytes_per_s()
        self.num_bytes += num_bytes
        # Each call waits for the bytes of all calls before and for its own, so that calls pass in their order.
        self._free_s = max(self._free_s, now_s - self._burst_s) + takes_s
        if self._free_s > now_s:
            try:
                await asyncio.sleep(self._free_s - now_s)
            except asyncio.CancelledError:
                self.num_bytes -= num_bytes
                self._free_s -= takes_s
                raise
