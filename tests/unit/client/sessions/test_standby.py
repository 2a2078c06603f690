"""Replicas of hops: made on other servers in the background, kept while they are of use, and handed over in step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm_client.core.background import now_s
from swarm_client.sessions.opening import Opener, Opening, Terms
from swarm_client.sessions.standby import StandbyReplicas
from swarm_client.transport.hops import HopSession, Inbox, Leaving
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from tests.worlds.fake_servers import NUM_BLOCKS, FakeCall, FakeServers, client_of, record
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)

ALL = Span(0, NUM_BLOCKS)
PROGRESS = pb.SessionProgress(number=7, length=20, batch_size=2)
LEAVES = pb.SessionReply(leaving=pb.Leaving())


class Session:
    """Two hops, a and b, and what makes replicas of them."""

    def __init__(self, servers: FakeServers, opener: Opener, hops: list[HopSession], replicas: StandbyReplicas) -> None:
        self.servers, self.opener, self.hops, self.replicas = servers, opener, hops, replicas
        self.num_notified = 0

    def call(self, hop: HopSession) -> FakeCall:
        (call,) = [call for call in self.servers.calls if call.request.session_key == hop.session_key]
        return call

    @property
    def ready(self) -> list[str | None]:
        """The servers of the replicas, by hop."""
        found = [self.replicas.of(hop) for hop in self.hops]
        return [None if replica is None else replica.hop.server.peer_id for replica in found]

    async def arranged(self) -> None:
        self.replicas.arrange()
        await asyncio.sleep(1.0)


@asynccontextmanager
async def standby(stand_by: bool = True, spares: tuple[str, ...] = ("a2", "b2")) -> AsyncIterator[Session]:
    servers = FakeServers(a="0:3", b="3:6")
    async with client_of(servers, view_max_age_s=1.0) as swarm:
        opener = Opener(swarm, Inbox())
        hops = await opener.open_span(ALL, Opening(batch_size=2, reserve_tokens=8), None)
        servers.progress.update({hop.session_key: PROGRESS for hop in hops})
        servers.records.update({name: record(name, "0:3" if name[0] == "a" else "3:6") for name in spares})
        await asyncio.sleep(2.0)  # until the client reads who is there again

        async def on_ready() -> None:
            session.num_notified += 1

        terms = Terms(None, 8)
        session = Session(servers, opener, hops, StandbyReplicas(hops, swarm, opener, terms, stand_by, on_ready))
        yield session


async def test_each_hop_gets_a_replica_on_another_server() -> None:
    async with standby() as session:
        first, last = session.hops
        await session.arranged()
        assert session.ready == ["a2", "b2"]
        requests = {call.peer_id: call.request for call in session.servers.calls}
        assert (requests["a2"].next, requests["b2"].next) == (last.as_next(), pb.NextHop())
        for hop in (first, last):
            replica = session.replicas.of(hop)
            assert (replica.span, replica.next_number) == (hop.span, hop.next_number)
            assert session.servers.progress[replica.session_key] == PROGRESS
            request = requests[replica.hop.server.peer_id]
            assert (request.batch_size, request.reserve_tokens, request.spare_tokens) == (2, PROGRESS.length, 0)
        await session.arranged()
        assert len(session.servers.calls) == 4  # no second one
        assert session.num_notified == 0


async def test_otherwise_only_hops_whose_servers_leave_get_one() -> None:
    async with standby(stand_by=False) as session:
        await session.arranged()
        assert session.ready == [None, None]
        session.call(session.hops[0]).say(LEAVES)
        await asyncio.sleep(0.1)
        await session.arranged()
        assert session.ready == ["a2", None] and session.num_notified == 1


async def test_it_is_made_as_soon_as_there_is_another_server() -> None:
    async with standby(spares=()) as session:
        await session.arranged()
        assert session.ready == [None, None]
        session.servers.records["b2"] = record("b2", "3:6")
        await asyncio.sleep(5.0)
        assert session.ready == [None, "b2"]


async def test_one_that_could_not_be_filled_is_made_again() -> None:
    async with standby(spares=("a2",)) as session:
        session.servers.copy_failures = 1
        await session.arranged()
        await asyncio.sleep(5.0)
        assert session.ready == ["a2", None]
        assert [call.cancelled for call in session.servers.calls if call.peer_id == "a2"] == [True, False]


async def test_one_that_says_anything_is_of_no_use_any_more() -> None:
    async with standby() as session:
        await session.arranged()
        replica = session.replicas.of(session.hops[0])
        session.replicas.handle(Leaving(session.hops[1].number))
        assert session.ready == ["a2", "b2"]  # that was no replica
        session.replicas.handle(Leaving(replica.number))
        assert session.ready == [None, "b2"] and session.call(replica).cancelled


@pytest.mark.parametrize("after_s", [0.0, 0.0015, 0.0025, 1.0])
async def test_those_of_hops_that_are_gone_are_dropped_made_or_not(after_s: float) -> None:
    async with standby() as session:
        session.replicas.arrange()
        await asyncio.sleep(after_s)
        session.replicas.drop(session.hops)
        await asyncio.sleep(5.0)
        assert session.ready == [None, None]
        assert all(call.cancelled for call in session.servers.calls[2:])
        assert not any(call.cancelled for call in session.servers.calls[:2])


# ---------------------------------------------------------------- handing over


async def test_it_takes_over_once_it_has_all_that_the_hop_has() -> None:
    async with standby() as session:
        await session.arranged()
        hop, progress = session.hops[0], session.servers.progress
        key = session.replicas.of(hop).session_key
        progress[key] = pb.SessionProgress(number=6, length=19, batch_size=2)
        start_s = now_s()
        catching_up = asyncio.ensure_future(session.replicas.catch_up(hop))
        await asyncio.sleep(1.0)
        assert not catching_up.done()
        progress[key] = PROGRESS
        assert await catching_up == PROGRESS.length
        assert now_s() - start_s == pytest.approx(1.0, abs=0.1)
        assert session.ready[0] == "a2" and key not in session.servers.nexts  # it sends to the right one already


async def test_it_sends_where_the_hop_does_by_now() -> None:
    async with standby() as session:
        await session.arranged()
        hop, replica = session.hops[0], session.replicas.of(session.hops[0])
        session.hops[1] = after = session.replicas.take(session.hops[1])
        assert await session.replicas.catch_up(hop) == PROGRESS.length
        assert session.servers.nexts == {replica.session_key: after.as_next().push_key}
        assert replica.next_number == after.number


async def test_one_that_never_catches_up_is_dropped() -> None:
    async with standby() as session:
        await session.arranged()
        hop, replica = session.hops[0], session.replicas.of(session.hops[0])
        session.servers.progress[replica.session_key] = pb.SessionProgress(number=6, length=19, batch_size=2)
        start_s = now_s()
        assert await session.replicas.catch_up(hop) is None
        assert now_s() - start_s == pytest.approx(5.0, abs=0.1)
        assert session.ready == [None, "b2"] and session.call(replica).cancelled
