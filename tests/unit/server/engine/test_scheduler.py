"""The compute thread: failures go to whom they belong, and nothing waits without end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.net.shares import Caller, Shares
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.scheduler import Scheduler
from swarm_server.engine.session_state import NextPositions, SessionStep
from swarm_server.engine.work_queue import MAX_POSITIONS
from tests.unit.support import TIMEOUT_S, run, until

TRAINING = 8  # passes that may be there


class Engine:
    """Computes nothing: remembers its batches, holds the thread while its gate is shut, and fails where it is told.

    Sessions are names; the result of a step is the name.
    """

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.refused: set[str] = set()
        self.fails: Callable[[Sequence[str]], bool] = lambda names: False

    def run(self, batch: Sequence[tuple[str, SessionStep] | NextPositions]) -> list[Any]:
        of_each = [list(work.sessions) if isinstance(work, NextPositions) else [work[0]] for work in batch]
        names = [name for names in of_each for name in names]
        self.batches.append(names)
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        if self.fails(names):
            raise ZeroDivisionError(names)
        results = [[RequestRejected(name) if name in self.refused else name for name in names] for names in of_each]
        return [
            result if isinstance(work, NextPositions) else result[0]
            for work, result in zip(batch, results, strict=True)
        ]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine, TRAINING)
    yield scheduler
    engine.gate.set()
    scheduler.stop()


def step(num_tokens: int = 1, rows: int = 1, start: int = 0, num_following: int = 0) -> SessionStep:
    return SessionStep(start, BlockInput(torch.zeros(rows, num_tokens, 1)), num_following=num_following)


async def held(scheduler: Scheduler, engine: Engine) -> asyncio.Task:
    """The compute thread is busy once this returns, until the gate is opened; what is submitted next waits."""
    engine.gate.clear()
    engine.entered.clear()
    task = asyncio.create_task(scheduler.step("first", step()))
    await until(engine.entered.is_set)
    return task


async def submit(coroutine: Any) -> asyncio.Task:
    """The work is in the queue once this returns."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)  # runs the task up to its first wait, which is for the result
    return task


def start_next(scheduler: Scheduler, sessions: Sequence[str], received: list[Any], client: str = "") -> None:
    """Each session is a user of its own; ``received`` gets what is delivered."""
    positions = NextPositions(sessions, [1] * len(sessions), torch.zeros(len(sessions), 1, 1))
    names = [(client, session) for session in sessions]
    scheduler.start_next(positions, sessions, names, lambda rows, results: received.append((rows, results)))


def test_everything_runs_on_one_other_thread(scheduler: Scheduler, engine: Engine) -> None:
    async def threads() -> list[int]:
        assert await scheduler.step("a", step()) == "a"
        assert await scheduler.step("b", step(100)) == "b"
        return [await scheduler.call(threading.get_ident), await scheduler.train(threading.get_ident)]

    (thread,) = {*run(threads()), *engine.threads}
    assert thread != threading.get_ident()


@pytest.mark.parametrize(
    ("rows", "num_tokens", "start", "waits"),
    [(40, 1, 0, False), (1, 32, 9, False), (1, 33, 9, True), (8, 5, 9, True), (1, 2, 0, True)],
)
async def test_what_somebody_watches_goes_before_prompts(
    scheduler: Scheduler, engine: Engine, rows: int, num_tokens: int, start: int, waits: bool
) -> None:
    tasks = [await held(scheduler, engine)]
    tasks += [await submit(scheduler.step("prompt", step(1000), client)) for client in "ab"]
    tasks += [await submit(scheduler.step("step", step(num_tokens, rows, start), "c"))]
    engine.gate.set()
    await asyncio.gather(*tasks)
    last = "step" if waits else "prompt"
    assert engine.batches[-1] == [last]


async def test_short_chunks_of_a_prompt_wait_among_prompts(scheduler: Scheduler, engine: Engine) -> None:
    tasks = [await held(scheduler, engine)]
    tasks += [await submit(scheduler.step("long prompt", step(64, num_following=600)))]
    tasks += [await submit(scheduler.step("prompt", step(16, num_following=19)))]
    tasks += [await submit(scheduler.step("token", step(1, start=9)))]
    engine.gate.set()
    await asyncio.gather(*tasks)
    for start, num_following in ((16, 3), (32, 0)):
        tasks = [await held(scheduler, engine)]
        tasks += [await submit(scheduler.step("long prompt", step(64, start=64, num_following=500)))]
        tasks += [await submit(scheduler.step("token", step(1, start=9)))]
        tasks += [await submit(scheduler.step("prompt", step(16 if num_following else 3, 1, start, num_following)))]
        engine.gate.set()
        await asyncio.gather(*tasks)
    assert engine.batches == [["first"], ["prompt"], ["token"], ["long prompt"]] * 3


async def test_a_user_with_many_prompts_does_not_hold_up_another(scheduler: Scheduler, engine: Engine) -> None:
    tasks = [await held(scheduler, engine)]
    tasks += [await submit(scheduler.step(f"anna {number}", step(64), "gateway", "anna")) for number in range(9)]
    tasks += [await submit(scheduler.step("bert", step(100), "gateway", "bert"))]
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert engine.batches[:3] == [["first"], ["anna 0"], ["bert"]]


async def test_too_much_training_is_refused_at_once(scheduler: Scheduler, engine: Engine) -> None:
    tasks = [await held(scheduler, engine)]
    share = Shares(TRAINING).most()
    tasks += [await submit(scheduler.train(lambda: "trained")) for _ in range(share)]
    with pytest.raises(PeerBusy, match=f"is full: {share} of {TRAINING} requests are waiting, {share} of this"):
        await scheduler.train(lambda: "refused")  # the gate is still shut
    tasks += [await submit(scheduler.train(lambda: "trained", Caller("another")))]
    tasks += [await submit(scheduler.step("a", step()))]  # sessions are not meant
    engine.gate.set()
    assert await asyncio.gather(*tasks) == ["first"] + ["trained"] * (share + 1) + ["a"]
    assert await scheduler.train(lambda: "room again") == "room again"


class TestNextPositions:
    async def test_of_several_sessions_are_computed_and_delivered_together(
        self, scheduler: Scheduler, engine: Engine
    ) -> None:
        first, received = await held(scheduler, engine), []
        start_next(scheduler, "abc", received)
        await asyncio.sleep(0)
        assert scheduler.num_waiting == 4 and scheduler.num_active == 4
        engine.gate.set()
        await asyncio.gather(first, scheduler.step("later", step()))
        assert received == [("abc", ["a", "b", "c"])] and scheduler.num_waiting == 0
        assert engine.batches[1][:3] == ["a", "b", "c"]
        *_, (_, count) = scheduler._counters.wait_s["decode"].cumulative()
        assert count == 5

    async def test_of_more_sessions_than_a_batch_takes_are_shared_among_users(
        self, scheduler: Scheduler, engine: Engine
    ) -> None:
        first, received = await held(scheduler, engine), []
        many = [f"many {number}" for number in range(MAX_POSITIONS)]
        start_next(scheduler, many, received, "crowd")
        start_next(scheduler, ["one", "other"], received, "two")
        await asyncio.sleep(0)
        engine.gate.set()
        await first
        await until(lambda: sum(len(rows) for rows, _ in received) == len(many) + 2)
        assert {"one", "other"} < set(engine.batches[1]) and len(engine.batches[1]) == MAX_POSITIONS
        assert sorted(row for rows, _ in received for row in rows) == sorted([*many, "one", "other"])
        assert all([rows == results for rows, results in received]) and len(received) <= 4  # two of each message

    async def test_that_fail_are_computed_one_by_one(self, scheduler: Scheduler, engine: Engine) -> None:
        engine.fails, received = (lambda names: "b" in names), []
        start_next(scheduler, "abc", received)
        await scheduler.step("later", step())
        ((rows, (a, b, c)),) = received
        assert (rows, a, c) == ("abc", ["a"], ["c"]) and isinstance(b, ZeroDivisionError)

    async def test_that_end_a_prompt_wait_among_prompts(self, scheduler: Scheduler, engine: Engine) -> None:
        received: list[Any] = []
        sessions = one, prompt, other = ["one", "prompt", "other"]
        await scheduler.step(prompt, step(2, num_following=1))
        start_next(scheduler, sessions, received)
        await scheduler.step("later", step(100))
        await until(lambda: len(received) == 2)
        assert sorted(received, key=str) == [([one, other], [one, other]), ([prompt], prompt)]
        *_, (_, count) = scheduler._counters.wait_s["prefill"].cumulative()
        assert count == 3

    async def test_after_the_end_are_refused(self, engine: Engine) -> None:
        scheduler, received = Scheduler(engine, TRAINING), []
        scheduler.stop()
        start_next(scheduler, "ab", received)
        await asyncio.sleep(0)
        ((rows, error),) = received
        assert rows == "ab" and isinstance(error, PeerBusy)


class TestFailures:
    async def test_a_refusal_goes_to_its_caller_alone(self, scheduler: Scheduler, engine: Engine) -> None:
        tasks = [await held(scheduler, engine)]
        tasks += [await submit(scheduler.step(name, step())) for name in "abc"]
        engine.refused = {"b"}
        engine.gate.set()
        first, a, b, c = await asyncio.gather(*tasks, return_exceptions=True)
        assert (first, a, c) == ("first", "a", "c")
        assert isinstance(b, RequestRejected)
        assert engine.batches == [["first"], ["a", "b", "c"]]

    async def test_a_batch_that_fails_is_computed_one_by_one(self, scheduler: Scheduler, engine: Engine) -> None:
        tasks = [await held(scheduler, engine)]
        tasks += [await submit(scheduler.step(name, step())) for name in "abc"]
        engine.fails = lambda names: "b" in names
        engine.gate.set()
        first, a, b, c = await asyncio.gather(*tasks, return_exceptions=True)
        assert await scheduler.step("later", step()) == "later"
        assert (first, a, c) == ("first", "a", "c")
        assert isinstance(b, ZeroDivisionError)
        assert engine.batches == [["first"], ["a", "b", "c"], ["a"], ["b"], ["c"], ["later"]]

    async def test_of_a_receiver_leaves_the_other_results_of_the_batch(
        self, scheduler: Scheduler, engine: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, received = await held(scheduler, engine), []

        def broken(_result: Any) -> None:
            raise MemoryError

        scheduler.start("a", step(), broken)
        scheduler.start("b", step(), received.append)
        await asyncio.sleep(0)
        engine.gate.set()
        await asyncio.gather(first, scheduler.step("later", step()))
        assert (received, scheduler.num_waiting) == (["b"], 0)
        assert "could not be delivered" in caplog.text

    async def test_of_calls_go_to_their_caller(self, scheduler: Scheduler) -> None:
        for submit in (scheduler.call, scheduler.train):
            with pytest.raises(ZeroDivisionError):
                await submit(lambda: 1 / 0)
        assert await scheduler.step("later", step()) == "later"


async def test_work_whose_caller_has_gone_is_not_computed(scheduler: Scheduler, engine: Engine) -> None:
    problems: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, problem: problems.append(problem))
    first = await held(scheduler, engine)
    gone = [await submit(scheduler.step("gone", step(length))) for length in (1, 1000)]
    gone += [await submit(scheduler.train(lambda: engine.batches.append(["trained"])))]
    still_there = await submit(scheduler.step("still there", step()))
    for task in (*gone, first):  # the first while it runs: it ends, and nobody hears of it
        task.cancel()
    await asyncio.wait([*gone, first])
    assert all(task.cancelled() for task in (*gone, first))
    engine.gate.set()
    assert await still_there == "still there"
    assert (engine.batches, problems) == ([["first"], ["still there"]], [])


async def test_stopping_finishes_what_runs_and_fails_what_waits(engine: Engine) -> None:
    scheduler = Scheduler(engine, TRAINING)
    running = await held(scheduler, engine)
    waiting = [await submit(scheduler.step("waited", step(length))) for length in (1, 1000)]
    stopping = asyncio.create_task(asyncio.to_thread(scheduler.stop))

    async def refuses_to_begin() -> bool:
        late = await submit(scheduler.train(lambda: "late"))
        if late.done():
            return "shutting down" in str(late.exception())
        late.cancel()
        return False

    await until(refuses_to_begin)
    assert not running.done()
    engine.gate.set()
    assert await running == "first"
    for task in waiting:
        with pytest.raises(PeerBusy, match="shutting down"):
            await task
    await stopping
    assert engine.batches == [["first"]]


def test_the_thread_ends_when_stopped(engine: Engine) -> None:
    scheduler = Scheduler(engine, TRAINING)
    thread = run(scheduler.call(threading.current_thread))
    assert thread.is_alive()
    scheduler.stop()
    assert not thread.is_alive()


async def test_delay_is_that_of_waiting(scheduler: Scheduler, engine: Engine) -> None:
    assert scheduler.queue_delay_s == 0
    first = await held(scheduler, engine)
    before = scheduler.queue_delay_s
    second = await submit(scheduler.step("second", step()))
    engine.gate.set()
    await asyncio.gather(first, second)
    assert before >= 0 and scheduler.queue_delay_s > 0


async def test_what_waits_and_what_is_done_is_counted(scheduler: Scheduler, engine: Engine) -> None:
    """So that clients tell a server that is busy from one that stands still."""
    first = await held(scheduler, engine)
    gone = await submit(scheduler.step("gone", step(1000)))
    others = [await submit(scheduler.step(name, step(100))) for name in "ab"]
    assert scheduler.num_waiting == 4 and scheduler.queue_s == 0  # nobody knows how long it takes
    gone.cancel()
    await asyncio.wait([gone])
    assert scheduler.num_waiting == 3
    engine.gate.set()
    await asyncio.gather(first, *others)
    assert scheduler.num_waiting == 0 and scheduler.queue_s == 0
    assert scheduler._counters.batches == len(engine.batches) == 3
    tasks = [await held(scheduler, engine), await submit(scheduler.step("c", step(300)))]
    pace_s = scheduler._counters.compute_s["prefill"] / 200
    assert pace_s / 10 < scheduler.queue_s / 300 < 10 * pace_s + 0.1
    engine.gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("num_waiting", [1, 2])
async def test_one_piece_of_training_is_in_the_queue(scheduler: Scheduler, engine: Engine, num_waiting: int) -> None:
    """A step waits for no more than one, however many there are: others hold up other training."""
    await scheduler.train(lambda: None, num_positions=100)
    pace_s = scheduler._counters.compute_s["training"] / 100
    first = await held(scheduler, engine)
    pieces = [await submit(scheduler.train(lambda: None, num_positions=300)) for _ in range(num_waiting)]
    assert scheduler.queue_s == pytest.approx(300 * pace_s) and pace_s > 0
    engine.gate.set()
    await asyncio.gather(first, *pieces)
    assert scheduler.queue_s == 0
