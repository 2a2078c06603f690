"""The client's cache of experts: recently read from the DHT, without servers that have just failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from swarm_protocol.backoff import Backoff
from swarm_protocol.errors import PeerUnavailable
from swarm_training.experts.core.cells import Cell, Prefix
from swarm_training.experts.directory.board import DhtExpertRegistry, Holders
from swarm_training.experts.directory.records import ExpertHolder

_STALE = 6  # times the refresh interval: records themselves do not last much longer
_LONGEST = 64  # times the first ban; each ban is twice as long as the one before
_MAX_BANS = 4096  # servers that restart have other peer ids, and would be remembered for ever
_logger = logging.getLogger(__name__)
Failure = tuple[str, Cell]  # of the server with this peer id, for one cell; (): for all its cells


@dataclass(frozen=True)
class _Ban:
    until: float = 0.0
    times: int = 0


class ExpertCache:
    """The cache of one mixture's experts; used on one event loop only.

    Entries older than ``refresh_s`` are read again in the background. Callers wait only for entries that are missing
    or very old.
    """

    def __init__(self, board: DhtExpertRegistry, refresh_s: float, ban_s: float, clock: Callable[[], float]) -> None:
        """Create an empty cache; ``clock`` returns seconds."""
        self._board = board
        self._refresh_s = refresh_s
        self._backoff = Backoff(ban_s, _LONGEST * ban_s)
        self._clock = clock
        self._known: dict[Prefix, tuple[Holders, float]] = {}  # with the time at which they were read
        self._bans: dict[Failure, _Ban] = {}  # the oldest first
        self._refreshing: asyncio.Task[Any] | None = None

    async def following(self, prefixes: Iterable[Prefix], without: Collection[Failure] = ()) -> dict[Prefix, set[int]]:
        """Return the coordinates that follow each prefix, of experts whose servers are not banned, nor in ``without``.
        Raise PeerUnavailable if the DHT does not answer."""
        wanted, now = set(prefixes), self._clock()
        ages = {prefix: now - self._known[prefix][1] for prefix in wanted if prefix in self._known}
        if unknown := {prefix for prefix in wanted if ages.get(prefix, self._too_old_s) >= self._too_old_s}:
            await self._read(unknown)
        old = {prefix for prefix, age_s in ages.items() if self._refresh_s <= age_s < self._too_old_s}
        if old and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.ensure_future(self._refresh(old))
        known = {prefix: self._known.get(prefix, ({}, now))[0] for prefix in wanted}  # some entries may be gone by now
        return {
            prefix: {
                at
                for at, holders in following.items()
                if any(self._is_usable(each, (*prefix, at), without) for each in holders)
            }
            for prefix, following in known.items()
        }

    def holder(self, cell: Cell, without: Collection[Failure] = ()) -> ExpertHolder | None:
        """Return the server to call for an expert, or None if all known servers have just failed."""
        holders, _ = self._known.get(cell[:-1], ({}, 0.0))
        return next((each for each in holders.get(cell[-1], ()) if self._is_usable(each, cell, without)), None)

    def failed(self, holder: ExpertHolder, cell: Cell = ()) -> None:
        """Ban the expert, or without ``cell`` the whole server, for a while: longer each time until it answers."""
        ban = self._bans.get((holder.peer_id, cell), _Ban())
        if self._clock() >= ban.until:  # simultaneous failures count once
            times = ban.times + 1
            self._bans.pop((holder.peer_id, cell), None)  # so that the ban is the newest again
            self._bans[holder.peer_id, cell] = _Ban(self._clock() + self._backoff.after(times), times)
            if len(self._bans) > _MAX_BANS:
                del self._bans[next(iter(self._bans))]

    def answered(self, holder: ExpertHolder, cell: Cell) -> None:
        for what in ((), cell):
            self._bans.pop((holder.peer_id, what), None)

    def forget(self) -> None:
        """Drop all entries, so that they are read again before they are used."""
        self._known.clear()

    def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()

    @property
    def _too_old_s(self) -> float:
        return self._refresh_s * _STALE

    def _is_usable(self, holder: ExpertHolder, cell: Cell, without: Collection[Failure]) -> bool:
        """Return whether no ban applies; ``cell`` may also be a prefix, which is never banned."""
        keys: list[Failure] = [(holder.peer_id, ()), (holder.peer_id, cell)]
        return all(
            key not in without and (key not in self._bans or self._clock() >= self._bans[key].until) for key in keys
        )

    async def _refresh(self, prefixes: set[Prefix]) -> None:
        try:
            await self._read(prefixes)
        except PeerUnavailable as error:
            _logger.debug("the addresses of experts are not refreshed: %s", error)

    async def _read(self, prefixes: set[Prefix]) -> None:
        found = await self._board.read(prefixes)
        now = self._clock()
        self._known |= {prefix: (found.get(prefix, {}), now) for prefix in prefixes}
