"""The scheduler, which decides what the compute thread does next."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import torch

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller, Shares
from swarm_server.core.counters import Counters
from swarm_server.engine.session_state import Session, SessionStep
from swarm_server.queueing.fair_queue import FairQueue
from swarm_server.queueing.prompt_order import PromptOrder

T = TypeVar("T")

_logger = logging.getLogger(__name__)
_DELAY_HALF_LIFE_S = 10.0
_ACTIVE_S = 1.0
_PACE_WEIGHT = 0.1  # weight of one batch in the moving average
_NOBODY = Caller("")
_PREFILLS_PER_TRAINING = 3  # prefill turns before a training turn, if both wait
_OTHERS_PER_BACKGROUND = 7  # turns before a turn of background steps, if both wait
_PROMPTS_BETWEEN = 3  # prefill turns between two decoding turns, while more prompts than decoding steps wait
_FEW_POSITIONS = 32  # rows × positions: a step of up to this size counts as decoding (speculative decoding)
_LEAST_ALONE = 16  # rows × positions: smaller decoding steps always share batches
MAX_POSITIONS = 256  # rows × positions that a batch of decoding steps has at most


class WorkKind(IntEnum):
    """A kind of work. Users watch decoding; prompts come in chunks, short ones in one batch; training can wait.

    Background work is steps of sessions for whose answers nobody waits.
    """

    DECODE = 0
    PREFILL = 1
    TRAINING = 2
    BACKGROUND = 3


@dataclass(eq=False)
class WorkItem:
    """A step of a session, or a function call, with the future that its caller awaits.

    Attributes:
        client: the peer id of the client; empty if the work is the server's own.
        user: which of the client's users the work is for, under a name that the client chooses.
        cost: rows × positions, roughly proportional to the time that the work takes.
    """

    kind: WorkKind
    done: asyncio.Future[Any] = field(repr=False)
    session: Session | None = None
    step: SessionStep | None = None
    call: Callable[[], Any] | None = None
    submitted_s: float = field(default_factory=time.monotonic)
    client: str = ""
    user: str = ""
    cost: int = 1

    @property
    def session_step(self) -> tuple[Session, SessionStep]:
        assert self.session is not None and self.step is not None
        return self.session, self.step

    @property
    def num_rows(self) -> int:
        return self.session_step[1].inputs.hidden.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.session_step[1].inputs.hidden.shape[1]

    @property
    def num_positions(self) -> int:
        return self.num_rows * self.num_tokens

    @property
    def num_left(self) -> int:
        """Return the number of positions of the prompt from this chunk on, over all rows."""
        return self.num_rows * (self.num_tokens + self.session_step[1].num_following)


class WorkQueue:
    """A queue that decides whose turn it is. It is pure: no clock, no thread.

    Within a kind, clients share the turns, and a client's users share the client's turns (see ``FairQueue``). A user's
    prompts run in the order of ``PromptOrder``, all other work in order of arrival. Decoding gets every second turn
    while other work waits, and all turns otherwise. Training gets one in four of the turns that decoding leaves.
    While more prompts than decoding steps wait, decoding gets every fourth turn: a decoding batch takes about as long
    for many sessions as for few, so prompts that become decoding sessions sooner make all work shorter.
    Background work gets the turns for which nothing else waits, and else one turn of eight.
    """

    def __init__(self, mixes_sessions: bool = True, chunk_positions: int = 64) -> None:
        """Create an empty queue. ``mixes_sessions``: steps of several sessions may be computed in one batch.

        ``chunk_positions``: the most rows × positions in a batch of prompts, unless one prompt chunk has more. Decoding
        waits for such a batch. A decoding step of a quarter of these positions keeps the machine busy, so it runs
        alone: the next server can start on this lane of a large batch while the other lanes are computed here.
        """
        self._mixes_sessions, self._chunk_positions = mixes_sessions, chunk_positions
        self._waiting: dict[WorkKind, FairQueue[WorkItem]] = {kind: FairQueue(num_levels=2) for kind in WorkKind}
        self._prompts = PromptOrder()  # keyed by the id() of each session
        self._num_others = _PROMPTS_BETWEEN  # turns since the last decoding
        self._num_prefills = 0  # since the last training
        self._num_urgent = 0  # turns since the last background work

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def count(self, kind: WorkKind) -> int:
        return len(self._waiting[kind])

    def add(self, work: WorkItem) -> None:
        names = work.client, work.user
        place: tuple[float, ...] = ()
        if work.kind is WorkKind.PREFILL and work.step is not None:
            place = self._prompts.place(id(work.session), names, work.num_left)
        self._waiting[work.kind].add(work, names, work.cost, place)

    def discard(self, work: WorkItem) -> None:
        """Remove work whose caller has gone."""
        self._waiting[work.kind].remove(work)
        self.forget(work.session)

    def is_prompt(self, session: Session) -> bool:
        """Return whether chunks of this session's prompt have come, and its last chunk has not started yet."""
        return id(session) in self._prompts

    def forget(self, session: Session | None) -> None:
        """Forget the session's prompt, of which no more chunks will come."""
        self._prompts.forget(id(session))

    def next_batch(self) -> list[WorkItem]:
        """Return what to compute now: one piece of work, or steps of several sessions; empty if nothing waits."""
        if not len(self):
            return []
        kind = self._next_kind()
        self._num_urgent = 0 if kind is WorkKind.BACKGROUND else self._num_urgent + 1
        if kind is WorkKind.DECODE:
            self._num_others = 0
            return self._batch(kind, MAX_POSITIONS, max(_LEAST_ALONE, self._chunk_positions // 4))
        self._num_others += 1
        if kind is not WorkKind.BACKGROUND:
            self._num_prefills = 0 if kind is WorkKind.TRAINING else self._num_prefills + 1
        return self._batch(kind, self._chunk_positions, self._chunk_positions)

    def clear(self) -> list[WorkItem]:
        """Take out and return all waiting work."""
        return [work for waiting in self._waiting.values() for work in waiting.clear()]

    def _next_kind(self) -> WorkKind:
        decode, prefill, training, background = (len(self._waiting[kind]) for kind in WorkKind)
        num_between = _PROMPTS_BETWEEN if prefill > decode else 1
        is_due = background > 0 and self._num_urgent >= _OTHERS_PER_BACKGROUND
        if decode and (self._num_others >= num_between or not (prefill or training or is_due)):
            return WorkKind.DECODE
        return WorkKind.BACKGROUND if is_due else self._kind_between(prefill, training)

    def _kind_between(self, prefill: int, training: int) -> WorkKind:
        """Return the kind of a turn that neither decoding takes nor background work that is due."""
        if not (prefill or training):
            return WorkKind.BACKGROUND
        if training and (not prefill or self._num_prefills >= _PREFILLS_PER_TRAINING):
            return WorkKind.TRAINING
        return WorkKind.PREFILL

    def _batch(self, kind: WorkKind, most_positions: int, alone_positions: int) -> list[WorkItem]:
        """Take the first work, and steps with as many new positions. Steps of ``alone_positions`` or more run alone."""
        waiting = self._waiting[kind]
        first = waiting.pop()
        assert first is not None
        batch = [first]
        if kind is WorkKind.PREFILL:
            self._prompts.has_turn(id(first.session))
        if first.step is not None and self._mixes_sessions and first.num_positions < alone_positions:
            batch += _companions(first, waiting, most_positions - first.num_positions, alone_positions)
        for work in batch:
            if work.step is not None and not work.step.num_following:
                self.forget(work.session)
        return batch


def _companions(
    first: WorkItem, waiting: FairQueue[WorkItem], num_left: int, alone_positions: int
) -> Iterator[WorkItem]:
    """Take out and yield steps with as many new positions as ``first``, of ``num_left`` positions together."""

    def fits(work: WorkItem) -> bool:
        if work.step is None or work.num_tokens != first.num_tokens:
            return False
        return work.num_positions < alone_positions and work.num_positions <= num_left

    while num_left > 0 and (work := waiting.pop(fits)) is not None:
        yield work
        num_left -= work.num_positions


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
