"""Work of one kind, in an order in which every client gets as much of the compute thread as any other."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(order=True)
class _Entry(Generic[T]):
    start: float
    number: int
    work: T = field(compare=False)


class FairQueue(Generic[T]):
    """Start-time fair queueing (Goyal et al., 1996): a client's next work starts, in virtual time, where its last ends.

    First come, first served within a client. Whoever has had nothing lately starts now: it waits for one piece of work
    of each of the others, however much of theirs is there already. Pure.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []  # in order
        self._ends: dict[str, float] = {}  # of each client's last work, in virtual time
        self._now = 0.0
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.work for entry in self._entries)

    def add(self, work: T, client: str, cost: float) -> None:
        """``cost``: how long it takes, in any unit that is the same for all."""
        start = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = start + cost
        insort(self._entries, _Entry(start, next(self._numbers), work))

    def pop(self) -> T:
        """What comes first."""
        entry = self._entries.pop(0)
        self._now = entry.start
        if not self._entries:
            self._forget()
        elif len(self._ends) > 2 * len(self._entries) + 8:
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}
        return entry.work

    def remove(self, *works: T) -> None:
        """Forgets work that will not be computed, or is computed together with other work; if it is there."""
        gone = set(map(id, works))
        self._entries = [entry for entry in self._entries if id(entry.work) not in gone]

    def clear(self) -> list[T]:
        everything = list(self)
        self._entries.clear()
        self._forget()
        return everything

    def _forget(self) -> None:
        """Nobody waits: all start alike."""
        self._now = 0.0
        self._ends.clear()
