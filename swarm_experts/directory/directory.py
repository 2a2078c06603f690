"""What a client knows of experts: read in the DHT a short while ago, without servers that have just failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from swarm_experts.core.cells import Cell, Prefix
from swarm_experts.directory.board import Board, Holders
from swarm_experts.directory.records import Holder
from swarm_protocol.errors import PeerUnavailable

_STALE = 6  # times the refresh interval: records themselves do not last longer by much
_MAX_BANS = 6  # each is twice as long as the one before
_logger = logging.getLogger(__name__)
Failure = tuple[str, Cell]  # of the server with this peer id, for one cell; (): for all


@dataclass
class _Ban:
    until: float
    times: int


class Directory:
    """Of one mixture; used on one event loop.

    What is older than ``refresh_s`` is read again, beside the use of it; who asks waits only for what is not known, or
    has become very old.
    """

    def __init__(self, board: Board, refresh_s: float, ban_s: float, clock: Callable[[], float]) -> None:
        """``clock``: in seconds."""
        self._board = board
        self._refresh_s = refresh_s
        self._ban_s = ban_s
        self._clock = clock
        self._known: dict[Prefix, tuple[Holders, float]] = {}  # with when it was read
        self._bans: dict[Failure, _Ban] = {}
        self._refreshing: asyncio.Task[Any] | None = None

    async def following(self, prefixes: Iterable[Prefix], without: Collection[Failure] = ()) -> dict[Prefix, set[int]]:
        """The coordinates that follow each prefix, of experts whose servers have not just failed, nor ``without``.

        Raises:
            PeerUnavailable: the DHT does not say.
        """
        wanted, now = set(prefixes), self._clock()
        ages = {prefix: now - self._known[prefix][1] for prefix in wanted if prefix in self._known}
        if unknown := {prefix for prefix in wanted if ages.get(prefix, self._too_old_s) >= self._too_old_s}:
            await self._read(unknown)
        old = {prefix for prefix, age_s in ages.items() if self._refresh_s <= age_s < self._too_old_s}
        if old and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.ensure_future(self._refresh(old))
        known = {prefix: self._known.get(prefix, ({}, now))[0] for prefix in wanted}  # some may be forgotten by now
        return {
            prefix: {
                at
                for at, holders in following.items()
                if any(self._is_usable(each, (*prefix, at), without) for each in holders)
            }
            for prefix, following in known.items()
        }

    def holder(self, cell: Cell, without: Collection[Failure] = ()) -> Holder | None:
        """The server that is to be asked for an expert; None if none is known that has not just failed."""
        holders, _ = self._known.get(cell[:-1], ({}, 0.0))
        return next((each for each in holders.get(cell[-1], ()) if self._is_usable(each, cell, without)), None)

    def failed(self, holder: Holder, cell: Cell = ()) -> None:
        """The expert, or without ``cell`` the server, is left out for a while: longer each time until it answers."""
        ban = self._bans.setdefault((holder.peer_id, cell), _Ban(0.0, 0))
        if self._clock() >= ban.until:  # calls that fail together count once
            ban.until = self._clock() + self._ban_s * 2**ban.times
            ban.times = min(ban.times + 1, _MAX_BANS)

    def answered(self, holder: Holder, cell: Cell) -> None:
        for what in ((), cell):
            self._bans.pop((holder.peer_id, what), None)

    def forget(self) -> None:
        """All is read again before it is used."""
        self._known.clear()

    def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()

    @property
    def _too_old_s(self) -> float:
        return self._refresh_s * _STALE

    def _is_usable(self, holder: Holder, cell: Cell, without: Collection[Failure]) -> bool:
        """``cell`` may also be a prefix, which nobody bans."""
        keys: list[Failure] = [(holder.peer_id, ()), (holder.peer_id, cell)]
        return all(
            key not in without and (key not in self._bans or self._clock() >= self._bans[key].until) for key in keys
        )

    async def _refresh(self, prefixes: set[Prefix]) -> None:
        try:
            await self._read(prefixes)
        except PeerUnavailable as error:
            _logger.debug("where experts are is not known anew: %s", error)

    async def _read(self, prefixes: set[Prefix]) -> None:
        found = await self._board.read(prefixes)
        now = self._clock()
        self._known |= {prefix: (found.get(prefix, {}), now) for prefix in prefixes}
