"""Admission to the KV cache when room is short: newcomers queue, and the youngest sessions are preempted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller, Shares
from swarm_server.admission.pressure import FairShares, Held, Need
from swarm_server.kv.kv_cache import CacheBudget, Lease, NoRoom

_MOMENT_S = 1e-3  # a wait with less time left is over, because timers may fire a little early
_MAX_WAITING = 1024
_POLL_S = 0.1  # memory may also come back when a tensor is freed, which sends no event


@dataclass(eq=False)
class Applicant:
    """A session that waits to be admitted.

    Attributes:
        client: the client in whose share the session counts.
        size_bytes: the number of bytes that its lease will promise.
        born_s: the time at which the client first asked for the session, by this server's clock.
        since_s: the time at which its request reached this server.
        lease: the lease that the session was given; None while it waits.
        refusal: the reason why the last attempt did not admit it.
    """

    client: Caller
    size_bytes: int
    born_s: float
    since_s: float = 0.0
    lease: Lease | None = None
    refusal: PeerBusy | None = None

    def asks(self, let_in: Callable[[Applicant], PeerBusy | None]) -> bool:
        """Ask to be admitted. Return whether the session is, and keep the reason if it is not."""
        self.refusal = let_in(self)
        return self.refusal is None

    def receive(self, lease: Lease) -> None:
        """Take the lease of the admitted session."""
        self.lease = lease
        lease.let_in()

    def take_lease(self) -> Lease | None:
        """Return the lease, if there is one, and forget it."""
        lease, self.lease = self.lease, None
        return lease


class RoomQueue:
    """The queue of sessions that wait for room, the oldest first, so that small requests cannot starve a large one.

    Clients report how old their sessions are. Sessions whose clients would exceed their fair share go last. Sessions of
    a client that already has its share are passed over until the client has less. The class is pure: no clock, no I/O.
    """

    def __init__(self) -> None:
        self._waiting: list[Applicant] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, applicant: Applicant) -> None:
        """Insert the applicant behind all that are as old or older."""
        index = len(self._waiting)
        while index and self._waiting[index - 1].born_s > applicant.born_s:
            index -= 1
        self._waiting.insert(index, applicant)

    def discard(self, applicant: Applicant) -> None:
        """Remove an applicant that no longer waits, if it is in the queue."""
        if applicant in self._waiting:
            self._waiting.remove(applicant)

    @property
    def clients(self) -> list[Caller]:
        return [applicant.client for applicant in self._waiting]

    def in_turn(self, shares: FairShares, held: Held) -> list[Applicant]:
        """Return the applicants by turn. ``held``, the bytes of admitted sessions, grows by what they ask for."""
        within: list[Applicant] = []
        beyond: list[Applicant] = []
        for applicant in self._waiting:
            held.add(applicant.client, applicant.size_bytes)
            (beyond if shares.exceeds(applicant.client, held) else within).append(applicant)
        return within + beyond

    def admit(
        self, let_in: Callable[[Applicant], PeerBusy | None], in_turn: Sequence[Applicant] | None = None
    ) -> Applicant | None:
        """Remove the applicants that ``let_in`` admits, and return the one whose turn is next, if any.

        ``let_in`` returns None, or the reason why not. ``in_turn`` is the order of all; None means the oldest first.
        """
        passed_over = set()
        for applicant in list(self._waiting if in_turn is None else in_turn):
            if applicant.client.peer_id in passed_over:
                continue
            if applicant.asks(let_in):
                self._waiting.remove(applicant)
            elif isinstance(applicant.refusal, NoRoom) and applicant.refusal.has_its_share:
                passed_over.add(applicant.client.peer_id)
            else:
                return applicant
        return None


@dataclass(frozen=True)
class AdmittedSession:
    """An admitted session and the bytes that its preemption would free; a lower seniority means an older session."""

    seniority: tuple[float, ...]
    size_bytes: int


def choose_victims(
    missing_bytes: int, holders: Sequence[AdmittedSession], seniority: tuple[float, ...]
) -> list[AdmittedSession]:
    """Return the youngest sessions, as few as possible, to preempt for a session that needs more bytes.

    Return an empty list if all younger sessions together would not suffice; then the session itself is preempted.
    This rule prevents circular waiting, and the oldest session always makes progress.
    """
    younger = sorted((h for h in holders if h.seniority > seniority), key=lambda h: h.seniority, reverse=True)
    victims = []
    for holder in younger:
        if missing_bytes > 0 and holder.size_bytes:
            victims.append(holder)
            missing_bytes -= holder.size_bytes
    return victims if missing_bytes <= 0 else []


class Admission:
    """The admission control of one span: it lets sessions in when there is room for them."""

    def __init__(self, budget: CacheBudget, max_sessions: int) -> None:
        self._budget = budget
        self._sessions = Shares(max_sessions, minimum=1)
        self._queue = RoomQueue()
        self._waiters = Shares(_MAX_WAITING, minimum=1)
        self._relieved_s = self._looked_s = -inf  # when sessions were last asked for room, and the queue last checked
        self._is_new = True  # something has changed since the queue was last checked
        self._num_growing = 0  # admitted sessions that wait for more room
        self._changed = asyncio.Event()  # wakes the waiters, which then check the queue again
        self.connect(lambda need: None, Held, list)  # no sessions are connected yet

    def connect(
        self, relieve: Callable[[Need], None], held: Callable[[], Held], tenants: Callable[[], list[Caller]]
    ) -> None:
        """Connect the admission to the admitted sessions.

        Args:
            relieve: asks these sessions to give room back.
            held: returns the bytes that all of them hold.
            tenants: returns the clients of all of them.
        """
        self._relieve, self._held, self._tenants = relieve, held, tenants

    def __len__(self) -> int:
        """Return the number of sessions that wait."""
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
        """Wait for room and return a lease. The caller must call ``left`` once it has closed the lease.

        Args:
            wanted_bytes: the bytes promised instead of ``size_bytes``, but at most half of the whole room: nobody
                should wait long for room that may never be used.
            require: called before each attempt; it raises the error that ends the waiting.

        Raises:
            PeerBusy: there is no room within ``wait_s``; raised at once if there can never be enough.
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
                if (lease := applicant.take_lease()) is not None:
                    return lease
                left_s = deadline_s - clock()
                if left_s < _MOMENT_S:
                    raise applicant.refusal or self._behind_others(applicant)
                await self.until_something_changes(left_s)
        finally:
            self._queue.discard(applicant)
            self._waiters.add(client, -1)
            if applicant.lease is not None:  # another waiter admitted it, but its request has gone
                applicant.lease.close()
                self._sessions.add(client, -1)
            self._change()

    def _change(self) -> None:
        self._is_new = True
        self._changed.set()

    def left(self, client: Caller) -> None:
        """Stop counting an admitted session that has ended; its lease must be closed already."""
        self._sessions.add(client, -1)
        self._change()

    @property
    def shares(self) -> FairShares:
        """Return the fair shares of the room among the clients that have some or wait for some."""
        return FairShares(self._budget.capacity_bytes, [*self._tenants(), *self._queue.clients])

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Admit nobody while the context is active: room that becomes free is for a session that grows."""
        self._num_growing += 1
        try:
            yield
        finally:
            self._num_growing -= 1
            self._change()

    async def until_something_changes(self, most_s: float = _POLL_S) -> None:
        """Wait until something changes, but for at most ``most_s`` or ``_POLL_S``, whichever is shorter."""
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
            return  # whichever waiter checks first does so for all
        self._is_new, self._looked_s = False, now_s
        first = self._queue.admit(self._let_in, self._queue.in_turn(self.shares, self._held()))
        if first is not None and now_s >= self._relieved_s + _POLL_S:
            self._relieved_s = now_s
            missing = first.refusal.missing_bytes if isinstance(first.refusal, NoRoom) else 0
            self._relieve(Need(first.client, first.size_bytes, missing, now_s - first.since_s))

    def _let_in(self, applicant: Applicant) -> PeerBusy | None:
        client, sessions = applicant.client, self._sessions
        if not sessions.fits(client, 1):
            if sessions.used >= sessions.capacity:
                return PeerBusy(f"the server has {sessions.capacity} sessions already")
            return NoRoom(
                f"the server has {sessions.used} of {sessions.capacity} sessions, {sessions.held(client)} of them of "
                "this client: the others are for clients that have fewer",
                0,
                has_its_share=True,
            )
        try:
            applicant.receive(self._budget.lease(client.peer_id, applicant.size_bytes))
        except NoRoom as error:
            return error
        sessions.add(client, 1)
        self._change()
        return None

    def _behind_others(self, applicant: Applicant) -> PeerBusy:
        return PeerBusy(f"{self._budget.described(applicant.size_bytes)}, and other sessions wait for that room")
