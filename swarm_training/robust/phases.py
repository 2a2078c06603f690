"""A state machine that waits for one kind of broadcast from certain peers at a time. No I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from swarm_training.robust.instructions import Broadcast, Instruction
from swarm_training.robust.messages import BroadcastMessage

Spoken = Mapping[str, Any]  # valid messages of the phase that has closed, all of its type, by sender


class PhaseMachine(ABC):
    """A machine whose phase ends once all expected peers have spoken, or at the deadline. Malformed means silent."""

    def __init__(self) -> None:
        self._phase: type[BroadcastMessage] | None = None
        self._expected: frozenset[str] = frozenset()
        self._heard: dict[type[BroadcastMessage], dict[str, BroadcastMessage]] = {}
        self._said: set[type[BroadcastMessage]] = set()
        self._equivocators: set[str] = set()
        self._is_late = False  # True: the time for data that only this peer waits for is over
        self._out: list[Instruction] = []

    @abstractmethod
    def _is_valid(self, message: BroadcastMessage) -> bool:
        """Return whether a message of an expected peer is valid."""

    @abstractmethod
    def _answer_if_complete(self) -> None:
        """Broadcast this peer's message once its data has come, or the time for the data is over."""

    @abstractmethod
    def _follow(self, phase: type[BroadcastMessage], spoken: Spoken, silent: list[str]) -> None:
        """Do what follows the end of a phase."""

    @property
    def waits_for(self) -> tuple[type[BroadcastMessage], frozenset[str]] | None:
        """Return the kind of broadcast that is waited for, and its expected senders; None if no phase is open."""
        return None if self._phase is None else (self._phase, self._expected)

    def _forget(self) -> None:
        """Clear all messages, because another attempt begins."""
        self._phase, self._heard, self._said, self._equivocators = None, {}, set(), set()

    def _do(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    def _say(self, message: BroadcastMessage) -> None:
        """Broadcast a message, once for each kind: a second one would not correct the first but be an equivocation."""
        if type(message) not in self._said:
            self._said.add(type(message))
            self._do(Broadcast(message))

    def _hear(self, message: BroadcastMessage) -> None:
        known = self._heard.setdefault(type(message), {}).setdefault(message.sender, message)
        if known != message:
            self._equivocators.add(message.sender)
        self._close_if_complete()

    def _enter(self, phase: type[BroadcastMessage], expected: Iterable[str]) -> None:
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
