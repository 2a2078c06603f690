"""The loop of all generations of a model: rows that are ready are computed together, token by token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from transformers import LogitsProcessorList

from swarm_client.batching.config import checked_config, generator_of
from swarm_client.batching.groups import groups_of
from swarm_client.batching.request import FinishReason, Request, Scored, Token, TokenListener
from swarm_client.batching.row import BatchRow
from swarm_client.batching.rows import BatchedModel
from swarm_client.batching.sampler import Choice, choose, token_of
from swarm_client.core import background
from swarm_client.sessions.opening import SessionPurpose
from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.choosing import verify
from swarm_client.speculation.generating import Ends, GeneratedText, has_room, ranking_of
from swarm_client.speculation.head_input import HeadInput
from swarm_client.speculation.speculation import Guessing
from swarm_protocol.errors import PeerUnavailable, RequestRejected, SwarmError
from swarm_protocol.failures import Closing, logged_errors, outcome_of
from swarm_protocol.wire.block_input import BlockInput

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin

_QUIET_S = 1e-3  # the wait for more results, because results that were computed together arrive one by one
_BETWEEN_GROUPS_S = 1e-3  # the pause that puts groups into different messages
_SCORED_TOGETHER = 64  # tokens of a prompt; then other generations have their turn
_RESERVED_TOKENS = 256  # the most new tokens in the first lease, which grows with its session
_logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _New:
    row: BatchRow


@dataclass(frozen=True)
class _Cancelled:
    row: BatchRow


@dataclass(frozen=True)
class _Stepped:
    """A finished step. ``hidden``: [1, wanted, hidden_size], ``BatchRow.num_wanted`` positions, or an error."""

    row: BatchRow
    hidden: torch.Tensor | BaseException


_Ending = FinishReason | Exception | Literal["lost"]  # lost: nobody listens
_Event = _New | _Cancelled | _Stepped | None  # None: the loop must end


class GenerationLoop(Closing):
    """A loop that computes many generations at once. Each has its own session, and joins and leaves at any token.

    A generation writes the same text as ``generate`` alone, after ``torch.manual_seed`` with its seed. A failed server
    only delays the generations that it was computing.
    """

    def __init__(self, model: RemoteModelMixin) -> None:
        """Start the thread. Raise RequestRejected if the model has trained prompts, which only ``generate`` can add."""
        if model.prompts is not None:
            raise RequestRejected("generations of a model with prompts cannot be batched: call generate")
        self._model: Any = model
        self._batched = BatchedModel(model)
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._rows: set[BatchRow] = set()
        self._is_closed = False
        self._submitting = threading.Lock()  # no row may enter the inbox after the message that ends the loop
        self._thread = threading.Thread(target=self._run, name="swarm generations", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: TokenListener) -> BatchRow:
        """Add a request to the loop. Any thread may call this method.

        Raises:
            ValueError: the request is invalid: an empty prompt, more positions than the model has, or an option that
                is not supported.
        """
        config = checked_config(self._model, request)
        prompt, processors = torch.tensor([request.prompt]), LogitsProcessorList(request.processors)
        choice = Choice(
            list(request.prompt),
            self._model._get_logits_processor(
                config, prompt.shape[1], encoder_input_ids=prompt, logits_processor=processors, device="cpu"
            ),
            generator_of(request) if config.do_sample else None,
            request.num_logprobs,
        )
        stop_ids = config._eos_token_tensor
        session = self._model.blocks.open_session(
            len(request.prompt) + min(config.max_new_tokens, _RESERVED_TOKENS),
            on_event=listener if request.with_servers else None,
            is_bundled=True,
            purpose=SessionPurpose(request.user, request.is_background),
        )
        (first,) = self._batched.inputs(prompt, [session], [0], request.pictures) if request.pictures else [None]
        ranking = ranking_of(config, choice.processors, choice.generator)
        row = BatchRow(
            lambda: self._inbox.put(_Cancelled(row)),
            choice,
            session,
            listener,
            Ends(frozenset([] if stop_ids is None else stop_ids.tolist()), config.max_new_tokens),
            None if request.pictures else self._model.speculation.begin(list(request.prompt), ranking),
            request,
            first,
        )
        return self._entered(row)

    def take_over(
        self, text: GeneratedText, ends: Ends, session: RemoteSession, guessing: Guessing, listener: TokenListener
    ) -> BatchRow:
        """Continue a text whose session has all tokens but the last. The session stays open at the end."""
        choice = Choice(
            text.ids[0].tolist(), text.processors, torch.default_generator if text.do_sample else None, None
        )
        row = BatchRow(lambda: self._inbox.put(_Cancelled(row)), choice, session, listener, ends, guessing)
        return self._entered(row)

    def _entered(self, row: BatchRow) -> BatchRow:
        with self._submitting:
            if self._is_closed:
                raise RequestRejected("the generation loop was closed")
            self._inbox.put(_New(row))
        return row

    def close(self) -> None:
        """End all generations with an error to their listeners."""
        with self._submitting:
            self._is_closed = True
            self._inbox.put(None)
        self._thread.join()

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        draft = self._model.speculation.draft
        with torch.no_grad(), HeadInput(self._model, draft is not None and draft.num_hidden > 0) as self._head_input:
            while True:
                events = self._next_events()
                self._done(self._rows, partial(self._turn, events))
                if None in events:
                    self._end(self._rows.copy(), RequestRejected("the generation loop was closed"))
                    return
                del events  # they would keep the sessions of ended rows until the next event

    def _turn(self, events: Sequence[_Event]) -> None:
        going_on = [row for row in self._joined(events) if row in self._rows]
        self._send([*going_on, *self._written([event for event in events if isinstance(event, _Stepped)])])

    def _next_events(self) -> list[_Event]:
        """Wait for one event, and for those that follow closely, unless a whole group has arrived."""
        events = [self._inbox.get()]
        with contextlib.suppress(queue.Empty):
            while not self._inbox.empty() or (len(events) < len(self._rows) and not self._is_group(events)):
                events.append(self._inbox.get(timeout=_QUIET_S))
        return events

    def _is_group(self, events: Sequence[_Event]) -> bool:
        """Return whether these rows were all sent together, and are at least as many as a group of all rows."""
        rows = {event.row for event in events if isinstance(event, _Stepped)}
        return len(rows) * _num_hops(rows) >= len(self._rows) and all(row.group <= rows for row in rows)

    def _joined(self, events: Iterable[_Event]) -> list[BatchRow]:
        """Return the new rows, after cancelled rows were removed."""
        joined = [event.row for event in events if isinstance(event, _New)]
        self._rows.update(joined)
        cancelled = [event.row for event in events if isinstance(event, _Cancelled)]
        self._forget([row for row in cancelled if row in self._rows])
        return joined

    def _written(self, stepped: Sequence[_Stepped]) -> list[BatchRow]:
        """Choose the next token of each row and pass it to its listener; return the rows that continue."""
        rows, hidden = [], []
        verified: list[BatchRow] = []
        for event in stepped:
            if event.row not in self._rows:
                continue
            if isinstance(event.hidden, BaseException):
                self._end([event.row], event.hidden)
            elif event.row.guesses.length:
                if self._verified(event.row, event.hidden):
                    verified.append(event.row)
            elif self._awaits_token(event.row, event.hidden):
                rows.append(event.row)
                hidden.append(event.hidden[:, -1:])
        return [*verified, *self._chosen(rows, hidden)] if rows else verified

    def _awaits_token(self, row: BatchRow, hidden: torch.Tensor) -> bool:
        """Score the row's prompt if the listener wants that. Return whether the row gets its next token now."""
        if row.scored is not None and not self._scored(row, row.scored, hidden):
            return False
        if row.is_full:  # no new tokens were asked for
            self._end([row], "length")
            return False
        return True

    def _chosen(self, rows: list[BatchRow], hidden: list[torch.Tensor]) -> list[BatchRow]:
        """Choose the next token of these rows from their last hidden states; return the rows that continue."""

        def states_and_tokens() -> tuple[list[torch.Tensor | None], list[Token | Exception]]:
            last_ids = torch.tensor([[row.last] for row in rows])
            logits = self._batched.logits(last_ids, torch.cat(hidden), [row.session for row in rows])
            states = [self._head_input.of_row(number) for number in range(len(rows))]  # processors may call the model
            return states, choose([row.choice for row in rows], logits.cpu())

        computed = self._done(rows, states_and_tokens)
        if computed is None:
            return []
        states, tokens = computed
        going_on = [self._continues(row, token) for row, token in zip(rows, tokens, strict=True)]
        for row, state, goes_on in zip(rows, states, going_on, strict=True):
            if goes_on:
                row.past.settle(0, 0)
                row.confirm([row.last], state)
        return [row for row, goes_on in zip(rows, going_on, strict=True) if goes_on]

    def _verified(self, row: BatchRow, hidden: torch.Tensor) -> bool:
        """Choose the next tokens of a row with guesses, as several may be right; return whether it continues."""

        ending: _Ending | None = None

        def choose_one(logits: torch.Tensor) -> tuple[int, bool]:
            nonlocal ending
            token = choose([row.choice], logits[None].cpu())[0]
            ending = self._taken(row, token)
            return (-1 if isinstance(token, Exception) else token.id), ending is not None

        logits = self._done([row], lambda: self._batched.logits_of_all(row.next_ids, hidden, row.session))
        if logits is None:
            return False
        state = self._head_input.of_row(0)
        found = verify(row.guesses, logits, choose_one)
        row.past.settle(row.guesses.length, found.num_right)  # before anybody else uses the session
        if ending is not None:
            self._finish(row, ending)
            return False
        row.confirm(found.token_ids, None if state is None else state[: len(found.token_ids)])
        return True

    def _scored(self, row: BatchRow, scored: list[Token], hidden: torch.Tensor) -> bool:
        """Score the next tokens of the row's prompt. After the last ones, call its listener and return True.

        Other generations take their turn before the remaining tokens.

        hidden: [1, left, hidden_size], of the remaining positions.
        """
        ids, num_left = row.choice.token_ids, hidden.shape[1] - 1  # the last position predicts the first new token
        first, num = len(scored) - 1, min(num_left, _SCORED_TOGETHER)

        def new_scores() -> list[Token]:
            of, after = torch.tensor([ids[first : first + num]]), hidden.shape[1] - num
            logits = self._batched.logits_of_all(of, hidden[:, :num], row.session, after)[0].cpu()
            new = zip(ids[first + 1 : first + 1 + num], logits, strict=True)
            return [token_of(row.choice.num_logprobs, token_id, each) for token_id, each in new]

        new = self._done([row], new_scores) if num else []
        if new is None:
            return False
        scored += new
        if num < num_left:
            self._inbox.put(_Stepped(row, hidden[:, num:]))
            return False
        row.end_scoring()
        if not _is_heard(lambda: row.listener(Scored(tuple(scored)))):
            self._forget([row])
            return False
        return True

    def _continues(self, row: BatchRow, token: Token | Exception) -> bool:
        """Take the token, and return whether the generation continues."""
        ending = self._taken(row, token)
        if ending is not None:
            self._finish(row, ending)
        return ending is None

    def _taken(self, row: BatchRow, token: Token | Exception) -> _Ending | None:
        """Take the next token and pass it to the listener; return why the generation ends, or None."""
        if isinstance(token, Exception):
            return token
        reason = row.take(token)
        return reason if _is_heard(lambda: row.listener(token)) else "lost"

    def _finish(self, row: BatchRow, ending: _Ending) -> None:
        if ending == "lost":
            self._forget([row])
        else:
            self._end([row], ending)

    def _send(self, rows: Sequence[BatchRow]) -> None:
        """Send the next step of each row into its session; decoding rows are sent in groups."""
        decoding = [row for row in rows if row.is_decoding]
        for row in decoding:
            row.guess(is_alone=len(self._rows) == 1 and has_room(row.session))
        groups = groups_of(decoding, len(self._rows), _num_hops(decoding))
        started = []
        for group in [*groups, *([row] for row in rows if not row.is_decoding)]:
            inputs = self._done(group, partial(self._inputs, group))
            if inputs is None:
                continue
            together = frozenset(group)
            for row in group:
                row.join(together)
            started.append(list(zip(group, inputs, strict=True)))
        if started:
            background.submit(self._start(started))

    def _inputs(self, group: Sequence[BatchRow]) -> list[BlockInput]:
        """Return the next input of each row's session."""
        first = group[0].first
        if first is not None:
            return [first]
        ids = torch.cat([row.next_ids for row in group])  # only a row that is alone has guesses
        return self._batched.inputs(ids, [row.session for row in group], [row.shift for row in group])

    def _done(self, rows: Collection[BatchRow], work: Callable[[], T]) -> T | None:
        """Return the result of the work. If it fails, end these rows, and return None: the loop goes on for others."""
        done = outcome_of(work)
        if isinstance(done, Exception):  # from a family's own code, or a bug: without an end, listeners would wait
            self._end(rows, done)
            return None
        return done

    def _end(self, rows: Iterable[BatchRow], reason: FinishReason | BaseException) -> None:
        rows = list(rows)
        if isinstance(reason, BaseException) and not isinstance(reason, SwarmError | ValueError):
            _logger.error("a generation has failed", exc_info=reason)
        self._forget(rows)
        for row in rows:
            _is_heard(partial(row.listener, reason))

    def _forget(self, rows: Iterable[BatchRow]) -> None:
        for row in rows:
            self._rows.discard(row)
            row.end()
            background.submit(_stop(row))

    # ------------------------------------------------------------ on the network's thread

    async def _start(self, groups: Sequence[Sequence[tuple[BatchRow, BlockInput]]]) -> None:
        for number, steps in enumerate(groups):
            if number and steps[0][0].is_decoding:  # prompts have their own streams
                await asyncio.sleep(_BETWEEN_GROUPS_S)
            for row, inputs in steps:
                if row not in self._rows:  # cancelled meanwhile
                    continue
                stepping = asyncio.create_task(_step(row, inputs), context=row.context)
                stepping.add_done_callback(partial(self._ended_step, row))
                row.begin_step(stepping)

    def _ended_step(self, row: BatchRow, step: asyncio.Task[torch.Tensor]) -> None:
        """Pass the step's outputs on to the loop, or its error, which the listener must get even if it is a bug."""
        if step.cancelled():  # by ``_stop``, when nobody waits for it, or because the connection was closed
            hidden: torch.Tensor | BaseException = PeerUnavailable("the connection to a server was closed")
        else:
            hidden = step.exception() or step.result()
        self._inbox.put(_Stepped(row, hidden))


def _is_heard(call: Callable[[], None]) -> bool:
    """Call the listener. Return whether it has taken the call; it cannot once it, or its event loop, has gone."""
    with logged_errors(_logger, "a generation has lost its listener", level=logging.DEBUG):
        call()
        return True
    return False


def _num_hops(rows: Iterable[BatchRow]) -> int:
    """Return the number of hops of the longest chain."""
    return max((len(row.session.hops) for row in rows), default=0)


async def _step(row: BatchRow, inputs: BlockInput) -> torch.Tensor:
    """Return the outputs of the row's next step, [1, wanted, hidden_size]."""
    hidden = await row.session.step_on_loop(inputs, row.num_wanted)
    row.report_servers()
    return hidden


async def _stop(row: BatchRow) -> None:
    """Cancel the row's step, and close the session if the row owns it, which frees room on servers; set ``stopped``."""
    try:
        if row.stepping is not None:
            row.stepping.cancel()
            await asyncio.gather(row.stepping, return_exceptions=True)
        if row.is_own:
            await row.session.close_on_loop()
    finally:
        row.stopped.set()
