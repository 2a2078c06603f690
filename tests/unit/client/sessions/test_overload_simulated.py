"""Servers that have far more to do than they can: sessions stay where they are, and what stalls is still found."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.core.events import Event, Recovery
from swarm_client.sessions.opening import SessionOptions
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.session_state import SessionStep
from tests.unit.client.sessions.test_stalls_simulated import claim
from tests.worlds.servers import MODEL, NUM_BLOCKS, REVISION, Net, ToyScheduler, ToySession, model_output
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)


NUM_SERVERS, NUM_STREAMS, PROMPT, NUM_STEPS = 4, 40, 16, 2
TOKENS_PER_S, SLOWER = 100.0, 20.0  # announced; by which servers are slower than that
CAPACITY = NUM_SERVERS * TOKENS_PER_S / SLOWER  # positions per second


class SlowScheduler(ToyScheduler):
    """One compute thread, which gets as much of a processor as a token bucket lets through."""

    def __init__(self, *options: object) -> None:
        super().__init__(*options)  # type: ignore[arg-type]
        self._thread = asyncio.Lock()  # first come, first served

    async def _wait(self, session: ToySession, step: SessionStep) -> None:
        async with self._thread:
            for _ in session.blocks:
                await asyncio.sleep(step.inputs.hidden.shape[1] * SLOWER / TOKENS_PER_S / len(session.blocks))
                await self.computes.wait()
                self._counters.blocks_run += 1


class Overloaded:
    """Many streams of one client, all at once."""

    def __init__(self) -> None:
        self.net = Net(random.Random(0))
        self.net.new_scheduler = SlowScheduler  # type: ignore[assignment]
        self.recoveries: list[Recovery] = []

    async def run(self) -> float:
        """Seconds until all streams are done; what comes out is checked."""
        for number in range(NUM_SERVERS):
            claim(self.net.start(f"server{number}", Span(0, NUM_BLOCKS)), tokens_per_s=TOKENS_PER_S)
        swarm = Swarm(ClientConfig(), MODEL, REVISION, NUM_BLOCKS, dht=self.net, connect=self.net.connect_client)
        await swarm.connect()
        clock = asyncio.get_running_loop().time
        start_s = clock()
        await asyncio.gather(*(self._stream(swarm, number) for number in range(NUM_STREAMS)))
        seconds = clock() - start_s
        await swarm.close()
        return seconds

    def _note(self, event: Event) -> None:
        if isinstance(event, Recovery):
            self.recoveries.append(event)

    async def _stream(self, swarm: Swarm, number: int) -> None:
        session = RemoteSession(swarm, Span(0, NUM_BLOCKS), None, SessionOptions(40, on_event=self._note))
        row: list[float] = []
        for count in (PROMPT, *[1] * NUM_STEPS):
            new = [float(5 * number + len(row) + index) for index in range(count)]  # positions count from 0
            row += new
            output = await session.step_on_loop(BlockInput(torch.tensor([new])[..., None], None, None), 1)
        assert torch.equal(output, model_output([row])[:, -1:])
        await session._lanes[0].chain.close()


async def test_streams_of_servers_that_are_twenty_times_slower_stay_where_they_are() -> None:
    swarm = Overloaded()
    seconds = await swarm.run()
    assert not swarm.recoveries
    assert NUM_STREAMS * (PROMPT + NUM_STEPS) / seconds >= 0.8 * CAPACITY


async def test_one_that_stalls_beside_them_is_left_within_seconds() -> None:
    swarm = Overloaded()
    running = asyncio.ensure_future(swarm.run())
    await asyncio.sleep(20.0)
    stalled = swarm.net.servers["server0"]
    stalled.scheduler.computes.clear()
    num_sessions = stalled.host.num_sessions
    await asyncio.sleep(8.0)
    assert num_sessions > 0 == stalled.host.num_sessions
    await running
    assert [recovery.failed for recovery in swarm.recoveries] == [("server0",)] * num_sessions
