"""Each fault of a server at each moment of a session, in virtual time: tokens stay right, and only that server goes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, product
from typing import Any

import pytest

from swarm_client.core.config import ClientConfig
from swarm_client.core.events import Move, Recovery, Waiting
from swarm_client.sessions.opening import SessionOptions
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.span import Span
from tests.marks import SLOW
from tests.unit.client.sessions.test_survival_simulated import Quiet, quiet, run
from tests.worlds.servers import MODEL, NUM_BLOCKS, REVISION, ToyServer

pytestmark = pytest.mark.run_by(function=run)

SPANS = "0:2", "2:4", "4:6"
CHUNK = 4  # positions that a server takes at once
PROMPT = [float(value) for value in (3, 1, 4, 1, 5)]
LONG = [float(value % 11) for value in range(10 * CHUNK)]
Fault = Callable[["Line", str], object]
Moment = Callable[["Line", int, Callable[[], object]], Coroutine[Any, Any, None]]


class Line(Quiet):
    """Three servers in a chain, each with a spare."""

    async def started(self, idle_timeout_s: float = 1e9, hops: Sequence[int] = (), **options: Any) -> RemoteSession:
        """A session whose prompt is computed; servers of ``hops`` let it go if it is idle for so long."""
        for copy in "12":
            for number, span in enumerate(SPANS):
                options_of_server = {"idle_timeout_s": idle_timeout_s} if number in hops else {}
                server = self.net.start(f"{span}/{copy}", Span.parse(span), CHUNK, **options_of_server)
                # Spares are slower than any distance makes the others.
                record = replace(server.record(), tokens_per_s=100.0 if copy == "1" else 10.0)
                server.record = partial(lambda record: record, record)  # type: ignore[method-assign]
        config = ClientConfig(recovery_timeout_s=100.0)
        swarm = Swarm(config, MODEL, REVISION, NUM_BLOCKS, dht=self.net, connect=self.net.connect_client)
        await swarm.connect()
        self.session = RemoteSession(
            swarm, Span(0, NUM_BLOCKS), None, SessionOptions(40, on_event=self.events.append, **options)
        )
        self.close = swarm.close
        self.leaving: list[asyncio.Task] = []
        await self.extend(self.session, PROMPT)
        return self.session

    def server(self, hop: int) -> ToyServer:
        return self.net.servers[self.hops(self.session)[hop]]

    def moved(self, kind: type[Recovery] | type[Move]) -> list[str]:
        """The blocks of each recovery or move."""
        return [str(event.span) for event in self.events if isinstance(event, kind)]

    # ------------------------------------------------------------ faults

    def kill(self, name: str) -> None:
        self.net.kill(name)

    def hang(self, name: str) -> None:
        self.net.servers[name].awake.clear()

    def cut_off(self, name: str) -> None:
        """The client cannot reach it; other servers can."""
        self.net.cut("client", name)

    def lie(self, name: str) -> None:
        self.net.servers[name].engine.spoils = lambda output: output * float("nan")

    def leave(self, name: str) -> None:
        self.leaving.append(asyncio.ensure_future(self.net.servers[name].host.leave(1000.0)))


def at_step(server: ToyServer, number: int, action: Callable[[], object], *, afterwards: bool = False) -> None:
    """Call ``action`` when the server begins a step, or when it has computed it but not yet answered."""
    step, numbers = server.scheduler.step, count(1)

    async def stepped(*arguments: Any, **options: Any) -> Any:
        is_now = next(numbers) == number
        if is_now and not afterwards:
            action()
        output = await step(*arguments, **options)
        if is_now and afterwards:
            action()
        return output

    server.scheduler.step = stepped


async def between_two_steps(line: Line, hop: int, strike: Callable[[], object]) -> None:
    strike()
    await line.extend(line.session, [7.0])


async def as_it_begins_a_step(line: Line, hop: int, strike: Callable[[], object]) -> None:
    at_step(line.server(hop), 1, strike)
    await line.extend(line.session, [7.0])


async def before_it_answers(line: Line, hop: int, strike: Callable[[], object]) -> None:
    at_step(line.server(hop), 1, strike, afterwards=True)
    await line.extend(line.session, [7.0])


async def while_another_computes(line: Line, hop: int, strike: Callable[[], object]) -> None:
    """The next server, or the first one."""
    at_step(line.server((hop + 1) % len(SPANS)), 1, strike)
    await line.extend(line.session, [7.0])


async def in_a_long_prompt(line: Line, hop: int, strike: Callable[[], object]) -> None:
    at_step(line.server(hop), 3, strike)
    await line.extend(line.session, LONG)


FAULTS: dict[str, Fault] = {
    "killed": Line.kill,
    "hangs": Line.hang,
    "cut-off": Line.cut_off,
    "lies": Line.lie,
    "leaves": Line.leave,
}
MOMENTS: list[Moment] = [
    between_two_steps,
    as_it_begins_a_step,
    before_it_answers,
    while_another_computes,
    in_a_long_prompt,
]


REASONS = {
    "killed": "cannot be reached",
    "hangs": "does not answer",
    "cut-off": "cannot be reached",
    "lies": "sent on what is wrong|not finite",
    "leaves": "leaves",
}


def at_each_hop() -> list[Any]:
    """Each fault at each moment of each hop; those of the other two hops are slow tests."""
    cases = product(enumerate(FAULTS), enumerate(MOMENTS), range(len(SPANS)))
    return [
        pytest.param(
            fault, moment, hop, id=f"{hop}-{moment.__name__}-{fault}", marks=() if (i + j) % 3 == hop else SLOW
        )
        for (i, fault), (j, moment), hop in cases
    ]


@pytest.mark.parametrize(("fault", "moment", "hop"), at_each_hop())
async def test_one_server_is_replaced_and_no_other(fault: str, moment: Moment, hop: int) -> None:
    async with quiet(kind=Line) as line:
        session = await line.started()
        before = line.hops(session)
        await moment(line, hop, lambda: FAULTS[fault](line, before[hop]))
        await line.extend(session, [8.0])
        await asyncio.sleep(30.0)  # a server that leaves hands its sessions over meanwhile
        await line.extend(session, [9.0])
        assert line.hops(session) == [*before[:hop], f"{SPANS[hop]}/2", *before[hop + 1 :]]
        (event,) = line.events
        assert str(event.span) == SPANS[hop] and re.search(REASONS[fault], str(event))
        stats = session.stats
        if fault == "leaves":
            assert line.net.servers[before[hop]].host.num_sessions == 0
            assert (stats.moves, stats.recoveries, stats.replayed_tokens) == (1, 0, 0)
            assert session.length - 2 <= stats.copied_tokens < session.length
        else:
            assert (stats.moves, stats.recoveries, stats.waits) == (0, 1, 0)
            # What the last call added is sent again, and no part of it counts as replayed, unless it was answered.
            assert len(PROMPT) <= stats.replayed_tokens <= len(PROMPT) + 1
            assert stats.stall_s < 5.0


async def test_servers_count_a_session_as_new_or_as_a_replacement() -> None:
    async with quiet(kind=Line) as line:

        def counted() -> dict[str, dict[str, int]]:
            counters = {name: server.host.services.counters.sessions for name, server in line.net.servers.items()}
            return {name: dict(sessions) for name, sessions in counters.items() if sessions}

        session = await line.started()
        before = line.hops(session)
        assert counted() == {name: {"new": 1} for name in before}
        line.kill(before[1])
        await line.extend(session, [7.0])
        assert counted() == {name: {"new": 1} for name in before} | {line.hops(session)[1]: {"replacement": 1}}


@pytest.mark.parametrize(
    ("hops", "moved"),
    [([0, 1], ["0:4"]), ([1, 2], ["2:6"]), ([0, 2], ["0:2", "4:6"]), ([0, 1, 2], ["0:6"])],
    ids=["first-two", "last-two", "not-neighbours", "all"],
)
async def test_several_are_killed_at_once(hops: list[int], moved: list[str]) -> None:
    async with quiet(kind=Line) as line:
        session = await line.started()
        for name in [line.hops(session)[hop] for hop in hops]:
            line.kill(name)
        await line.extend(session, [7.0])
        assert sorted(line.moved(Recovery)) == moved and session.stats.replayed_tokens == len(PROMPT) * len(moved)
        await line.extend(session, [8.0])


@pytest.mark.parametrize("afterwards", [False, True], ids=["before-the-replay", "after-a-part-of-the-replay"])
@pytest.mark.parametrize("fault", ["killed", "hangs", "cut-off", "lies"])
@pytest.mark.parametrize("hop", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW)])
async def test_the_one_that_takes_over_fails_too(fault: str, afterwards: bool, hop: int) -> None:
    async with quiet(kind=Line) as line:
        session = await line.started()
        third = f"{SPANS[hop]}/3"
        line.net.start(third, Span.parse(SPANS[hop]), CHUNK)
        spares = [line.net.servers[f"{SPANS[hop]}/{copy}"] for copy in "23"]
        struck: list[str] = []

        def strike(server: ToyServer) -> None:
            if not struck:
                struck.append(server.name)
                FAULTS[fault](line, server.name)

        for spare in spares:
            at_step(spare, 1, partial(strike, spare), afterwards=afterwards)
        line.kill(line.hops(session)[hop])
        await line.extend(session, [7.0])
        await line.extend(session, [8.0])
        (left,) = {spare.name for spare in spares} - set(struck)
        assert line.hops(session)[hop] == left
        assert set(line.moved(Recovery)) == {SPANS[hop]}


@pytest.mark.parametrize("who", ["the-same", "another"])
@pytest.mark.parametrize("hop", range(len(SPANS)))
async def test_everybody_is_gone_and_somebody_comes_later(who: str, hop: int) -> None:
    """A server that comes back with its old identity has forgotten the session."""
    async with quiet(kind=Line) as line:
        session = await line.started()
        name = line.hops(session)[hop]
        for copy in "12":
            line.kill(f"{SPANS[hop]}/{copy}")
        step = asyncio.ensure_future(line.extend(session, [7.0]))
        while not any(isinstance(event, Waiting) for event in line.events):
            await asyncio.sleep(0.1)
        came = line.net.start(name if who == "the-same" else "new", Span.parse(SPANS[hop]), CHUNK)
        await step
        assert line.hops(session)[hop] == came.name
        assert [SPANS[hop] in event.reason for event in line.events if isinstance(event, Waiting)] == [True]
        assert session.stats.waits == 1 and session.stats.replayed_tokens == len(PROMPT)


@pytest.mark.parametrize("hops", [[1], [2, 0, 1]], ids=["one", "each"])
async def test_a_call_after_the_servers_have_let_an_idle_session_go(hops: list[int]) -> None:
    async with quiet(kind=Line) as line:
        session = await line.started(idle_timeout_s=60.0, hops=hops)
        before = line.hops(session)
        await asyncio.sleep(50.0)
        await line.extend(session, [7.0])
        await asyncio.sleep(50.0)
        assert [line.server(hop).host.num_sessions for hop in range(3)] == [1, 1, 1] and not line.events
        await asyncio.sleep(30.0)
        assert [line.server(hop).host.num_sessions for hop in range(3)] == [int(hop not in hops) for hop in range(3)]
        await line.extend(session, [8.0])
        assert line.hops(session) == before and session.stats.replayed_tokens == len(PROMPT) + 1
        assert session.stats.recoveries == 1
