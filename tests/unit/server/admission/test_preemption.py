"""Younger sessions are preempted for older ones that grow; a session that cannot be helped is told so at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

import pytest

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller
from swarm_server.admission.admission import Admission
from swarm_server.admission.preemption import RETRY_S, Claim, Preemption
from swarm_server.admission.pressure import IDLE_S
from swarm_server.kv.kv_cache import CacheBudget, NoRoom
from tests.worlds.virtual_time import run_virtually

ANNA, BERT = Caller("anna"), Caller("bert")


class Room:
    """100 bytes for sessions that were let in."""

    def __init__(self) -> None:
        self.budget = CacheBudget(100, 1)
        self.admission = Admission(self.budget, 20)
        self.preemption = Preemption(self.admission)

    async def enter(self, born_s: float, size_bytes: int, client: Caller = ANNA, wait_s: float = 0.0) -> Claim:
        lease = await self.admission.lease(client, size_bytes, 0, born_s, wait_s)
        claim = Claim(lease, (born_s, 0), client)
        self.preemption.add(claim)
        return claim

    def leave(self, claim: Claim) -> None:
        claim.close()
        self.preemption.remove(claim)
        claim.lease.close()
        self.admission.left(claim.client)

    async def grow(self, claim: Claim, size_bytes: int) -> int:
        async def work() -> int:
            claim.lease.promise(size_bytes)
            return claim.lease.charged

        return await self.preemption.with_room(claim, work)


async def test_who_finds_room_preempts_nobody() -> None:
    room = Room()
    old, young = await room.enter(1.0, 40), await room.enter(2.0, 40)
    assert await room.grow(old, 60) == 60
    assert not young.is_preempted


async def test_the_youngest_makes_room_once_it_has_gone() -> None:
    room = Room()
    claims = [await room.enter(born_s, 30) for born_s in (1.0, 2.0, 3.0)]
    growing = asyncio.ensure_future(room.grow(claims[0], 60))
    await claims[2].until_preempted()
    assert not growing.done() and not claims[1].is_preempted
    room.leave(claims[2])
    with pytest.raises(PeerBusy, match="other sessions wait"):  # what becomes free is not for newcomers
        await room.enter(4.0, 10)
    assert await growing == 60


@pytest.mark.parametrize("spoil", [Claim.preempt, Claim.close], ids=["it is preempted itself", "its session has ended"])
async def test_nobody_gives_way_to_a_session_that_ends(spoil: Callable[[Claim], None]) -> None:
    room = Room()
    old, young = await room.enter(1.0, 50), await room.enter(2.0, 50)
    spoil(old)
    with pytest.raises(NoRoom):
        await room.grow(old, 60)
    assert not young.is_preempted


async def test_the_youngest_session_is_refused() -> None:
    room = Room()
    old, young = await room.enter(1.0, 50), await room.enter(2.0, 50)
    with pytest.raises(NoRoom):
        await room.grow(young, 60)
    assert not old.is_preempted and not young.is_preempted


async def test_one_preemption_at_a_time() -> None:
    room = Room()
    claims = [await room.enter(born_s, 25) for born_s in (1.0, 2.0, 3.0, 4.0)]
    growing = [asyncio.ensure_future(room.grow(claim, 35)) for claim in claims[:2]]
    await claims[3].until_preempted()
    await asyncio.sleep(0.05)
    assert not claims[2].is_preempted and not any(one.done() for one in growing)
    room.leave(claims[3])
    assert await asyncio.gather(*growing) == [35, 35]
    assert not claims[2].is_preempted


def story_on_a_clock(story: Callable[[], Coroutine]) -> None:
    run_virtually(story())


async def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_who_has_more_than_a_share_counts_as_younger() -> None:
    """However long ago its client says that it has come."""
    room = Room()
    old, young = await room.enter(1.0, 70), await room.enter(2.0, 30, BERT)
    with pytest.raises(NoRoom):
        await room.grow(old, 75)
    assert not young.is_preempted
    growing = asyncio.ensure_future(room.grow(young, 40))
    await old.until_preempted()
    room.leave(old)
    assert await growing == 40


def test_a_promise_that_is_not_used_is_for_those_who_wait() -> None:
    async def story() -> None:
        room = Room()
        promised = [await room.enter(0.0, 10) for _ in range(10)]
        shrunk: list[Claim] = []
        for claim in promised:
            claim.on_shrunk = partial(shrunk.append, claim)
        await room.enter(-1e9, 30, BERT, wait_s=60.0)
        assert 1.5 <= await now_s() < 2.0
        assert len(shrunk) == 3 and not any(claim.is_preempted for claim in promised)
        with pytest.raises(NoRoom):  # what it does about it is the client's affair
            await room.grow(shrunk[0], 10)

    story_on_a_clock(story)


def test_promises_are_kept_while_nobody_else_waits() -> None:
    async def story() -> None:
        room = Room()
        promised = await room.enter(0.0, 100)
        with pytest.raises(NoRoom):
            await room.enter(0.0, 10, wait_s=60.0)  # its own client's
        assert promised.lease.charged == 100

    story_on_a_clock(story)


def test_room_that_is_used_goes_to_others_when_they_have_waited() -> None:
    async def story() -> None:
        room, memory = Room(), [Memory() for _ in range(10)]
        claims = [await room.enter(float(number), 10) for number in range(10)]
        for claim, owner in zip(claims, memory, strict=True):
            claim.begin()
            claim.lease.take(10, owner)
            claim.end(lambda: 10, await now_s())
        waiting = asyncio.ensure_future(room.enter(99.0, 20, BERT, wait_s=60.0))
        await asyncio.sleep(9.0)
        assert not any(claim.is_preempted for claim in claims)
        await asyncio.sleep(2.0)
        assert [claim.is_preempted for claim in claims] == [False] * 8 + [True] * 2
        for claim in claims[8:]:
            room.leave(claim)
        memory.clear()
        await waiting

    story_on_a_clock(story)


class Memory:
    """Somebody's keys and values."""


class Idle:
    """A session that gives its room back when it is parked, after ``seconds``; ``leaves``: whether it can be."""

    def __init__(self, claim: Claim, leaves: bool, seconds: float) -> None:
        self.claim, self.leaves, self.seconds = claim, leaves, seconds
        self.num_parked = 0
        claim.park_by(self.park, lambda: True)
        self.memory: Memory | None = Memory()
        claim.lease.take(claim.lease.charged, self.memory)
        claim.begin()
        claim.end(lambda: claim.lease.held, asyncio.get_running_loop().time())

    async def park(self) -> bool:
        self.num_parked += 1
        await asyncio.sleep(self.seconds)
        if self.leaves:
            self.memory = None
            self.claim.lease.close()
        return self.leaves


async def idle_room(
    *sizes: int, leaves: bool = True, client: Caller = ANNA, seconds: float = 0.5
) -> tuple[Room, list[Idle]]:
    room = Room()
    claims = [await room.enter(float(number), size, client) for number, size in enumerate(sizes)]
    sessions = [Idle(claim, leaves, seconds) for claim in claims]
    await asyncio.sleep(IDLE_S)
    return room, sessions


async def test_idle_sessions_are_parked_for_one_that_grows_and_nobody_is_preempted() -> None:
    room, sessions = await idle_room(30, 30)
    young = await room.enter(9.0, 30, BERT)
    assert await room.grow(young, 60) == 60, "older sessions give way, too, since they lose nothing"
    assert sum(idle.num_parked for idle in sessions) == 1
    assert not any(claim.is_preempted for claim in room.preemption._claims)


async def test_idle_sessions_are_parked_for_one_that_waits_also_those_of_the_same_client() -> None:
    room, sessions = await idle_room(40, 40)
    await room.enter(9.0, 60, ANNA, wait_s=5.0)
    assert sum(idle.num_parked for idle in sessions) == 1


async def test_who_cannot_be_parked_is_asked_again_after_its_next_step_or_a_while() -> None:
    room, (idle,) = await idle_room(60, leaves=False)
    with pytest.raises(PeerBusy):
        await room.enter(9.0, 60, ANNA, wait_s=5.0)
    assert idle.num_parked == 1
    await asyncio.sleep(RETRY_S)
    with pytest.raises(PeerBusy):
        await room.enter(9.0, 60, ANNA, wait_s=5.0)
    assert idle.num_parked == 2
    idle.claim.begin()
    idle.claim.end(lambda: 60, asyncio.get_running_loop().time())
    await asyncio.sleep(IDLE_S)
    with pytest.raises(PeerBusy):
        await room.enter(9.0, 60, ANNA, wait_s=5.0)
    assert idle.num_parked == 3


async def test_nobody_is_parked_in_vain() -> None:
    """The rest is not idle, and belongs to older sessions."""
    room, sessions = await idle_room(20, 20)
    await room.enter(0.5, 40, ANNA)
    young = await room.enter(9.0, 20, BERT)
    with pytest.raises(NoRoom):
        await room.grow(young, 70)
    assert not any(idle.num_parked for idle in sessions)


async def test_a_client_beyond_its_share_gets_no_room_from_others() -> None:
    """But from its own idle sessions."""
    room, (others,) = await idle_room(45)
    own = Idle(await room.enter(3.0, 20, BERT), leaves=True, seconds=0.5)
    growing = await room.enter(9.0, 25, BERT)
    await asyncio.sleep(IDLE_S)
    assert await room.grow(growing, 50) == 50
    assert (others.num_parked, own.num_parked) == (0, 1)


async def test_a_disk_that_hangs_holds_nobody_up() -> None:
    room, (idle,) = await idle_room(60, seconds=1e6)
    old, young = await room.enter(-1.0, 10), await room.enter(9.0, 30)
    growing = asyncio.ensure_future(room.grow(old, 40))
    await young.until_preempted()
    assert idle.num_parked == 1 and not idle.claim.is_preempted
    room.leave(young)
    assert await growing == 40
