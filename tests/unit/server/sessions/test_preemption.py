"""Younger sessions are preempted for older ones that grow; a session that cannot be helped is told so at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarm_protocol.errors import PeerBusy
from swarm_server.kv.kv_cache import CacheBudget, NoRoom
from swarm_server.sessions.admission import Admission
from swarm_server.sessions.preemption import Claim, Preemption
from tests.unit.support import run


class Room:
    """100 bytes for sessions that were let in."""

    def __init__(self) -> None:
        self.budget = CacheBudget(100, 1)
        self.admission = Admission(self.budget, 10)
        self.preemption = Preemption(self.admission)

    async def enter(self, born_s: float, size_bytes: int) -> Claim:
        claim = Claim(await self.admission.lease(f"client{born_s}", size_bytes, 0, born_s, 0.0), (born_s, 0))
        self.preemption.add(claim)
        return claim

    def leave(self, claim: Claim) -> None:
        claim.close()
        self.preemption.remove(claim)
        claim.lease.close()
        self.admission.left()

    async def grow(self, claim: Claim, size_bytes: int) -> int:
        async def work() -> int:
            claim.lease.promise(size_bytes)
            return claim.lease.charged

        return await self.preemption.with_room(claim, work)


def test_who_finds_room_preempts_nobody() -> None:
    async def story() -> None:
        room = Room()
        old, young = await room.enter(1.0, 40), await room.enter(2.0, 40)
        assert await room.grow(old, 60) == 60
        assert not young.is_preempted

    run(story())


def test_the_youngest_makes_room_once_it_has_gone() -> None:
    async def story() -> None:
        room = Room()
        claims = [await room.enter(born_s, 30) for born_s in (1.0, 2.0, 3.0)]
        growing = asyncio.ensure_future(room.grow(claims[0], 60))
        await claims[2].until_preempted()
        assert not growing.done() and not claims[1].is_preempted
        room.leave(claims[2])
        with pytest.raises(PeerBusy, match="others wait"):  # what becomes free is not for newcomers
            await room.enter(4.0, 10)
        assert await growing == 60

    run(story())


@pytest.mark.parametrize("spoil", [Claim.preempt, Claim.close], ids=["it is preempted itself", "its session has ended"])
def test_nobody_gives_way_to_a_session_that_ends(spoil: Callable[[Claim], None]) -> None:
    async def story() -> None:
        room = Room()
        old, young = await room.enter(1.0, 50), await room.enter(2.0, 50)
        spoil(old)
        with pytest.raises(NoRoom):
            await room.grow(old, 60)
        assert not young.is_preempted

    run(story())


def test_the_youngest_session_is_refused() -> None:
    async def story() -> None:
        room = Room()
        old, young = await room.enter(1.0, 50), await room.enter(2.0, 50)
        with pytest.raises(NoRoom):
            await room.grow(young, 60)
        assert not old.is_preempted and not young.is_preempted

    run(story())


def test_one_preemption_at_a_time() -> None:
    async def story() -> None:
        room = Room()
        claims = [await room.enter(born_s, 25) for born_s in (1.0, 2.0, 3.0, 4.0)]
        growing = [asyncio.ensure_future(room.grow(claim, 35)) for claim in claims[:2]]
        await claims[3].until_preempted()
        await asyncio.sleep(0.05)
        assert not claims[2].is_preempted and not any(one.done() for one in growing)
        room.leave(claims[3])
        assert await asyncio.gather(*growing) == [35, 35]
        assert not claims[2].is_preempted

    run(story())
