"""The record of servers that clients doubt without proof, each for as long as a doubt counts."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable

from swarm_protocol.net.shares import Caller

_LASTS_S = 3600.0
_MAX_OF_A_CALLER = 4  # servers that one caller may doubt at a time
_MAX_KNOWN = 1024


class Doubts:
    """The doubts of this server's clients, none of which can be checked.

    An address counts once for each server, and may doubt only few servers at a time; callers without an address
    count as one. Beyond ``_MAX_KNOWN`` doubts, the oldest one is dropped.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create an empty record; ``clock`` returns seconds."""
        self._clock = clock
        self._doubted_s: OrderedDict[tuple[str, str], float] = OrderedDict()  # by address and server, oldest first

    def add(self, peer_id: str, client: Caller) -> None:
        """Note that the client doubts this server; ignore a caller that already doubts too many servers."""
        self._forget_old()
        key = client.address, peer_id
        if key not in self._doubted_s and sum(other == key[0] for other, _ in self._doubted_s) >= _MAX_OF_A_CALLER:
            return
        self._doubted_s[key] = self._clock()
        self._doubted_s.move_to_end(key)
        if len(self._doubted_s) > _MAX_KNOWN:
            self._doubted_s.popitem(last=False)

    def doubted(self) -> list[str]:
        """Return the peer ids of the doubted servers, first the one with the most doubting callers.

        The order of equals is random, so that nobody can keep others out by being early.
        """
        self._forget_old()
        peer_ids = [peer_id for _, peer_id in self._doubted_s]
        return [peer_id for peer_id, _ in Counter(random.sample(peer_ids, len(peer_ids))).most_common()]

    def _forget_old(self) -> None:
        while self._doubted_s and next(iter(self._doubted_s.values())) < self._clock() - _LASTS_S:
            self._doubted_s.popitem(last=False)
