"""Decides what the compute thread does next."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
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
_PACE_WEIGHT = 0.1  # of one batch in the average
_NOBODY = Caller("")
_PREFILLS_PER_TRAINING = 3  # of turns that decoding leaves
_FEW_POSITIONS = 32  # rows × positions of a step that somebody watches, such as one of speculative decoding
_LEAST_ALONE = 16  # rows of a decoding step that may be computed by itself
MAX_POSITIONS = 256  # rows × positions of a batch of decoding steps


class Kind(IntEnum):
    """Decoding is short and somebody watches it; prompts come in chunks, short ones together; training can wait."""

    DECODE = 0
    PREFILL = 1
    TRAINING = 2


@dataclass(eq=False)
class Work:
    """A step of a session, or a call, and the future that its caller awaits.

    Attributes:
        client: for whom it is, by peer id; empty: for the server itself.
        user: which of the client's users that is, by a name of the client's choice.
        cost: rows × positions, which is roughly what it takes.
    """

    kind: Kind
    done: asyncio.Future[Any] = field(repr=False)
    session: Session | None = None
    step: SessionStep | None = None
    call: Callable[[], Any] | None = None
    submitted_s: float = 0.0
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
        """Positions of the prompt from this chunk on."""
        return self.num_rows * (self.num_tokens + self.session_step[1].num_following)


class WorkQueue:
    """Whose turn it is. Pure: no clock, no thread.

    Within a kind, clients share the turns, and the users of a client share its own, see ``FairQueue``. The prompts of a
    user are computed in the order of ``PromptOrder``, all else as it comes. Decoding gets every other turn while
    anything else waits, and all turns while nothing does; of the others' turns, training gets one in four.
    """

    def __init__(self, mixes_sessions: bool = True, chunk_positions: int = 64) -> None:
        """``mixes_sessions``: steps of several sessions may be computed in one batch.

        ``chunk_positions``: rows × positions of a batch of prompts, unless one has more: what decoding waits for. A
        decoding step of a quarter of that, such as a lane of a large batch, keeps the machine busy: it is alone, so
        that the next server has it while others are computed here.
        """
        self._mixes_sessions, self._chunk_positions = mixes_sessions, chunk_positions
        self._waiting: dict[Kind, FairQueue[Work]] = {kind: FairQueue(num_levels=2) for kind in Kind}
        self._prompts = PromptOrder()  # by the id() of their sessions
        self._last = Kind.TRAINING
        self._num_prefills = 0  # since the last training

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def count(self, kind: Kind) -> int:
        return len(self._waiting[kind])

    def add(self, work: Work) -> None:
        names = work.client, work.user
        place: tuple[float, ...] = ()
        if work.kind is Kind.PREFILL and work.step is not None:
            place = self._prompts.place(id(work.session), names, work.num_left)
        self._waiting[work.kind].add(work, names, work.cost, place)

    def discard(self, work: Work) -> None:
        """Forgets work whose caller has gone."""
        self._waiting[work.kind].remove(work)
        self.forget(work.session)

    def is_prompt(self, session: Session) -> bool:
        """Whether chunks of a prompt of this session have come, and its last one is still to be computed."""
        return id(session) in self._prompts

    def forget(self, session: Session | None) -> None:
        """Nothing more will come of the session's prompt."""
        self._prompts.forget(id(session))

    def next_batch(self) -> list[Work]:
        """What to compute now: one piece of work, or steps of several sessions. Empty if nothing waits."""
        if not len(self):
            return []
        self._last = kind = self._next_kind()
        if kind is Kind.DECODE:
            return self._batch(kind, MAX_POSITIONS, max(_LEAST_ALONE, self._chunk_positions // 4))
        self._num_prefills = 0 if kind is Kind.TRAINING else self._num_prefills + 1
        return self._batch(kind, self._chunk_positions, self._chunk_positions)

    def clear(self) -> list[Work]:
        """Takes out everything."""
        return [work for waiting in self._waiting.values() for work in waiting.clear()]

    def _next_kind(self) -> Kind:
        decode, prefill, training = (bool(self._waiting[kind]) for kind in Kind)
        if decode and (self._last is not Kind.DECODE or not (prefill or training)):
            return Kind.DECODE
        if training and (not prefill or self._num_prefills >= _PREFILLS_PER_TRAINING):
            return Kind.TRAINING
        return Kind.PREFILL

    def _batch(self, kind: Kind, most_positions: int, alone_positions: int) -> list[Work]:
        """The first, with steps of as many new positions each; those of ``alone_positions`` or more by themselves."""
        waiting = self._waiting[kind]
        first = waiting.pop()
        assert first is not None
        batch = [first]
        if kind is Kind.PREFILL:
            self._prompts.has_turn(id(first.session))
        if first.step is not None and self._mixes_sessions and first.num_positions < alone_positions:
            num_left = most_positions - first.num_positions

            def fits(work: Work) -> bool:
                if work.step is None or work.num_tokens != first.num_tokens:
                    return False
                return work.num_positions < alone_positions and work.num_positions <= num_left

            while num_left > 0 and (work := waiting.pop(fits)) is not None:
                batch.append(work)
                num_left -= work.num_positions
        for work in batch:
            if work.step is not None and not work.step.num_following:
                self.forget(work.session)
        return batch


class StepRunner(Protocol):
    """What computes steps: the engine."""

    def run(self, batch: Sequence[tuple[Session, SessionStep]]) -> list[torch.Tensor | Exception]: ...


class Scheduler:
    """One compute thread behind a queue."""

    def __init__(
        self,
        engine: StepRunner,
        max_training: int,
        mixes_sessions: bool = True,
        counters: Counters | None = None,
        chunk_positions: int = 64,
    ) -> None:
        """``max_training``: passes that may wait; more are refused. Steps are bounded by the sessions there are.

        The others: see ``WorkQueue``.
        """
        self._engine = engine
        self._counters = counters or Counters()
        self._training = Shares(max_training, minimum=1)  # used on the event loop
        self._queue = WorkQueue(mixes_sessions, chunk_positions)
        self._changed = threading.Condition()
        self._stopping = False
        self._delay_s, self._delay_time = 0.0, time.monotonic()
        self._costs = dict.fromkeys(Kind, 0)  # of all work that waits or is being computed; used on the event loop
        self._num_waiting = 0
        self._pace_s = dict.fromkeys(Kind, 0.0)  # for a unit of cost: an exponential average; 0: not known
        self._stepped_s: dict[int, float] = {}  # when each session, by its id(), had its last step; the latest last
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)
        self._thread.start()

    @property
    def queue_delay_s(self) -> float:
        """How long work has waited lately: an exponential average, which fades while there is none."""
        idle_s = time.monotonic() - self._delay_time
        faded: float = 0.5 ** (idle_s / _DELAY_HALF_LIFE_S)
        return self._delay_s * faded

    @property
    def queue_s(self) -> float:
        """Return how long a step would wait: for all steps, and for one piece of training, since they take turns.

        It is known by how long others of the same kind took lately.
        """
        costs = self._costs | {Kind.TRAINING: self._costs[Kind.TRAINING] / max(1, self._training.used)}
        return sum(costs[kind] * self._pace_s[kind] for kind in Kind)

    @property
    def num_waiting(self) -> int:
        """Pieces of work that wait or are being computed. What comes later may go before some of them."""
        return self._num_waiting

    @property
    def num_active(self) -> int:
        """Sessions that had a step lately. On the event loop."""
        oldest_s = time.monotonic() - _ACTIVE_S
        while self._stepped_s and (first := next(iter(self._stepped_s.items())))[1] < oldest_s:
            del self._stepped_s[first[0]]
        return len(self._stepped_s)

    def forget(self, session: Session) -> None:
        """Remove a session that has come to its end from all that is counted."""
        self._stepped_s.pop(id(session), None)
        with self._changed:
            self._queue.forget(session)

    async def step(self, session: Session, step: SessionStep, client: str = "", user: str = "") -> torch.Tensor:
        """Return the step's output, [batch, tokens, hidden_size].

        ``user``: whose of the client's users it is, see ``Work``. Raises what refused the step (see ``Engine.run``).
        """
        self._stepped_s.pop(id(session), None)
        self._stepped_s[id(session)] = time.monotonic()
        rows, num_tokens, _ = step.inputs.hidden.shape
        is_short = num_tokens == 1 or (step.start > 0 and rows * num_tokens <= _FEW_POSITIONS)
        is_chunk = step.num_following > 0 or self._queue.is_prompt(session)
        kind = Kind.DECODE if is_short and not is_chunk else Kind.PREFILL
        output: torch.Tensor = await self._submit(
            Work(kind, _future(), session=session, step=step, client=client, user=user, cost=rows * num_tokens)
        )
        return output

    async def train(self, call: Callable[[], T], client: Caller = _NOBODY, num_positions: int = 1) -> T:
        """Calls a function on the compute thread when training has its turn.

        ``num_positions``: rows × positions that it computes.

        Raises:
            PeerBusy: too much training waits already.
        """
        if not self._training.fits(client, 1):
            raise PeerBusy(
                f"the server's queue is full: {self._training.used} of {self._training.capacity} requests are waiting, "
                f"{self._training.held(client)} of this client"
            )
        work = Work(Kind.TRAINING, _future(), call=call, client=client.peer_id, cost=num_positions)
        self._training.add(client, 1)
        work.done.add_done_callback(lambda _done: self._training.add(client, -1))
        result: T = await self._submit(work)
        return result

    async def call(self, call: Callable[[], T], client: str = "") -> T:
        """Calls a short function on the compute thread, soon."""
        result: T = await self._submit(Work(Kind.DECODE, _future(), call=call, client=client))
        return result

    def stop(self) -> None:
        """Finishes the work in progress, fails what waits, and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    async def _submit(self, work: Work) -> Any:
        work.submitted_s = time.monotonic()
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
            del work  # an error's traceback would hold on to it, and it to the error, and both to memory

    def _main(self) -> None:
        while batch := self._next_batch():
            start_s = time.monotonic()
            results = self._run(batch)
            self._count(batch, time.monotonic() - start_s)
            _resolve([work.done for work in batch], results)
            del batch, results  # their memory is not needed until there is more to do

    def _next_batch(self) -> list[Work]:
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
            self._delay_s += 0.1 * (wait_s - self._delay_s)
            self._counters.wait_s[work.kind.name.lower()].add(wait_s)
        self._delay_time = now
        return batch

    def _count(self, batch: list[Work], seconds: float) -> None:
        kind = batch[0].kind
        self._counters.batches += 1
        self._counters.compute_s[kind.name.lower()] += seconds
        if batch[0].call is not None and kind is not Kind.TRAINING:
            return  # it is not as long as a step
        pace_s = seconds / max(1, sum(work.cost for work in batch))
        self._pace_s[kind] += (pace_s - self._pace_s[kind]) * (_PACE_WEIGHT if self._pace_s[kind] else 1.0)

    def _run(self, batch: list[Work]) -> list[Any]:
        """The result of each, or the exception it ended with. Failures belong to the caller; the thread goes on."""
        try:
            if batch[0].call is not None:
                return [batch[0].call()]
            return self._engine.run([work.session_step for work in batch])
        except Exception as error:
            if len(batch) == 1:
                return [error]
            _logger.warning("a batch of %d sessions failed; computing them one by one", len(batch))
            return [result for work in batch for result in self._run([work])]


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _resolve(futures: Sequence[asyncio.Future[Any]], results: Sequence[Any]) -> None:
    """On their loops, each of which is woken once: what was computed together goes on its way together."""
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
