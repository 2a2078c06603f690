"""Preempts the youngest sessions so that an older one can grow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm_server.kv.kv_cache import Lease, NoRoom
from swarm_server.sessions.admission import Admission, Holder, choose_victims

T = TypeVar("T")


class Claim:
    """What one session has of the room for keys and values, and whether it may keep it.

    Attributes:
        seniority: the lower, the longer the session has been here.
        closed: its session has ended: nobody else gives way for it.
    """

    def __init__(self, lease: Lease, seniority: tuple[float, int]) -> None:
        self.lease = lease
        self.seniority = seniority
        self.closed = False
        self._preempted = asyncio.Event()

    def close(self) -> None:
        self.closed = True

    @property
    def is_preempted(self) -> bool:
        """Whether its session is about to be ended."""
        return self._preempted.is_set()

    def preempt(self) -> None:
        """For an older session: the client must wait for room, and replay the session."""
        self._preempted.set()

    async def until_preempted(self) -> None:
        await self._preempted.wait()


class Preemption:
    """The claims of all sessions of one span."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._claims: list[Claim] = []

    def add(self, claim: Claim) -> None:
        self._claims.append(claim)

    def remove(self, claim: Claim) -> None:
        """Its session has no room any more that others could get."""
        self._claims.remove(claim)

    async def with_room(self, claim: Claim, work: Callable[[], Awaitable[T]]) -> T:
        """What ``work`` returns, which is tried again when it finds no room and younger sessions can be preempted.

        Raises:
            NoRoom: the session itself is preempted; its client may ask for room again.
        """
        try:
            return await work()
        except NoRoom as error:
            shortage = error
        with self._admission.growing():
            while True:
                await self._make_room(claim, shortage)
                try:
                    return await work()
                except NoRoom as error:
                    shortage = error

    async def _make_room(self, claim: Claim, shortage: NoRoom) -> None:
        """Preempts the youngest so that the session can grow. Raises the shortage if that would not do."""
        if claim.is_preempted or claim.closed:
            raise shortage
        if not any(other.is_preempted for other in self._claims):
            others = {Holder(other.seniority, other.lease.charged): other for other in self._claims}
            victims = choose_victims(shortage.missing_bytes, list(others), claim.seniority)
            if not victims:
                raise shortage
            for victim in victims:
                others[victim].preempt()
        await self._admission.until_something_changes()
