"""Which of the prompts of one user goes first: short ones do, but none is overtaken for long."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from math import sqrt


@dataclass
class _Line:
    """The prompts of one user: the place that was reached last, and that of each prompt under way."""

    reached: float = 0.0
    places: dict[Hashable, tuple[float, int]] = field(default_factory=dict)


class PromptOrder:
    """The places of prompts that come in chunks. Each prompt keeps its place from the first chunk to the last.

    A prompt's place is when it would be through, in virtual time, if all shared the turns and its share grew with the
    square root of its length: self-clocked fair queueing (Golestani, 1994), of whole prompts instead of their chunks as
    in the fair sojourn protocol (Friedman and Henderson, 2003). So waits grow with the square root of a prompt's
    length. Whoever sends one prompt after another overtakes another prompt with less work than that one has itself.
    Of equal prompts, the one that came first goes first.

    A length is what a client says. It matters among the prompts of the same user alone. Pure.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._users: dict[Hashable, Hashable] = {}  # of each prompt under way
        self._numbers = count()

    def __contains__(self, prompt: Hashable) -> bool:
        """Whether the prompt is under way."""
        return prompt in self._users

    def place(self, prompt: Hashable, user: Hashable, length: int) -> tuple[float, int]:
        """Return where the prompt stands among those of its user: the lowest goes first.

        ``length``: positions that are still to be computed. It counts if the prompt has no place yet.
        """
        line = self._lines.setdefault(self._users.setdefault(prompt, user), _Line())
        return line.places.setdefault(prompt, (line.reached + sqrt(length), next(self._numbers)))

    def has_turn(self, prompt: Hashable) -> None:
        """A chunk of the prompt is the next to be computed."""
        if prompt in self._users:
            line = self._lines[self._users[prompt]]
            line.reached = max(line.reached, line.places[prompt][0])

    def forget(self, prompt: Hashable) -> None:
        """All of the prompt has been computed, or never will be. Nothing happens if it is not under way."""
        if prompt in self._users:
            user = self._users.pop(prompt)
            del self._lines[user].places[prompt]
            if not self._lines[user].places:
                del self._lines[user]
