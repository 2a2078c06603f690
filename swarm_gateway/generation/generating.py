"""The generations of one request: their turns, their text, and their end when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from swarm_client.batching.request import FinishReason, Request, Scored, Servers, Token
from swarm_client.batching.streaming import stream
from swarm_client.core.events import Event
from swarm_client.generation.text_stream import StopStrings, TextStream
from swarm_gateway.answers.answer_reader import AnswerPiece, AnswerReader, ToolCall
from swarm_gateway.generation.generation_trace import GenerationTrace
from swarm_gateway.limits.admission import QueuePlace
from swarm_gateway.web.metrics import Metrics, TokenTimes
from swarm_gateway.web.models import ServedModel, end_ids
from swarm_protocol.process.routine import end_tasks

Finish = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True)
class SaidToken:
    """A token of an answer; ``offset`` is where its text begins in the text of the choice."""

    token: Token
    offset: int


@dataclass(frozen=True)
class Delta:
    """A new piece of one choice: first its reasoning, then its text, then its calls.

    Attributes:
        tokens: the tokens if logprobs were asked for.
        finish: why the choice ended; None while more pieces follow.
        stop: the stop string that ended the choice.
    """

    choice: int
    text: str
    tokens: tuple[SaidToken, ...] = ()
    finish: Finish | None = None
    calls: tuple[ToolCall, ...] = ()
    stop: str = ""
    reasoning: str = ""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return one delta that says all that these pieces of a choice say."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        calls=tuple(call for delta in deltas for call in delta.calls),
        reasoning="".join(delta.reasoning for delta in deltas),
    )


@dataclass(frozen=True)
class Happened:
    """An event of one choice's servers, or their chain; sent only if the request asks for it."""

    choice: int
    what: Servers | Event


Item: TypeAlias = Delta | Happened


class _Writer:
    """A writer that turns the tokens of one choice into deltas."""

    def __init__(
        self, choice: int, model: ServedModel, request: Request, stop: Sequence[str], reader: AnswerReader | None
    ) -> None:
        self._choice, self._reader, self._tokenizer = choice, reader, model.tokenizer
        # Special tokens may mark the beginning or the end of reasoning and calls.
        self._text = TextStream(model.tokenizer, request.prompt, with_special=reader is not None)
        self._stops = StopStrings(stop)
        self._ends = frozenset(end_ids(request.config))
        self._with_tokens = request.num_logprobs is not None
        self._counts_end = request.scores_prompt  # evaluation harnesses expect as many tokens as they asked for
        self._num_decoded = self._num_sent = 0  # characters
        self._held: list[SaidToken] = []
        self._has_called = False

    @property
    def is_in_reasoning(self) -> bool:
        return self._reader is not None and self._reader.is_in_reasoning

    def begin(self, echo: str, prompt: Sequence[Token]) -> Delta:
        """Return the echoed prompt, which begins the answer; ``prompt`` has its tokens if logprobs were asked for."""
        text, said, offset = TextStream(self._tokenizer), [], 0
        for token in prompt:
            said.append(SaidToken(token, offset))
            offset += len(text.put(token.id))
        self._num_decoded = self._num_sent = len(echo)  # offsets count from the beginning of the echo
        return Delta(self._choice, echo, tuple(said))

    def put(self, token: Token) -> Delta | None:
        if token.id in self._ends:  # the end token has no text
            if self._counts_end:
                self._held.append(SaidToken(token, self._num_decoded))
            return None
        if self._with_tokens:
            self._held.append(SaidToken(token, self._num_decoded))
        text = self._passed(self._text.put(token.id))
        return self._delta(text, "stop" if self._stops.found else None)

    def end(self, reason: FinishReason) -> Delta | None:
        text = self._passed(self._text.end())
        if self._stops.found:
            return self._delta(text, "stop")
        return self._delta(text + self._stops.end(), reason)

    def _passed(self, text: str) -> str:
        self._num_decoded += len(text)
        return self._stops.put(text)

    def _delta(self, text: str, reason: FinishReason | None) -> Delta | None:
        """Return a delta with the tokens that begin in the text; at an end without stop string, with all held ones."""
        piece, reason = self._read(text, reason)
        if piece == AnswerPiece() and reason is None:
            return None
        self._has_called |= bool(piece.calls)
        finish: Finish | None = "tool_calls" if reason == "stop" and self._has_called else reason
        self._num_sent += len(piece.reasoning) + len(piece.text)
        is_whole = finish is not None and not self._stops.found
        said = [token for token in self._held if is_whole or token.offset < self._num_sent]
        self._held = self._held[len(said) :]
        calls, stop = tuple(piece.calls), self._stops.found
        return Delta(self._choice, piece.text, tuple(said), finish, calls, stop, piece.reasoning)

    def _read(self, text: str, reason: FinishReason | None) -> tuple[AnswerPiece, FinishReason | None]:
        """Return what the text means, and the reason; the first call ends an answer that may have only one."""
        if self._reader is None:
            return AnswerPiece(text), reason
        piece = self._reader.put(text)
        if reason is not None:
            piece += self._reader.end(is_cut=reason == "length")
        if piece.calls and not self._reader.several:
            return replace(piece, calls=piece.calls[:1]), "stop"
        return piece, reason


@dataclass
class QueuedGenerations:
    """One request's generations, each with its place in the queue.

    Attributes:
        began_s: when the request came, by ``time.perf_counter``.
        reader: a reader that has read nothing, of which each answer has another one; None: the answers are all text.
        echoes: the text that each answer begins with; empty if answers begin with the generated text.
        num_generated, num_reasoning: the numbers of tokens so far, and of those in the reasoning, over all generations.
    """

    model: ServedModel
    requests: Sequence[Request]
    stop: Sequence[str]
    places: Sequence[QueuePlace]
    metrics: Metrics
    began_s: float
    num_prompt: int
    reader: AnswerReader | None = None
    echoes: Sequence[str] = ()
    operation: str = "text_completion"
    num_generated: int = 0
    num_reasoning: int = 0

    async def items(self) -> AsyncGenerator[Item, None]:
        """Yield the items of all choices as they come. Closing the iterator ends all generations.

        Raises:
            ValueError: see ``GenerationLoop.submit``.
            SwarmError: see ``swarm_protocol.errors``.
        """
        queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._write(choice, queue)) for choice in range(len(self.requests))]
        for task in tasks:  # called after the task's last item; an error is raised below
            task.add_done_callback(lambda task: queue.put_nowait(None if task.cancelled() else task.exception()))
        try:
            num_ended = 0
            while num_ended < len(tasks):
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is not None:
                    yield item
                num_ended += item is None
        finally:
            await end_tasks(tasks)
            for place in self.places:
                place.leave()

    async def _write(self, choice: int, queue: asyncio.Queue[Item | BaseException | None]) -> None:
        with GenerationTrace(self.operation, self.model.name, self.requests[choice]) as trace:
            async with self.places[choice]:
                trace.starts("prompt")
                await self._generate(choice, queue, trace)

    async def _generate(
        self, choice: int, queue: asyncio.Queue[Item | BaseException | None], trace: GenerationTrace
    ) -> None:
        request = replace(self.requests[choice], user=self.places[choice].user)
        reader = None if self.reader is None else self.reader.another()
        writer = _Writer(choice, self.model, request, self.stop, reader)
        times = TokenTimes(self.metrics, self.began_s)
        echo = self.echoes[choice] if self.echoes else None
        async with aclosing(stream(self.model.batcher, request)) as items:
            async for item in items:
                # Events of servers may come before, and do not begin the answer.
                if echo is not None and isinstance(item, Scored | Token | str):
                    queue.put_nowait(writer.begin(echo, item.prompt if isinstance(item, Scored) else ()))
                    echo = None
                if isinstance(item, Scored):
                    continue
                if isinstance(item, Token):
                    self.num_generated += 1
                    times.token()
                    trace.token()
                    delta = writer.put(item)
                    self.num_reasoning += writer.is_in_reasoning
                elif isinstance(item, str):
                    delta = writer.end(item)
                else:
                    queue.put_nowait(Happened(choice, item))
                    continue
                if delta is not None:
                    queue.put_nowait(delta)
                    if delta.finish is not None:
                        trace.ends(delta.finish)
                        return
