"""Servers fail, hang, lie, fill up and leave in many orders: what comes out is what one machine computes."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.core.events import Event
from swarm_client.sessions.opening import SessionOptions
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.errors import NoRoute, PeerBusy, RecoveryFailed, RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.marks import in_tiers
from tests.worlds.servers import MODEL, NUM_BLOCKS, REVISION, Net, additions_to, model_output, offset
from tests.worlds.virtual_time import run_virtually

run = partial(run_virtually, limit_s=100_000)
pytestmark = pytest.mark.run_by(function=run)

SEEDS_PER_TEST, TESTS = 5, 1
SLOW_SEEDS_PER_TEST, SLOW_TESTS, LONG_TESTS = 50, 1, 20


class Scenario:
    """A session that lives through faults, and what one machine would have computed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.net = Net(self.chance)
        self.sees = seed % 3 == 0
        self.rows: list[list[float]] = []
        self.faults: set[asyncio.Task] = set()
        self.events: list[Event] = []
        self.most_faults = self.chance.choice([1, 1, 2, 4])  # at a time
        self.all_honest = self.chance.random() < 0.5

    async def run(self) -> RemoteSession:
        chance = self.chance
        for replica in range(chance.randint(2, 3)):
            cuts = sorted(chance.sample(range(1, NUM_BLOCKS), chance.randint(0, 3)))
            for start, end in zip([0, *cuts], [*cuts, NUM_BLOCKS], strict=True):
                self.start_server(f"{replica}:{start}", Span(start, end))
        config = ClientConfig(recovery_timeout_s=chance.choice([3.0, 300.0]), step_timeout_s=20.0)
        swarm = Swarm(config, MODEL, REVISION, NUM_BLOCKS, dht=self.net, connect=self.net.connect_client)
        await swarm.connect()
        session = RemoteSession(
            swarm,
            Span(0, NUM_BLOCKS),
            None,
            SessionOptions(40, standby=chance.random() < 0.4, on_event=self.events.append),
        )
        trouble = asyncio.ensure_future(self.make_trouble(session))
        for _ in range(chance.randint(5, 20)):
            await asyncio.sleep(chance.choice([0.0, 0.0, 0.1, 2.0]))
            await self.one_call(session)
        trouble.cancel()
        await asyncio.gather(*self.faults)
        await self.one_call(session)  # once all is well again
        await session._lanes[0].chain.close()
        await asyncio.sleep(20.0)
        await swarm.close()
        if self.all_honest:  # nobody was sent anything that did not fit
            assert not any(re.search("what is wrong|another shape", str(event)) for event in self.events)
        for server in self.net.servers.values():
            assert server.host.num_sessions == 0
            assert server.budget.tokens_left == server.budget.capacity_bytes
        return session

    def start_server(self, name: str, span: Span) -> None:
        roomy = name.startswith("0")  # somebody has room for everything
        capacity = 10**6 if roomy else self.chance.choice([60, 10**6])
        self.net.start(name, span, self.chance.choice([4, 16, 1 << 31]), capacity)

    # ------------------------------------------------------------ what the user does

    async def one_call(self, session: RemoteSession) -> None:
        """Changes rows, and adds to them; a call that fails is made again."""
        chance = self.chance
        if self.rows and chance.random() < 0.2:
            removed = chance.randint(0, min(5, len(self.rows[0]) - 1))
            session.crop(removed)
            self.rows = [row[: len(row) - removed] for row in self.rows]
        if self.rows and chance.random() < 0.25:
            indices = [chance.randrange(len(self.rows)) for _ in range(chance.randint(1, 3))]
            session.reorder(torch.tensor(indices))
            self.rows = [list(self.rows[i]) for i in indices]
        if not self.rows:
            self.rows = [[] for _ in range(chance.randint(1, 3))]
        count = chance.choice([1, 1, 1, 2, 7, 40])
        new = [[float(chance.randrange(100)) for _ in range(count)] for _ in self.rows]
        start = len(self.rows[0])
        offsets = torch.tensor([offset([*row, *added]) for row, added in zip(self.rows, new, strict=True)])
        positions = torch.arange(start, start + count) + offsets[:, None]
        added = additions_to(new) if self.sees else None
        inputs = BlockInput(torch.tensor(new)[..., None], None, positions, additions=added)
        wanted = chance.choice([1, count])
        while True:
            step = asyncio.ensure_future(session.step_on_loop(inputs, wanted))
            if chance.random() < 0.1:  # the user presses Ctrl-C
                await asyncio.wait([step], timeout=0.3 * chance.random())
                step.cancel()
            try:
                output = await step
                break
            except (NoRoute, PeerBusy, RecoveryFailed, asyncio.CancelledError):
                assert session.length == start
                await asyncio.sleep(1.0)
        self.rows = [[*row, *added] for row, added in zip(self.rows, new, strict=True)]
        assert torch.equal(output, model_output(self.rows, self.sees)[:, -wanted:])
        assert session.length == start + count

    # ------------------------------------------------------------ what happens to servers

    async def make_trouble(self, session: RemoteSession) -> None:
        """Most of it where it hurts."""
        faults: list[Callable] = [self.crash, self.crash, self.hang, self.wall, self.outage, self.leave]
        if not self.all_honest:
            faults.append(self.lie)
        while True:
            await asyncio.sleep(0.002 + self.chance.choice([0.01, 0.05, 0.5]) * self.chance.random())
            if len(self.faults) < self.most_faults:
                name = self.chance.choice(sorted(self.net.servers))
                if session._lanes[0].chain.hops and self.chance.random() < 0.7:
                    name = self.chance.choice(session._lanes[0].chain.hops).hop.server.peer_id
                task = asyncio.ensure_future(self.chance.choice(faults)(name))
                self.faults.add(task)
                task.add_done_callback(self.faults.discard)

    async def pause(self, most_s: float) -> None:
        await asyncio.sleep(self.chance.random() * most_s)

    async def crash(self, name: str) -> None:
        """kill -9; later a new process with the same identity, which knows nothing."""
        server = self.net.servers[name]
        self.net.kill(name)
        await self.pause(5.0)
        if self.net.servers[name] is server:
            self.start_server(name, server.span)

    async def hang(self, name: str) -> None:
        """SIGSTOP; afterwards everything arrives that was sent meanwhile."""
        server = self.net.servers[name]
        server.awake.clear()
        await self.pause(8.0)
        server.awake.set()

    async def wall(self, name: str) -> None:
        """Two servers cannot reach each other for a while."""
        other = self.chance.choice(sorted(self.net.servers))
        await self.cut(name, other)

    async def outage(self, name: str) -> None:
        """The client loses a server for a while."""
        await self.cut("client", name)

    async def cut(self, one: str, other: str) -> None:
        self.net.cut(one, other)
        await self.pause(4.0)
        self.net.walls.discard(frozenset((one, other)))

    async def lie(self, name: str) -> None:
        """Outputs that are not finite, or of another shape."""
        engine = self.net.servers[name].engine
        others = [lambda output: output * float("nan"), lambda output: output[:, :, [0, 0]].flatten(2)]
        engine.spoils = self.chance.choice(others)
        await self.pause(0.3)
        engine.spoils = None

    async def leave(self, name: str) -> None:
        """SIGTERM; it ends when its sessions have moved, or after a while."""
        server = self.net.servers[name]
        if server.alive and server.awake.is_set():
            await server.host.leave(self.chance.random() * 5)
            if self.net.servers[name] is server:
                await self.crash(name)


def simulate(seed: int) -> RemoteSession:
    try:
        return run(Scenario(seed).run())
    except BaseException as error:
        error.args = (*error.args, f"seed {seed}")
        raise


def check(first_seed: int, count: int) -> None:
    sessions = [simulate(seed) for seed in range(first_seed, first_seed + count)]
    assert sum(session.stats.recoveries for session in sessions) > count
    assert sum(session.stats.replayed_tokens for session in sessions) > count


@pytest.mark.parametrize("number", range(TESTS))
def test_outputs_are_those_of_one_machine_whatever_happens(number):
    check(number * SEEDS_PER_TEST, SEEDS_PER_TEST)


@pytest.mark.parametrize("number", in_tiers(SLOW_TESTS, LONG_TESTS))
def test_outputs_are_those_of_one_machine_whatever_happens_at_length(number):
    check(10**6 + number * SLOW_SEEDS_PER_TEST, SLOW_SEEDS_PER_TEST)


# ------------------------------------------------------------ one fault at a time


class Quiet(Scenario):
    """Two servers in a chain, each with a spare; nothing happens by itself."""

    async def started(self, max_positions: int | None = None, cut: int = 3, **options) -> RemoteSession:
        for name, span in (("a", f"0:{cut}"), ("b", f"{cut}:6"), ("a2", f"0:{cut}"), ("b2", f"{cut}:6")):
            self.net.start(name, Span.parse(span))
        config = ClientConfig(recovery_timeout_s=5.0, **options)
        swarm = Swarm(config, MODEL, REVISION, NUM_BLOCKS, dht=self.net, connect=self.net.connect_client)
        await swarm.connect()
        self.session = RemoteSession(
            swarm, Span(0, NUM_BLOCKS), max_positions, SessionOptions(40, on_event=self.events.append)
        )
        self.close = swarm.close
        return self.session

    async def extend(self, session: RemoteSession, *new: list[float]) -> None:
        """Adds a list of values to each row and checks what comes out."""
        rows = [[*row, *added] for row, added in zip(self.rows or [[]] * len(new), new, strict=True)]
        start, count = session.length, len(new[0])
        offsets = torch.tensor(list(map(offset, rows)))
        positions = torch.arange(start, start + count) + offsets[:, None]
        added = additions_to(new) if self.sees else None
        output = await session.step_on_loop(BlockInput(torch.tensor(new)[..., None], None, positions, additions=added))
        self.rows = rows
        assert torch.equal(output, model_output(rows, self.sees)[:, start:])

    def hops(self, session: RemoteSession) -> list[str]:
        return [hop.hop.server.peer_id for hop in session._lanes[0].chain.hops]


@asynccontextmanager
async def quiet(seed: int = 0, kind: type[Quiet] = Quiet) -> AsyncIterator[Any]:
    swarm = kind(seed)
    yield swarm
    await swarm.session._lanes[0].chain.close()
    await swarm.close()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("indices", [[1, 0], [1, 1, 0], [0]])
@pytest.mark.parametrize("seed", range(8))  # the hop before hears of both in either order
async def test_rows_that_change_while_a_server_is_dead(index, indices, seed):
    """The hop before has not heard of the change when it must replay its history to the new one."""
    async with quiet(seed) as swarm:
        session = await swarm.started()
        await swarm.extend(session, [1.0, 2.0, 3.0], [7.0, 5.0, 6.0])
        swarm.net.kill(swarm.hops(session)[index])
        session.crop(1)
        session.reorder(torch.tensor(indices))
        swarm.rows = [swarm.rows[i][:2] for i in indices]
        await swarm.extend(session, *([float(i)] for i in range(len(indices))))
        assert [event.reason.count("cannot be reached") for event in swarm.events] == [1]
        assert session.stats.replayed_tokens == 2
        await swarm.extend(session, *([4.0 + i] for i in range(len(indices))))


@pytest.mark.parametrize("cut", [2, 4])
@pytest.mark.parametrize("index", [0, 1])
async def test_a_server_dies_after_a_picture(index, cut):
    """The first server has all blocks after which something is added, or the second one needs additions too."""
    async with quiet() as swarm:
        session = await swarm.started(cut=cut)
        await swarm.extend(session, [1.0, 95.0, 2.0], [99.0, 5.0, 6.0])
        swarm.net.kill(swarm.hops(session)[index])
        await swarm.extend(session, [3.0], [4.0])
        assert session.stats.recoveries == 1
        await swarm.extend(session, [5.0, 90.0], [6.0, 7.0])


@pytest.mark.parametrize("cut", [2, 4])
async def test_servers_that_cannot_reach_each_other_have_a_picture_relayed(cut):
    async with quiet() as swarm:
        swarm.net.walls |= {frozenset((one, other)) for one in ("a", "a2") for other in ("b", "b2")}
        session = await swarm.started(cut=cut)
        await swarm.extend(session, [1.0, 95.0, 2.0], [99.0, 5.0, 6.0])
        assert not swarm.events


async def test_rows_that_begin_alike_are_computed_once_and_survive():
    async with quiet() as swarm:
        session = await swarm.started()
        await swarm.extend(session, [1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, 2.0])
        entries = session._lanes[0].rows.entries.tolist()
        assert entries[0] == entries[2] == entries[3] != entries[1]
        swarm.net.kill("b")  # before any server has the four rows
        await swarm.extend(session, [5.0], [5.0], [6.0], [7.0])
        swarm.net.kill("a")
        await swarm.extend(session, [8.0], [8.0], [8.0], [9.0])


async def test_a_call_that_fails_leaves_the_session_where_it_stood():
    async with quiet() as swarm:
        session = await swarm.started()
        await swarm.extend(session, [1.0, 2.0], [3.0, 4.0])
        for name in ("b", "b2"):
            swarm.net.kill(name)
        session.reorder(torch.tensor([1, 0, 0]))
        swarm.rows = [swarm.rows[i] for i in (1, 0, 0)]
        blamed: list[tuple[bool, Span | None]] = []
        for _ in range(2):
            with pytest.raises(
                RecoveryFailed,
                match=r"blocks .* could not be moved .* within 5 s: .* Nothing is lost: the session goes on",
            ) as caught:
                await swarm.extend(session, [5.0], [6.0], [7.0])
            assert session.length == 2
            blamed.append((caught.value.peer_id in ("b", "b2"), caught.value.span))
            assert any(re.search("nobody answers|did not answer", sentence) for sentence in caught.value.tried)
        assert blamed == [(True, Span(3, 6)), (False, Span(0, 6))]  # the second call finds no chain at all
        swarm.net.start("b3", Span(3, 6))
        await swarm.extend(session, [5.0], [6.0], [7.0])


async def test_a_session_may_fill_all_positions_of_the_model_and_no_more():
    async with quiet() as swarm:
        session = await swarm.started(max_positions=4)
        await swarm.extend(session, [1.0, 2.0, 3.0])
        with pytest.raises(RequestRejected, match="5 positions are more than the model's 4: shorten the prompt"):
            await swarm.extend(session, [4.0, 5.0])
        await swarm.extend(session, [4.0])
        with pytest.raises(RequestRejected, match="5 positions are more"):
            await swarm.extend(session, [5.0])
        assert session.length == 4


async def test_a_copy_stands_by():
    async with quiet() as swarm:
        session = await swarm.started(standby=True)
        await swarm.extend(session, [1.0, 2.0], [3.0, 4.0])
        for index in (0, 1, 0):
            await asyncio.sleep(1.0)
            chain = session._lanes[0].chain
            assert all(map(chain._standby.of, chain.hops))
            name = swarm.hops(session)[index]
            swarm.net.kill(name)
            session.reorder(torch.tensor([1, 0]))
            swarm.rows = swarm.rows[::-1]
            await swarm.extend(session, [5.0], [6.0])
            await swarm.extend(session, [8.0], [9.0])
            swarm.net.start(name, swarm.net.servers[name].span)
            await asyncio.sleep(70.0)  # until its backoff has ended
        assert session.stats.standbys_used == session.stats.recoveries == 3
        assert session.stats.replayed_tokens == 0


async def test_nothing_more_is_read_for_a_copy_that_is_gone():
    async with quiet() as swarm:
        session = await swarm.started(standby=True)
        await swarm.extend(session, [1.0, 2.0])
        await asyncio.sleep(1.0)
        reads: list[str] = []
        for name in swarm.hops(session):
            engine = swarm.net.servers[name].engine
            engine.stored = partial(counted, reads, name, engine.stored)
            swarm.net.kill(name[0] + "2" if len(name) == 1 else name[0])
        for _ in range(3):
            await swarm.extend(session, [3.0])
            await asyncio.sleep(1.0)
        assert len(reads) <= len(swarm.hops(session))  # the step that finds out
        assert session.stats.recoveries == 0


def counted(reads: list[str], name: str, stored: Callable, *arguments: Any) -> Any:
    reads.append(name)
    return stored(*arguments)
