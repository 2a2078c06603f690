"""Servers that answer everything but steps: they cost seconds, however many they are and whatever they say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.sessions.opening import SessionOptions
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.constants import FIRST_STEP
from tests.marks import SLOW
from tests.unit.client.sessions.test_survival_simulated import Quiet, quiet, run
from tests.worlds.servers import MODEL, NUM_BLOCKS, REVISION, Context, Net, ToyServer

pytestmark = pytest.mark.run_by(function=run)

WHOLE = "0:6"
Says = Callable[[int], pb.SessionProgress]  # how far a session is, by how often that was asked
SILENT: Says = lambda _asked: pb.SessionProgress()  # noqa: E731
DONE: Says = lambda _asked: pb.SessionProgress(number=2**63)  # noqa: E731
CREEPS: Says = lambda asked: pb.SessionProgress(number=FIRST_STEP - 1 + asked)  # noqa: E731
BUSY: Says = lambda asked: pb.SessionProgress(computed=asked, num_batches=1, num_waiting=1)  # noqa: E731


class Staller:
    """A service that takes sessions and steps, says what it likes, and computes nothing."""

    def __init__(self, honest: Any, says: Says, chatters: bool) -> None:
        self._honest = honest
        self._says, self._chatters = says, chatters
        self._asked = 0
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    async def Session(self, requests: AsyncIterator[Any], context: Context) -> None:
        await context.write(pb.SessionReply(opened=pb.Opened(max_step_tokens=1 << 31)))
        chatting = asyncio.ensure_future(self._chat(context))
        try:
            async for request in requests:
                self.num_steps += request.HasField("step")
        finally:
            chatting.cancel()

    async def Progress(self, _request: pb.ProgressRequest, _context: Context) -> pb.SessionProgress:
        self._asked += 1
        return self._says(self._asked)

    async def Reroute(self, _requests: Any, _context: Context) -> pb.SessionProgress:
        return self._says(self._asked)

    async def Push(self, requests: AsyncIterator[Any], _context: Context) -> None:
        async for _ in requests:
            pass

    async def _chat(self, context: Context) -> None:
        """Whatever is no answer."""
        while self._chatters:
            await asyncio.sleep(0.3)
            await context.write(pb.SessionReply(leaving=pb.Leaving()))
            await context.write(pb.SessionReply(output=pb.Output(number=FIRST_STEP + 10**6)))


def claim(server: ToyServer, **fields: float) -> None:
    record = replace(server.record(), **fields)
    server.record = lambda: record


def stall(net: Net, name: str, span: str = WHOLE, says: Says = SILENT, chatters: bool = False) -> Staller:
    """Such a server, which claims to be far faster than others."""
    server = net.start(name, Span.parse(span))
    claim(server, tokens_per_s=1000.0)
    server.service = staller = Staller(server.service, says, chatters)
    return staller


class Beside(Quiet):
    """A client of honest servers ``spans``, and of others that the test adds."""

    async def beside(self, *spans: str, **options: Any) -> Swarm:
        for number, span in enumerate(spans):
            claim(self.net.start(f"honest{number}", Span.parse(span)), tokens_per_s=5.0)
        config = ClientConfig(**options)
        self.swarm = Swarm(config, MODEL, REVISION, NUM_BLOCKS, dht=self.net, connect=self.net.connect_client)
        await self.swarm.connect()
        self.close = self.swarm.close
        return self.swarm

    def new_session(self) -> RemoteSession:
        self.rows = []
        self.session = RemoteSession(
            self.swarm, Span(0, NUM_BLOCKS), None, SessionOptions(40, on_event=self.events.append)
        )
        return self.session

    async def seconds(self, session: RemoteSession, *new: list[float]) -> float:
        """That adding these values takes; what comes out is checked."""
        start_s = asyncio.get_running_loop().time()
        await self.extend(session, *new)
        return asyncio.get_running_loop().time() - start_s


def beside(seed: int = 0) -> AbstractAsyncContextManager[Beside]:
    return quiet(seed, Beside)


@pytest.mark.parametrize("spans", [(WHOLE,), pytest.param(("0:3", "3:6"), marks=SLOW)], ids=["whole", "halves"])
@pytest.mark.parametrize("chatters", [False, True], ids=["quiet", "chattering"])
@pytest.mark.parametrize("says", [SILENT, DONE, CREEPS, BUSY], ids=["silent", "done", "creeping", "busy"])
async def test_forty_servers_that_compute_nothing_cost_seconds(
    says: Says, chatters: bool, spans: tuple[str, ...]
) -> None:
    async with beside() as swarm:
        await swarm.beside(*spans)
        stallers = [stall(swarm.net, f"s{n}", spans[n % len(spans)], says, chatters) for n in range(40)]
        session = swarm.new_session()
        assert await swarm.seconds(session, [1.0, 2.0, 3.0]) < (60 if says is BUSY else 30)
        assert all(name.startswith("honest") for name in swarm.hops(session))
        for value in range(5):
            assert await swarm.seconds(session, [float(value)]) < 1
        num_steps = sum(staller.num_steps for staller in stallers)
        assert num_steps > len(stallers) / 2  # some in earnest, all others on trial
        await session._lanes[0].chain.close()
        assert await swarm.seconds(swarm.new_session(), [4.0, 5.0]) < 1  # the client has learned whom to take
        assert sum(staller.num_steps for staller in stallers) == num_steps


@pytest.mark.parametrize("says", [SILENT, DONE], ids=["silent", "done"])
@pytest.mark.parametrize("span", ["0:3", "3:6"])
async def test_a_server_that_stalls_in_the_middle_is_replaced_from_the_journal(span: str, says: Says) -> None:
    async with beside() as swarm:
        await swarm.beside("0:3", "3:6", "0:3", "3:6")
        session = swarm.new_session()
        for value in range(3):
            await swarm.extend(session, [float(value)])
        (victim,) = [hop for hop in session._lanes[0].chain.hops if str(hop.span) == span]
        server = swarm.net.servers[victim.hop.server.peer_id]
        server.scheduler.computes.clear()
        if says is DONE:
            server.service.Progress = Staller(server.service, says, False).Progress
        assert await swarm.seconds(session, [7.0]) < 20
        assert server.name not in swarm.hops(session)
        assert await swarm.seconds(session, [8.0]) < 1
        assert any(re.search("did not finish a step within|does not answer", str(event)) for event in swarm.events)
        server.scheduler.computes.set()


async def test_the_only_server_is_waited_for() -> None:
    async with beside() as swarm:
        await swarm.beside(WHOLE, step_timeout_s=100.0)
        session = swarm.new_session()
        await swarm.extend(session, [1.0])
        scheduler = swarm.net.servers["honest0"].scheduler
        scheduler.computes.clear()
        asyncio.get_running_loop().call_later(60.0, scheduler.computes.set)
        assert 59 < await swarm.seconds(session, [2.0]) < 62
        assert session.stats.recoveries == 0


async def test_when_all_are_slow_for_a_while_that_costs_a_replay_and_not_the_generation() -> None:
    async with beside() as swarm:
        await swarm.beside(WHOLE, WHOLE, WHOLE)
        session = swarm.new_session()
        await swarm.extend(session, [1.0, 2.0])
        for server in swarm.net.servers.values():
            server.scheduler.computes.clear()
            asyncio.get_running_loop().call_later(25.0, server.scheduler.computes.set)
        assert await swarm.seconds(session, [3.0]) < 40
        assert 1 <= session.stats.recoveries <= 4
        await swarm.extend(session, [4.0])


async def test_steps_that_take_long_by_the_record_are_waited_for() -> None:
    """A prompt on a slow server takes no alarm, though another server could take over."""
    async with beside() as swarm:
        await swarm.beside(WHOLE, WHOLE)
        for server in swarm.net.servers.values():
            claim(server, forward_tokens_per_s=4.0)  # 4 s for 16 tokens, a step
            server.scheduler.computes.clear()
            asyncio.get_running_loop().call_later(30.0, server.scheduler.computes.set)
        session = swarm.new_session()
        assert await swarm.seconds(session, list(map(float, range(40)))) < 32
        assert session.stats.recoveries == 0


@pytest.mark.parametrize(
    ("others_go_on", "held_s", "seconds"),
    [(False, 20.0, 6), (True, 18.0, 18), (True, 1000.0, 23)],
    ids=["stalled", "busy", "unfair"],
)
async def test_a_server_that_computes_for_others_meanwhile_is_busy(
    others_go_on: bool, held_s: float, seconds: float
) -> None:
    """It keeps one step, though another server could take over; but not when many that came later are done."""
    async with beside() as swarm:
        await swarm.beside(WHOLE, WHOLE)
        claim(swarm.net.servers["honest1"], tokens_per_s=0.5)
        await swarm.swarm.view(0)
        other, session = swarm.new_session(), swarm.new_session()
        await swarm.extend(session, [1.0])
        server = swarm.net.servers["honest0"]
        (held,) = (hosted.session for hosted in server.host._sessions.values())
        server.scheduler.held_s = lambda session: held_s if session is held else 0.0
        inputs = BlockInput(torch.zeros(1, 1, 1), None, None)

        async def step_others() -> None:
            while others_go_on:
                await other.step_on_loop(inputs)
                await asyncio.sleep(1.0)

        others = asyncio.ensure_future(step_others())
        assert seconds - 2 < await swarm.seconds(session, [2.0]) < seconds + 2
        others.cancel()
        assert session.stats.recoveries == (0 if seconds == held_s else 1)
        for lane in other._lanes:
            await lane.chain.close()
