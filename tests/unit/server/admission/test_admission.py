"""Who gets room when it is short: a queue for newcomers, and whose turn it is to give way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from swarm_protocol.errors import PeerBusy, PeerMoved
from swarm_protocol.net.shares import Caller
from swarm_server.admission.admission import Admission, AdmittedSession, Applicant, RoomQueue, choose_victims
from swarm_server.kv.kv_cache import CacheBudget, NoRoom
from tests.worlds.virtual_time import run_virtually


def applicant(name: str, size_bytes: int = 1, born_s: float = 0.0) -> Applicant:
    return Applicant(Caller(name), size_bytes, born_s)


CLIENT = Caller("client")


class Room:
    """Lets in whoever fits; ``full`` names clients that have their share."""

    def __init__(self, left: int, *full: str) -> None:
        self.left, self.full = left, full
        self.admitted: list[str] = []

    def __call__(self, one: Applicant) -> PeerBusy | None:
        if one.client.peer_id in self.full:
            return NoRoom("it has its share", 1, has_its_share=True)
        if one.size_bytes > self.left:
            return NoRoom("no room", one.size_bytes - self.left)
        self.left -= one.size_bytes
        self.admitted.append(one.client.peer_id)
        return None


def queue_of(*applicants: Applicant) -> RoomQueue:
    queue = RoomQueue()
    for one in applicants:
        queue.add(one)
    return queue


class TestRoomQueue:
    def test_first_come_first_served(self):
        queue = queue_of(*(applicant(name, 2) for name in "abc"))
        room = Room(4)
        queue.admit(room)
        assert (room.admitted, len(queue)) == (["a", "b"], 1)

    def test_nobody_overtakes_a_large_one(self):
        queue = queue_of(applicant("large", 9), applicant("small", 1))
        room = Room(8)
        queue.admit(room)
        assert room.admitted == []
        room.left = 10
        queue.admit(room)
        assert room.admitted == ["large", "small"]

    def test_the_oldest_first_whenever_it_comes(self):
        queue = queue_of(applicant("b", born_s=2.0), applicant("c", born_s=3.0), applicant("a", born_s=1.0))
        room = Room(3)
        queue.admit(room)
        assert room.admitted == ["a", "b", "c"]

    def test_those_who_have_their_share_are_passed_over(self):
        queue = queue_of(applicant("a"), applicant("b"), applicant("a"))
        room = Room(3, "a")
        queue.admit(room)
        assert (room.admitted, len(queue)) == (["b"], 2)

    def test_who_has_gone_is_forgotten(self):
        first, second = applicant("a"), applicant("b")
        queue = queue_of(first, second)
        queue.discard(first)
        queue.discard(first)
        room = Room(2)
        queue.admit(room)
        assert room.admitted == ["b"]


class TestVictims:
    def test_as_few_of_the_youngest_as_will_do(self):
        holders = [AdmittedSession((float(born), 0), 10) for born in (1, 2, 3, 4)]
        assert choose_victims(15, holders, (2.0, 0)) == [holders[3], holders[2]]
        assert choose_victims(10, holders, (2.0, 0)) == [holders[3]]

    def test_nobody_if_all_that_are_younger_would_not_do(self):
        holders = [AdmittedSession((float(born), 0), 10) for born in (1, 2, 3, 4)]
        assert choose_victims(21, holders, (2.0, 0)) == []
        assert choose_victims(1, holders, (4.0, 0)) == []

    def test_nobody_without_room_is_asked(self):
        holders = [AdmittedSession((1.0, 0), 10), AdmittedSession((2.0, 0), 0)]
        assert choose_victims(5, holders, (0.0, 0)) == holders[:1]

    @pytest.mark.parametrize("seed", range(20))
    def test_the_oldest_of_any_always_goes_on(self, seed):
        """However large the others are: it needs no more than the room."""
        chance = random.Random(seed)
        sizes = [chance.randint(0, 30) for _ in range(8)]
        holders = [AdmittedSession((chance.random(), number), size) for number, size in enumerate(sizes)]
        oldest = min(holders, key=lambda holder: holder.seniority)
        others = [holder for holder in holders if holder is not oldest]
        missing = chance.randint(1, max(1, sum(holder.size_bytes for holder in others)))
        victims = choose_victims(missing, others, oldest.seniority)
        assert sum(victim.size_bytes for victim in victims) >= missing
        assert all(victim.size_bytes for victim in victims)


pytestmark = pytest.mark.run_by(function=run_virtually)


class TestAdmission:
    """A room of 100 bytes."""

    def lease(self, size: int, wait_s: float = 0.0, born_s: float = 0.0, wanted: int = 0, **options: Any) -> Coroutine:
        return self.admission.lease(CLIENT, size, wanted, born_s, wait_s, **options)

    @pytest.fixture(autouse=True)
    def start(self):
        self.budget = CacheBudget(100, 1)
        self.admission = Admission(self.budget, 4)

    def test_what_never_fits_is_refused_at_once(self):
        with pytest.raises(PeerBusy, match="no room for 101 tokens in the KV cache, which has 100 in all"):
            run_virtually(self.lease(101, wait_s=1e6))

    async def test_who_does_not_wait_is_refused_while_others_do(self):
        first = await self.lease(60)
        waiting = asyncio.ensure_future(self.lease(50, wait_s=10.0))
        await asyncio.sleep(1.0)
        with pytest.raises(PeerBusy, match=r"no room for 1 more tokens .* 40 of 100 are left, and other sessions wait"):
            await self.lease(1, born_s=1.0)
        first.close()
        self.admission.left(CLIENT)
        (await waiting).close()

    async def test_the_wait_ends_with_the_reason(self):
        await self.lease(60)
        with pytest.raises(NoRoom, match=r"no room for 50 more tokens .* 40 of 100 are left"):
            await self.lease(50, wait_s=5.0)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert (len(self.admission), self.budget.bytes_left) == (0, 40)

    async def test_memory_that_comes_back_by_itself(self):
        """Nobody tells when a tensor dies."""
        owner = Applicant(CLIENT, 1, 0.0)
        lease = await self.lease(0)
        lease.take(60, owner)
        waiting = asyncio.ensure_future(self.lease(50, wait_s=10.0))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        del owner
        await waiting

    @pytest.mark.parametrize(("size", "wanted", "promised"), [(10, 30, 30), (10, 90, 50), (70, 90, 70), (20, 0, 20)])
    def test_spare_room_is_promised_up_to_half_of_all(self, size, wanted, promised):
        assert run_virtually(self.lease(size, wanted=wanted)).charged == promised

    async def test_too_many_sessions_wait_like_too_large_ones(self):
        leases = [await self.lease(1) for _ in range(3)]
        with pytest.raises(PeerBusy, match="has 3 of 4 sessions, 3 of them of this client"):
            await self.lease(1)
        await self.admission.lease(Caller("another"), 1, 0, 0.0, 0.0)
        with pytest.raises(PeerBusy, match="the server has 4 sessions already"):
            await self.admission.lease(Caller("a third"), 1, 0, 0.0, 0.0)
        self.admission.left(Caller("another"))
        waiting = asyncio.ensure_future(self.lease(1, wait_s=10.0))
        await asyncio.sleep(1.0)
        leases[0].close()
        self.admission.left(CLIENT)
        await waiting

    async def test_nobody_is_let_in_while_a_session_grows(self):
        with self.admission.growing():
            with pytest.raises(PeerBusy, match="other sessions wait"):
                await self.lease(1)
            waiting = asyncio.ensure_future(self.lease(1, wait_s=10.0))
            await asyncio.sleep(1.0)
            assert not waiting.done()
        await waiting

    @pytest.mark.parametrize("is_let_in", [False, True])
    async def test_who_goes_away_gives_back_what_it_has_got(self, is_let_in):
        first = await self.lease(60)
        waiting = asyncio.ensure_future(self.lease(50, wait_s=10.0))
        other = asyncio.ensure_future(self.lease(50, wait_s=10.0))
        await asyncio.sleep(1.0)
        if is_let_in:
            first.close()
            self.admission.left(CLIENT)
            self.admission._admit()  # as somebody else does who looks
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        first.close()
        if not is_let_in:
            self.admission.left(CLIENT)
        await other
        assert (len(self.admission), self.budget.bytes_left) == (0, 50)

    async def test_a_server_that_leaves_lets_nobody_wait(self):
        await self.lease(60)
        leaving = False

        def require() -> None:
            if leaving:
                raise PeerMoved("the server is leaving")

        waiting = asyncio.ensure_future(self.lease(50, wait_s=1e6, require=require))
        await asyncio.sleep(1.0)
        leaving = True
        with pytest.raises(PeerMoved):
            await waiting
        assert len(self.admission) == 0
