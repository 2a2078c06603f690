"""The queue of the compute thread: whose turn it is, and which steps are computed in one batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from swarm_server.engine.session_state import BatchEntry, NextPositions, Session, SessionStep
from swarm_server.queueing.fair_queue import FairQueue, QueueEntry
from swarm_server.queueing.prompt_order import PromptOrder

_PREFILLS_PER_TRAINING = 3  # prefill turns before a training turn, if both wait
_OTHERS_PER_BACKGROUND = 7  # turns before a turn of background steps, if both wait
_PROMPTS_BETWEEN = 8  # prefill turns between two decoding turns, while more prompts than decoding steps wait
_CALLS_PER_DECODING = 8  # short calls that do not use up a decoding turn
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
    """A step of a session, the next positions of several sessions, or a function call.

    Attributes:
        deliver: takes the result, or the exception that ended the work; called on ``loop``. For next positions, it
            takes ``rows`` before that.
        rows: for each of the next positions, what ``deliver`` needs to know of it.
        loop: the event loop that submitted the work. In a ``Scheduler``, all work has one.
        client: the peer id of the client; empty if the work is the server's own.
        user: which of the client's users the work is for, under a name that the client chooses.
        names: the client and the user of each of the next positions.
        num_rows, num_tokens: the rows of a step, and the new positions of each; 0 for a function call.
        num_positions: rows × new positions.
        num_pieces: the number of next positions; 1 for other work.
        cost: rows × positions, roughly proportional to the time that the work takes.
    """

    kind: WorkKind
    deliver: Callable[..., None] = field(repr=False)
    session: Session | None = None
    step: SessionStep | None = None
    call: Callable[[], Any] | None = None
    next_positions: NextPositions | None = None
    rows: Sequence[Any] = ()
    submitted_s: float = field(default_factory=time.monotonic)
    client: str = ""
    user: str = ""
    names: Sequence[tuple[str, str]] = ()
    cost: int = 1
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)
    num_rows: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    num_positions: int = field(default=0, init=False)
    num_pieces: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if self.next_positions is not None:
            self.num_rows = self.num_pieces = self.cost = len(self.next_positions)
            self.num_tokens = 1
        elif self.step is not None:
            self.num_rows, self.num_tokens, _ = self.step.inputs.hidden.shape
        self.num_positions = self.num_rows * self.num_tokens

    @property
    def entry(self) -> BatchEntry:
        """Return what the engine computes."""
        if self.next_positions is not None:
            return self.next_positions
        assert self.session is not None and self.step is not None
        return self.session, self.step

    @property
    def num_left(self) -> int:
        """Return the number of positions of the prompt from this chunk on, over all rows."""
        assert self.step is not None
        return self.num_rows * (self.num_tokens + self.step.num_following)

    def hand_over(self, result: Any) -> None:
        """Deliver the result."""
        if self.next_positions is None:
            self.deliver(result)
        else:
            self.deliver(self.rows, result)

    def part(self, numbers: Sequence[int]) -> WorkItem:
        """Return the pieces with these numbers as work of their own; this work if these are all pieces."""
        if len(numbers) == self.num_pieces:
            return self
        assert self.next_positions is not None
        rows, names = [self.rows[number] for number in numbers], [self.names[number] for number in numbers]
        return replace(self, next_positions=self.next_positions.part(numbers), rows=rows, names=names)


@dataclass(eq=False, slots=True)
class WaitingPosition:
    """One of the next positions of a piece of work, which wait for their turns one by one.

    It has those attributes of a ``WorkItem`` of one position that the queue reads.
    """

    work: WorkItem
    number: int
    session = call = None
    num_tokens = num_positions = num_pieces = 1


Waiting = WorkItem | WaitingPosition


class WorkQueue:
    """A queue that decides whose turn it is. It is pure: no clock, no thread.

    Within a kind, clients share the turns, and a client's users share the client's turns (see ``FairQueue``). A user's
    prompts run in the order of ``PromptOrder``, all other work in order of arrival. Decoding gets every second turn
    while other work waits, and all turns otherwise. Training gets one in four of the turns that decoding leaves.
    While more prompts than decoding steps wait, decoding gets every ninth turn: a decoding batch takes about as long
    for many sessions as for few, so prompts that become decoding sessions sooner make all work shorter.
    Short calls have decoding turns, too; up to eight of them come before a turn counts as used.
    Background work gets the turns for which nothing else waits, and else one turn of eight.
    """

    def __init__(self, mixes_sessions: bool = True, chunk_positions: int = 64) -> None:
        """Create an empty queue. ``mixes_sessions``: steps of several sessions may be computed in one batch.

        ``chunk_positions``: the most rows × positions in a batch of prompts, unless one prompt chunk has more. Decoding
        waits for such a batch. A decoding step of a quarter of these positions keeps the machine busy, so it runs
        alone: the next server can start on this lane of a large batch while the other lanes are computed here.
        """
        self._mixes_sessions, self._chunk_positions = mixes_sessions, chunk_positions
        self._waiting = [FairQueue[Waiting](num_levels=2) for _ in WorkKind]  # by kind
        self._prompts = PromptOrder()  # keyed by the id() of each session
        self._num_others = _PROMPTS_BETWEEN  # turns since the last decoding
        self._num_calls = 0  # short calls since the last decoding step
        self._num_prefills = 0  # since the last training
        self._num_urgent = 0  # turns since the last background work

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def add(self, work: WorkItem) -> None:
        if work.next_positions is not None:

            def split() -> Iterator[QueueEntry[Waiting]]:
                return ((WaitingPosition(work, number), names, 1, ()) for number, names in enumerate(work.names))

            self._waiting[work.kind].add_together(work, work.num_pieces, split)
            return
        names = work.client, work.user
        place: tuple[float, ...] = ()
        if work.kind is WorkKind.PREFILL and work.step is not None:
            place = self._prompts.place(id(work.session), names, work.num_left)
        self._waiting[work.kind].add(work, names, work.cost, place)

    def discard(self, work: WorkItem) -> None:
        """Remove work whose caller has gone."""
        self._waiting[work.kind].remove(work)
        self.forget(work.session)

    @property
    def has_prompts(self) -> bool:
        """Return whether ``is_prompt`` is true of any session."""
        return len(self._prompts) > 0

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
            batch = self._batch(kind, MAX_POSITIONS, max(_LEAST_ALONE, self._chunk_positions // 4))
            self._num_calls = self._num_calls + 1 if batch[0].call is not None else 0
            if self._num_calls % _CALLS_PER_DECODING == 0:
                self._num_others = 0
            return batch
        self._num_others += 1
        if kind is not WorkKind.BACKGROUND:
            self._num_prefills = 0 if kind is WorkKind.TRAINING else self._num_prefills + 1
        return self._batch(kind, self._chunk_positions, self._chunk_positions)

    def clear(self) -> list[WorkItem]:
        """Take out and return all waiting work."""
        return _rejoined([each for waiting in self._waiting for each in waiting.clear()])

    def _next_kind(self) -> WorkKind:
        decode, prefill, training, background = map(len, self._waiting)
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
        batch: list[Waiting] = []
        if kind is WorkKind.DECODE and self._mixes_sessions:
            batch = waiting.take_all(lambda all_work: _fit_together(all_work, most_positions, alone_positions))
        if not batch:
            first = waiting.pop()
            assert first is not None
            batch.append(first)
            if kind is WorkKind.PREFILL:
                self._prompts.has_turn(id(first.session))
            if first.call is None and self._mixes_sessions and first.num_positions < alone_positions:
                batch += _companions(first, waiting, most_positions - first.num_positions, alone_positions)
        works = _rejoined(batch)
        for work in works:
            if work.step is not None and not work.step.num_following:
                self.forget(work.session)
        return works


def _rejoined(batch: Sequence[Waiting]) -> list[WorkItem]:
    """Return the work of a batch, with the positions that arrived in one ``WorkItem`` joined again."""
    numbers: dict[WorkItem, list[int]] = {}
    for each in batch:
        if isinstance(each, WaitingPosition):
            numbers.setdefault(each.work, []).append(each.number)
        else:
            numbers[each] = []
    return [work.part(of_work) if of_work else work for work, of_work in numbers.items()]


def _fit_together(all_work: Sequence[Waiting], most_positions: int, alone_positions: int) -> bool:
    """Return whether all this work is steps that one batch takes, whatever their order; see ``_companions``."""
    num_tokens = all_work[0].num_tokens
    if not num_tokens or sum([work.num_positions for work in all_work]) > most_positions:
        return False
    most = alone_positions  # of one session
    return all([work.num_tokens == num_tokens and work.num_positions < most * work.num_pieces for work in all_work])


def _companions(first: Waiting, waiting: FairQueue[Waiting], num_left: int, alone_positions: int) -> Iterator[Waiting]:
    """Take out and yield steps with as many new positions as ``first``, of ``num_left`` positions together."""

    def fits(work: Waiting) -> bool:
        is_alike = work.num_tokens == first.num_tokens
        return is_alike and work.num_positions < alone_positions and work.num_positions <= num_left

    while num_left > 0 and (work := waiting.pop(fits)) is not None:
        yield work
        num_left -= work.num_positions
