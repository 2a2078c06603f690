"""The scheduler: the compute thread, and the work that others submit to it. ``work_queue`` decides whose turn it is."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller, Shares
from swarm_server.core.counters import Counters
from swarm_server.engine.session_state import Session, SessionStep
from swarm_server.engine.work_queue import WorkItem, WorkKind, WorkQueue

T = TypeVar("T")

_logger = logging.getLogger(__name__)
_DELAY_HALF_LIFE_S = 10.0
_ACTIVE_S = 1.0
_PACE_WEIGHT = 0.1  # weight of one batch in the moving average
_NOBODY = Caller("")
_FEW_POSITIONS = 32  # rows × positions: a step of up to this size counts as decoding (speculative decoding)


class StepRunner(Protocol):
    """The interface through which the scheduler uses the engine."""

    def run(self, batch: Sequence[tuple[Session, SessionStep]]) -> list[torch.Tensor | Exception]: ...


class Scheduler:
    """A compute thread with the queue of its work."""

    def __init__(
        self,
        engine: StepRunner,
        max_training: int,
        mixes_sessions: bool = True,
        counters: Counters | None = None,
        chunk_positions: int = 64,
    ) -> None:
        """Start the compute thread. ``max_training``: how many training passes may wait; more are refused.

        Steps have no such limit, because open sessions bound their number. For the other arguments see ``WorkQueue``.
        """
        self._engine = engine
        self._counters = counters or Counters()
        self._training = Shares(max_training, minimum=1)  # only used on the event loop
        self._queue = WorkQueue(mixes_sessions, chunk_positions)
        self._changed = threading.Condition()
        self._stopping = False
        self._delay_s, self._delay_time = 0.0, time.monotonic()
        self._costs = dict.fromkeys(WorkKind, 0)  # of waiting and running work; only used on the event loop
        self._num_waiting = 0
        self._pace_s = dict.fromkeys(WorkKind, 0.0)  # seconds per unit of cost, an exponential average; 0 if not known
        self._stepped_s: dict[int, float] = {}  # time of the last step by id() of the session, latest last
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)
        self._thread.start()

    @property
    def queue_delay_s(self) -> float:
        """Return how long work has waited lately: an exponential average, which fades while no work comes."""
        idle_s = time.monotonic() - self._delay_time
        faded: float = 0.5 ** (idle_s / _DELAY_HALF_LIFE_S)
        return self._delay_s * faded

    @property
    def queue_s(self) -> float:
        """Return how long a step would wait: for all steps, and for one training pass, since these take turns.

        The estimate uses the time that recent work of the same kind took. Background work does not count.
        """
        costs, pace_s = self._costs, self._pace_s
        one_training = costs[WorkKind.TRAINING] / max(1, self._training.used)
        steps_s = sum(costs[kind] * pace_s[kind] for kind in (WorkKind.DECODE, WorkKind.PREFILL))
        return steps_s + one_training * pace_s[WorkKind.TRAINING]

    @property
    def num_waiting(self) -> int:
        """Return how many pieces of work wait or run. Later work may be computed before some of them."""
        return self._num_waiting

    @property
    def num_active(self) -> int:
        """Return how many sessions had a step in the last second. Only call this on the event loop."""
        oldest_s = time.monotonic() - _ACTIVE_S
        while self._stepped_s and (first := next(iter(self._stepped_s.items())))[1] < oldest_s:
            del self._stepped_s[first[0]]
        return len(self._stepped_s)

    def forget(self, session: Session) -> None:
        """Remove a finished session from the scheduler's counters and forget its prompt."""
        self._stepped_s.pop(id(session), None)
        with self._changed:
            self._queue.forget(session)

    async def step(
        self, session: Session, step: SessionStep, client: str = "", user: str = "", *, is_background: bool = False
    ) -> torch.Tensor:
        """Return the step's output, [batch, tokens, hidden_size].

        ``user``: which of the client's users the step is for. ``is_background``: nobody waits for the session's
        answers. Raises the error that refused it (see ``Engine.run``).
        """
        self._stepped_s.pop(id(session), None)
        self._stepped_s[id(session)] = time.monotonic()
        rows, num_tokens, _ = step.inputs.hidden.shape
        is_short = num_tokens == 1 or (step.start > 0 and rows * num_tokens <= _FEW_POSITIONS)
        is_chunk = step.num_following > 0 or self._queue.is_prompt(session)
        kind = WorkKind.DECODE if is_short and not is_chunk else WorkKind.PREFILL
        kind = WorkKind.BACKGROUND if is_background else kind
        output: torch.Tensor = await self._submit(
            WorkItem(kind, _future(), session=session, step=step, client=client, user=user, cost=rows * num_tokens)
        )
        return output

    async def train(self, call: Callable[[], T], client: Caller = _NOBODY, num_positions: int = 1) -> T:
        """Call a function on the compute thread when training has its turn, and return its result.

        ``num_positions``: rows × positions that the function computes.

        Raises:
            PeerBusy: too many training passes wait already.
        """
        if not self._training.fits(client, 1):
            raise PeerBusy(
                f"the server's queue is full: {self._training.used} of {self._training.capacity} requests are waiting, "
                f"{self._training.held(client)} of this client"
            )
        work = WorkItem(WorkKind.TRAINING, _future(), call=call, client=client.peer_id, cost=num_positions)
        self._training.add(client, 1)
        work.done.add_done_callback(lambda _done: self._training.add(client, -1))
        result: T = await self._submit(work)
        return result

    async def call(self, call: Callable[[], T], client: str = "") -> T:
        """Call a short function on the compute thread in a decoding turn, and return its result."""
        result: T = await self._submit(WorkItem(WorkKind.DECODE, _future(), call=call, client=client))
        return result

    def stop(self) -> None:
        """Finish the work in progress, fail all waiting work, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    async def _submit(self, work: WorkItem) -> Any:
        with self._changed:
            if self._stopping:
                raise PeerBusy("the server is shutting down")
            self._queue.add(work)
            self._changed.notify()
        kind, cost = work.kind, work.cost
        self._num_waiting, self._costs[kind] = self._num_waiting + 1, self._costs[kind] + cost
        try:
            return await work.done
        except asyncio.CancelledError:
            with self._changed:
                self._queue.discard(work)
            raise
        finally:
            self._num_waiting, self._costs[kind] = self._num_waiting - 1, self._costs[kind] - cost
            del work  # else it and an error's traceback would refer to each other and keep memory alive

    def _main(self) -> None:
        while batch := self._next_batch():
            start_s = time.monotonic()
            results = self._run(batch)
            self._count(batch, time.monotonic() - start_s)
            _resolve([work.done for work in batch], results)
            del batch, results  # free their memory before waiting for more work

    def _next_batch(self) -> list[WorkItem]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) or self._stopping)
            if self._stopping:
                waiting = [work.done for work in self._queue.clear()]
                _resolve(waiting, [PeerBusy("the server is shutting down")] * len(waiting))
                return []
            batch = self._queue.next_batch()
        now = time.monotonic()
        for work in batch:
            wait_s = now - work.submitted_s
            if work.kind is not WorkKind.BACKGROUND:
                self._delay_s += 0.1 * (wait_s - self._delay_s)
            self._counters.wait_s[work.kind.name.lower()].add(wait_s)
        self._delay_time = now
        return batch

    def _count(self, batch: list[WorkItem], seconds: float) -> None:
        kind = batch[0].kind
        self._counters.finish(kind.name.lower(), seconds)
        if batch[0].call is not None and kind is not WorkKind.TRAINING:
            return  # a short call says nothing about the pace of steps
        pace_s = seconds / max(1, sum(work.cost for work in batch))
        self._pace_s[kind] += (pace_s - self._pace_s[kind]) * (_PACE_WEIGHT if self._pace_s[kind] else 1.0)

    def _run(self, batch: list[WorkItem]) -> list[Any]:
        """Return each result, or the exception that ended its work."""
        try:
            if batch[0].call is not None:
                return [batch[0].call()]
            return self._engine.run([work.session_step for work in batch])
        except Exception as error:  # the caller gets whatever failed, and the thread goes on
            if len(batch) == 1:
                return [error]
            _logger.warning("a batch of %d sessions failed; computing them one by one", len(batch))
            return [result for work in batch for result in self._run([work])]


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _resolve(futures: Sequence[asyncio.Future[Any]], results: Sequence[Any]) -> None:
    """Resolve futures on their loops. Each loop is woken once, so that the results of a batch leave together."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for future, result in zip(futures, results, strict=True):
        by_loop.setdefault(future.get_loop(), []).append((future, result))
    for loop, resolved in by_loop.items():
        loop.call_soon_threadsafe(_set_all, resolved)


def _set_all(resolved: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in resolved:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
