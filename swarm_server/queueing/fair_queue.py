"""Work of one kind, in an order in which every client gets as much of the compute thread as any other."""

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
    """The work of one name, by its places: the lowest first, and first come, first served among equal ones."""

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
    """The work of one name among equals.

    Attributes:
        start: when its next work starts, in virtual time: where its last one ended.
        turn: the lower, the longer ago it had its last turn.
    """

    start: float
    turn: int
    waiting: _Line[T] | FairQueue[T]


class FairQueue(Generic[T]):
    """Start-time fair queueing (Goyal et al., 1996): a name's next work starts, in virtual time, where its last ends.

    Whoever has had nothing lately starts now: it waits for one piece of work of each of the others, however much of
    theirs is there already. With several levels of names, such as clients and their users, those of the first level
    share equally, and what one of them gets is shared equally among its own names. Pure.
    """

    def __init__(self, num_levels: int = 1) -> None:
        self._num_levels = num_levels
        self._shares: dict[str, _Share[T]] = {}
        self._now = 0.0
        self._turns = count()

    def __len__(self) -> int:
        return sum(len(share.waiting) for share in self._shares.values())

    def add(self, work: T, names: Sequence[str], cost: float, place: tuple[float, ...] = ()) -> None:
        """Let work wait.

        Args:
            names: whose it is, one for each level.
            cost: how long it takes, in any unit that is the same for all.
            place: among the work of the same names, the lowest goes first.
        """
        name, *others = names
        share = self._shares.get(name)
        if share is None:
            self._shares = {old: each for old, each in self._shares.items() if each.waiting or each.start > self._now}
            waiting: _Line[T] | FairQueue[T] = _Line() if self._num_levels == 1 else FairQueue(self._num_levels - 1)
            share = self._shares[name] = _Share(self._now, next(self._turns), waiting)
        elif not share.waiting:
            share.start, share.turn = max(self._now, share.start), next(self._turns)
        share.waiting.add(work, others, cost, place)

    def pop(self, fits: Callable[[T], bool] = lambda _work: True) -> T | None:
        """Take out the first work, or the first that fits; None if there is none."""
        taken = self.take(fits)
        return None if taken is None else taken[0]

    def take(self, fits: Callable[[T], bool]) -> tuple[T, float] | None:
        """``pop`` that returns the cost too."""
        waiting = sorted((s for s in self._shares.values() if s.waiting), key=lambda share: (share.start, share.turn))
        for share in waiting:
            if (taken := share.waiting.take(fits)) is not None:
                self._now = waiting[0].start
                share.start, share.turn = share.start + taken[1], next(self._turns)
                self._forget_if_empty()
                return taken
        return None

    def remove(self, work: T) -> None:
        """Forget work that will not be computed, if it is there."""
        for share in self._shares.values():
            share.waiting.remove(work)
        self._forget_if_empty()

    def clear(self) -> list[T]:
        """Take out everything."""
        everything: list[Any] = []
        while (work := self.pop()) is not None:
            everything.append(work)
        return everything

    def _forget_if_empty(self) -> None:
        """Nobody waits: all start alike."""
        if not len(self):
            self._shares.clear()
            self._now = 0.0
