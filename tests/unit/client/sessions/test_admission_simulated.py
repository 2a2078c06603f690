"""Many sessions in servers with room for few: each of them finishes, and writes what one machine computes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.sessions.opening import SessionOptions
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import NoRoute, PeerBusy, RecoveryFailed
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.marks import in_tiers
from tests.unit.client.sessions.test_survival_simulated import Scenario, run
from tests.worlds.servers import MODEL, NUM_BLOCKS, REVISION, model_output, offset

pytestmark = pytest.mark.run_by(function=run)

SEEDS_PER_TEST, TESTS = 3, 1
SLOW_SEEDS_PER_TEST, SLOW_TESTS, LONG_TESTS = 40, 1, 8
LEAST_ROOM, MOST_ROOM = 50, 80  # of a server, over all rows
MOST_ROWS, MOST_TOKENS = 2, 25  # of a session, which any server has room for, if it is the only one


class Writer:
    """A session of ``rows`` rows that is extended until it has so many positions."""

    def __init__(self, swarm: Swarm, chance: random.Random, num_rows: int, length: int, reserve: int) -> None:
        self._chance, self._length = chance, length
        self._rows: list[list[float]] = [[] for _ in range(num_rows)]
        self.session = RemoteSession(swarm, Span(0, NUM_BLOCKS), None, SessionOptions(reserve))

    async def extend(self, count: int) -> None:
        """Adds positions, and checks what comes out; if it fails, the session is as it was."""
        start = self.session.length
        rows = [[*row, *(float(self._chance.randrange(100)) for _ in range(count))] for row in self._rows]
        offsets = torch.tensor(list(map(offset, rows)))
        positions = torch.arange(start, start + count) + offsets[:, None]
        new = torch.tensor([row[start:] for row in rows])[..., None]
        output = await self.session.step_on_loop(BlockInput(new, None, positions))
        self._rows = rows
        assert torch.equal(output, model_output(rows)[:, start:])

    async def write(self, interrupts: bool) -> None:
        while (left := self._length - self.session.length) > 0:
            await asyncio.sleep(self._chance.choice([0.0, 0.0, 0.05, 1.0]))
            step = asyncio.ensure_future(self.extend(min(left, self._chance.choice([1, 1, 1, 2, 7]))))
            if interrupts and self._chance.random() < 0.1:  # the user presses Ctrl-C
                await asyncio.wait([step], timeout=2 * self._chance.random())
                step.cancel()
            try:
                await step
            except (NoRoute, PeerBusy, RecoveryFailed, asyncio.CancelledError):
                if not interrupts:
                    raise
                await asyncio.sleep(1.0)
        await self.session._lanes[0].chain.close()


class Crowd(Scenario):
    """Several clients at once. ``faults``: servers fail meanwhile, and users stop waiting."""

    def __init__(self, seed: int, faults: bool) -> None:
        super().__init__(seed)
        self.with_faults = faults
        self.swarms: list[Swarm] = []

    def start_server(self, name: str, span: Span) -> None:
        self.net.start(name, span, self.chance.choice([4, 16, 1 << 31]), self.chance.randint(LEAST_ROOM, MOST_ROOM))

    async def client(self, name: str, wait_timeout_s: float, **options: Any) -> Swarm:
        config = ClientConfig(wait_timeout_s=wait_timeout_s, step_timeout_s=20.0, **options)

        async def connect(record: ServerRecord, config: ClientConfig) -> ServerConnection:
            await asyncio.sleep(0.001)
            return ServerConnection(record, self.net.connect(name, record.peer_id), config)

        swarm = Swarm(config, MODEL, REVISION, NUM_BLOCKS, dht=self.net, connect=connect)
        await swarm.connect()
        self.swarms.append(swarm)
        return swarm

    async def run(self) -> list[RemoteSession]:
        chance = self.chance
        for replica in range(chance.randint(1, 2)):
            cuts = sorted(chance.sample(range(1, NUM_BLOCKS), chance.randint(0, 2)))
            for start, end in zip([0, *cuts], [*cuts, NUM_BLOCKS], strict=True):
                self.start_server(f"{replica}:{start}", Span(start, end))
        one_address = chance.random() < 0.5
        writers = []
        for number in range(chance.randint(4, 8)):
            # Only those who try again stop waiting soon.
            swarm = await self.client(
                "client" if one_address else f"client{number}",
                wait_timeout_s=5.0 if self.with_faults and chance.random() < 0.3 else 10_000.0,
                recovery_timeout_s=300.0,
            )
            length = chance.randint(10, MOST_TOKENS)
            reserve = chance.choice([0, 0, 0, length])
            writers.append(Writer(swarm, chance, chance.randint(1, MOST_ROWS), length, reserve))
        writing = asyncio.gather(*(writer.write(self.with_faults) for writer in writers))
        trouble = asyncio.ensure_future(self.make_trouble(writers[0].session)) if self.with_faults else None
        await asyncio.sleep(20.0)
        if trouble is not None:
            trouble.cancel()
            await asyncio.gather(*self.faults)
        await writing
        await self.end()
        return [writer.session for writer in writers]

    async def end(self) -> None:
        await asyncio.sleep(20.0)
        for swarm in self.swarms:
            await swarm.close()
        for server in self.net.servers.values():
            assert server.host.num_sessions == 0
            assert server.budget.tokens_left == server.budget.capacity_bytes


def simulate(seed: int, faults: bool) -> list[RemoteSession]:
    try:
        return run(Crowd(seed, faults).run())
    except BaseException as error:
        error.args = (*error.args, f"seed {seed}, faults {faults}")
        raise


def check(first_seed: int, count: int, faults: bool) -> None:
    seeds = range(first_seed, first_seed + count)
    stats = [session.stats for seed in seeds for session in simulate(seed, faults)]
    assert sum(stats.waits for stats in stats) > count
    assert sum(stats.replayed_tokens for stats in stats) > count  # of sessions that had to give way


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("number", range(TESTS))
def test_all_finish(number, faults):
    check(number * SEEDS_PER_TEST, SEEDS_PER_TEST, faults)


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("number", in_tiers(SLOW_TESTS, LONG_TESTS))
def test_all_finish_at_length(number, faults):
    check(10**6 + number * SLOW_SEEDS_PER_TEST, SLOW_SEEDS_PER_TEST, faults)


# ------------------------------------------------------------ one thing at a time


class Quiet(Crowd):
    """One server for each half of the blocks, both of one room."""

    def __init__(self, room: int = 60) -> None:
        super().__init__(0, faults=False)
        for name, span in (("a", "0:3"), ("b", "3:6")):
            self.net.start(name, Span.parse(span), capacity=room)

    async def writer(self, reserve: int, wait_timeout_s: float = 100.0, num_rows: int = 1) -> Writer:
        swarm = await self.client("client", wait_timeout_s)
        return Writer(swarm, self.chance, num_rows, 0, reserve)

    async def until_waiting(self, writer: Writer) -> None:
        while not writer.session.stats.waits:
            await asyncio.sleep(0.01)

    @property
    def nobody_waits(self) -> bool:
        return all(len(server.host.admission) == 0 for server in self.net.servers.values())


@asynccontextmanager
async def quiet(**options: Any) -> AsyncIterator[Quiet]:
    swarm = Quiet(**options)
    yield swarm
    await swarm.end()


async def test_a_session_waits_its_turn_and_small_ones_do_not_overtake_a_large_one():
    async with quiet() as swarm:
        order: list[str] = []
        first = await swarm.writer(40)
        await first.extend(1)

        async def take_a_turn(name: str, reserve: int) -> asyncio.Task:
            writer = await swarm.writer(reserve)
            task = asyncio.ensure_future(self_closing(writer, name))
            await swarm.until_waiting(writer)
            return task

        async def self_closing(writer: Writer, name: str) -> None:
            await writer.extend(1)
            order.append(name)
            await asyncio.sleep(1.0)
            await writer.session._lanes[0].chain.close()

        tasks = [await take_a_turn(name, size) for name, size in (("large", 55), ("small", 10), ("tiny", 1))]
        await asyncio.sleep(10.0)
        assert order == []  # though the small ones would fit
        await first.session._lanes[0].chain.close()
        await asyncio.gather(*tasks)
        assert order[0] == "large" and sorted(order[1:]) == ["small", "tiny"]
        assert swarm.nobody_waits


async def test_who_waits_too_long_gets_an_error_and_goes_on_later():
    async with quiet() as swarm:
        first, second = await swarm.writer(10), await swarm.writer(0, wait_timeout_s=5.0)
        await second.extend(3)
        await second.session._lanes[0].chain.close()
        await first.extend(50)
        with pytest.raises(PeerBusy, match=r"no room for .* more tokens in the KV cache: .*; waited 5 s for room") as e:
            await second.extend(20)
        assert e.value.peer_id in "ab"
        assert swarm.nobody_waits and second.session.length == 3
        await first.session._lanes[0].chain.close()
        await second.extend(20)
        assert second.session.stats.waits == 1
        await second.session._lanes[0].chain.close()


async def test_who_stops_waiting_leaves_the_queue():
    async with quiet() as swarm:
        first, second = await swarm.writer(60), await swarm.writer(50)
        await first.extend(1)
        waiting = asyncio.ensure_future(second.extend(1))
        await swarm.until_waiting(second)
        assert not swarm.nobody_waits
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(1.0)
        assert swarm.nobody_waits
        await first.session._lanes[0].chain.close()


async def test_what_can_never_fit_is_refused_at_once():
    async with quiet() as swarm:
        writer = await swarm.writer(61, wait_timeout_s=10_000.0)
        start_s = asyncio.get_running_loop().time()
        with pytest.raises(PeerBusy, match="no room for 61 tokens in the KV cache, which has 60 in all"):
            await writer.extend(1)
        assert asyncio.get_running_loop().time() - start_s < 1.0
        assert writer.session.stats.waits == 0


async def test_the_youngest_gives_way_and_goes_on_when_an_older_one_has_finished():
    async with quiet() as swarm:
        old, young = await swarm.writer(10), await swarm.writer(10)
        await old.extend(20)
        await young.extend(20)
        await old.extend(25)  # no room for both
        going_on = asyncio.ensure_future(young.extend(15))
        await swarm.until_waiting(young)
        await old.extend(10)
        assert old.session.stats.recoveries == 0
        await old.session._lanes[0].chain.close()
        await going_on
        assert young.session.stats.replayed_tokens == 20
        await young.session._lanes[0].chain.close()


async def test_two_that_hold_what_the_other_needs_do_not_wait_for_one_another():
    """Each has been let in first by one of the servers."""

    async def late(open_: Any, name: str, request: Any, *arguments: Any) -> Any:
        first = request.session_key[0] % 2 == (name == "a")
        await asyncio.sleep(0.0 if first else 0.02)
        return await open_(request, *arguments)

    async def finish(writer: Writer) -> None:
        for _ in range(50):
            await writer.extend(1)
        await writer.session._lanes[0].chain.close()

    async with quiet() as swarm:
        for server in swarm.net.servers.values():
            server.host.open = partial(late, server.host.open, server.name)
        writers = [await swarm.writer(0), await swarm.writer(0)]
        await asyncio.gather(*(finish(writer) for writer in writers))


async def test_a_server_that_comes_while_others_wait_is_taken():
    async with quiet() as swarm:
        first, second = await swarm.writer(60), await swarm.writer(60, wait_timeout_s=1000.0)
        await first.extend(1)
        waiting = asyncio.ensure_future(second.extend(1))
        await swarm.until_waiting(second)
        swarm.net.start("c", Span(0, NUM_BLOCKS), capacity=60)
        await waiting
        assert [hop.server.peer_id for hop in second.session.hops] == ["c"]
        assert swarm.nobody_waits
        for writer in (first, second):
            await writer.session._lanes[0].chain.close()
