"""Who gets room for keys and values when it is short: newcomers queue, and the youngest sessions are preempted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swarm_protocol.errors import PeerBusy
from swarm_server.kv.kv_cache import CacheBudget, Lease, NoRoom

_MOMENT_S = 1e-3
_MAX_WAITING = 1024
_POLL_S = 0.1  # memory may also come back when a tensor is freed, which sends no event


@dataclass(eq=False)
class Applicant:
    """A session that wants to be let in.

    Attributes:
        client: whose share it is part of, by peer id.
        size_bytes: what it is to be promised.
        born_s: since when its client has asked, by this server's clock.
        lease: what it was given.
        refusal: why it was not let in when it was last looked at.
    """

    client: str
    size_bytes: int
    born_s: float
    lease: Lease | None = None
    refusal: PeerBusy | None = None


class RoomQueue:
    """Whose turn it is: the oldest first, and nobody before them, so that small requests cannot starve a large one.

    Only those are passed over whose client has its share already, until it has less. Pure.
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

    def admit(self, let_in: Callable[[Applicant], PeerBusy | None]) -> None:
        """Takes out those that ``let_in`` lets in; it says why not of others."""
        passed_over = set()
        for applicant in list(self._waiting):
            if applicant.client in passed_over:
                continue
            applicant.refusal = let_in(applicant)
            if applicant.refusal is None:
                self._waiting.remove(applicant)
            elif isinstance(applicant.refusal, NoRoom) and applicant.refusal.has_its_share:
                passed_over.add(applicant.client)
            else:
                return


@dataclass(frozen=True)
class Holder:
    """A session that was let in, and what would be free without it. Seniority: the lower, the older."""

    seniority: tuple[float, int]
    size_bytes: int


def choose_victims(missing_bytes: int, holders: Sequence[Holder], seniority: tuple[float, int]) -> list[Holder]:
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
        self._max_sessions = max_sessions
        self._queue = RoomQueue()
        self._num_admitted = 0
        self._num_growing = 0
        self._changed = asyncio.Event()  # who waits looks again

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    async def lease(
        self,
        client: str,
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
        if len(self._queue) >= _MAX_WAITING:
            raise PeerBusy(f"the server has {_MAX_WAITING} sessions that wait for room already")
        promised = max(size_bytes, min(wanted_bytes, self._budget.capacity_bytes // 2))
        applicant = Applicant(client, promised, born_s)
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + wait_s
        self._queue.add(applicant)
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
            if applicant.lease is not None:  # somebody has let it in, but it has gone
                applicant.lease.close()
                self._num_admitted -= 1
            self._changed.set()

    def left(self) -> None:
        """A session that was let in is gone, and its lease is closed."""
        self._num_admitted -= 1
        self._changed.set()

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Nobody is let in meanwhile: what becomes free is for a session that grows."""
        self._num_growing += 1
        try:
            yield
        finally:
            self._num_growing -= 1
            self._changed.set()

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
        if not self._num_growing:
            self._queue.admit(self._let_in)

    def _let_in(self, applicant: Applicant) -> PeerBusy | None:
        if self._num_admitted >= self._max_sessions:
            return PeerBusy(f"the server has {self._max_sessions} sessions already")
        try:
            applicant.lease = self._budget.lease(applicant.client, applicant.size_bytes)
        except NoRoom as error:
            return error
        applicant.lease.is_let_in = True
        self._num_admitted += 1
        self._changed.set()
        return None

    def _behind_others(self, applicant: Applicant) -> PeerBusy:
        return PeerBusy(f"{self._budget.described(applicant.size_bytes)}, and others wait for them")
