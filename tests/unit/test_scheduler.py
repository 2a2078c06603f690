"""The compute thread: the most urgent work first, failures to whom they belong, and no queue without end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swarm_protocol.errors import PeerBusy
from swarm_server.scheduler import Priority, Scheduler
from tests.unit.support import PATIENCE_S, run, until

WAITING = 24  # room in the queue


class Gate:
    """Work that holds the compute thread until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self._opened.wait(PATIENCE_S)
        return "through the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(max_waiting=WAITING)
    yield scheduler
    scheduler.stop()


async def held(scheduler: Scheduler, gate: Gate) -> asyncio.Task:
    """The compute thread is busy once this returns; what is submitted next waits."""
    task = asyncio.create_task(scheduler.run(Priority.DECODE, gate))
    await until(gate.entered.is_set)
    return task


async def submit(scheduler: Scheduler, priority: Priority, function: Callable[[], Any]) -> asyncio.Task:
    """The work is in the queue once this returns."""
    task = asyncio.create_task(scheduler.run(priority, function))
    await asyncio.sleep(0)  # runs the task up to its first wait, which is for the result
    return task


def test_returns_the_result_from_one_other_thread(scheduler: Scheduler) -> None:
    async def threads() -> list[int]:
        return [await scheduler.run(priority, threading.get_ident) for priority in Priority]

    (thread,) = set(run(threads()))
    assert thread != threading.get_ident()


def test_urgent_work_runs_first_and_equals_in_order(scheduler: Scheduler) -> None:
    submitted = [(priority, number) for number in range(WAITING // 3) for priority in reversed(Priority)]
    done: list[tuple[Priority, int]] = []

    async def submit_all() -> None:
        gate = Gate()
        tasks = [await held(scheduler, gate)]
        for work in submitted:
            tasks.append(await submit(scheduler, work[0], lambda work=work: done.append(work)))
        gate.open()
        await asyncio.gather(*tasks)

    run(submit_all())
    assert done == sorted(submitted)


def test_a_full_queue_refuses_at_once(scheduler: Scheduler) -> None:
    async def overfill() -> None:
        gate = Gate()
        tasks = [await held(scheduler, gate)]
        tasks += [await submit(scheduler, Priority.TRAINING, lambda: "waited") for _ in range(WAITING)]
        for priority in Priority:
            with pytest.raises(PeerBusy, match=rf"queue is full \({WAITING} requests are waiting\)"):
                await scheduler.run(priority, lambda: "refused")  # the gate is still closed
        gate.open()
        assert await asyncio.gather(*tasks) == ["through the gate"] + ["waited"] * WAITING
        assert await scheduler.run(Priority.DECODE, lambda: "room again") == "room again"

    run(overfill())


def test_a_failure_goes_to_its_caller_and_the_thread_lives_on(scheduler: Scheduler) -> None:
    async def fail() -> None:
        thread = await scheduler.run(Priority.DECODE, threading.get_ident)
        gate = Gate()
        first = await held(scheduler, gate)
        good = await submit(scheduler, Priority.PREFILL, lambda: "good")
        bad = await submit(scheduler, Priority.DECODE, lambda: 1 / 0)
        gate.open()
        with pytest.raises(ZeroDivisionError):
            await bad
        assert (await first, await good) == ("through the gate", "good")
        assert await scheduler.run(Priority.DECODE, threading.get_ident) == thread

    run(fail())


def test_work_whose_caller_has_gone_is_skipped(scheduler: Scheduler) -> None:
    done: list[str] = []
    problems: list[dict] = []

    async def cancel() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, problem: problems.append(problem))
        gate = Gate()
        first = await held(scheduler, gate)
        gone = await submit(scheduler, Priority.DECODE, lambda: done.append("gone"))
        still_there = await submit(scheduler, Priority.DECODE, lambda: done.append("still there"))
        gone.cancel()
        first.cancel()  # while it runs: it ends, and nobody hears of it
        await asyncio.wait([gone, first])
        gate.open()
        await still_there
        assert gone.cancelled() and first.cancelled()

    run(cancel())
    assert (done, problems) == (["still there"], [])


def test_stopping_finishes_what_runs_and_fails_what_waits() -> None:
    done: list[str] = []

    async def stop() -> None:
        scheduler, gate = Scheduler(max_waiting=1), Gate()
        running = await held(scheduler, gate)
        waiting = await submit(scheduler, Priority.DECODE, lambda: done.append("waited"))
        stopping = asyncio.create_task(asyncio.to_thread(scheduler.stop))

        async def refuses_to_begin() -> bool:
            with pytest.raises(PeerBusy) as caught:  # until then because the queue is full
                await scheduler.run(Priority.DECODE, lambda: done.append("late"))
            return "shutting down" in str(caught.value)

        await until(refuses_to_begin)
        assert not running.done()
        gate.open()
        assert await running == "through the gate"
        with pytest.raises(PeerBusy, match="shutting down"):
            await waiting
        await stopping

    run(stop())
    assert done == []


def test_the_thread_ends_when_stopped() -> None:
    async def compute_thread(scheduler: Scheduler) -> threading.Thread:
        return await scheduler.run(Priority.DECODE, threading.current_thread)

    scheduler = Scheduler(max_waiting=1)
    thread = run(compute_thread(scheduler))
    assert thread.is_alive()
    scheduler.stop()
    assert not thread.is_alive()


def test_delay_is_that_of_waiting(scheduler: Scheduler) -> None:
    assert scheduler.queue_delay_s == 0

    async def wait() -> None:
        gate = Gate()
        first = await held(scheduler, gate)
        before = scheduler.queue_delay_s
        second = await submit(scheduler, Priority.DECODE, lambda: None)
        gate.open()
        await asyncio.gather(first, second)
        assert before >= 0 and scheduler.queue_delay_s > 0

    run(wait())
