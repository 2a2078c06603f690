"""The order of the prompts of one user: short prompts go first, but no prompt is overtaken for long."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from math import log2

_SHORT = 4  # positions: among shorter prompts, waits grow nearly in proportion to the length


@dataclass
class _Line:
    """The prompts of one user: the highest place that had a turn, and the place of each prompt under way."""

    reached: float = 0.0
    places: dict[Hashable, tuple[float, int]] = field(default_factory=dict)

    def has_turn(self, prompt: Hashable) -> None:
        self.reached = max(self.reached, self.places[prompt][0])


class PromptOrder:
    """The places of prompts that come in chunks. Each prompt keeps its place from the first chunk to the last.

    A prompt's place is the virtual time at which it would end if all prompts shared the turns, with shares such that
    waits grow with the logarithm of a prompt's length. This is self-clocked fair queueing (Golestani, 1994) of whole
    prompts instead of chunks, like the fair sojourn protocol (Friedman and Henderson, 2003).
    A series of short prompts overtakes a long prompt only with less work than the long prompt has itself. Among equal
    prompts, the one that came first goes first.

    Clients state the lengths, which matter only among the prompts of the same user. Pure: no clock, no thread.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._users: dict[Hashable, Hashable] = {}  # the user of each prompt under way
        self._numbers = count()

    def __len__(self) -> int:
        """Return how many prompts are under way."""
        return len(self._users)

    def __contains__(self, prompt: Hashable) -> bool:
        """Return whether the prompt is under way."""
        return prompt in self._users

    def place(self, prompt: Hashable, user: Hashable, length: int) -> tuple[float, int]:
        """Return the prompt's place among the prompts of its user; the lowest place goes first.

        ``length``: the number of positions still to be computed. It only counts if the prompt has no place yet.
        """
        line = self._lines.setdefault(self._users.setdefault(prompt, user), _Line())
        return line.places.setdefault(prompt, (line.reached + log2(1 + length / _SHORT), next(self._numbers)))

    def has_turn(self, prompt: Hashable) -> None:
        """Note that a chunk of the prompt is computed next."""
        if prompt in self._users:
            self._lines[self._users[prompt]].has_turn(prompt)

    def forget(self, prompt: Hashable) -> None:
        """Remove a prompt that is finished or dropped. Do nothing if the prompt is not under way."""
        if prompt in self._users:
            user = self._users.pop(prompt)
            del self._lines[user].places[prompt]
            if not self._lines[user].places:
                del self._lines[user]
