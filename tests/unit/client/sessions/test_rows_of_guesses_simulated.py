"""Rows of guesses are given up where servers have no room or fail, and the text's own row stays."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_client.sessions.opening import SessionOptions
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import PeerBusy
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.unit.client.sessions.test_survival_simulated import run
from tests.worlds.servers import MODEL, NUM_BLOCKS, REVISION, Net, model_output

pytestmark = pytest.mark.run_by(function=run)
ROWS = 8
WHOLE_STEPS = 1 << 31  # prompts are not divided


class Text:
    """A session whose rows go on, and what one machine would have computed."""

    def __init__(self, swarm: Swarm, reserve_tokens: int = 0, **options: Any) -> None:
        self._chance = random.Random(0)
        self.swarm = swarm
        self.session = RemoteSession(swarm, Span(0, NUM_BLOCKS), None, SessionOptions(reserve_tokens, **options))
        self.rows: list[list[float]] = [[]]

    @property
    def hops(self) -> list[Any]:
        return list(self.session._lanes[0].chain.hops)

    async def write(self, count: int) -> None:
        positions = range(self.session.length, self.session.length + count)
        new = [[float(position and self._chance.randrange(100)) for position in positions] for _ in self.rows]
        output = await self.session.step_on_loop(BlockInput(torch.tensor(new)[..., None], None, None))
        self.rows = [[*row, *values] for row, values in zip(self.rows, new, strict=True)]
        assert torch.equal(output, model_output(self.rows)[:, -count:])

    async def guess(self, count: int) -> None:
        """As many guesses in several rows."""
        self.pick(*[0] * ROWS)
        with self.session.with_optional_rows():
            await self.write(count)

    def pick(self, *rows: int) -> None:
        self.session.reorder(torch.tensor(rows))
        self.rows = [self.rows[row] for row in rows]

    def only_one(self) -> None:
        """Of rows that are equal: the guesses were given up."""
        self.session.reorder(torch.tensor([0]))
        self.rows = self.rows[:1]

    async def end(self) -> None:
        await self.session.close_on_loop()
        await self.swarm.close()


async def client(net: Net, name: str = "client") -> Swarm:
    async def connect(record: ServerRecord, config: ClientConfig) -> ServerConnection:
        return ServerConnection(record, net.connect(name, record.peer_id), config)

    swarm = Swarm(ClientConfig(), MODEL, REVISION, NUM_BLOCKS, dht=net, connect=connect)
    await swarm.connect()
    return swarm


async def test_rows_without_room_are_refused_at_once_and_the_session_keeps_its_own():
    net = Net(random.Random(1))
    budget = net.start("server", Span(0, NUM_BLOCKS), WHOLE_STEPS, 300).budget
    other, events = Text(await client(net, "other")), []
    await other.write(140)
    text = Text(await client(net), on_event=events.append)
    await text.write(30)
    assert 10 < budget.tokens_left < 100
    hops, start_s = text.hops, now_s()
    with pytest.raises(PeerBusy):
        await text.guess(20)
    assert now_s() - start_s < 1.0  # of the simulation
    assert text.hops == hops and not events
    text.only_one()
    await text.write(3)
    assert text.hops == hops and text.session.stats.replayed_tokens == 0
    await other.write(1)
    await text.end()
    await other.end()


async def test_rows_of_guesses_take_room_for_what_is_new_in_them():
    net = Net(random.Random(1))
    budget = net.start("server", Span(0, NUM_BLOCKS), WHOLE_STEPS, 300).budget
    text = Text(await client(net))
    await text.write(30)
    await asyncio.sleep(1.0)
    other = Text(await client(net, "other"))
    await other.write(60)
    left = budget.tokens_left
    assert left < 30 * ROWS
    await text.guess(3)
    text.pick(5)
    await text.write(1)
    assert budget.tokens_left == left
    await other.write(1)
    assert other.session.stats.replayed_tokens == 0
    await text.end()
    await other.end()


async def killed_in_a_pass(text: Text, net: Net) -> None:
    """The last server, while it computes rows of guesses."""
    guessing = asyncio.ensure_future(text.guess(3))
    await asyncio.sleep(0.001)
    net.kill(text.hops[-1].hop.server.peer_id)
    await guessing


async def test_a_server_that_fails_in_the_midst_of_guesses_is_replaced_and_no_other():
    net = Net(random.Random(1))
    for name, span in (("a", Span(0, 3)), ("b", Span(3, 6)), ("c", Span(3, 6))):
        net.start(name, span, WHOLE_STEPS)
    text = Text(await client(net), 200)
    await text.write(100)
    await text.guess(3)
    text.pick(2)
    (rest,) = {"b", "c"} - {text.hops[-1].hop.server.peer_id}
    first = text.hops[0]
    await killed_in_a_pass(text, net)
    text.pick(5)
    await text.write(3)
    assert text.hops[0] is first and text.hops[-1].hop.server.peer_id == rest
    assert text.session.stats.recoveries == 1
    await text.end()


async def test_a_replica_takes_over_with_all_rows():
    net = Net(random.Random(1))
    for name, span in (("a", Span(0, 3)), ("a2", Span(0, 3)), ("b", Span(3, 6)), ("b2", Span(3, 6))):
        net.start(name, span, WHOLE_STEPS)
    text = Text(await client(net), 200, standby=True)
    await text.write(100)
    chain = text.session._lanes[0].chain
    while not all(map(chain._standby.of, chain.hops)):
        await asyncio.sleep(0.1)
    await killed_in_a_pass(text, net)
    assert len(text.rows) == ROWS
    assert text.session.stats.standbys_used == 1 and text.session.stats.replayed_tokens == 0
    await text.end()
