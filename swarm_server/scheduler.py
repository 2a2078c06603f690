"""Decides what the compute thread does next: a bounded priority queue of work."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from swarm_protocol.errors import PeerBusy

_DELAY_HALF_LIFE_S = 10.0


class Priority(IntEnum):
    """Lower runs first. Decode steps are short and somebody watches them."""

    DECODE = 0
    PREFILL = 1
    TRAINING = 2


@dataclass(order=True)
class Work:
    """One call of the engine and the future that its caller awaits."""

    priority: Priority
    number: int  # first come, first served within a priority
    run: Callable[[], Any] = field(compare=False)
    loop: asyncio.AbstractEventLoop = field(compare=False)
    done: asyncio.Future = field(compare=False)
    submitted_s: float = field(compare=False)


class Scheduler:
    """One compute thread behind a bounded queue; a full queue refuses at once."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._queue: list[Work] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False
        self._delay_s, self._delay_time = 0.0, time.monotonic()
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)
        self._thread.start()

    @property
    def queue_delay_s(self) -> float:
        """How long work has waited lately: an exponential average, which fades while there is none."""
        idle_s = time.monotonic() - self._delay_time
        return self._delay_s * 0.5 ** (idle_s / _DELAY_HALF_LIFE_S)

    async def run(self, priority: Priority, function: Callable[[], Any]) -> Any:
        """Runs the function on the compute thread and returns its result.

        Work whose caller has gone before its turn is dropped.

        Raises:
            PeerBusy: too much work waits already.
        """
        loop = asyncio.get_running_loop()
        work = Work(priority, next(self._numbers), function, loop, loop.create_future(), time.monotonic())
        with self._changed:
            if self._stopping:
                raise PeerBusy("the server is shutting down")
            if len(self._queue) >= self._max_waiting:
                raise PeerBusy(f"the server's queue is full ({self._max_waiting} requests are waiting)")
            heapq.heappush(self._queue, work)
            self._changed.notify()
        return await work.done

    def stop(self) -> None:
        """Finishes the work in progress, fails what waits, and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _main(self) -> None:
        while (work := self._next()) is not None:
            if work.done.cancelled():
                continue
            now = time.monotonic()
            self._delay_s += 0.1 * (now - work.submitted_s - self._delay_s)
            self._delay_time = now
            try:
                result, error = work.run(), None
            except Exception as failure:  # whatever it is, it belongs to the caller; the thread goes on
                result, error = None, failure
            work.loop.call_soon_threadsafe(_resolve, work.done, result, error)

    def _next(self) -> Work | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping)
            if self._stopping:
                for work in self._queue:
                    error = PeerBusy("the server is shutting down")
                    work.loop.call_soon_threadsafe(_resolve, work.done, None, error)
                return None
            return heapq.heappop(self._queue)


def _resolve(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
