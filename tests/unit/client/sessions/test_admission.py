"""What a session does while servers are full: it waits in their queues, looks elsewhere, and gives up in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarm_client.core.background import now_s
from swarm_client.core.events import Event, Reporter, Waiting
from swarm_client.sessions.admission import AdmissionWait
from swarm_client.sessions.opening import Opener, Opening
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.hops import HopSession, Inbox
from swarm_protocol.errors import PeerBusy
from swarm_protocol.span import Span
from tests.worlds.fake_servers import NUM_BLOCKS, FakeServers, client_of
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)

ALL = Span(0, NUM_BLOCKS)
OPENING = Opening(batch_size=1, reserve_tokens=8)
SHORTAGE = PeerBusy("all are full", "a", ALL)
WAIT_S = 50.0


class Session:
    """What waits, and what it has reported."""

    def __init__(self, swarm: Swarm) -> None:
        self.events: list[Event] = []
        self.wait = AdmissionWait(swarm, Opener(swarm, Inbox()), Reporter(self.events.append))

    async def hops(self) -> list[HopSession]:
        return await self.wait.hops(ALL, OPENING, SHORTAGE)


@asynccontextmanager
async def admission(servers: FakeServers, **options: Any) -> AsyncIterator[Session]:
    async with client_of(servers, **{"wait_timeout_s": WAIT_S, **options}) as swarm:
        yield Session(swarm)


def names(hops: list[HopSession]) -> list[str]:
    return [hop.hop.server.peer_id for hop in hops]


async def later(delay_s: float, action: Callable[[], None]) -> None:
    await asyncio.sleep(delay_s)
    action()


@pytest.mark.parametrize(("after_s", "is_reported"), [(0.1, False), (3.0, True), (WAIT_S - 1.0, True)])
async def test_it_gets_room_when_its_turn_has_come(after_s: float, is_reported: bool) -> None:
    servers = FakeServers(a="0:3", b="3:6")
    async with admission(servers) as session:
        servers.fill("a")
        start_s = now_s()
        hops, _ = await asyncio.gather(session.hops(), later(after_s, servers.room["a"].set))
        assert names(hops) == ["a", "b"]
        assert now_s() - start_s == pytest.approx(after_s, abs=0.2)
        reasons = [event.reason for event in session.events if isinstance(event, Waiting)]
        assert reasons == ([str(SHORTAGE)] if is_reported else [])


@pytest.mark.parametrize("is_there_room", [False, True])
async def test_a_session_that_may_not_wait_fails_at_once_and_asks_nobody(is_there_room: bool) -> None:
    servers = FakeServers(a="0:6")
    async with admission(servers) as session:
        if not is_there_room:
            servers.fill("a")
        session.wait.may_wait = False
        start_s = now_s()
        for waiting in (session.wait.begin(SHORTAGE), session.hops()):
            with pytest.raises(PeerBusy) as caught:
                await waiting
            assert caught.value is SHORTAGE
        assert now_s() == start_s and not servers.calls and not session.events


async def test_the_time_is_for_all_waits_until_there_was_room() -> None:
    servers = FakeServers(a="0:6")
    async with admission(servers) as session:
        await session.wait.begin(SHORTAGE)
        await asyncio.sleep(WAIT_S)
        with pytest.raises(PeerBusy, match="all are full; waited 50 s"):
            await session.wait.begin(SHORTAGE)
        session.wait.over()
        await session.wait.begin(SHORTAGE)
        assert names(await session.hops()) == ["a"]
