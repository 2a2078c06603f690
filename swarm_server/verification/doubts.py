"""Servers that clients doubt without proof, for as long as a doubt counts."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable

from swarm_protocol.net.shares import Caller

_LASTS_S = 3600.0
_MAX_OF_A_CALLER = 4  # servers that one caller doubts at a time
_MAX_KNOWN = 1024


class Doubts:
    """The doubts of this server's clients, none of which anybody can check.

    An address counts once for each server, and may doubt few servers at a time; callers without one count as one.
    Beyond ``_MAX_KNOWN`` the oldest doubt is forgotten.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._told_s: OrderedDict[tuple[str, str], float] = OrderedDict()  # by address and doubted server, oldest first

    def add(self, peer_id: str, client: Caller) -> None:
        """Note that the client doubts this server; a caller that doubts too many servers is not heard."""
        self._forget_old()
        key = client.address, peer_id
        if key not in self._told_s and sum(other == key[0] for other, _ in self._told_s) >= _MAX_OF_A_CALLER:
            return
        self._told_s[key] = self._clock()
        self._told_s.move_to_end(key)
        if len(self._told_s) > _MAX_KNOWN:
            self._told_s.popitem(last=False)

    def doubted(self) -> list[str]:
        """Return the peer ids of the doubted servers, those that the most callers doubt first.

        Of equals any comes first: nobody can keep others out by being early.
        """
        self._forget_old()
        peer_ids = [peer_id for _, peer_id in self._told_s]
        return [peer_id for peer_id, _ in Counter(random.sample(peer_ids, len(peer_ids))).most_common()]

    def _forget_old(self) -> None:
        while self._told_s and next(iter(self._told_s.values())) < self._clock() - _LASTS_S:
            self._told_s.popitem(last=False)
