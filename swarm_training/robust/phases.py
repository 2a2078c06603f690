"""A state machine that waits for one kind of broadcast of certain peers at a time. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from swarm_training.robust.instructions import Broadcast, Instruction
from swarm_training.robust.messages import Message

Spoken = Mapping[str, Any]  # messages of the phase that has closed, of the type that it waited for, by sender


class PhaseMachine(ABC):
    """A phase closes when all who are expected have spoken, or at the deadline; malformed messages count as silence."""

    def __init__(self) -> None:
        self._phase: type[Message] | None = None
        self._expected: frozenset[str] = frozenset()
        self._heard: dict[type[Message], dict[str, Message]] = {}
        self._said: set[type[Message]] = set()
        self._equivocators: set[str] = set()
        self._is_late = False  # for data that only this peer waits for
        self._out: list[Instruction] = []

    @abstractmethod
    def _is_valid(self, message: Message) -> bool:
        """Of a peer that is expected to speak."""

    @abstractmethod
    def _answer_if_complete(self) -> None:
        """Says what this peer says once its data has come, or is late."""

    @abstractmethod
    def _follow(self, phase: type[Message], spoken: Spoken, silent: list[str]) -> None:
        """What the end of a phase leads to."""

    @property
    def waits_for(self) -> tuple[type[Message], frozenset[str]] | None:
        """A kind of broadcast, and of whom."""
        return None if self._phase is None else (self._phase, self._expected)

    def _forget(self) -> None:
        """Another attempt begins."""
        self._phase, self._heard, self._said, self._equivocators = None, {}, set(), set()

    def _do(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    def _say(self, message: Message) -> None:
        """Once for each kind: what would be said later is no correction but equivocation."""
        if type(message) not in self._said:
            self._said.add(type(message))
            self._do(Broadcast(message))

    def _hear(self, message: Message) -> None:
        known = self._heard.setdefault(type(message), {}).setdefault(message.sender, message)
        if known != message:
            self._equivocators.add(message.sender)
        self._close_if_complete()

    def _enter(self, phase: type[Message], expected: Iterable[str]) -> None:
        self._phase, self._expected, self._is_late = phase, frozenset(expected), False
        self._answer_if_complete()
        self._close_if_complete()

    def _become_late(self) -> None:
        self._is_late = True
        self._answer_if_complete()

    def _close_if_complete(self) -> None:
        if self._phase is not None and self._expected <= self._heard.get(self._phase, {}).keys():
            self._close()

    def _close(self) -> None:
        if self._phase is None:
            return
        phase, heard = self._phase, self._heard.get(self._phase, {})
        spoken = {name: heard[name] for name in sorted(self._expected & heard.keys()) if self._is_valid(heard[name])}
        self._phase = None
        self._follow(phase, spoken, sorted(self._expected - spoken.keys()))
