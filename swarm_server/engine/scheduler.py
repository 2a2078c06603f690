"""The scheduler: the compute thread, and the work that others submit to it. ``work_queue`` decides whose turn it is."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swarm_protocol.errors import PeerBusy
from swarm_protocol.failures import logged_errors
from swarm_protocol.net.shares import Caller, Shares
from swarm_server.core.counters import Counters
from swarm_server.engine.session_state import NextPositions, Results, Session, SessionStep
from swarm_server.engine.work_queue import WorkItem, WorkKind, WorkQueue

if TYPE_CHECKING:
    from swarm_server.engine.engine import Engine

R = TypeVar("R")
T = TypeVar("T")

_logger = logging.getLogger(__name__)
_DELAY_HALF_LIFE_S = 10.0
_DELAY_KEPT = 0.9  # weight of the average so far, when a piece of work is added to it
_ACTIVE_S = 1.0  # how long a session counts as active after a step
_PACE_WEIGHT = 0.1  # weight of one batch in the moving average
_NOBODY = Caller("")
_FEW_POSITIONS = 32  # rows × positions: a step of up to this size counts as decoding (speculative decoding)


class Scheduler:
    """A compute thread with the queue of its work."""

    def __init__(
        self,
        engine: Engine,
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
        self._costs = [0] * len(WorkKind)  # by kind, of waiting and running work; only used on the event loop
        self._num_waiting = 0
        self._arrived: list[WorkItem] = []  # steps that have started in this turn of the event loop
        self._pace_s = [0.0] * len(WorkKind)  # seconds per unit of cost by kind, an exponential average; 0: unknown
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
        """Return how long a step would wait for all steps and one training pass, since steps and passes take turns.

        The estimate uses the time that recent work of the same kind took. Background work does not count.
        """
        times_s = [cost * pace_s for cost, pace_s in zip(self._costs, self._pace_s, strict=True)]
        decode_s, prefill_s, training_s, _background_s = times_s
        return decode_s + prefill_s + training_s / max(1, self._training.used)

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
        self._add_arrived()
        with self._changed:
            self._queue.forget(session)

    async def step(
        self, session: Session, step: SessionStep, client: str = "", user: str = "", *, is_background: bool = False
    ) -> torch.Tensor:
        """Return the step's output, [batch, tokens, hidden_size].

        ``user``: which of the client's users the step is for. ``is_background``: nobody waits for the session's
        answers. Raises the error that refused it (see ``Engine.run``).
        """
        done = _future()
        work = self._work_of(session, step, partial(_set, done), client, user, is_background)
        output: torch.Tensor = await self._submit(work, done)
        return output

    def start(
        self,
        session: Session,
        step: SessionStep,
        deliver: Callable[[torch.Tensor | Exception], None],
        client: str = "",
        user: str = "",
        *,
        is_background: bool = False,
    ) -> None:
        """Submit a step like ``step``, and return at once; ``deliver`` gets the output, or the error that refused it.

        Steps that start in one turn of the event loop are submitted together.
        """
        self._arrive(self._work_of(session, step, deliver, client, user, is_background))

    def start_next(
        self,
        positions: NextPositions,
        rows: Sequence[R],
        names: Sequence[tuple[str, str]],
        deliver: Callable[[Sequence[R], Results], None],
        *,
        is_background: bool = False,
    ) -> None:
        """Submit the next positions of several sessions like ``start``.

        Args:
            rows: for each session, what ``deliver`` needs to know of it.
            names: the client and the user of each session.
            deliver: gets some of the rows, and what ``Engine.run`` returns for their positions, or one error for all.
        """
        numbers: Sequence[int] = range(len(positions))
        if self._queue.has_prompts:  # whose last chunks may be single positions
            prompts = [number for number in numbers if self._queue.is_prompt(positions.sessions[number])]
            for number in prompts:
                (client, user), deliver_one = names[number], partial(deliver, rows[number : number + 1])
                session, step = positions.sessions[number], positions.step(number)
                self.start(session, step, deliver_one, client, user, is_background=is_background)
            if prompts:
                numbers = [number for number in numbers if number not in prompts]
                positions = positions.part(numbers)
                rows, names = [rows[number] for number in numbers], [names[number] for number in numbers]
        if not numbers:
            return
        self._count_stepped(positions.sessions, time.monotonic())
        kind = WorkKind.BACKGROUND if is_background else WorkKind.DECODE
        loop = asyncio.get_running_loop()
        self._arrive(WorkItem(kind, deliver, next_positions=positions, rows=rows, names=names, loop=loop))

    def _arrive(self, work: WorkItem) -> None:
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._add_arrived)
        self._arrived.append(work)

    def _count_stepped(self, sessions: Sequence[Session], now_s: float) -> None:
        for session in sessions:
            self._stepped_s.pop(id(session), None)
        self._stepped_s.update(dict.fromkeys(map(id, sessions), now_s))

    def _work_of(
        self,
        session: Session,
        step: SessionStep,
        deliver: Callable[[Any], None],
        client: str,
        user: str,
        is_background: bool,
    ) -> WorkItem:
        now_s = time.monotonic()
        self._count_stepped([session], now_s)
        rows, num_tokens, _ = step.inputs.hidden.shape
        # A first step of several positions is a prompt, however short it is.
        is_short = num_tokens == 1 or (step.start > 0 and rows * num_tokens <= _FEW_POSITIONS)
        is_chunk = step.num_following > 0 or self._queue.is_prompt(session)
        kind = WorkKind.DECODE if is_short and not is_chunk else WorkKind.PREFILL
        kind = WorkKind.BACKGROUND if is_background else kind
        loop, cost = asyncio.get_running_loop(), rows * num_tokens
        return WorkItem(kind, deliver, session, step, submitted_s=now_s, client=client, user=user, cost=cost, loop=loop)

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
        done = _future()
        work = _call(WorkKind.TRAINING, done, call, client.peer_id, num_positions)
        self._training.add(client, 1)
        done.add_done_callback(lambda _done: self._training.add(client, -1))
        result: T = await self._submit(work, done)
        return result

    async def call(self, call: Callable[[], T], client: str = "") -> T:
        """Call a short function on the compute thread in a decoding turn, and return its result."""
        done = _future()
        result: T = await self._submit(_call(WorkKind.DECODE, done, call, client), done)
        return result

    def stop(self) -> None:
        """Finish the work in progress, fail all waiting work, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    async def _submit(self, work: WorkItem, done: asyncio.Future[Any]) -> Any:
        self._add_arrived()  # they came first
        if not self._add([work]):
            raise _shutting_down()
        try:
            return await done
        except asyncio.CancelledError:
            self._discard(work)
            raise
        finally:
            del work  # else it and an error's traceback would refer to each other and keep memory alive

    def _add_arrived(self) -> None:
        """Submit the steps that have started in this turn of the event loop."""
        arrived, self._arrived = self._arrived, []
        if arrived and not self._add(arrived):
            for work in arrived:
                _hand_over(work, _shutting_down())

    def _add(self, arrived: Sequence[WorkItem]) -> bool:
        """Add work to the queue. Return False if the thread ends, and computes nothing more."""
        with self._changed:
            if self._stopping:
                return False
            for work in arrived:
                self._queue.add(work)
            self._changed.notify()
        for work in arrived:
            self._costs[work.kind] += work.cost
            self._num_waiting += work.num_pieces
        return True

    def _discard(self, work: WorkItem) -> None:
        """Remove work whose caller has gone, unless it has begun; then its result is dropped later."""
        with self._changed:
            num_before = len(self._queue)
            self._queue.discard(work)
            is_gone = len(self._queue) < num_before
        if is_gone:
            self._count_out(work)

    def _count_out(self, work: WorkItem) -> None:
        self._num_waiting -= work.num_pieces
        self._costs[work.kind] -= work.cost

    def _main(self) -> None:
        while batch := self._next_batch():
            start_s = time.monotonic()
            results = self._run(batch)
            self._count(batch, time.monotonic() - start_s)
            self._deliver(batch, results)
            del batch, results  # free their memory before waiting for more work

    def _next_batch(self) -> list[WorkItem]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) or self._stopping)
            if self._stopping:
                waiting = self._queue.clear()
                self._deliver(waiting, [_shutting_down()] * len(waiting))
                return []
            batch = self._queue.next_batch()
        now = time.monotonic()
        kind = batch[0].kind
        distribution = self._counters.wait_s[kind.name.lower()]
        for work in batch:
            wait_s = now - work.submitted_s
            if kind is not WorkKind.BACKGROUND:
                self._delay_s = wait_s + _DELAY_KEPT**work.num_pieces * (self._delay_s - wait_s)
            distribution.add(wait_s, work.num_pieces)
        self._delay_time = now
        return batch

    def _count(self, batch: list[WorkItem], seconds: float) -> None:
        kind = batch[0].kind
        self._counters.finish(kind.name.lower(), seconds)
        if batch[0].call is not None and kind is not WorkKind.TRAINING:
            return  # a short call says nothing about the pace of steps
        pace_s = seconds / max(1, sum(work.cost for work in batch))
        self._pace_s[kind] += (pace_s - self._pace_s[kind]) * (_PACE_WEIGHT if self._pace_s[kind] else 1.0)

    def _deliver(self, batch: Sequence[WorkItem], results: Sequence[Any]) -> None:
        """Deliver results on their loops. Each loop is woken once, so that the results of a batch leave together."""
        everything = list(zip(batch, results, strict=True))
        for loop in {work.loop for work in batch}:
            assert loop is not None
            done = [(work, result) for work, result in everything if work.loop is loop]
            loop.call_soon_threadsafe(self._deliver_all, done)

    def _deliver_all(self, done: Sequence[tuple[WorkItem, Any]]) -> None:
        for work, result in done:
            self._count_out(work)
            _hand_over(work, result)

    def _run(self, batch: list[WorkItem]) -> list[Any]:
        """Return each result, or the exception that ended its work."""
        try:
            if batch[0].call is not None:
                return [batch[0].call()]
            return self._engine.run([work.entry for work in batch])
        except Exception as error:  # the caller gets whatever failed, and the thread goes on
            num_pieces = sum(work.num_pieces for work in batch)
            if num_pieces == 1:
                return [error]
            _logger.warning("a batch of %d sessions failed; computing them one by one", num_pieces)
            return [self._run_one_by_one(work) for work in batch]

    def _run_one_by_one(self, work: WorkItem) -> Any:
        results = [self._run([work.part([number])])[0] for number in range(work.num_pieces)]
        return results[0] if work.next_positions is None else results


def _hand_over(work: WorkItem, result: Any) -> None:
    """Deliver a result. If that fails, log the error: the other results of the batch must still be delivered."""
    with logged_errors(_logger, "the result of a step could not be delivered"):
        work.hand_over(result)


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _call(kind: WorkKind, done: asyncio.Future[Any], call: Callable[[], Any], client: str, cost: int = 1) -> WorkItem:
    return WorkItem(kind, partial(_set, done), call=call, client=client, cost=cost, loop=done.get_loop())


def _shutting_down() -> PeerBusy:
    return PeerBusy("the server is shutting down")


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
