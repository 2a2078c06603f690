"""Numbered cases, each of which follows from a seed and its number: run many of them, or one alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

import grpc

from tests.attack.fuzzing.conversations import Conversation, conversation
from tests.attack.fuzzing.files import Files
from tests.attack.fuzzing.honest_requests import HonestRequests
from tests.attack.fuzzing.records import RECORDS
from tests.attack.fuzzing.talking import DEADLINE_S, Outputs, Talker, WrongAnswer

_AT_ONCE = 8  # conversations
_CONVERSATIONS, _RECORDS = 0.9, 0.98  # of the cases; what is beyond are files
_MOST_FAILURES = 20  # after which the fuzzer stops


@dataclass
class Tally:
    """What became of the cases of one kind."""

    messages: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest_number: int = -1

    def add(self, number: int, answer: str, seconds: float) -> None:
        self.answers[answer] += 1
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest_number = seconds, number


@dataclass(frozen=True)
class Failure:
    """A case with another end than it should have; it can be run again alone."""

    seed: int
    number: int
    kind: str
    what: str

    def __str__(self) -> str:
        return f"seed {self.seed} number {self.number} ({self.kind}): {self.what}"


class Fuzzer:
    """Attributes:
    tallies: by kind of what was tried.
    failures: the cases that went wrong.
    """

    def __init__(
        self, seed: int, honest: HonestRequests, channel: grpc.aio.Channel, outputs: Outputs, files: Files
    ) -> None:
        """``outputs``: what the blocks of the server behind the channel make of hidden states."""
        self._seed = seed
        self._honest = honest
        self._talker = Talker(channel, outputs)
        self._files = files
        self._thread = ThreadPoolExecutor(1)
        self.tallies: dict[str, Tally] = {}
        self.failures: list[Failure] = []

    @property
    def gave_up(self) -> bool:
        """Whether so many cases have failed that more would tell nothing."""
        return len(self.failures) >= _MOST_FAILURES

    @property
    def num_messages(self) -> int:
        return sum(tally.messages for tally in self.tallies.values())

    async def run(self, num_messages: int, start: int = 0) -> int:
        """Cases from number ``start`` on until so many more messages were sent; returns the next number.

        Stops early when many have failed.
        """
        numbers = itertools.count(start)
        enough = self.num_messages + num_messages

        async def work() -> None:
            while self.num_messages < enough and not self.gave_up:
                await self.run_one(next(numbers))

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
        return next(numbers)

    async def run_one(self, number: int) -> str:
        """The case of this number; returns a description of it."""
        chance = Random(f"{self._seed}/{number}")
        choice = chance.random()
        if choice < _CONVERSATIONS:
            talk = conversation(self._honest, chance)
            await self._talk(number, talk)
            return _described(talk)
        kinds = RECORDS if choice < _RECORDS else self._files.kinds
        kind = chance.choice(list(kinds))
        tally = self.tallies.setdefault(kind, Tally())
        tally.messages += 1
        start_s = time.perf_counter()
        try:
            answering = asyncio.get_running_loop().run_in_executor(self._thread, kinds[kind], chance)
            answer = await asyncio.wait_for(answering, DEADLINE_S)
        except Exception as error:  # whatever it is, it is no answer
            answer = type(error).__name__
            if isinstance(error, TimeoutError):
                self._thread = ThreadPoolExecutor(1)  # the old one will not come back
            self._failed(number, kind, f"{answer}: {error}")
        tally.add(number, answer, time.perf_counter() - start_s)
        return kind

    async def _talk(self, number: int, talk: Conversation) -> None:
        tally = self.tallies.setdefault(talk.kind, Tally())
        tally.messages += talk.num_messages
        try:
            for answered in await self._talker.talk(talk):
                tally.add(number, answered.status, answered.seconds)
        except WrongAnswer as error:
            tally.add(number, "WRONG", 0.0)
            self._failed(number, talk.kind, str(error))

    def _failed(self, number: int, kind: str, what: str) -> None:
        self.failures.append(Failure(self._seed, number, kind, what[:1000]))


def _described(talk: Conversation) -> str:
    calls = [f"{call.method} × {len(call.messages)} messages, then {call.ending.name}" for call in talk.calls]
    return f"{talk.kind} beside {len(talk.sessions)} sessions: {'; '.join(calls)}"
