"""A queue of work of one kind, in which every client gets an equal share of the compute thread."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Generic, TypeVar

T = TypeVar("T")
QueueEntry = tuple[T, Sequence[str], float, tuple[float, ...]]  # work, names, cost and place, see ``FairQueue.add``
_FEW_SHARES = 8  # up to so many shares, none is forgotten


class _Line(Generic[T]):
    """The waiting work of one name, lowest place first. Work with equal places is first come, first served."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, ...], int, float, T]] = []  # place, number, cost, work; in order
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, work: T, _names: Sequence[str], cost: float, place: tuple[float, ...]) -> None:
        insort(self._entries, (place, next(self._numbers), cost, work))  # numbers differ, so work is never compared

    def take(self, fits: Callable[[T], bool]) -> tuple[T, float] | None:
        for index, (_place, _number, cost, work) in enumerate(self._entries):
            if fits(work):
                del self._entries[index]
                return work, cost
        return None

    def remove(self, work: T) -> None:
        self._entries = [entry for entry in self._entries if entry[-1] is not work]


@dataclass(eq=False)
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

    The shares with waiting work are kept in order, so that taking work and adding work need no look at every name.
    """

    def __init__(self, num_levels: int = 1) -> None:
        self._num_levels = num_levels
        self._shares: dict[str, _Share[T]] = {}
        self._most_shares = _FEW_SHARES  # from so many on, those that say no more than a new one are forgotten
        self._in_order: list[tuple[float, int, _Share[T]]] = []  # start, turn and share; those with waiting work
        self._new: list[tuple[T, Callable[[], Iterable[QueueEntry[T]]]]] = []  # work that is in no share yet
        self._num_new = 0  # pieces of this work
        self._num_waiting = 0
        self._now = 0.0
        self._turns = count()

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, work: T, names: Sequence[str], cost: float, place: tuple[float, ...] = ()) -> None:
        """Add work to the queue.

        Args:
            names: the names to which the work belongs, one for each level.
            cost: how long the work takes, in any unit that is the same for all work.
            place: the order among work of the same names; the lowest place goes first.
        """
        self.add_together(work, 1, lambda: [(work, names, cost, place)])

    def add_together(self, work: T, num_pieces: int, split: Callable[[], Iterable[QueueEntry[T]]]) -> None:
        """Add several pieces of work, which stay one if ``take_all`` takes them out.

        ``split``: returns the pieces, with what ``add`` takes for each.
        """
        self._new.append((work, split))
        self._num_new += num_pieces
        self._num_waiting += num_pieces

    def pop(self, fits: Callable[[T], bool] = lambda _work: True) -> T | None:
        """Take out and return the first work that fits; return None if there is none."""
        taken = self.take(fits)
        return None if taken is None else taken[0]

    def take(self, fits: Callable[[T], bool]) -> tuple[T, float] | None:
        """Take out the first work that fits, like ``pop``, and return its cost too."""
        self._sort()
        for index, (start, _turn, share) in enumerate(self._in_order):
            if (taken := share.waiting.take(fits)) is not None:
                self._now = self._in_order[0][0]
                del self._in_order[index]
                share.restart(start + taken[1], next(self._turns))
                if share.waiting:
                    self._enter(share)
                self._forget(1)
                return taken
        return None

    def take_all(self, fit: Callable[[Sequence[T]], bool]) -> list[T]:
        """Take out and return all work, in order of arrival, if it has come to an empty queue and fits together.

        Return an empty list otherwise. Work that is computed at once needs no order, which takes longer to find.
        """
        if not self._new or self._num_new < self._num_waiting:
            return []
        everything = [work for work, _ in self._new]
        if not fit(everything):
            return []
        self._new, self._num_new = [], 0
        self._forget(self._num_waiting)
        return everything

    def remove(self, work: T) -> None:
        """Remove work that will not be computed, if it waits here."""
        self._sort()
        for _start, _turn, share in self._in_order:
            num_before = len(share.waiting)
            share.waiting.remove(work)
            if num_removed := num_before - len(share.waiting):
                self._in_order = [entry for entry in self._in_order if entry[-1].waiting]  # without an empty share
                self._forget(num_removed)
                return

    def clear(self) -> list[T]:
        """Take out and return all work."""
        return list(iter(self.pop, None))

    def _sort(self) -> None:
        """Put new work into the shares of its names. Nothing has been taken out since it came."""
        if not self._new:
            return
        new, self._new, self._num_new = self._new, [], 0
        for work, (name, *others), cost, place in chain.from_iterable([split() for _, split in new]):
            share = self._shares.get(name) or self._new_share(name)
            if not share.waiting:
                share.restart(max(self._now, share.start), next(self._turns))
                self._enter(share)
            share.waiting.add(work, others, cost, place)

    def _new_share(self, name: str) -> _Share[T]:
        """Return a new share. Once shares have doubled in number, forget those that say no more than a new one."""
        if len(self._shares) >= self._most_shares:
            self._shares = {old: each for old, each in self._shares.items() if each.waiting or each.start > self._now}
            self._most_shares = max(_FEW_SHARES, 2 * len(self._shares))
        waiting: _Line[T] | FairQueue[T] = _Line() if self._num_levels == 1 else FairQueue(self._num_levels - 1)
        share = self._shares[name] = _Share(self._now, 0, waiting)
        return share

    def _enter(self, share: _Share[T]) -> None:
        insort(self._in_order, (share.start, share.turn, share))  # turns differ, so shares are never compared

    def _forget(self, num_gone: int) -> None:
        """Count work that no longer waits. If none waits, reset the virtual time, so that all names start alike."""
        self._num_waiting -= num_gone
        if not self._num_waiting:
            self._shares.clear()
            self._now = 0.0
