"""A queue of work of one kind, in which every client gets an equal share of the compute thread."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(order=True)
class _Entry(Generic[T]):
    place: tuple[float, ...]
    number: int
    cost: float = field(compare=False)
    work: T = field(compare=False)


class _Line(Generic[T]):
    """The waiting work of one name, lowest place first. Work with equal places is first come, first served."""

    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []  # in order
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, work: T, _names: Sequence[str], cost: float, place: tuple[float, ...]) -> None:
        insort(self._entries, _Entry(place, next(self._numbers), cost, work))

    def take(self, fits: Callable[[T], bool]) -> tuple[T, float] | None:
        for index, entry in enumerate(self._entries):
            if fits(entry.work):
                del self._entries[index]
                return entry.work, entry.cost
        return None

    def remove(self, work: T) -> None:
        self._entries = [entry for entry in self._entries if entry.work is not work]


@dataclass
class _Share(Generic[T]):
    """One name's share of the turns, with its waiting work.

    Attributes:
        start: the virtual time at which the name's next work starts, which is when its last work ended.
        turn: a number that is lower the longer ago the name had its last turn.
    """

    start: float
    turn: int
    waiting: _Line[T] | FairQueue[T]

    def restart(self, start: float, turn: int) -> None:
        self.start, self.turn = start, turn


class FairQueue(Generic[T]):
    """A queue with start-time fair queueing (Goyal et al., 1996): a name's next work starts where its last one ends.

    Starts and ends are in virtual time. A name without recent work starts now: it waits for one piece of work of each
    other name, however much of their work waits already. If names have several levels, such as clients and their users,
    first-level names share equally, and each share is divided equally among the names below. Pure: no clock, no thread.
    """

    def __init__(self, num_levels: int = 1) -> None:
        self._num_levels = num_levels
        self._shares: dict[str, _Share[T]] = {}
        self._now = 0.0
        self._turns = count()

    def __len__(self) -> int:
        return sum(len(share.waiting) for share in self._shares.values())

    def add(self, work: T, names: Sequence[str], cost: float, place: tuple[float, ...] = ()) -> None:
        """Add work to the queue.

        Args:
            names: the names to which the work belongs, one for each level.
            cost: how long the work takes, in any unit that is the same for all work.
            place: the order among work of the same names; the lowest place goes first.
        """
        name, *others = names
        share = self._shares.get(name)
        if share is None:
            self._shares = {old: each for old, each in self._shares.items() if each.waiting or each.start > self._now}
            waiting: _Line[T] | FairQueue[T] = _Line() if self._num_levels == 1 else FairQueue(self._num_levels - 1)
            share = self._shares[name] = _Share(self._now, next(self._turns), waiting)
        elif not share.waiting:
            share.restart(max(self._now, share.start), next(self._turns))
        share.waiting.add(work, others, cost, place)

    def pop(self, fits: Callable[[T], bool] = lambda _work: True) -> T | None:
        """Take out and return the first work that fits; return None if there is none."""
        taken = self.take(fits)
        return None if taken is None else taken[0]

    def take(self, fits: Callable[[T], bool]) -> tuple[T, float] | None:
        """Take out the first work that fits, like ``pop``, and return its cost too."""
        waiting = sorted((s for s in self._shares.values() if s.waiting), key=lambda share: (share.start, share.turn))
        for share in waiting:
            if (taken := share.waiting.take(fits)) is not None:
                self._now = waiting[0].start
                share.restart(share.start + taken[1], next(self._turns))
                self._forget_if_empty()
                return taken
        return None

    def remove(self, work: T) -> None:
        """Remove work that will not be computed, if it waits here."""
        for share in self._shares.values():
            share.waiting.remove(work)
        self._forget_if_empty()

    def clear(self) -> list[T]:
        """Take out and return all work."""
        everything: list[Any] = []
        while (work := self.pop()) is not None:
            everything.append(work)
        return everything

    def _forget_if_empty(self) -> None:
        """Reset the virtual time if nothing waits, so that all names start alike."""
        if not len(self):
            self._shares.clear()
            self._now = 0.0
