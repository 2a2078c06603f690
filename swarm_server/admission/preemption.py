"""Room for a session that grows: idle sessions are parked, or the youngest preempted for an older one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm_protocol.net.shares import Caller
from swarm_server.admission.admission import Admission, AdmittedSession, choose_victims
from swarm_server.admission.pressure import Held, Need, Tenant, juniors_last, parkable, relief
from swarm_server.kv.kv_cache import Lease, NoRoom

PARK_S = 5.0  # how long others wait for a session that leaves the cache
RETRY_S = 60.0  # until a session that could not leave is asked again
T = TypeVar("T")


class Claim:
    """One session's claim to room for keys and values, which the session loses when it is preempted.

    Attributes:
        seniority: the sort key of the session's age; a lower one means an older session.
        client: the client in whose share the session counts.
        closed: True after the session has ended; no other session gives way for it then.
        on_shrunk: the callback for when an unused promise of room is taken back.
    """

    def __init__(
        self,
        lease: Lease,
        seniority: tuple[float, int],
        client: Caller,
        on_shrunk: Callable[[], None] = lambda: None,
    ) -> None:
        self.lease = lease
        self.seniority = seniority
        self.client = client
        self.closed = False
        self.on_shrunk = on_shrunk
        self._preempted = asyncio.Event()
        self._is_computing = False
        self._has_begun = False
        self._used_bytes: Callable[[], int] = lambda: 0
        self._last_s = now_s()  # when it was admitted, or last used
        self._can_park: Callable[[], bool] = lambda: False
        self._park: Callable[[], Awaitable[bool]] | None = None
        self._parking: asyncio.Future[bool] | None = None
        self._gives_room_until_s = 0.0  # others wait for a session that leaves the cache until then
        self._can_park_from_s = 0.0

    def park_by(self, park: Callable[[], Awaitable[bool]], can_park: Callable[[], bool]) -> None:
        """Let ``park`` take the session out of the cache, if it can, while ``can_park``; it returns whether it has."""
        self._park, self._can_park = park, can_park

    def park(self) -> None:
        """Begin to park the session. If that fails, it is tried again after the session's next step, or ``RETRY_S``."""
        assert self._park is not None
        self._parking = asyncio.ensure_future(self._park())
        self._gives_room_until_s, self._can_park_from_s = now_s() + PARK_S, now_s() + RETRY_S

    def returned(self) -> None:
        """Note that the session is in the cache, and may be parked again."""
        self._can_park_from_s = 0.0

    @property
    def is_giving_room(self) -> bool:
        """Return whether the session is about to leave the cache, for at most ``PARK_S``, or to be ended."""
        return self.is_preempted or (self._is_leaving and now_s() < self._gives_room_until_s)

    @property
    def _is_leaving(self) -> bool:
        return self._parking is not None and not self._parking.done()

    def heard(self) -> None:
        """Note that a message has come for the session."""
        self._last_s = now_s()

    def begin(self) -> None:
        """Mark a step as being computed until ``end``."""
        self._is_computing = True

    def end(self, used_bytes: Callable[[], int], time_s: float) -> None:
        """Mark the step as computed at ``time_s``. ``used_bytes`` returns the bytes with content, whenever asked."""
        self._is_computing = False
        self._has_begun, self._used_bytes, self._last_s = True, used_bytes, time_s
        self._can_park_from_s = 0.0

    def as_tenant(self) -> Tenant:
        """Return how the session uses its room now."""
        idle_s = 0.0 if self._is_computing else now_s() - self._last_s
        charged, held = self.lease.charged, self.lease.held
        may_try = self._has_begun and not self.closed and not self._is_leaving and now_s() >= self._can_park_from_s
        can_park = may_try and self._can_park()
        return Tenant(self.client, self.seniority, charged, held, self._used_bytes(), idle_s, self._has_begun, can_park)

    def shrink(self) -> None:
        """Give back the promised room that the session does not hold, because other sessions wait for it."""
        self.lease.release_unused()
        self.on_shrunk()

    def close(self) -> None:
        self.closed = True

    @property
    def is_preempted(self) -> bool:
        """Return whether the session is about to be ended."""
        return self._preempted.is_set()

    def preempt(self) -> None:
        """Preempt the session for an older one: its client must wait for room and replay the session."""
        self._preempted.set()

    async def until_preempted(self) -> None:
        await self._preempted.wait()


class Preemption:
    """The claims of all sessions of one span."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._claims: list[Claim] = []
        admission.connect(self._relieve, self._held, lambda: [claim.client for claim in self._claims])

    def add(self, claim: Claim) -> None:
        self._claims.append(claim)

    def remove(self, claim: Claim) -> None:
        """Remove the claim of a session that has no room left to give to others."""
        self._claims.remove(claim)

    async def with_room(self, claim: Claim, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``; on NoRoom, park idle sessions or preempt younger ones, and try again.

        Raises:
            NoRoom: the session itself is preempted; its client may ask for room again.
        """
        try:
            return await work()
        except NoRoom as error:
            shortage = error.with_traceback(None)  # whose frames may keep memory
        with self._admission.growing():
            while True:
                await self._make_room(claim, shortage)
                try:
                    return await work()
                except NoRoom as error:
                    shortage = error.with_traceback(None)

    async def _make_room(self, claim: Claim, shortage: NoRoom) -> None:
        """Let other sessions give room so that this one can grow. Raise the shortage if that would not suffice."""
        if claim.is_preempted or claim.closed:
            raise shortage
        # While others are still giving room, nobody else is asked: what they give may suffice.
        if not any(other.is_giving_room for other in self._claims) and not self._park_for(claim, shortage):
            seniority = juniors_last(self._admission.shares, self._held(), claim.client, shortage.missing_bytes)
            others = {
                AdmittedSession(seniority(other.client, other.seniority), other.lease.charged): other
                for other in self._claims
            }
            own = seniority(claim.client, claim.seniority)
            victims = choose_victims(shortage.missing_bytes, list(others), own)
            if not victims:
                raise shortage
            for victim in victims:
                others[victim].preempt()
        await self._admission.until_something_changes()

    def _park_for(self, claim: Claim, shortage: NoRoom) -> bool:
        """Park the sessions that are idle for longest; return False, and park none, if that would not suffice.

        A client beyond its share gets room from its own sessions alone.
        """
        held = self._held()
        held.add(claim.client, shortage.missing_bytes)
        is_over = self._admission.shares.exceeds(claim.client, held)
        tenants = {
            other: other.as_tenant()
            for other in self._claims
            if other is not claim and not (is_over and other.client.peer_id != claim.client.peer_id)
        }
        chosen, missing = parkable(shortage.missing_bytes, tenants.values())
        if missing > 0:
            return False
        for other, tenant in tenants.items():
            if tenant in chosen:
                other.park()
        return True

    def _held(self) -> Held:
        """Return the bytes that are charged to each client and address."""
        held = Held()
        for claim in self._claims:
            held.add(claim.client, claim.lease.charged)
        return held

    def _relieve(self, need: Need) -> None:
        """Make sessions give room back for the one that waits, unless some are still about to."""
        if any(claim.is_giving_room for claim in self._claims):
            return
        claims = {id(tenant): (claim, tenant) for claim in self._claims for tenant in [claim.as_tenant()]}
        found = relief(need, [tenant for _, tenant in claims.values()], self._admission.shares)
        for tenant in found.shrunk:
            claims[id(tenant)][0].shrink()
        for tenant in found.parked:
            claims[id(tenant)][0].park()
        for tenant in found.preempted:
            claims[id(tenant)][0].preempt()


def now_s() -> float:
    """Return the event loop's time, which tests can move."""
    return asyncio.get_running_loop().time()
