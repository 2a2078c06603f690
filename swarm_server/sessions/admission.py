"""Who gets room for keys and values when it is short: newcomers queue, and the youngest sessions are preempted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller, Shares
from swarm_server.kv.kv_cache import CacheBudget, Lease, NoRoom
from swarm_server.sessions.pressure import FairShares, Held, Need

_MOMENT_S = 1e-3
_MAX_WAITING = 1024
_POLL_S = 0.1  # memory may also come back when a tensor is freed, which sends no event


@dataclass(eq=False)
class Applicant:
    """A session that wants to be let in.

    Attributes:
        client: whose share it is part of.
        size_bytes: what it is to be promised.
        born_s: since when its client says that it has asked, by this server's clock.
        since_s: when it came here.
        lease: what it was given.
        refusal: why it was not let in when it was last looked at.
    """

    client: Caller
    size_bytes: int
    born_s: float
    since_s: float = 0.0
    lease: Lease | None = None
    refusal: PeerBusy | None = None


class RoomQueue:
    """Whose turn it is: the oldest first, and nobody before them, so that small requests cannot starve a large one.

    Those come last whose client would have more than its fair share: how old a session is, its client says. Those are
    passed over whose client has its share already, until it has less. Pure.
    """

    def __init__(self) -> None:
        self._waiting: list[Applicant] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, applicant: Applicant) -> None:
        """Behind all that are as old or older."""
        index = len(self._waiting)
        while index and self._waiting[index - 1].born_s > applicant.born_s:
            index -= 1
        self._waiting.insert(index, applicant)

    def discard(self, applicant: Applicant) -> None:
        """Forgets one that has gone, if it is there."""
        if applicant in self._waiting:
            self._waiting.remove(applicant)

    @property
    def clients(self) -> list[Caller]:
        return [applicant.client for applicant in self._waiting]

    def in_turn(self, shares: FairShares, held: Held) -> list[Applicant]:
        """``held``: by sessions that were let in; what is asked for is added."""
        within: list[Applicant] = []
        beyond: list[Applicant] = []
        for applicant in self._waiting:
            held.add(applicant.client, applicant.size_bytes)
            (beyond if shares.exceeds(applicant.client, held) else within).append(applicant)
        return within + beyond

    def admit(
        self, let_in: Callable[[Applicant], PeerBusy | None], in_turn: Sequence[Applicant] | None = None
    ) -> Applicant | None:
        """Takes out those that ``let_in`` lets in; it says why not of others. Returns whose turn it is now, if any's.

        ``in_turn``: all in their order; None: the oldest first.
        """
        passed_over = set()
        for applicant in list(self._waiting if in_turn is None else in_turn):
            if applicant.client.peer_id in passed_over:
                continue
            applicant.refusal = let_in(applicant)
            if applicant.refusal is None:
                self._waiting.remove(applicant)
            elif isinstance(applicant.refusal, NoRoom) and applicant.refusal.has_its_share:
                passed_over.add(applicant.client.peer_id)
            else:
                return applicant
        return None


@dataclass(frozen=True)
class Holder:
    """A session that was let in, and what would be free without it. Seniority: the lower, the older."""

    seniority: tuple[float, ...]
    size_bytes: int


def choose_victims(missing_bytes: int, holders: Sequence[Holder], seniority: tuple[float, ...]) -> list[Holder]:
    """Who is preempted so that a session of this seniority gets so much more: the youngest, as few as will do.

    None if all that are younger would not do: the session itself is preempted then. So nobody waits for one another
    in a circle, and the oldest session always goes on.
    """
    younger = sorted((h for h in holders if h.seniority > seniority), key=lambda h: h.seniority, reverse=True)
    victims = []
    for holder in younger:
        if missing_bytes > 0 and holder.size_bytes:
            victims.append(holder)
            missing_bytes -= holder.size_bytes
    return victims if missing_bytes <= 0 else []


class Admission:
    """Lets sessions in as there is room for them."""

    def __init__(self, budget: CacheBudget, max_sessions: int) -> None:
        self._budget = budget
        self._sessions = Shares(max_sessions, minimum=1)
        self._queue = RoomQueue()
        self._waiters = Shares(_MAX_WAITING, minimum=1)
        self._relieved_s = self._looked_s = -inf
        self._is_new = True  # something has changed since somebody looked
        self._num_growing = 0
        self._changed = asyncio.Event()  # who waits looks again
        self.relieve: Callable[[Need], None] = lambda need: None  # has others give something back
        self.held: Callable[[], Held] = Held  # bytes of all sessions
        self.tenants: Callable[[], list[Caller]] = list  # of all sessions

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    async def lease(
        self,
        client: Caller,
        size_bytes: int,
        wanted_bytes: int,
        born_s: float,
        wait_s: float,
        require: Callable[[], None] = lambda: None,
    ) -> Lease:
        """A lease, to be followed by ``left`` once it is closed.

        Args:
            wanted_bytes: promised instead of ``size_bytes``, but not if it is more than half of the whole room: nobody
                should wait long for what may never be used.
            require: raises what ends the waiting.

        Raises:
            PeerBusy: there is no room within ``wait_s``, or never: then at once.
        """
        if size_bytes > self._budget.capacity_bytes:
            raise self._budget.never(size_bytes)
        if not self._waiters.fits(client, 1):
            raise PeerBusy(
                f"the server has {self._waiters.used} sessions that wait for room already, "
                f"{self._waiters.held(client)} of this client: expected at most {_MAX_WAITING}"
            )
        promised = max(size_bytes, min(wanted_bytes, self._budget.capacity_bytes // 2))
        clock = asyncio.get_running_loop().time
        applicant = Applicant(client, promised, born_s, clock())
        deadline_s = clock() + wait_s
        self._queue.add(applicant)
        self._waiters.add(client, 1)
        self._is_new = True
        try:
            while True:
                require()
                self._admit()
                if applicant.lease is not None:
                    lease, applicant.lease = applicant.lease, None
                    return lease
                left_s = deadline_s - clock()
                if left_s < _MOMENT_S:
                    raise applicant.refusal or self._behind_others(applicant)
                await self.until_something_changes(left_s)
        finally:
            self._queue.discard(applicant)
            self._waiters.add(client, -1)
            if applicant.lease is not None:  # somebody has let it in, but it has gone
                applicant.lease.close()
                self._sessions.add(client, -1)
            self._change()

    def _change(self) -> None:
        self._is_new = True
        self._changed.set()

    @property
    def num_admitted(self) -> int:
        return self._sessions.used

    def left(self, client: Caller) -> None:
        """A session that was let in is gone, and its lease is closed."""
        self._sessions.add(client, -1)
        self._change()

    @property
    def shares(self) -> FairShares:
        """Of the room, among those who have some, or wait for it."""
        return FairShares(self._budget.capacity_bytes, [*self.tenants(), *self._queue.clients])

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Nobody is let in meanwhile: what becomes free is for a session that grows."""
        self._num_growing += 1
        try:
            yield
        finally:
            self._num_growing -= 1
            self._change()

    async def until_something_changes(self, most_s: float = _POLL_S) -> None:
        """Or for a moment."""
        self._changed.clear()
        # Not wait_for: before Python 3.12, it may swallow that the caller is cancelled.
        changing = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([changing], timeout=min(most_s, _POLL_S))
        finally:
            changing.cancel()

    def _admit(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._num_growing or (not self._is_new and now_s < self._looked_s + _POLL_S / 2):
            return  # all who wait look whenever one does
        self._is_new, self._looked_s = False, now_s
        first = self._queue.admit(self._let_in, self._queue.in_turn(self.shares, self.held()))
        if first is not None and now_s >= self._relieved_s + _POLL_S:
            self._relieved_s = now_s
            missing = first.refusal.missing_bytes if isinstance(first.refusal, NoRoom) else 0
            self.relieve(Need(first.client, first.size_bytes, missing, now_s - first.since_s))

    def _let_in(self, applicant: Applicant) -> PeerBusy | None:
        client, sessions = applicant.client, self._sessions
        if not sessions.fits(client, 1):
            if sessions.used >= sessions.capacity:
                return PeerBusy(f"the server has {sessions.capacity} sessions already")
            return NoRoom(
                f"the server has {sessions.used} of {sessions.capacity} sessions, {sessions.held(client)} of them of "
                "this client, which leaves the others to those who have fewer",
                0,
                has_its_share=True,
            )
        try:
            applicant.lease = self._budget.lease(client.peer_id, applicant.size_bytes)
        except NoRoom as error:
            return error
        applicant.lease.is_let_in = True
        sessions.add(client, 1)
        self._change()
        return None

    def _behind_others(self, applicant: Applicant) -> PeerBusy:
        return PeerBusy(f"{self._budget.described(applicant.size_bytes)}, and others wait for them")
