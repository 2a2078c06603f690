"""A client's measurements of servers: their round-trip times, and which of them have failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from types import MappingProxyType
from typing import Any

from swarm_protocol.backoff import Backoff
from swarm_protocol.dht.records import ServerRecord

NEWCOMER_S = 600.0  # how long a server that appears during the client's life is new to it, unless it is proven
_AT_ONCE = 16  # the number of servers that are asked together
_ENOUGH_S = 1.0  # the longest time for a round of pings; later answers are still used
_FAR_S = 10.0  # the round trip that is assumed for servers that should not be chosen
_WEIGHT = 0.3  # the weight of one round trip in the average
_BACKOFF = Backoff(first_s=5.0, most_s=60.0)
FAILED, SILENT, WRONG = "that failed a moment ago", "that did not answer", "that answered wrongly"
DENIED = "that do not accept this client"
_JUST_NOW_S = 1.0  # how long a failed server is left out even if there is no other


class RttTracker:
    """The averaged round-trip times from the client to servers. Unknown ones are measured on demand."""

    def __init__(self, ping: Callable[[ServerRecord], Awaitable[float | None]]) -> None:
        """Keep ``ping``, which returns one round trip in seconds, or None if there was no answer."""
        self._ping = ping
        self._rtts_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[Any]] = {}

    @property
    def known(self) -> Mapping[str, float]:
        """Return the known round-trip times in seconds, by peer id."""
        return MappingProxyType(self._rtts_s)

    def guess_s(self, optimistic: bool) -> float:
        """Return the round-trip time to assume for unmeasured servers: 0 if ``optimistic``, so that they are chosen and
        measured; else a long one, so that measured servers are chosen first."""
        return 0.0 if optimistic else _FAR_S

    async def measure(self, first: Sequence[ServerRecord], others: Sequence[ServerRecord]) -> set[str]:
        """Ping the unknown servers of ``first`` and some of ``others``. Return which of ``first`` do not answer."""
        asked = {server.peer_id: server for server in first if server.peer_id not in self._rtts_s}
        unknown = [server for server in others if server.peer_id not in self._rtts_s.keys() | asked.keys()]
        if num_left := max(0, _AT_ONCE - len(asked)):
            # The servers are in the order of their blocks; the sample must reach the last ones, hence the rounding up.
            some = unknown[:: max(1, ceil(len(unknown) / num_left))]
            asked |= {server.peer_id: server for server in some}
        tasks = [self._ask(server) for server in asked.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=_ENOUGH_S)
        return {server.peer_id for server in first if server.peer_id not in self._rtts_s}

    async def measure_again(self, server: ServerRecord) -> float | None:
        """Ping the server once more. Return the average; None if no round trip is known."""
        await asyncio.wait([self._ask(server)])
        return self._rtts_s.get(server.peer_id)

    def forget(self, peer_id: str) -> None:
        self._rtts_s.pop(peer_id, None)

    def close(self) -> None:
        """Cancel all pings."""
        for task in list(self._asking.values()):
            task.cancel()

    def _ask(self, server: ServerRecord) -> asyncio.Task[Any]:
        if server.peer_id not in self._asking:
            task = self._asking[server.peer_id] = asyncio.ensure_future(self._answer(server))
            task.add_done_callback(lambda _task: self._asking.pop(server.peer_id, None))
        return self._asking[server.peer_id]

    async def _answer(self, server: ServerRecord) -> None:
        rtt_s = await self._ping(server)
        if rtt_s is not None:
            known_s = self._rtts_s.get(server.peer_id, rtt_s)
            self._rtts_s[server.peer_id] = known_s + _WEIGHT * (rtt_s - known_s)


@dataclass(frozen=True)
class _Failures:
    """The failures of a server, one after the other: when the newest one was, and how many there were."""

    since_s: float
    number: int
    expires_at: float | None  # expiry of the server's record, if it does not answer


class PeerTrust:
    """A client's trust in servers: which of them it has seen work, and since when it knows them.

    Attributes:
        worked: the peer ids of servers that have given answers since they last failed.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}  # the time at which the client first saw each server
        self.worked: set[str] = set()
        self._is_first = True
        self._distrustful_until_s = -inf

    def see(self, servers: Iterable[ServerRecord], now_s: float) -> None:
        """Note the servers that exist now. Those of the first view may be old, so they are no newcomers."""
        start_s = -inf if self._is_first else now_s
        there = {server.peer_id: self._since_s.get(server.peer_id, start_s) for server in servers}
        self._is_first = self._is_first and not there
        # A proven server that is gone for a moment keeps its time. Other identities are forgotten, to bound the memory.
        gone = {p: s for p, s in self._since_s.items() if p not in there and p in self.worked}
        self._since_s = there | gone

    def look_elsewhere(self) -> None:
        """Expect servers in the next view that are new to this client only because it looks at other blocks."""
        self._is_first = True

    def distrust_newcomers(self, now_s: float) -> None:
        """Ignore for a while how long servers have been there: treat all unproven servers as newcomers."""
        self._distrustful_until_s = now_s + NEWCOMER_S

    def newcomers(self, now_s: float) -> set[str]:
        """Return the servers that came recently and have not been seen to work."""
        since_s = -inf if now_s < self._distrustful_until_s else now_s - NEWCOMER_S
        return {p for p, came_s in self._since_s.items() if p not in self.worked and came_s >= since_s}


class PeerBackoff:
    """The backoff of failed servers: each one is left out for a while, longer each time.

    A server that did not answer may be dead, so it also stays out until it has published another record.
    """

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}
        self._banned_until_s: dict[str, float] = {}  # peer ids that are left out even if there are no other servers

    def add(self, peer_id: str, now_s: float, expires_at: float | None) -> None:
        """Start or extend the server's backoff. ``expires_at``: the expiry of its record, if it does not answer."""
        last = self._failures.get(peer_id, _Failures(-inf, 0, None))
        is_known = now_s < last.since_s + _JUST_NOW_S  # the same failure, reported by another session
        self._failures[peer_id] = _Failures(now_s, last.number + (not is_known), expires_at)

    def ban(self, peer_id: str, until_s: float) -> None:
        """Leave the server out until then, even if there is no other way."""
        self._banned_until_s[peer_id] = max(until_s, self._banned_until_s.get(peer_id, until_s))

    def is_banned(self, peer_id: str, now_s: float) -> bool:
        return self._banned_until_s.get(peer_id, -inf) > now_s

    def reset(self, peer_id: str) -> None:
        self._failures.pop(peer_id, None)

    def now(self, now_s: float, servers: Iterable[ServerRecord], just_now: bool = False) -> dict[str, str]:
        """Return which servers are left out, and why. ``just_now``: only failures of a moment ago, as a last resort."""
        banned = {}
        expirations = {} if just_now else {server.peer_id: server.expires_at for server in servers}
        for peer_id, last in self._failures.items():
            duration_s = _JUST_NOW_S if just_now else _BACKOFF.after(last.number)
            is_silent = last.expires_at is not None and expirations.get(peer_id, inf) <= last.expires_at < inf
            if is_silent or last.since_s + duration_s > now_s:
                banned[peer_id] = FAILED if last.expires_at is None else SILENT
        banned |= {peer_id: WRONG for peer_id in self._banned_until_s if self.is_banned(peer_id, now_s)}
        return banned
